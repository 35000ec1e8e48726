"""Native half of `neuron_sched`. Use the names that the package exports."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, SupportsIndex, TypedDict, final, overload, type_check_only

import numpy as np
from numpy.typing import NDArray

from neuron_sched.runner import DecodeRow, Ids, PrefillRow

__version__: str

@type_check_only
class BuildInfo(TypedDict):
    profile: str
    commit: str | None
    target: str

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

    def __new__(cls, sizes: list[int] | tuple[int, ...]) -> Buckets:
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
    """Configuration of `BucketScheduler`: checked when made, every default filled in, immutable, hashable.

    Required are `max_num_seqs`, `max_num_batched_tokens`, `max_model_len`, `block_size` and `num_blocks`. None stands
    for the default. One ValueError lists all faults, a line each, with the field, its value and what is expected.

    >>> config = NeuronConfig(
    ...     max_num_seqs=6, max_num_batched_tokens=2048, max_model_len=1000, block_size=32, num_blocks=256
    ... )
    >>> config.num_batched_tokens_buckets
    [128, 256, 512, 1000]
    >>> config.num_seqs_buckets
    [1, 2, 4, 6]
    """

    def __new__(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        num_batched_tokens_buckets: list[int] | tuple[int, ...] | None = None,
        num_seqs_buckets: list[int] | tuple[int, ...] | None = None,
        decode_context_length_buckets: list[int] | tuple[int, ...] | None = None,
        kv_segment_size_buckets: list[int] | tuple[int, ...] | None = None,
        max_prefills_per_batch: int | None = None,
        kv_admission: Literal["reserve", "max_model_len"] | None = None,
        max_consecutive_prefill_steps: int | None = None,
        min_decode_steps: int | None = None,
        chunking: Literal["fixed", "bucket"] | None = None,
        prefill_cost: dict[int, float] | None = None,
        long_prefill_token_threshold: int | None = None,
        prefix_caching: bool | None = None,
        policy: Literal["fcfs", "priority"] | None = None,
        lookahead: int | None = None,
        dcp: int | None = None,
    ) -> NeuronConfig: ...
    @property
    def max_num_seqs(self) -> int:
        """Most requests that hold a slot at once."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of one step; at least `max_num_seqs`."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and outputs together."""

    @property
    def block_size(self) -> int:
        """Tokens of one KV block."""

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks. Their ids are 1 to `num_blocks`; block 0 is never given out."""

    @property
    def num_batched_tokens_buckets(self) -> list[int]:
        """Compiled prefill sizes in tokens, ascending; the last is `min(max_num_batched_tokens, max_model_len)`.

        Default: doubling from 128 while below the last, then the last.
        """

    @property
    def num_seqs_buckets(self) -> list[int]:
        """Compiled decode batch sizes, ascending, up to `max_num_seqs`. Default: doubling from 1."""

    @property
    def decode_context_length_buckets(self) -> list[int]:
        """Compiled decode context lengths in tokens, completed with `max_model_len`. Default: that alone.

        Checked and kept; no decision depends on them yet.
        """

    @property
    def kv_segment_size_buckets(self) -> list[int] | None:
        """Segment sizes of segmented prefill; where given alone, the token buckets are this list."""

    @property
    def max_prefills_per_batch(self) -> int:
        """Most prompts that start in one step. Default: 1."""

    @property
    def kv_admission(self) -> Literal["reserve", "max_model_len"]:
        """How the KV cache is promised, so that nobody is ever evicted.

        `"reserve"` (default): each request reserves its own worst case; `"max_model_len"`: each counts as a sequence
        of the longest length.
        """

    @property
    def max_consecutive_prefill_steps(self) -> int | None:
        """Most prefill steps in a row while a decode is ready. Default None: prefill first, without bound."""

    @property
    def min_decode_steps(self) -> int:
        """Decode steps owed once `max_consecutive_prefill_steps` is hit. Default: 1."""

    @property
    def chunking(self) -> Literal["fixed", "bucket"]:
        """How a long prompt is cut.

        `"fixed"` (default): as much as a step takes; `"bucket"`: where ending on a bucket edge is cheaper.
        """

    @property
    def prefill_cost(self) -> dict[int, float] | None:
        """For chunking `"bucket"`: cost of a prefill of each padded size, any unit. Default: the size + 256."""

    @property
    def long_prefill_token_threshold(self) -> int:
        """Most prompt tokens of a step while other requests are there; 0 (default) is off."""

    @property
    def prefix_caching(self) -> bool:
        """Whether full KV blocks are shared by content. Default: False."""

    @property
    def policy(self) -> Literal["fcfs", "priority"]:
        """Order of the queue: first come first served (default), or the lower priority number first."""

    @property
    def lookahead(self) -> int:
        """Tokens beyond the next one for which KV slots are kept (speculative decoding). Default: 0."""

    @property
    def dcp(self) -> int:
        """Decode context parallel size; above 1, only token buckets divisible by dcp * block_size stay. Default: 1."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, defaults filled in: `NeuronConfig(**config.as_dict()) == config`."""

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

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

@final
class Request:
    """A request for `BucketScheduler`; an immutable value.

    `prompt` is a length in tokens, or the token ids themselves: those are needed to share KV blocks by content. At
    most `max_tokens` tokens are emitted, capped at max(1, max_model_len - prompt); an id of `stop_token_ids` ends the
    request earlier. `top_k`, `top_p` and `temperature` are carried for the engine, the scheduler ignores them.
    TypeError or ValueError name the field.
    """

    def __new__(
        cls,
        id: str,
        prompt: int | Ids,
        max_tokens: int,
        *,
        priority: int = 0,
        stop_token_ids: Ids = (),
        top_k: int = -1,
        top_p: float = 1.0,
        temperature: float = 0.0,
    ) -> Request: ...
    @property
    def id(self) -> str:
        """The name; no two live requests of a scheduler have the same."""

    @property
    def prompt(self) -> int | list[int]:
        """The length in tokens, or a new list of the token ids."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that it may emit, as given."""

    @property
    def priority(self) -> int:
        """Lower numbers first, under policy `"priority"`."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end the request when it emits one."""

    @property
    def top_k(self) -> int:
        """For sampling in the engine; -1, the default, and 0 are off."""

    @property
    def top_p(self) -> float:
        """For sampling in the engine, above 0 and at most 1, the default."""

    @property
    def temperature(self) -> float:
        """For sampling in the engine; 0, the default, is greedy."""

@final
class RequestState:
    """How a request stood when `BucketScheduler.request` was called: counts are those of the last completed step."""

    @property
    def id(self) -> str:
        """The name of the request."""

    @property
    def status(self) -> Literal["waiting", "prefill", "decode", "finished", "cancelled"]:
        """`"waiting"`, `"prefill"`, `"decode"`, `"finished"` or `"cancelled"`."""

    @property
    def finish_reason(self) -> Literal["length", "stop"] | None:
        """Why it finished; None while it lives, and when it was cancelled."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV entries are computed."""

    @property
    def output_token_ids(self) -> list[int | None]:
        """What it emitted; None for a token that `complete` was not told."""

    @property
    def block_ids(self) -> list[int]:
        """The KV blocks that it holds, in order of position."""

@final
class Step:
    """One planned step: who runs, how many tokens, padded to what. All values are those of its planning.

    Readable until it was completed and another `schedule()` was called; a later look is a ValueError, or gives the
    same values.
    """

    @property
    def kind(self) -> Literal["prefill", "decode", "idle"]:
        """`"prefill"`, `"decode"`, or `"idle"` when nobody runs."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Real tokens by request id, in batch order; a new dict each time."""

    @property
    def num_scheduled_tokens_padded(self) -> dict[str, int]:
        """Padded tokens by request id, in batch order; a new dict each time.

        In a prefill of several prompts the last one carries the padding, so that the values add up to the bucket.
        """

    @property
    def num_computed_tokens(self) -> dict[str, int]:
        """Tokens computed before this step by request id, in batch order, prefix hits included."""

    @property
    def num_seqs_padded(self) -> int:
        """Rows that the batch of a decode step is padded to; 0 for another step."""

    @property
    def padded_tokens(self) -> int:
        """The compiled size that runs: the token bucket of a prefill, the batch bucket of a decode step."""

    @property
    def finished_ids(self) -> list[str]:
        """Requests that ended since the last completed step, cancelled ones too.

        Repeated until a step that carries them is completed, so that a worker never misses one. A worker handles the
        ended ids of a step before its new requests, since an id may be used again once its request ended.
        """

    def block_ids(self, id: str) -> list[int]:
        """KV blocks of a scheduled request, enough for the step's tokens; KeyError for any other id."""

    def __len__(self) -> int:
        """Number of scheduled requests."""

@final
class Outcome:
    """One token that a step emitted."""

    @property
    def id(self) -> str:
        """The request that emitted it."""

    @property
    def token(self) -> int | None:
        """The token id; None where `complete` was not told."""

    @property
    def finish_reason(self) -> Literal["length", "stop"] | None:
        """Set on the last token of a request; a stop token wins over the length."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Outcomes:
    """The emitted tokens of a step in batch order: as a list, but its items are made when they are read."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Outcome]: ...
    @overload
    def __getitem__(self, index: int, /) -> Outcome: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Outcome]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Explanation:
    """Why the head of the queue waits, and the numbers behind it in KV blocks."""

    @property
    def id(self) -> str:
        """The request at the head."""

    @property
    def reason(self) -> str:
        """Stable name of what it waits for; `"ready"`: nothing, the next `schedule()` takes it.

        `"slots"`, `"prefill_in_progress"`, `"prefill_batch_full"`, `"kv"`, `"interleave"`, `"throttled"`,
        `"step_running"`; of the vLLM classes `"paused"` and `"blocked"` too, and the names of an override.
        """

    @property
    def needed(self) -> int:
        """What it needs at worst."""

    @property
    def reserved(self) -> int:
        """What the running requests have reserved."""

    @property
    def usable(self) -> int:
        """The whole cache."""

@final
class BucketScheduler:
    """Continuous batching where a step is all prefill or all decode, padded to a compiled size.

    May be used from several threads.

    >>> config = NeuronConfig(
    ...     max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=4096, block_size=32, num_blocks=1024
    ... )
    >>> scheduler = BucketScheduler(config)
    >>> scheduler.add(Request("a", prompt=1500, max_tokens=16))
    >>> step = scheduler.schedule()
    >>> step.kind, step.num_scheduled_tokens, step.num_scheduled_tokens_padded
    ('prefill', {'a': 1500}, {'a': 2048})
    >>> scheduler.complete(step, [17])[0]
    Outcome(id='a', token=17, finish_reason=None)
    >>> scheduler.request("a").num_computed_tokens
    1500
    """

    def __new__(cls, config: NeuronConfig) -> BucketScheduler: ...
    def add(self, request: Request) -> None:
        """Queues a request.

        ValueError, and nothing is changed, when its id is live, its prompt is longer than `max_model_len`, or its
        worst case is larger than the whole KV cache.
        """

    def schedule(self, throttle_prefills: bool = False, *, ahead: bool = False) -> Step:
        """Plans the next step: admits and allocates at once, changes nothing else.

        A step that was not completed may be planned again; the older one is then void. `throttle_prefills` holds
        prefills back while something decodes. `ahead` plans one step beyond the pending one, assuming that each of
        its emitting rows emits; ValueError when one is planned ahead already.
        """

    def complete(self, step: Step, tokens: Sequence[int | None] | None = None) -> Outcomes:
        """Takes the result of the step that is due, and moves all counts on.

        `tokens` has one entry a scheduled request: the token id, or None for a row that emits nothing. It may be left
        out for prompts given as lengths. ValueError, and nothing is changed, for a step that is not due or tokens
        that do not match it.
        """

    def cancel(self, id: str) -> bool:
        """Ends a request at once and frees its KV blocks; False when no live request has the id."""

    def request(self, id: str) -> RequestState:
        """A snapshot of a request; KeyError once its end was delivered by a completed step."""

    def explain(self) -> Explanation | None:
        """Why the head of the queue waits, before the next `schedule()`; None when nothing waits."""

    def check(self) -> None:
        """Verifies the conservation laws; RuntimeError tells of a fault of the scheduler itself."""

    @property
    def config(self) -> NeuronConfig:
        """The configuration that it was made with."""

    @property
    def state(self) -> Literal["idle", "prefill", "decode"]:
        """Idle when nothing waits and nothing runs, else what the last completed step did."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that are free, or cached but used by nobody."""

    @property
    def reserved_blocks(self) -> int:
        """KV blocks that running requests may need at worst."""

@final
class Batch:
    """The arrays of one step, in a compiled shape.

    `T` is the token bucket, `P` `max_prefills_per_batch`, `B` the batch bucket, `W` the blocks of the longest sequence,
    `Wc` those of the context bucket. The arrays belong to the `PaddedInputs` that filled them: a later fill of the same
    shape (with `buffers=n`, the n-th later one) writes into the same memory, and this batch then shows that step.
    Whoever keeps one longer takes a `copy()`.
    """

    @property
    def kind(self) -> Literal["prefill", "decode"]:
        """`"prefill"` or `"decode"`."""

    @property
    def shape(self) -> tuple[str, int] | tuple[str, int, int]:
        """The key of the compiled graph: `("prefill", tokens)` or `("decode", rows, context)`."""

    @property
    def request_ids(self) -> tuple[str | None, ...]:
        """The requests of the real rows, in batch order."""

    @property
    def num_real_tokens(self) -> int:
        """Real tokens of a prefill, real rows of a decode step."""

    @property
    def emits(self) -> list[bool]:
        """Whether each real row emits a token: all do but chunks in the middle of a prompt; a new list."""

    @property
    def num_padded_tokens(self) -> int:
        """The compiled size: tokens of a prefill, rows of a decode step, padding included."""

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Token ids, int32 [T] or [B]; padding 0."""

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions in the sequence, int64, as `input_ids`; padding of a prefill repeats the last, of a decode is 0."""

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """KV slots to write, int64, as `input_ids`: block id * block size + offset; padding -1, which is no index.

        numpy and torch would take -1 for the last slot: whatever writes must leave those tokens out.
        """

    @property
    def block_table(self) -> NDArray[np.int32]:
        """KV blocks of each row in order of position, int32 [P, W] or [B, Wc]; padding -1."""

    @property
    def cached_seq_len(self) -> NDArray[np.int32] | None:
        """Tokens of each prompt that were computed before, int32 [P, 1]; padding 0. None for a decode step."""

    @property
    def cu_seqlens(self) -> NDArray[np.int32] | None:
        """Where each prompt starts, and the end, int32 [P + 1]; padding repeats the end. None for a decode step."""

    @property
    def context_lens(self) -> NDArray[np.int32] | None:
        """Tokens that each row looks back on, its own included, int32 [B]; padding 0. None for a prefill."""

    @property
    def logits_index(self) -> NDArray[np.int64]:
        """Where the last token of each row is in `input_ids`, int64 [P] or [B]; padding repeats the last."""

    @property
    def sampling_params(self) -> NDArray[np.float32]:
        """`top_k`, `top_p`, `temperature` of each row, float32 [P, 3] or [B, 3]; padding -1, 1, 0."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that are there, by name, in the order in which a graph takes them; a new dict."""

    def torch(self) -> dict[str, Any]:
        """As `arrays()`, but torch tensors, which share the memory; ImportError without torch."""

    def copy(self) -> Batch:
        """The same in memory of its own, which no fill writes to."""

@final
class PaddedInputs:
    """Turns steps into arrays of compiled shapes, in memory that it uses again.

    The shapes are those of the configuration's buckets and no others. `buffers` is how many steps of a shape may be in
    flight at once. With `vocab_size`, token ids from there on are refused. Whatever is refused writes nothing; it is a
    ValueError, or a TypeError for a value of a wrong type, and names the row or the request. For one thread at a time.

    >>> config = NeuronConfig(
    ...     max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=4096, block_size=64, num_blocks=64
    ... )
    >>> inputs = PaddedInputs(config)
    >>> batch = inputs.decode([DecodeRow(token_id=5, position=100, block_ids=[10, 15, 22])])
    >>> batch
    <Batch ('decode', 1, 4096): 1 of 1>
    >>> batch.slot_mapping, batch.context_lens
    (array([996]), array([101], dtype=int32))
    """

    def __new__(cls, config: NeuronConfig, *, buffers: int = 1, vocab_size: int | None = None) -> PaddedInputs: ...
    def fill(
        self,
        step: Step,
        tokens: Sequence[int | None] | Ids | Callable[[list[str]], Sequence[int | None] | Ids] | None = None,
        *,
        context_bucket: int | None = None,
    ) -> Batch:
        """The arrays of a `BucketScheduler` step, while it is readable.

        `tokens` are for decode rows whose token the scheduler does not know, as of a step planned ahead: one entry a
        row, a token id or None; or a callable that is given the ids of those requests and returns their token ids.
        `context_bucket` asks for a larger context bucket than the rows need.

        ValueError for an idle step, a step of another configuration or one that is too old, and for a request whose
        token ids are not known.
        """

    def prefill(self, rows: Sequence[PrefillRow]) -> Batch:
        """The arrays of a prefill of these rows, for callers with a scheduler of their own.

        ValueError, naming row and value, for a position of `max_model_len` or more, blocks that do not hold the row's
        positions or are more than the longest sequence takes, a block id outside 1 to `num_blocks` or twice in a row,
        more rows than `max_prefills_per_batch`, and more tokens than the last bucket.
        """

    def decode(self, rows: Sequence[DecodeRow], context_bucket: int | None = None) -> Batch:
        """The arrays of a decode step of these rows, for callers with a scheduler of their own.

        ValueError as in `prefill`, and for more rows than the last batch bucket. `context_bucket` as in `fill`.
        """

    def dummy(self, shape: tuple[str, int] | tuple[str, int, int]) -> Batch:
        """The arrays of a step without any request: nothing but padding, which writes nothing to the KV cache.

        For warm-up, and for a rank that has nothing to do while others run a step. ValueError for a shape that is not
        among `shapes`.
        """

    @property
    def config(self) -> NeuronConfig:
        """The configuration that it was made with."""

    @property
    def shapes(self) -> tuple[tuple[str, int] | tuple[str, int, int], ...]:
        """Every compiled shape: prefills, then decodes by rows and context, ascending."""

@final
class Gate:
    """The decisions of `BucketScheduler` for a scheduler that keeps its own queues and KV blocks.

    It knows who holds a slot and blocks, by row handles that it gives out, and never sees a queue. The vLLM classes
    ask it; its methods may change with them.
    """

    def __new__(
        cls,
        config: NeuronConfig,
        groups: Sequence[tuple[int, int, int | None]],
        *,
        slots_max: int = ...,
        watermark: int = 0,
        adaptive_threshold: bool = False,
        decode_width: int = ...,
    ) -> Gate:
        """`groups`: for each KV cache group the tokens of a block, the blocks beyond those that hold the tokens, and
        the most blocks of a request (None: no bound). `watermark`: blocks kept free when a request starts while others
        hold some. `adaptive_threshold`: the cap on long prompts is never below an even share of a step's tokens.
        `decode_width`: most tokens of a decode row.
        """

    def need(self, prompt: int, max_tokens: int, session: bool = False) -> int:
        """KV blocks that a request needs at worst.

        ValueError when it can never run: no prompt, one longer than `max_model_len`, or a worst case larger than the
        whole cache. A `session` may be continued, so its worst case is the longest sequence.
        """

    def enter(self, need: int) -> int:
        """Reserves `need` blocks and a slot; returns the row handle."""

    def seat(self, row: int) -> bool:
        """Gives a holder of blocks a slot, unless it has one; False for a stale handle."""

    def unseat(self, row: int) -> bool:
        """Takes the slot back and leaves the blocks; False for a stale handle."""

    def leave(self, row: int) -> bool:
        """Takes back all that a row holds; False for a stale handle."""

    def begin(self) -> None:
        """Starts to choose the prompts of a step."""

    def refuse(
        self, need: int, rest: int, requests: int, *, row: int | None = None, prefill_in_progress: bool = False
    ) -> str | None:
        """Why a request may not start now, as a stable name; None when it may.

        `rest`: tokens to compute, whatever the prefix cache holds; `requests`: those that run or wait, itself included;
        `row`: its handle where it holds blocks.
        """

    def pack(self, rest: int, requests: int) -> bool:
        """Counts a prompt among those of the step; False when it does not fit beside the others."""

    def unpack(self, rest: int) -> None:
        """Lets a prompt go that was counted but is not in the step after all."""

    def budget(self, rest: int, requests: int) -> int:
        """Most tokens of the step of which the prompt with `rest` to compute is the first."""

    def decide(self, prefill_wanted: bool, decode_ready: bool, throttled: bool) -> tuple[str, bool]:
        """Chooses what the step does: "prefill", "decode" or "idle", and whether decodes that are owed came before a
        prefill.
        """

    def interleaves(self, decode_ready: bool) -> bool:
        """Whether a prompt that may start would wait for decode steps that are owed."""

    def ran(self, prefill: bool) -> None:
        """Counts the chosen step, which ran as a prefill or as a decode."""

    def pad_prefill(self, rows: Sequence[tuple[str, bool, int]]) -> tuple[dict[str, int], int]:
        """Checks a prefill step; returns its padded counts and its bucket.

        `rows`: (id, whether prompt tokens are left, count). The last row carries the padding. RuntimeError names what
        breaks a rule.
        """

    def pad_decode(self, counts: dict[str, int], prefilling: list[str]) -> tuple[dict[str, int], int]:
        """Checks a decode step; returns a copy of its counts, which are never padded, and its bucket of rows.

        `prefilling`: ids of the prompts that are part done, none of which may be in the step. RuntimeError names what
        breaks a rule.
        """

    def decode_ready(self, running: list[Any], step: int) -> bool:
        """Whether any of vLLM's running requests would get a token in step `step`; looks no further than the first."""

    def explanation(self, id: str, reason: str, needed: int) -> Explanation:
        """Why `id` waits, as `explain()` tells it."""

    @property
    def seated(self) -> int:
        """Requests that hold a slot."""

    @property
    def reserved(self) -> int:
        """KV blocks promised to requests."""

    @property
    def usable(self) -> int:
        """KV blocks of the whole cache."""

    @property
    def longest(self) -> int:
        """KV blocks of a sequence of `max_model_len`."""

@final
class Worker:
    """What `VllmInputs` keeps of the requests of a vLLM worker; its methods may change with it."""

    def __new__(cls, inputs: PaddedInputs) -> Worker: ...
    def fill(
        self,
        step: tuple[Any, ...],
        tokens: Sequence[int | None] | Ids | Callable[[list[str]], Sequence[int | None] | Ids] | None = None,
        context_bucket: int | None = None,
    ) -> Batch | None:
        """The arrays of a step; None when nobody is scheduled. A refused step changes nothing.

        `step`: counts by id in batch order, padded counts by id, padded rows of a decode (0 for a prefill), ids that
        ended, then those who are told:

        - the new ones: (id, prompt and outputs, tokens of the prompt, ([block id, ...],), computed tokens,
          (`top_k`, `top_p`, `temperature`)), each;
        - the known ones, as a tuple of lists: ids, computed tokens, ([new block id, ...],) or None each, outputs with
          those of steps in flight; and behind the lists a dict of those among them that start over, {id: tokens},
          whose blocks are all that they have.

        RuntimeError while another fill of the same object runs.
        """

    def accept(self, sampled: Sequence[Ids]) -> None:
        """Takes what the oldest step in flight has sampled: one list a row, with its token, or empty for a chunk in
        the middle of a prompt. ValueError when no step is in flight, and for a row with too few tokens or too many;
        RuntimeError while another `accept` of the same object runs.
        """

    @property
    def inputs(self) -> PaddedInputs:
        """Where the steps are written."""

    @property
    def num_requests(self) -> int:
        """Requests that are known."""

    @property
    def num_in_flight(self) -> int:
        """Steps that were filled and not accepted."""

@final
class TraceRequest:
    """One request of a workload; an immutable value.

    >>> TraceRequest("a", "0.25", 128, 16)
    TraceRequest(id='a', arrival_s=0.25, prompt_tokens=128, output_tokens=16)
    """

    def __new__(
        cls,
        id: str,
        arrival_s: int | float | str | Decimal,
        prompt_tokens: int,
        output_tokens: int,
        *,
        priority: int = 0,
        hash_ids: Sequence[int] | None = None,
    ) -> TraceRequest:
        """`arrival_s` in seconds, at least 0, kept to the nanosecond (half up); only differences between requests
        matter. A float counts as the shortest decimal that stands for it. `hash_ids` tell the content of the prompt,
        one for each 512 tokens: equal ids are equal tokens, which prefix caching shares.

        ValueError names every bad field.
        """

    @property
    def id(self) -> str:
        """The name."""

    @property
    def arrival_s(self) -> float:
        """The arrival in seconds, the float nearest to `arrival_ns`."""

    @property
    def arrival_ns(self) -> int:
        """The arrival in whole nanoseconds."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def output_tokens(self) -> int:
        """Number of outputs."""

    @property
    def priority(self) -> int:
        """For the policy of that name: the lower number first. 0 unless given."""

    @property
    def hash_ids(self) -> tuple[int, ...] | None:
        """What the prompt consists of, an id for each 512 tokens; None when that was not told."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Cost:
    """Step times of a device, in nanoseconds, from milliseconds rounded half up; see `neuron_sched.simulate`."""

    @staticmethod
    def constant(prefill_ms: int | float | str | Decimal, decode_ms: int | float | str | Decimal) -> Cost:
        """Every prefill step takes the one time, every decode step the other."""

    @staticmethod
    def table(
        prefill: Mapping[int, int | float | str | Decimal], decode: Mapping[int, int | float | str | Decimal]
    ) -> Cost:
        """Times by padded size, with straight lines between the sizes."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class ReplayReport:
    """The result of a replay; `neuron_sched.simulate.Report` gives it a face."""

    def summary(self) -> dict[str, Any]:
        """All numbers of the run, as docs/replay.md lists them."""

    def __len__(self) -> int:
        """Number of requests."""

    def request(
        self, index: int
    ) -> tuple[str, Literal["completed", "rejected"], str | None, float, float | None, float | None, float | None, int]:
        """Id, status, reason, arrival, time to first token, end to end, mean gap (all in seconds), outputs."""

    @property
    def num_steps(self) -> int | None:
        """Number of recorded steps; None where they were not recorded."""

    def step(self, index: int) -> tuple[float, float, Literal["prefill", "decode"], dict[str, int], int]:
        """Start and end in seconds, kind, tokens by id, padded tokens."""

def replay(
    requests: Sequence[TraceRequest],
    config: NeuronConfig,
    cost: Cost,
    scheduler: str,
    record_steps: bool,
    progress: Callable[[int, int], object] | None,
) -> ReplayReport:
    """What `neuron_sched.simulate.replay` calls. Other threads go on while it runs."""
