"""Native part of `neuron_sched`. Use the names that the package exports."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Literal, SupportsIndex, TypedDict, final, overload, type_check_only

import numpy as np
from numpy.typing import NDArray

from neuron_sched.rows import DecodeRow, Ids, PrefillRow, StepTokens

__version__: str

@type_check_only
class BuildInfo(TypedDict):
    profile: str
    commit: str | None
    target: str

def build_info() -> BuildInfo:
    """Return what the extension was built from.

    `profile` is `"debug"` or `"release"`, `target` is the platform triple, and `commit` is the git commit of the
    sources, `None` if they were not a git checkout.
    """

@final
class Buckets:
    """An ascending list of compiled sizes.

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
        """Check the sizes.

        Raise `ValueError` if `sizes` is not a list or tuple of at least one positive int, or not strictly ascending.
        """

    def fit(self, count: int) -> int:
        """Return the smallest size of at least `count`, or 0 for 0.

        Raise `ValueError` if `count` is negative or exceeds the last size.
        """

    @property
    def sizes(self) -> list[int]:
        """All sizes, ascending."""

    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class ConfigField:
    """The description of one field of `NeuronConfig`."""

    @property
    def name(self) -> str:
        """Name of the field in every interface."""

    @property
    def kind(self) -> Literal["count", "sizes", "choice", "flag", "costs"]:
        """Kind of its values: `"count"`, `"sizes"`, `"choice"`, `"flag"` or `"costs"`."""

    @property
    def minimum(self) -> int | None:
        """Smallest value of a count; `None` for other kinds."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that a choice takes, the default first; empty for other kinds."""

    @property
    def required(self) -> bool:
        """Whether the field must be given."""

    @property
    def default(self) -> str | None:
        """Default as text; `None` for a required field."""

    @property
    def meaning(self) -> str:
        """Meaning of the field, in one sentence."""

    @property
    def vllm_flag(self) -> str | None:
        """vLLM flag that sets the field; `None` if `additional_config["neuron_config"]` does."""

@final
class NeuronConfig:
    """Checked, immutable configuration of `BucketScheduler`.

    `None` selects the default of a field. One `ValueError` lists all faults, one per line, each with the field, its
    value and the expectation.

    >>> config = NeuronConfig(
    ...     max_num_seqs=6, max_num_batched_tokens=2048, max_model_len=1000, block_size=32, num_blocks=256
    ... )
    >>> config.num_batched_tokens_buckets
    [128, 256, 512, 1000]
    >>> config.num_seqs_buckets
    [1, 2, 4, 6]
    """

    FIELDS: ClassVar[tuple[ConfigField, ...]]
    """Descriptions of all fields, in the order of `as_dict`."""

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
        """Maximum number of requests that run at once; each holds one batch slot."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens in one step; at least `max_num_seqs`."""

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence in tokens, prompt and outputs together."""

    @property
    def block_size(self) -> int:
        """Number of tokens in one KV block."""

    @property
    def num_blocks(self) -> int:
        """Number of usable KV blocks; their ids are 1 to `num_blocks`, and block 0 is never allocated."""

    @property
    def num_batched_tokens_buckets(self) -> list[int]:
        """Compiled prefill sizes in tokens, ascending; the last is `min(max_num_batched_tokens, max_model_len)`.

        A prefill step is padded to the smallest bucket that holds its tokens.
        """

    @property
    def num_seqs_buckets(self) -> list[int]:
        """Compiled decode batch sizes in rows, ascending; the last is `max_num_seqs`.

        A decode step is padded to the smallest bucket that holds its rows.
        """

    @property
    def decode_context_length_buckets(self) -> list[int]:
        """Compiled decode context lengths in tokens, ascending; `max_model_len` is added if it is not the last.

        `PaddedInputs` selects the context bucket of a decode step. No scheduling decision depends on it.
        """

    @property
    def kv_segment_size_buckets(self) -> list[int] | None:
        """Segment sizes of a device that prefills in segments; given alone, they are also the token buckets."""

    @property
    def max_prefills_per_batch(self) -> int:
        """Maximum number of prompts that start in one prefill step."""

    @property
    def kv_admission(self) -> Literal["reserve", "max_model_len"]:
        """KV blocks that a request reserves: its own worst case, or those of a sequence of `max_model_len` tokens.

        A request is admitted only if its reservation fits, so that no running request is ever preempted.
        """

    @property
    def max_consecutive_prefill_steps(self) -> int | None:
        """Maximum number of prefill steps in a row while a request could decode."""

    @property
    def min_decode_steps(self) -> int:
        """Number of decode steps that follow once `max_consecutive_prefill_steps` is reached."""

    @property
    def chunking(self) -> Literal["fixed", "bucket"]:
        """How a long prompt is cut: as much as a step takes, or where ending on a bucket edge is cheaper."""

    @property
    def prefill_cost(self) -> dict[int, float] | None:
        """Cost of a prefill step by padded tokens, in any unit, for chunking `"bucket"`."""

    @property
    def long_prefill_token_threshold(self) -> int:
        """Maximum number of prompt tokens in a step while other requests run or wait; 0 is no limit."""

    @property
    def prefix_caching(self) -> bool:
        """Whether requests share full KV blocks of equal content."""

    @property
    def policy(self) -> Literal["fcfs", "priority"]:
        """Order of the waiting queue: first come first served, or the lower priority number first."""

    @property
    def lookahead(self) -> int:
        """Number of tokens beyond the next one that have KV slots, for speculative decoding."""

    @property
    def dcp(self) -> int:
        """Decode context parallel size; above 1, token buckets must be divisible by `dcp * block_size`."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name, with defaults filled in.

        `NeuronConfig(**config.as_dict())` equals `config`.
        """

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Req:
    """A request for the token-budget `Scheduler`. All counts are in tokens.

    `rid` is any hashable value, unique among the live requests of a scheduler. The request finishes after `max_new`
    output tokens. With `prefilled` or `generated` above 0 it resumes from these counters.

    Counts are ints, or objects with `__index__` such as `numpy.int64`: `prompt_len` and `max_new` from 1 to 2**53,
    `prefilled` from 0 to `prompt_len`, `generated` from 0 to `max_new - 1`. Raise `ValueError` for a count out of
    range, and `TypeError` for a value of another type.

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
        """Id of the request: the object passed to the constructor."""

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""

    @property
    def max_new(self) -> int:
        """Number of output tokens after which the request finishes."""

    @property
    def prefilled(self) -> int:
        """Number of computed prompt tokens, as of the last completed step."""

    @property
    def generated(self) -> int:
        """Number of generated output tokens, as of the last completed step."""

@final
class Requests(Sequence[Req]):
    """A read-only sequence of the waiting or running requests of a `Scheduler`, oldest first.

    It always shows the current state of the scheduler. An iterator covers the requests present when it was created, so
    the scheduler may change during the iteration. The sequence equals a list of the same requests; a slice is a list.
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
        """Return the position of the first request that equals `value`. Raise `ValueError` if there is none.

        `bounds` are the start and stop of `list.index`.
        """

    def count(self, value: object, /) -> int:
        """Return the number of requests that equal `value`."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Scheduler:
    """Continuous-batching scheduler with a token budget, for hardware that can mix prefill and decode in one step.

    A step has at most `token_budget` tokens. They are assigned in this order, oldest request first:

    1. one token to every running request with a computed prompt (a decode);
    2. the remaining prompt tokens of running requests, as far as the budget allows (a chunk);
    3. prompt tokens of waiting requests, in queue order. A request is admitted if budget is left, fewer than `max_seqs`
       requests run, and `prompt_len + max_new` tokens fit the unreserved part of `kv_tokens`. If the head of the queue
       does not fit, no later request is admitted.

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
        """Queue a request.

        A cancelled request may be added again; it resumes from its counters. Raise `ValueError` and change nothing if
        the request can never fit (`prompt_len + max_new > kv_tokens`), if it is live in this or another scheduler, if a
        live request of this scheduler has the same rid, or if it has generated all its outputs.
        """

    def schedule(self) -> list[tuple[Req, int]]:
        """Plan the next step: return the scheduled requests with their token counts.

        Requests are admitted here; counters change in `complete`. The next call voids a plan that is not completed; the
        requests that it admitted stay admitted. The list is a new one.
        """

    def complete(self, plan: list[tuple[Req, int]]) -> list[Any]:
        """Complete the plan of the last `schedule`, and return the rids that emitted a token, in order of the plan.

        A decode emits a token, and so does the chunk that ends a prompt; an earlier chunk does not. A request that has
        generated `max_new` tokens leaves `running` and releases its reservation. Items of requests that were cancelled
        since `schedule` are skipped.

        `plan` is the list of the last `schedule` or an equal one, and can be completed once. Raise `ValueError` and
        change nothing for any other list, and `TypeError` for a value that is not a list.
        """

    def cancel(self, rid: Hashable) -> bool:
        """Cancel a live request and release its reservation. Return `False` if no live request has the rid."""

    @property
    def waiting(self) -> Requests:
        """Waiting requests, first come first served."""

    @property
    def running(self) -> Requests:
        """Running requests, oldest first."""

    @property
    def reserved(self) -> int:
        """Number of reserved KV tokens: the sum of `prompt_len + max_new` over `running`."""

    def check(self) -> None:
        """Check the invariants of the scheduler. Raise `RuntimeError` if one is violated, which is always a bug.

        Takes time proportional to the number of live requests.
        """

@final
class Request:
    """An immutable request for `BucketScheduler`.

    `prompt` is a number of tokens, or the token ids; prefix caching needs the ids. The request finishes after
    `max_tokens` output tokens, capped at `max(1, max_model_len - prompt)`, or with an output token of `stop_token_ids`.
    The scheduler ignores `top_k`, `top_p` and `temperature`; they are copied to `Batch.sampling_params`.

    Raise `TypeError` or `ValueError` with the name of the field for a bad value.
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
        """Id of the request, unique among the live requests of a scheduler."""

    @property
    def prompt(self) -> int | list[int]:
        """Number of prompt tokens, or a new list of the prompt's token ids."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens, as given."""

    @property
    def priority(self) -> int:
        """Priority under policy `"priority"`; the lowest number is admitted first."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that finish the request when one is emitted."""

    @property
    def top_k(self) -> int:
        """Sampling parameter `top_k`; -1 (default) and 0 are off."""

    @property
    def top_p(self) -> float:
        """Sampling parameter `top_p`, above 0 and at most 1; 1 (default) is off."""

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 (default) is greedy."""

@final
class RequestState:
    """A snapshot of a request, as of the last completed step."""

    @property
    def id(self) -> str:
        """Id of the request."""

    @property
    def status(self) -> Literal["waiting", "prefill", "decode", "finished", "cancelled"]:
        """`"waiting"`, `"prefill"`, `"decode"`, `"finished"` or `"cancelled"`."""

    @property
    def finish_reason(self) -> Literal["length", "stop"] | None:
        """`"length"` or `"stop"` for a finished request, else `None`."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens with computed KV entries."""

    @property
    def output_token_ids(self) -> list[int | None]:
        """Output token ids; `None` for a token that was not passed to `complete`."""

    @property
    def block_ids(self) -> list[int]:
        """Allocated KV blocks, in order of position."""

@final
class Step:
    """A planned step: the scheduled requests, their token counts and the padded size.

    All values are as of the planning. They can be read until the step is completed and `schedule()` is called again.
    Reading a value later returns the same value or raises `ValueError`.
    """

    @property
    def kind(self) -> Literal["prefill", "decode", "idle"]:
        """`"prefill"`, `"decode"`, or `"idle"` if no request is scheduled."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Unpadded number of tokens by request id, in batch order, as a new dict."""

    @property
    def num_scheduled_tokens_padded(self) -> dict[str, int]:
        """Padded number of tokens by request id, in batch order, as a new dict.

        In a prefill step of several prompts the last prompt carries the padding, so that the values add up to the token
        bucket.
        """

    @property
    def num_computed_tokens(self) -> dict[str, int]:
        """Number of tokens computed before the step by request id, in batch order, as a new dict.

        Cached tokens of a prefix-cache hit are included.
        """

    @property
    def num_seqs_padded(self) -> int:
        """Batch bucket of a decode step in rows; 0 for other steps."""

    @property
    def padded_tokens(self) -> int:
        """Compiled size of the step: the token bucket of a prefill step, the batch bucket of a decode step."""

    @property
    def finished_ids(self) -> list[str]:
        """Ids of the requests that finished or were cancelled since the last completed step.

        An id is repeated in every step until a step that lists it is completed, so that a worker never misses it. A
        worker removes these requests before it adds the new ones of the step, because a new request may reuse an id.
        """

    def block_ids(self, id: str) -> list[int]:
        """Return the KV blocks of a scheduled request, in order of position; they hold the tokens of the step.

        Raise `KeyError` for any other id, and `ValueError` if the step is too old.
        """

    def __len__(self) -> int:
        """Return the number of scheduled requests."""

@final
class Outcome:
    """A token emitted by a step."""

    @property
    def id(self) -> str:
        """Id of the request."""

    @property
    def token(self) -> int | None:
        """Token id; `None` if it was not passed to `complete`."""

    @property
    def finish_reason(self) -> Literal["length", "stop"] | None:
        """`"stop"` or `"length"` for the last token of a request, else `None`.

        A stop token takes precedence over the length.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Outcomes:
    """A read-only sequence of the tokens emitted by a step, in batch order.

    Items are created when they are read. The sequence equals a list of the same outcomes; a slice is a list.
    """

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
    """Why the head of the queue waits, with the KV blocks that admission compares."""

    @property
    def id(self) -> str:
        """Id of the request at the head of the queue."""

    @property
    def reason(self) -> str:
        """Stable name of the reason; `"ready"` if the next `schedule()` admits the request.

        Reasons: `"slots"`, `"prefill_in_progress"`, `"prefill_batch_full"`, `"kv"`, `"interleave"`, `"throttled"`,
        `"step_running"` and `"ready"`; for the vLLM classes also `"paused"`, `"blocked"`, and the reasons of an
        override.
        """

    @property
    def needed(self) -> int:
        """Worst case of the request, in KV blocks."""

    @property
    def reserved(self) -> int:
        """Reservations of the running requests, in KV blocks."""

    @property
    def usable(self) -> int:
        """Capacity of the whole KV cache, in KV blocks."""

@final
class BucketScheduler:
    """Continuous-batching scheduler for steps that are all prefill or all decode, padded to a compiled size.

    Methods may be called from several threads.

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
        """Queue a request.

        Raise `ValueError` and change nothing if a live request has the same id, if the prompt is longer than
        `max_model_len`, or if the worst case of the request is larger than the whole KV cache.
        """

    def schedule(self, throttle_prefills: bool = False, *, ahead: bool = False) -> Step:
        """Plan the next step: admit requests and allocate KV blocks.

        A step that is not completed may be planned again, which voids the earlier plan. `throttle_prefills` plans no
        prefill while a request decodes. `ahead` plans one step beyond the step in flight, assuming that each of its
        emitting rows emits a token. Raise `ValueError` if a step is planned ahead already.
        """

    def complete(self, step: Step, tokens: Sequence[int | None] | None = None) -> Outcomes:
        """Complete the step that is due: append its tokens, and finish requests.

        `tokens` has one entry per scheduled request: the token id, or `None` for a row that emits nothing. It may be
        omitted if every prompt was given as a length. Raise `ValueError` and change nothing for a step that is not due,
        or for tokens that do not match its rows.
        """

    def cancel(self, id: str) -> bool:
        """Cancel a live request and free its KV blocks. Return `False` if no live request has the id."""

    def request(self, id: str) -> RequestState:
        """Return a snapshot of a request.

        Raise `KeyError` for an unknown id. The id of a finished or cancelled request is unknown once a completed step
        has listed it in `Step.finished_ids`.
        """

    def explain(self) -> Explanation | None:
        """Return why the head of the queue waits. `None` if the queue is empty."""

    def check(self) -> None:
        """Check the invariants of the scheduler. Raise `RuntimeError` if one is violated, which is always a bug."""

    @property
    def config(self) -> NeuronConfig:
        """The configuration of the scheduler."""

    @property
    def state(self) -> Literal["idle", "prefill", "decode"]:
        """`"idle"` if no request waits or runs, else the kind of the last completed step."""

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""

    @property
    def num_running(self) -> int:
        """Number of running requests; each holds one batch slot."""

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that can be allocated: free ones, and cached ones that no request uses."""

    @property
    def reserved_blocks(self) -> int:
        """Number of KV blocks reserved for running requests: the sum of their worst cases."""

@final
class Batch:
    """The arrays of one step, padded to a compiled shape.

    Sizes in the shapes below: `T` is the token bucket, `P` is `max_prefills_per_batch`, `B` is the batch bucket, `W` is
    the number of KV blocks of a sequence of `max_model_len` tokens, and `Wc` that of the context bucket.

    The arrays belong to the `PaddedInputs` that filled them. A later fill of the same shape overwrites them; with
    `buffers=n`, the `n`-th later fill does. Use `copy()` to keep a batch longer.
    """

    @property
    def kind(self) -> Literal["prefill", "decode"]:
        """Kind of the step, `"prefill"` or `"decode"`."""

    @property
    def shape(self) -> tuple[str, int] | tuple[str, int, int]:
        """Key of the compiled graph: `("prefill", tokens)` or `("decode", rows, context)`."""

    @property
    def request_ids(self) -> tuple[str | None, ...]:
        """Request ids of the unpadded rows, in batch order."""

    @property
    def num_real_tokens(self) -> int:
        """Unpadded size: number of tokens of a prefill step, number of rows of a decode step."""

    @property
    def emits(self) -> list[bool]:
        """Whether each unpadded row emits a token, as a new list.

        A chunk that does not end its prompt emits none.
        """

    @property
    def num_padded_tokens(self) -> int:
        """Padded size: the token bucket of a prefill step, the batch bucket of a decode step."""

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Token ids.

        Shape `[T]` or `[B]`, int32; padding is 0.
        """

    @property
    def positions(self) -> NDArray[np.int64]:
        """Position of each token in its sequence.

        Shape `[T]` or `[B]`, int64; padding repeats the last position in a prefill step, and is 0 in a decode step.
        """

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """KV slot of each token: block id * block size + offset.

        Shape `[T]` or `[B]`, int64; padding is -1. A kernel that writes the KV cache must skip the padding: as an
        index, numpy and torch take -1 for the last slot.
        """

    @property
    def block_table(self) -> NDArray[np.int32]:
        """KV blocks of each row, in order of position.

        Shape `[P, W]` or `[B, Wc]`, int32; padding is -1.
        """

    @property
    def cached_seq_len(self) -> NDArray[np.int32] | None:
        """Number of tokens of each prompt computed before the step.

        Shape `[P, 1]`, int32; padding rows are 0. `None` for decode steps.
        """

    @property
    def cu_seqlens(self) -> NDArray[np.int32] | None:
        """Start of each prompt in `input_ids`, followed by the end of the last prompt.

        Shape `[P + 1]`, int32; padding repeats the end. `None` for decode steps.
        """

    @property
    def context_lens(self) -> NDArray[np.int32] | None:
        """Context length of each row, including the token being computed.

        Shape `[B]`, int32; padding rows are 0. `None` for prefill steps.
        """

    @property
    def logits_index(self) -> NDArray[np.int64]:
        """Index of the last token of each row in `input_ids`.

        Shape `[P]` or `[B]`, int64; padding repeats the last index.
        """

    @property
    def sampling_params(self) -> NDArray[np.float32]:
        """`top_k`, `top_p` and `temperature` of each row.

        Shape `[P, 3]` or `[B, 3]`, float32; padding rows are -1, 1, 0.
        """

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, in the order of the graph's arguments, as a new dict."""

    def torch(self) -> dict[str, Any]:
        """Return the arrays as torch tensors that share their memory, as a new dict.

        Raise `ImportError` if torch is not installed.
        """

    def copy(self) -> Batch:
        """Return a copy with arrays that no later fill overwrites."""

@final
class PaddedInputs:
    """Fills the arrays of compiled shapes with the rows of a step, in memory that is reused.

    The shapes are those of the configuration's buckets. `buffers` is the number of steps of one shape that may be in
    flight. With `vocab_size`, token ids of at least `vocab_size` are refused. A refused call writes nothing: it raises
    `ValueError`, or `TypeError` for a value of a wrong type, with the row or the request in the message. Only one
    thread at a time may use an object.

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
        tokens: StepTokens | None = None,
        *,
        context_bucket: int | None = None,
    ) -> Batch:
        """Fill the arrays of a `BucketScheduler` step, and return them.

        `tokens` are needed for decode rows with a token that the scheduler does not know, as in a step planned ahead: a
        sequence with one entry per row, a token id or `None`; or a callable that takes the ids of these requests and
        returns their token ids. `context_bucket` selects a larger context bucket than the rows need.

        Raise `ValueError` for an idle step, a step of another configuration, a step that is too old, and a request with
        unknown token ids.
        """

    def prefill(self, rows: Sequence[PrefillRow]) -> Batch:
        """Fill the arrays of a prefill step with a caller's rows, and return them.

        Raise `ValueError` for a position of at least `max_model_len`, KV blocks that do not hold the row's positions or
        exceed those of the longest sequence, a block id outside 1 to `num_blocks` or twice in a row, more rows than
        `max_prefills_per_batch`, and more tokens than the last token bucket.
        """

    def decode(self, rows: Sequence[DecodeRow], context_bucket: int | None = None) -> Batch:
        """Fill the arrays of a decode step with a caller's rows, and return them.

        `context_bucket` selects a larger context bucket than the rows need. Raise `ValueError` as `prefill` does, and
        for more rows than the last batch bucket.
        """

    def dummy(self, shape: tuple[str, int] | tuple[str, int, int]) -> Batch:
        """Fill the arrays of a shape with padding only, and return them.

        A step of padding writes nothing to the KV cache. Use it for warm-up, and for an idle rank while other ranks run
        a step. Raise `ValueError` for a shape that is not in `shapes`.
        """

    @property
    def config(self) -> NeuronConfig:
        """The configuration of the inputs."""

    @property
    def shapes(self) -> tuple[tuple[str, int] | tuple[str, int, int], ...]:
        """Every compiled shape: prefills ascending, then decodes ascending by rows and context."""

@final
class Gate:
    """Scheduling decisions for the vLLM classes, without a queue and without KV blocks; internal.

    A request is identified by the row handle that `admit` returns.
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
        """Return a gate without requests.

        Each KV cache group in `groups` is (tokens per block, blocks beyond those that hold the tokens, maximum number
        of blocks per request or `None`). `slots_max` bounds the batch slots in addition to `max_num_seqs`. `watermark`
        is the number of blocks that stay free when a request is admitted while others have reservations. With
        `adaptive_threshold`, the long-prefill threshold is never below an even share of the step's tokens.
        `decode_width` is the maximum number of tokens of a decode row.
        """

    def needed_blocks(self, prompt: int, max_tokens: int, session: bool = False) -> int:
        """Return the worst case of a request in KV blocks.

        The worst case of a `session` is the longest sequence, because a later prompt may continue it. Raise
        `ValueError` if the request can never run: no prompt, a prompt longer than `max_model_len`, or a worst case
        larger than the whole KV cache.
        """

    def admit(self, needed_blocks: int) -> int:
        """Reserve `needed_blocks` KV blocks and a batch slot for a request, and return its row handle."""

    def take_slot(self, row: int) -> bool:
        """Give a request a batch slot, unless it has one. Return `False` for a stale handle."""

    def free_slot(self, row: int) -> bool:
        """Free the batch slot of a request and keep its reservation. Return `False` for a stale handle."""

    def release(self, row: int) -> bool:
        """Release the reservation and the batch slot of a request. Return `False` for a stale handle."""

    def begin(self) -> None:
        """Start to select the prompts of a step."""

    def refuse(
        self,
        needed_blocks: int,
        rest: int,
        num_requests: int,
        *,
        row: int | None = None,
        prefill_in_progress: bool = False,
    ) -> str | None:
        """Return the stable name of the reason why a request is not admitted now, or `None` if it fits.

        `rest` is the number of prompt tokens to compute, prefix-cache hits not deducted; `num_requests` the number of
        running and waiting requests, including this one; `row` the handle of a request that has a reservation already.
        """

    def pack(self, rest: int, num_requests: int) -> bool:
        """Add a prompt to the step. Return `False` if the step's token or row capacity is exhausted."""

    def unpack(self, rest: int) -> None:
        """Remove a prompt that `pack` has added and that is not scheduled."""

    def budget(self, rest: int, num_requests: int) -> int:
        """Return the token budget of a step with a first prompt of `rest` tokens to compute."""

    def decide(self, prefill_wanted: bool, decode_ready: bool, throttled: bool) -> tuple[str, bool]:
        """Decide the kind of the step, and return it with whether due decode steps delay a prefill.

        The kind is `"prefill"`, `"decode"` or `"idle"`.
        """

    def interleaves(self, decode_ready: bool) -> bool:
        """Return whether a head that fits would wait for decode steps that are due under the interleave bound."""

    def ran(self, prefill: bool) -> None:
        """Record that the step of the last `decide` ran as a prefill or as a decode."""

    def pad_prefill(self, rows: Sequence[tuple[str, bool, int]]) -> tuple[dict[str, int], int]:
        """Check a prefill step, and return its padded token counts by id and its token bucket.

        Each row is (id, whether prompt tokens are left, unpadded count). The last row carries the padding. Raise
        `RuntimeError` if no compiled graph can run the step.
        """

    def pad_decode(self, counts: dict[str, int], prefilling: list[str]) -> tuple[dict[str, int], int]:
        """Check a decode step, and return a copy of its token counts, which need no padding, and its batch bucket.

        `prefilling` lists the ids of prefilling requests; none of them may be in the step. Raise `RuntimeError` if no
        compiled graph can run the step.
        """

    def decode_ready(self, running: list[Any], step: int) -> bool:
        """Return whether at least one of vLLM's running requests would get a token in step `step`."""

    def explanation(self, id: str, reason: str, needed: int) -> Explanation:
        """Return the `Explanation` of request `id` with the reserved and usable blocks of this gate."""

    @property
    def slots_used(self) -> int:
        """Number of batch slots in use."""

    @property
    def reserved(self) -> int:
        """Number of KV blocks reserved for requests."""

    @property
    def usable(self) -> int:
        """Number of KV blocks in the whole cache."""

    @property
    def longest(self) -> int:
        """Number of KV blocks of a sequence of `max_model_len` tokens."""

@final
class Worker:
    """The requests of a vLLM worker; internal to `VllmInputs`."""

    def __new__(cls, inputs: PaddedInputs) -> Worker: ...
    def fill(
        self,
        step: tuple[Any, ...],
        tokens: StepTokens | None = None,
        context_bucket: int | None = None,
    ) -> Batch | None:
        """Fill the arrays of a step, and return them; `None` if no request is scheduled.

        A refused step changes nothing. Raise `RuntimeError` while another `fill` of the same object runs.

        `step` is a tuple: token counts by id in batch order, padded token counts by id, padded number of rows of a
        decode step (0 for a prefill), ids of finished requests, then the scheduled requests:

        - a list of new requests, each (id, prompt tokens followed by output tokens, number of prompt tokens, ([block
          id, ...],), number of computed tokens, (`top_k`, `top_p`, `temperature`));
        - the known requests, as a tuple of lists: ids, numbers of computed tokens, ([new block id, ...],) or `None`,
          and numbers of output tokens including those of steps in flight; followed by a dict {id: token ids} of the
          resumed requests, for which the list of blocks has all blocks.

        `tokens` and `context_bucket` are those of `PaddedInputs.fill`.
        """

    def accept(self, sampled: Sequence[Ids]) -> None:
        """Append the tokens sampled by the oldest step in flight.

        `sampled` has one list per unpadded row, in batch order: one token, or an empty list for a chunk that does not
        end its prompt. Raise `ValueError` if no step is in flight, or for a row with too few or too many tokens, and
        `RuntimeError` while another `accept` of the same object runs.
        """

    @property
    def inputs(self) -> PaddedInputs:
        """The inputs that fill the arrays of a step."""

    @property
    def num_requests(self) -> int:
        """Number of known requests."""

    @property
    def num_in_flight(self) -> int:
        """Number of steps in flight: filled and not accepted yet."""

@final
class TraceRequest:
    """An immutable request of a workload.

    `arrival_s` is the arrival in seconds, at least 0, rounded half up to nanoseconds; only differences between requests
    matter. A float is read as the shortest decimal that converts to it. `hash_ids` identify the content of the prompt,
    one id per 512 tokens: segments with equal ids have equal tokens, which prefix caching shares.

    One `ValueError` lists all bad fields.

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
    ) -> TraceRequest: ...
    @property
    def id(self) -> str:
        """Id of the request."""

    @property
    def arrival_s(self) -> float:
        """Arrival in seconds: the float nearest to `arrival_ns`."""

    @property
    def arrival_ns(self) -> int:
        """Arrival in whole nanoseconds."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""

    @property
    def output_tokens(self) -> int:
        """Number of output tokens."""

    @property
    def priority(self) -> int:
        """Priority under policy `"priority"`, 0 by default; the lowest number is admitted first."""

    @property
    def hash_ids(self) -> tuple[int, ...] | None:
        """Content of the prompt, one id per 512 tokens; `None` if it is unknown."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Cost:
    """Durations of a device's steps, in nanoseconds; internal to `neuron_sched.simulate`.

    Arguments are in milliseconds, rounded half up.
    """

    @staticmethod
    def constant(prefill_ms: int | float | str | Decimal, decode_ms: int | float | str | Decimal) -> Cost:
        """Return a cost with one duration for all prefill steps and one for all decode steps."""

    @staticmethod
    def table(
        prefill: Mapping[int, int | float | str | Decimal], decode: Mapping[int, int | float | str | Decimal]
    ) -> Cost:
        """Return a cost with durations by padded size, interpolated linearly."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class ReplayReport:
    """The result of a replay; internal to `neuron_sched.simulate.Report`."""

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run that docs/replay.md lists."""

    def __len__(self) -> int:
        """Return the number of requests of the workload."""

    def request(
        self, index: int
    ) -> tuple[str, Literal["completed", "rejected"], str | None, float, float | None, float | None, float | None, int]:
        """Return the record of one request.

        Items: id, status, refusal reason, arrival, time to first token, end-to-end time, mean inter-token latency,
        number of outputs. Times are in seconds. Raise `IndexError` if there is no such request.
        """

    @property
    def num_steps(self) -> int | None:
        """Number of recorded steps; `None` if steps were not recorded."""

    def step(self, index: int) -> tuple[float, float, Literal["prefill", "decode"], dict[str, int], int]:
        """Return one recorded step.

        Items: start and end in seconds, kind, number of tokens by request id, padded number of tokens. Raise
        `IndexError` if there is no such step.
        """

def replay(
    requests: Sequence[TraceRequest],
    config: NeuronConfig,
    cost: Cost,
    scheduler: str,
    record_steps: bool,
    progress: Callable[[int, int], object] | None,
) -> ReplayReport:
    """Replay a workload; internal to `neuron_sched.simulate.replay`.

    Other Python threads run during the replay. `progress` is called with the number of finished or refused requests and
    the number of all requests; an exception that it raises ends the replay.
    """
