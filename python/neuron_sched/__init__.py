"""Continuous-batching scheduler for compiled-shape accelerators."""

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

__all__ = [
    "BucketScheduler",
    "Buckets",
    "Explanation",
    "NeuronConfig",
    "Outcome",
    "Req",
    "Request",
    "RequestState",
    "Scheduler",
    "Step",
    "__version__",
    "build_info",
]
