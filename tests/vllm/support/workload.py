"""Workloads for vLLM's schedulers and `BucketScheduler`.

A workload is plain data, so a failing one can be pasted into a test. It has the configuration and, for each step, the
requests that arrive or are aborted. After its last entry, steps run until all requests have finished.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arrival:
    """A request. Its tokens depend on `prefix_group` and position only, so prompts of a group share their prefixes."""

    prompt: int
    max_tokens: int
    prefix_group: int = 0
    unique_end: bool = False
    """Whether the last prompt token differs from that of the group."""
    priority: int = 0
    stop: int | None = None
    """Output position modulo 7 whose token is a stop token, or `None`."""

    def token(self, position: int) -> int:
        return 10 * (self.prefix_group + 1) + position % 7

    @property
    def prompt_ids(self) -> list[int]:
        ids = [self.token(position) for position in range(self.prompt)]
        if self.unique_end:
            ids[-1] = 999
        return ids

    @property
    def stop_token_ids(self) -> list[int]:
        return [] if self.stop is None else [self.token(self.stop)]


@dataclass(frozen=True)
class StepEvents:
    """Events before and during one step. Aborts and resubmissions refer to requests by index of arrival."""

    add: Sequence[Arrival] = ()
    abort: Sequence[int] = ()
    throttle: bool = False
    """Whether prefills are throttled in this step."""
    abort_in_flight: Sequence[int] = ()
    """Requests aborted while the step is in flight."""
    resubmit: Sequence[int] = ()
    """Requests added under their ids again, after the arrivals."""


@dataclass(frozen=True)
class Workload:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    """KV blocks without vLLM's null block."""
    steps: Sequence[StepEvents]
    prefix_caching: bool = False
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    options: dict = field(default_factory=dict)
    """Fields of `neuron_config`."""

    def arrivals(self) -> dict[str, Arrival]:
        """Return every request by id, in order of arrival."""
        return {f"r{i}": arrival for i, arrival in enumerate(a for events in self.steps for a in events.add)}

    def aborted(self) -> set[str]:
        """Return the ids of the requests that are aborted unless they finish earlier."""
        return {f"r{i}" for events in self.steps for i in (*events.abort, *events.abort_in_flight)}

    def worst_case_blocks(self, arrival: Arrival) -> int:
        """Return the number of KV blocks that a request reserves."""
        outputs = min(arrival.max_tokens, max(1, self.max_model_len - arrival.prompt))
        tokens = min(arrival.prompt + outputs - 1, self.max_model_len)
        if self.options.get("kv_admission") == "max_model_len":
            tokens = self.max_model_len
        return -(-tokens // self.block_size)

    def fits(self, arrival: Arrival) -> bool:
        """Return whether a request can run if no other request has blocks."""
        return arrival.prompt <= self.max_model_len and self.worst_case_blocks(arrival) <= self.num_blocks

    @property
    def max_steps(self) -> int:
        """Upper bound of the steps after the last events, as at least every second step computes a token."""
        arrivals = list(self.arrivals().values())
        resubmitted = [arrivals[i] for events in self.steps for i in events.resubmit]
        return 100 + 2 * sum(arrival.prompt + arrival.max_tokens for arrival in (*arrivals, *resubmitted))


def steps_to_completion(workload: Workload, unfinished: Callable[[], bool]):
    """Yield (events, ids of the requests to add) for each step of a workload.

    After the events of the workload, yield events without arrivals and aborts while `unfinished()`.
    """
    added = 0
    for events in workload.steps:
        new = range(added, added + len(events.add))
        added += len(events.add)
        yield events, [f"r{i}" for i in (*new, *events.resubmit)]
    throttles = [events.throttle for events in workload.steps] or [False]
    for i in range(workload.max_steps):
        if not unfinished():
            return
        yield StepEvents(throttle=throttles[i % len(throttles)]), []
    raise AssertionError(f"not finished after {workload.max_steps} steps")
