"""Native half of `neuron_sched`. Use the names that the package exports."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, SupportsIndex, TypedDict, final, overload, type_check_only

__version__: str

@type_check_only
class BuildInfo(TypedDict):
    profile: str | None
    commit: str | None
    target: str | None

def build_info() -> BuildInfo:
    """What the extension was built from.

    `profile` is `"debug"` or `"release"`, `target` the platform triple, `commit` that of the sources, or
    None where they were no git checkout.
    """

@final
class Buckets:
    """An ascending list of compiled sizes, and the smallest one that holds a count.

    >>> buckets = Buckets([128, 256, 512])
    >>> buckets.fit(129)
    256
    >>> buckets.fit(0)
    0
    >>> buckets.fit(513)
    Traceback (most recent call last):
    ValueError: count: 513: expected at most the last bucket, 512
    """

    def __new__(cls, sizes: Sequence[int]) -> Buckets:
        """`sizes`: a list or tuple of positive whole numbers, strictly ascending, at least one; else ValueError."""

    def fit(self, count: int) -> int:
        """The smallest size that holds `count`; 0 for 0; ValueError when negative or above the last size."""

    @property
    def sizes(self) -> list[int]:
        """All sizes, ascending."""

    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class NeuronConfig:
    """Checked configuration of the exclusive scheduler; an immutable value."""

    def __new__(cls, **fields: object) -> NeuronConfig: ...

@final
class Req:
    """A request of the token-budget `Scheduler`. All counts are tokens.

    `rid` names it and may be anything hashable; no two requests of one name are live in a scheduler together.
    It ends with its `max_new`-th output. With `prefilled` or `generated` above 0 it goes on from there.

    Whole numbers are ints (or what Python takes for one, as `numpy.int64`) from 1 to 2**53; `prefilled` goes from 0
    to `prompt_len` and `generated` from 0 to `max_new - 1`. Other numbers are a ValueError, other types a TypeError.

    >>> Req("a", 6, 4)
    Req('a', 6, 4, prefilled=0, generated=0)
    """

    def __new__(
        cls,
        rid: Hashable,
        prompt_len: SupportsIndex,
        max_new: SupportsIndex,
        prefilled: SupportsIndex = 0,
        generated: SupportsIndex = 0,
    ) -> Req: ...
    @property
    def rid(self) -> Any:
        """The name, the very object that was given."""

    @property
    def prompt_len(self) -> int:
        """Length of the prompt."""

    @property
    def max_new(self) -> int:
        """Number of outputs after which the request ends."""

    @property
    def prefilled(self) -> int:
        """Tokens of the prompt that are computed; moves when a step is completed."""

    @property
    def generated(self) -> int:
        """Outputs generated; moves when a step is completed."""

@final
class Requests(Sequence[Req]):
    """The waiting or the running requests of a `Scheduler`, oldest first: a read-only sequence.

    It always shows the present state, also when it was obtained earlier. Iterating goes over those that are there
    when it begins, so the scheduler may be changed meanwhile. Equal to a list of the same requests; a slice is a
    list.
    """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Req: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Req]: ...
    def __iter__(self) -> Iterator[Req]: ...
    def __reversed__(self) -> Iterator[Req]: ...
    def __contains__(self, value: object, /) -> bool: ...
    def index(self, value: object, /, *bounds: int) -> int:
        """Position of the first that equals `value`; `bounds` as in `list.index`. ValueError when it is not there."""

    def count(self, value: object, /) -> int:
        """How many equal `value`."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Scheduler:
    """Continuous batching under a token budget, for hardware that may mix prefill and decode in one batch.

    A step spends at most `token_budget` tokens, in this order, each oldest first:

    1. one token for every running request whose prompt is computed (a decode);
    2. the rest of any running request's prompt, as much as the budget leaves (a chunk);
    3. waiting requests in order, while budget is left, fewer than `max_seqs` run, and the KV cache has room for
       `prompt_len + max_new` tokens besides what is reserved. The head of the queue is never passed over.

    Ranges and errors of the arguments are those of `Req`. Methods may be called from several threads.

    >>> s = Scheduler(token_budget=8, max_seqs=4, kv_tokens=20)
    >>> s.add(Req("a", 6, 2))
    >>> s.add(Req("b", 6, 1))
    >>> plan = s.schedule()
    >>> [(req.rid, tokens) for req, tokens in plan]
    [('a', 6), ('b', 2)]
    >>> s.complete(plan)
    ['a']
    >>> [(req.rid, tokens) for req, tokens in s.schedule()]
    [('a', 1), ('b', 4)]
    """

    def __new__(cls, token_budget: SupportsIndex, max_seqs: SupportsIndex, kv_tokens: SupportsIndex) -> Scheduler: ...
    def add(self, req: Req) -> None:
        """Queues a request.

        ValueError, and nothing is changed, if it could never fit (`prompt_len + max_new > kv_tokens`), if it is live
        in this or another scheduler, if its rid is live in this one, or if it has generated all its outputs.
        A cancelled request may be added again; it goes on from its counters.
        """

    def schedule(self) -> list[tuple[Req, int]]:
        """Plans the next step: who runs, and how many tokens of each.

        Admits at once; counters move in `complete`. A plan that was not completed is void once another one is made;
        whom it admitted stays admitted. The list is the caller's own.
        """

    def complete(self, plan: list[tuple[Req, int]]) -> list[Any]:
        """Applies the plan of the last `schedule` once it has run; returns the rids that emitted a token, in its order.

        A decode emits a token, and so does the chunk that ends a prompt; an earlier chunk does not. A request that
        has generated `max_new` tokens leaves `running` and frees its reservation. Entries whose request was
        cancelled meanwhile are passed over.

        The plan is the list of the last `schedule` or one equal to it, and is taken once. Any other list is a
        ValueError that changes nothing; what is no list, a TypeError.
        """

    def cancel(self, rid: Hashable) -> bool:
        """Ends the live request of that rid, waiting or running, and frees its reservation at once.

        False when no live request bears it.
        """

    @property
    def waiting(self) -> Requests:
        """The requests not admitted yet, first come first served."""

    @property
    def running(self) -> Requests:
        """The admitted requests, oldest first."""

    @property
    def reserved(self) -> int:
        """KV tokens reserved now: the sum of `prompt_len + max_new` over `running`."""

    def check(self) -> None:
        """Verifies the conservation laws; RuntimeError on a fault of the scheduler itself.

        Costs time in proportion to the number of live requests.
        """
