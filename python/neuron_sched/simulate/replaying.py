"""The function `replay`, which runs a workload through a scheduler on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from neuron_sched._native import NeuronConfig, TraceRequest
from neuron_sched._native import replay as run_replay
from neuron_sched.simulate.cost import ConstantCost, Cost, TableCost
from neuron_sched.simulate.report import Report


def replay(
    requests: Iterable[TraceRequest],
    *,
    config: NeuronConfig,
    cost: Cost,
    scheduler: Literal["bucket", "mixed"] = "bucket",
    record_steps: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Report:
    """Run the workload until every request is completed or rejected, and return the report.

    With `scheduler="bucket"`, `BucketScheduler` schedules the steps. With `scheduler="mixed"`, `Scheduler` does:
    `max_num_batched_tokens` is the token budget of a step, `max_num_seqs` the number of batch slots, and
    `num_blocks * block_size` the number of KV slots. No step is padded then. A step with at least one prompt token
    counts as a prefill, and its decode tokens are not counted in `tokens` of the summary.

    A request that can never run is rejected and reported with the reason. `record_steps` keeps every step for
    `Report.steps`, which identifies requests by id.

    `progress(done, total)` is called at intervals with the number of requests that are completed or rejected, and the
    number of all requests. If it raises an exception, or on `KeyboardInterrupt`, the run ends with that exception.

    Raise `TypeError` if an argument has the wrong type. Raise `ValueError` if `scheduler` is unknown, if `record_steps`
    is set and two requests have the same id, or if the times of the run exceed the range of the virtual clock.
    """
    if not isinstance(config, NeuronConfig):
        raise TypeError(f"config: {config!r}: expected a NeuronConfig")
    if not isinstance(cost, (ConstantCost, TableCost)):
        raise TypeError(f"cost: {cost!r}: expected a ConstantCost or a TableCost")
    return Report(run_replay(list(requests), config, cost.native(), scheduler, record_steps, progress))
