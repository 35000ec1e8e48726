"""Report of a replay: the summary, the requests and the steps, converted to Python values when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, overload

from neuron_sched._native import ReplayReport


class RequestRecord(NamedTuple):
    """One request of a report. Times are in seconds; a time that cannot be measured is `None`."""

    id: str
    status: Literal["completed", "rejected"]
    reason: str | None
    """Reason of a rejection: `"prompt_too_long"` or `"kv_never_fits"`. `None` for a completed request."""
    arrival_s: float
    """Arrival after time zero, which is the earliest arrival of the workload."""
    ttft_s: float | None
    """Time from arrival to the first output token."""
    e2e_s: float | None
    """Time from arrival to the last output token."""
    mean_itl_s: float | None
    """Mean time between consecutive output tokens; `None` if there are fewer than two."""
    output_tokens: int
    """Number of output tokens, after capping the sequence at the model length."""


class StepRecord(NamedTuple):
    """One step of a report."""

    start_s: float
    """Start in seconds after time zero."""
    end_s: float
    """End in seconds after time zero."""
    kind: Literal["prefill", "decode"]
    num_scheduled_tokens: dict[str, int]
    """Unpadded number of tokens by request id, in batch order."""
    padded_tokens: int
    """Padded tokens of a prefill step, or padded rows of a decode step. Without padding, the tokens of the step."""


class Steps(Sequence[StepRecord]):
    """The steps of a report in time order. Each record is created when it is read."""

    def __init__(self, native: ReplayReport, count: int) -> None:
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
    """The result of a replay. Its values are converted to Python objects when they are read."""

    def __init__(self, native: ReplayReport) -> None:
        self._native = native

    def __repr__(self) -> str:
        names = ("completed", "rejected", "makespan_s")
        return f"Report({', '.join(f'{name}={self.summary[name]!r}' for name in names)})"

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of the whole workload, as `to_json` writes them."""
        return self._native.summary()

    @cached_property
    def requests(self) -> tuple[RequestRecord, ...]:
        """The requests, in the order of the workload."""
        return tuple(RequestRecord(*self._native.request(number)) for number in range(len(self._native)))

    @cached_property
    def steps(self) -> Steps:
        """The steps, in time order. Reading them raises `ValueError` unless `record_steps=True` was set."""
        count = self._native.num_steps
        if count is None:
            raise ValueError("record_steps: False: expected True to read the steps")
        return Steps(self._native, count)

    def to_json(self) -> str:
        """Return the summary as JSON text. Equal workloads and settings give equal text."""
        return json.dumps(self.summary, indent=2, allow_nan=False) + "\n"
