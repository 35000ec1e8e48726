"""Continuous-batching scheduler for compiled-shape accelerators."""

from typing import TYPE_CHECKING, Any

from neuron_sched._native import Buckets, NeuronConfig, __version__, build_info
from neuron_sched.runner import Batch, CompiledModel, DecodeRow, PaddedInputs, PrefillRow, ShapeError
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
    from neuron_sched.vllm.scheduler import NeuronAsyncScheduler as NeuronAsyncScheduler
    from neuron_sched.vllm.scheduler import NeuronScheduler as NeuronScheduler

# The vLLM classes are left out: `import *` must work without vLLM.
__all__ = [
    "Batch",
    "BucketScheduler",
    "Buckets",
    "CompiledModel",
    "DecodeRow",
    "Explanation",
    "NeuronConfig",
    "Outcome",
    "PaddedInputs",
    "PrefillRow",
    "Req",
    "Request",
    "RequestState",
    "Scheduler",
    "ShapeError",
    "Step",
    "__version__",
    "build_info",
]

_VLLM_CLASSES = ("NeuronAsyncScheduler", "NeuronScheduler")


def __dir__() -> list[str]:
    return sorted({*globals(), *_VLLM_CLASSES})


def __getattr__(name: str) -> Any:
    """Import a vLLM class on first access: nothing else in the package needs vLLM."""
    if name not in _VLLM_CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from neuron_sched.vllm import scheduler
    except ImportError as error:
        raise ImportError(
            f"neuron_sched.{name} needs vLLM 0.24 to 0.33, which could not be imported ({error})"
        ) from error
    return getattr(scheduler, name)
