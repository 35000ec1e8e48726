"""Continuous-batching scheduler for compiled-shape accelerators."""

from neuron_sched._native import (
    BucketScheduler,
    Buckets,
    Explanation,
    NeuronConfig,
    Outcome,
    Request,
    RequestState,
    Step,
    __version__,
    build_info,
)

__all__ = [
    "BucketScheduler",
    "Buckets",
    "Explanation",
    "NeuronConfig",
    "Outcome",
    "Request",
    "RequestState",
    "Step",
    "__version__",
    "build_info",
]
