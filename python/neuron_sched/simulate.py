"""Replay of a workload on a virtual clock.

The real schedulers decide, a cost model says how long each step takes, and nothing sleeps:

>>> from neuron_sched import NeuronConfig
>>> from neuron_sched.simulate import ConstantCost, replay
>>> from neuron_sched.trace import TraceRequest
>>> config = NeuronConfig(
...     max_num_seqs=2, max_num_batched_tokens=1024, max_model_len=1024, block_size=16, num_blocks=512
... )
>>> workload = [TraceRequest("A", 0, 128, 3), TraceRequest("B", 0.05, 128, 3)]
>>> report = replay(workload, config=config, cost=ConstantCost(prefill_ms=100, decode_ms=10))
>>> [request.ttft_s for request in report.requests]
[0.1, 0.15]
>>> report.summary["steps"]
{'prefill': 2, 'decode': 2}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from neuron_sched import _native
from neuron_sched._native import NeuronConfig, TraceRequest
from neuron_sched.profile import load_profile, profiles

__all__ = [
    "ConstantCost",
    "Cost",
    "Report",
    "RequestRecord",
    "StepRecord",
    "TableCost",
    "cost_of",
    "profiles",
    "replay",
]

Milliseconds: TypeAlias = int | float | str | Decimal
"""A time from 0 up; a float counts as the shortest decimal that stands for it."""


@dataclass(frozen=True)
class ConstantCost:
    """Every prefill takes `prefill_ms` milliseconds, every decode step `decode_ms`."""

    prefill_ms: Milliseconds
    decode_ms: Milliseconds

    def __post_init__(self) -> None:
        self.native()

    def native(self) -> _native.Cost:
        """The same for the core."""
        return _native.Cost.constant(self.prefill_ms, self.decode_ms)


@dataclass(frozen=True)
class TableCost:
    """Step times by padded size, in milliseconds: `prefill` by tokens, `decode` by rows.

    Linear between two sizes, on the last line beyond the last size (never below 0), the first time below the first.
    """

    prefill: Mapping[int, Milliseconds]
    decode: Mapping[int, Milliseconds]

    def __post_init__(self) -> None:
        self.native()

    def native(self) -> _native.Cost:
        """The same for the core."""
        return _native.Cost.table(self.prefill, self.decode)

    @classmethod
    def load(cls, name: str) -> TableCost:
        """The profile that ships under that name (one of `profiles()`), or the one in the TOML file at that path.

        ValueError when there is neither, or the file is no profile.
        """
        prefill, decode = load_profile(name)
        try:
            return cls(prefill, decode)
        except ValueError as error:
            raise ValueError("\n".join(f"cost: {name}: {fault}" for fault in str(error).splitlines())) from None


Cost: TypeAlias = ConstantCost | TableCost


def cost_of(text: str) -> Cost:
    """The cost model that a command line means: `prefill_ms=100,decode_ms=25`, or what `TableCost.load` takes."""
    if text.strip() and "=" not in text:
        return TableCost.load(text)
    pairs = [part.partition("=") for part in text.split(",")]
    given = {name.strip(): value.strip() for name, _, value in pairs}
    if len(pairs) != 2 or set(given) != {"prefill_ms", "decode_ms"}:
        raise ValueError(f"cost: {text!r}: expected prefill_ms=N,decode_ms=N, or the name or file of a profile")
    return ConstantCost(given["prefill_ms"], given["decode_ms"])


class RequestRecord(NamedTuple):
    """One request of a report. Times in seconds; None where there is nothing to measure."""

    id: str
    status: Literal["completed", "rejected"]
    reason: str | None
    """Why it was rejected: `"prompt_too_long"` or `"kv_never_fits"`."""
    arrival_s: float
    """From time zero, the earliest arrival."""
    ttft_s: float | None
    """From its arrival to its first token."""
    e2e_s: float | None
    """From its arrival to its last token."""
    mean_itl_s: float | None
    """Mean time between its tokens; None when there are not two."""
    output_tokens: int


class StepRecord(NamedTuple):
    """One step of a report."""

    start_s: float
    end_s: float
    kind: Literal["prefill", "decode"]
    num_scheduled_tokens: dict[str, int]
    """Tokens by request id, in batch order."""
    padded_tokens: int
    """The compiled size: tokens of a prefill, rows of a decode; all tokens where nothing is padded."""


class Steps(Sequence[StepRecord]):
    """The steps of a report in time order, each made when it is read."""

    def __init__(self, native: _native.ReplayReport, count: int) -> None:
        self._native = native
        self._numbers = range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(index, slice):
            return [self._read(number) for number in self._numbers[index]]
        return self._read(self._numbers[index])

    def __iter__(self) -> Iterator[StepRecord]:
        return map(self._read, self._numbers)

    def _read(self, number: int) -> StepRecord:
        return StepRecord(*self._native.step(number))


class Report:
    """What came out of a replay; made into Python values when read."""

    def __init__(self, native: _native.ReplayReport) -> None:
        self._native = native

    def __repr__(self) -> str:
        shown = ("completed", "rejected", "makespan_s")
        return f"Report({', '.join(f'{name}={self.summary[name]!r}' for name in shown)})"

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The workload as a whole: the content of the JSON file."""
        return self._native.summary()

    @cached_property
    def requests(self) -> tuple[RequestRecord, ...]:
        """Each request, in the order in which they were given."""
        return tuple(RequestRecord(*self._native.request(number)) for number in range(len(self._native)))

    @cached_property
    def steps(self) -> Steps:
        """Each step; ValueError unless they were recorded (`record_steps=True`)."""
        count = self._native.num_steps
        if count is None:
            raise ValueError("record_steps: False: expected True, to read the steps")
        return Steps(self._native, count)

    def to_json(self) -> str:
        """The summary as JSON text; the same workload and settings give the same bytes."""
        return json.dumps(self.summary, indent=2, allow_nan=False) + "\n"


def replay(
    requests: Iterable[TraceRequest],
    *,
    config: NeuronConfig,
    cost: Cost,
    scheduler: Literal["bucket", "mixed"] = "bucket",
    record_steps: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Report:
    """Runs the workload to its end.

    `scheduler`: `"bucket"` is the exclusive scheduler; `"mixed"` the token-budget one, with
    `max_num_batched_tokens` as its budget, `max_num_seqs` slots and `num_blocks * block_size` KV tokens, and nothing
    padded: a step with any prompt token then counts as a prefill, and its decodes are not in `tokens`.
    `progress(done, total)` is called now and then with counts of requests; what it raises ends the run, as
    KeyboardInterrupt does.
    Requests that can never run are refused, and reported with their reason. `record_steps` keeps every step for
    `Report.steps`, which knows requests by their ids: they must then be unique, else ValueError.
    TypeError names an argument of another type.
    """
    if not isinstance(config, NeuronConfig):
        raise TypeError(f"config: {config!r}: expected a NeuronConfig")
    if not isinstance(cost, (ConstantCost, TableCost)):
        raise TypeError(f"cost: {cost!r}: expected a ConstantCost or a TableCost")
    return Report(_native.replay(list(requests), config, cost.native(), scheduler, record_steps, progress))
