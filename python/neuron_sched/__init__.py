"""Continuous-batching scheduler for compiled-shape accelerators."""

from typing import TYPE_CHECKING, Any

from neuron_sched._native import Buckets, NeuronConfig, __version__, build_info
from neuron_sched.scheduler import (
    BucketScheduler,
    Explanation,
    Outcome,
    Req,
    Request,
    RequestState,
    Scheduler,
    Step,
)

if TYPE_CHECKING:
    from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler

__all__ = [
    "BucketScheduler",
    "Buckets",
    "Explanation",
    "NeuronAsyncScheduler",
    "NeuronConfig",
    "NeuronScheduler",
    "Outcome",
    "Req",
    "Request",
    "RequestState",
    "Scheduler",
    "Step",
    "__version__",
    "build_info",
]


def __getattr__(name: str) -> Any:
    """The vLLM classes, loaded when asked for: nothing else here needs vLLM."""
    if name not in {"NeuronAsyncScheduler", "NeuronScheduler"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from neuron_sched.vllm import scheduler
    except ImportError as error:
        raise ImportError(
            f"neuron_sched.{name} needs vLLM 0.24 to 0.33, which could not be imported ({error})"
        ) from error
    return getattr(scheduler, name)
