"""Random workloads, played on vLLM's schedulers and on `BucketScheduler` in the same way.

A workload is plain data, so that a failing one can be pasted into a test: the configuration, and turns of arrivals,
aborts and one step each. Whatever is left after the last turn is run to its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import neuron_sched
from vllm_harness import build, starts

# Enough for every workload to end; one that does not hangs.
STEPS_MAX = 3000


@dataclass(frozen=True)
class Arrival:
    """A request. Its tokens follow from `theme` and their position, so prompts of a theme share their beginnings."""

    prompt: int
    max_tokens: int
    theme: int = 0
    odd: bool = False  # the last token of the prompt is nobody else's
    priority: int = 0
    stop: int | None = None  # it stops at its first output whose position modulo 7 is this

    def token(self, position: int) -> int:
        return 10 * (self.theme + 1) + position % 7

    @property
    def prompt_ids(self) -> list[int]:
        ids = [self.token(position) for position in range(self.prompt)]
        if self.odd:
            ids[-1] = 999
        return ids

    @property
    def stop_token_ids(self) -> list[int]:
        return [] if self.stop is None else [self.token(self.stop)]


@dataclass(frozen=True)
class Turn:
    """What happens before a step is planned, and which requests are aborted while it runs. Requests go by number."""

    add: Sequence[Arrival] = ()
    abort: Sequence[int] = ()
    throttle: bool = False
    late_abort: Sequence[int] = ()
    again: Sequence[int] = ()  # requests that are sent once more, at the end of the arrivals


@dataclass(frozen=True)
class Workload:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int  # usable ones
    turns: Sequence[Turn]
    prefix_caching: bool = False
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    options: dict = field(default_factory=dict)  # neuron_config

    def arrivals(self) -> dict[str, Arrival]:
        """Every request under its name, in order of arrival."""
        return {f"r{i}": arrival for i, arrival in enumerate(a for turn in self.turns for a in turn.add)}

    def aborted(self) -> set[str]:
        """The requests that are aborted at some time, if they live so long."""
        return {f"r{i}" for turn in self.turns for i in (*turn.abort, *turn.late_abort)}

    def need(self, arrival: Arrival) -> int:
        """The KV blocks of a request at worst."""
        outputs = min(arrival.max_tokens, max(1, self.max_model_len - arrival.prompt))
        tokens = min(arrival.prompt + outputs - 1, self.max_model_len)
        if self.options.get("kv_admission") == "max_model_len":
            tokens = self.max_model_len
        return -(-tokens // self.block_size)

    def fits(self, arrival: Arrival) -> bool:
        """Whether a request of its size can ever run."""
        return arrival.prompt <= self.max_model_len and self.need(arrival) <= self.num_blocks

    @property
    def budget(self) -> int:
        return min(self.max_num_batched_tokens, self.max_model_len)


class VllmSide:
    """A scheduler class of ours on the installed vLLM."""

    def __init__(self, cls: type, workload: Workload, *, asynchronous: bool = False):
        self.workload, self.arrivals, self.added = workload, workload.arrivals(), 0
        self.sched = build(
            cls,
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            max_model_len=workload.max_model_len,
            num_blocks=workload.num_blocks + 1,
            block_size=workload.block_size,
            prefix_caching=workload.prefix_caching,
            policy=workload.policy,
            async_scheduling=asynchronous,
            neuron_config=workload.options,
            long_prefill_token_threshold=workload.long_prefill_token_threshold,
        )

    def add(self, name: str) -> None:
        arrival = self.arrivals[name]
        self.added += 1
        params = SamplingParams(
            ignore_eos=True,
            max_tokens=arrival.max_tokens,
            stop_token_ids=arrival.stop_token_ids,
            **self.wishes(arrival),
        )
        self.sched.add_request(
            Request(
                request_id=name,
                prompt_token_ids=arrival.prompt_ids,
                sampling_params=params,
                pooling_params=None,
                priority=arrival.priority,
                arrival_time=float(self.added),
                block_hasher=get_request_block_hasher(self.workload.block_size, sha256),
            )
        )

    def wishes(self, arrival: Arrival) -> dict[str, float]:
        """What it asks of the sampler."""
        return {"temperature": 0.0}

    def abort(self, name: str) -> None:
        self.sched.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self, throttle: bool):
        return self.sched.schedule(throttle_prefills=throttle)

    def deliver(self, out) -> list[tuple[str, list[int], str | None]]:
        """Ends a step; returns the outputs in order, as (id, new tokens, finish reason)."""
        names, before = list(out.num_scheduled_tokens), starts(out)
        sampled = []
        for name in names:
            end = before[name] + out.num_scheduled_tokens[name]
            arrival = self.arrivals[name]
            sampled.append([arrival.token(end)] if end >= arrival.prompt else [])
        outputs = self.sched.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        emitted = outputs[0].outputs if 0 in outputs else []
        ends = [None if o.finish_reason is None else str(o.finish_reason) for o in emitted]
        return [(o.request_id, list(o.new_token_ids), end) for o, end in zip(emitted, ends, strict=True)]

    def unfinished(self) -> bool:
        return bool(self.sched.requests)

    def blocks(self, name: str) -> list[int]:
        return list(self.sched.kv_cache_manager.get_block_ids(name)[0])

    @property
    def free_blocks(self) -> int:
        return self.sched.kv_cache_manager.block_pool.get_num_free_blocks()

    def explained(self) -> tuple[str, str, int, int, int] | None:
        e = self.sched.explain()
        return e and (e.id, e.reason, e.needed, e.reserved, e.usable)


class BucketSide:
    """`BucketScheduler` over the same blocks."""

    def __init__(self, workload: Workload):
        self.workload, self.arrivals = workload, workload.arrivals()
        self.sched = neuron_sched.BucketScheduler(
            neuron_sched.NeuronConfig(
                max_num_seqs=workload.max_num_seqs,
                max_num_batched_tokens=workload.max_num_batched_tokens,
                max_model_len=workload.max_model_len,
                block_size=workload.block_size,
                num_blocks=workload.num_blocks,
                prefix_caching=workload.prefix_caching,
                policy=workload.policy,
                long_prefill_token_threshold=workload.long_prefill_token_threshold,
                **workload.options,
            )
        )

    def add(self, name: str) -> None:
        """ValueError when it can never run, or lives."""
        arrival = self.arrivals[name]
        self.sched.add(
            neuron_sched.Request(
                name,
                arrival.prompt_ids,
                arrival.max_tokens,
                priority=arrival.priority,
                stop_token_ids=arrival.stop_token_ids,
            )
        )

    def abort(self, name: str) -> None:
        self.sched.cancel(name)

    def schedule(self, throttle: bool, ahead: bool):
        return self.sched.schedule(throttle_prefills=throttle, ahead=ahead)

    def deliver(self, step) -> list[tuple[str, list[int], str | None]]:
        tokens = []
        before = step.num_computed_tokens
        for name, count in step.num_scheduled_tokens.items():
            end, arrival = before[name] + count, self.arrivals[name]
            tokens.append(arrival.token(end) if end >= arrival.prompt else None)
        return [(o.id, [o.token], o.finish_reason) for o in self.sched.complete(step, tokens)]

    def explained(self) -> tuple[str, str, int, int, int] | None:
        e = self.sched.explain()
        return e and (e.id, e.reason, e.needed, e.reserved, e.usable)


def turns_to_the_end(workload: Workload, unfinished: Callable[[], bool]):
    """The turns of a workload, each with the names of its arrivals, then plain ones until nothing is unfinished."""
    added = 0
    for turn in workload.turns:
        new = range(added, added + len(turn.add))
        added += len(turn.add)
        yield turn, [f"r{i}" for i in (*new, *turn.again)]
    throttles = [turn.throttle for turn in workload.turns] or [False]
    for i in range(STEPS_MAX):
        if not unfinished():
            return
        yield Turn(throttle=throttles[i % len(throttles)]), []
    raise AssertionError(f"not finished after {STEPS_MAX} steps")


def play(side: VllmSide, *, ahead: bool = False, look: Callable[..., None] = lambda _: None):
    """Runs a workload on vLLM's side alone, `look(output)` after each plan; returns {id: [tokens, finish reason]}."""
    results = {}
    in_flight = []

    def deliver():
        for name, tokens, reason in side.deliver(in_flight.pop(0)):
            seen = results.setdefault(name, [[], None])
            assert seen[1] is None, f"{name} goes on after its end"
            seen[0] += tokens
            seen[1] = reason

    for turn, names in turns_to_the_end(side.workload, side.unfinished):
        for name in names:
            side.add(name)
        for i in turn.abort:
            side.abort(f"r{i}")
        out = side.schedule(turn.throttle)
        in_flight.append(out)
        look(out)
        for i in turn.late_abort:
            side.abort(f"r{i}")
        if len(in_flight) > ahead:
            deliver()
    while in_flight:
        deliver()
    return results


def buckets_up_to(last: int):
    """None for the default, or some sizes that end at `last`."""
    return st.none() | st.sets(st.integers(1, last), max_size=3).map(lambda some: sorted({*some, last}))


@st.composite
def workloads(
    draw, *, prefix_caching: bool | None = False, packed: bool = True, late: bool = True, again: bool = False
):
    """Small limits, so that each of them is met often; now and then larger ones, with the default buckets.

    `prefix_caching` None draws it; `packed` allows several prompts in one step, `late` aborts while a step runs,
    `again` requests under an id that was used before.
    """
    large = draw(st.integers(0, 4)) == 4
    seqs = draw(st.sampled_from([3, 2, 4, 5, 6, 1]))
    if large:
        tokens, length = draw(st.integers(64, 600)), draw(st.integers(64, 900))
        block_size = draw(st.sampled_from([16, 32]))
    else:
        tokens, length = draw(st.integers(max(4, seqs), 40)), draw(st.integers(5, 40))
        block_size = draw(st.integers(1, 8))
    budget = min(tokens, length)
    longest = -(-length // block_size)
    seed_rule = draw(st.integers(0, 4)) == 4
    buckets = draw(buckets_up_to(budget))
    options = {
        "num_batched_tokens_buckets": buckets,
        "num_seqs_buckets": draw(buckets_up_to(seqs)),
        "max_prefills_per_batch": draw(st.integers(1, 4)) if packed else None,
        "kv_admission": "max_model_len" if seed_rule else None,
        "max_consecutive_prefill_steps": draw(st.none() | st.integers(1, 3)),
        "min_decode_steps": draw(st.none() | st.integers(1, 3)),
        "chunking": draw(st.sampled_from([None, "bucket"])),
    }
    if buckets is not None and draw(st.booleans()):
        options["prefill_cost"] = {size: draw(st.integers(0, 9)) for size in buckets}
    else:
        kinds = st.sampled_from(["kv_segment_size_buckets", "num_batched_tokens_buckets"])
        options[draw(kinds)] = options.pop("num_batched_tokens_buckets")
    options = {name: value for name, value in options.items() if value is not None}
    short = st.integers(1, max(1, budget // 3))
    lengths = short | short | st.integers(1, length - 1) | st.integers(1, length + 1)
    arrivals = st.builds(
        Arrival,
        prompt=lengths,
        max_tokens=st.integers(1, 5) | st.integers(1, min(2 * length, 30)),
        theme=st.integers(0, 2),
        odd=st.booleans(),
        priority=st.integers(-1, 1),
        stop=st.sampled_from([None, None, None, 0, 3, 5]),
    )
    some = st.just([]) | st.lists(arrivals, max_size=2) | st.lists(arrivals, min_size=1, max_size=4)
    turn = st.tuples(some, st.booleans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 40))
    turns = draw(st.lists(turn, min_size=draw(st.integers(1, 8)), max_size=14))
    throttled, aborting = draw(st.booleans()), draw(st.booleans())
    added, made = 0, []
    for add, throttle, first, last, pick in turns:
        added += len(add)
        who = [pick % added] if added and aborting else []
        early, lately = who if first == 9 else [], who if late and last == 9 else []
        made.append(Turn(add, early, throttled and throttle, lately, who if again and first == 8 else []))
    return Workload(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        block_size=block_size,
        num_blocks=longest + draw(st.integers(0 if seed_rule else -(longest // 2), 3 * longest)),
        turns=made,
        prefix_caching=draw(st.booleans()) if prefix_caching is None else prefix_caching,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        long_prefill_token_threshold=draw(st.just(0) | st.just(0) | st.integers(1, max(2, budget // 2))),
        options=options,
    )
