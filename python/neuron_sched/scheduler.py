"""Standalone schedulers: `Scheduler` with a token budget, `BucketScheduler` with exclusive phases and buckets."""

from collections.abc import Sequence

from neuron_sched._native import (
    BucketScheduler,
    Explanation,
    Outcome,
    Req,
    Request,
    Requests,
    RequestState,
    Scheduler,
    Step,
)

Sequence.register(Requests)

__all__ = [
    "BucketScheduler",
    "Explanation",
    "Outcome",
    "Req",
    "Request",
    "RequestState",
    "Requests",
    "Scheduler",
    "Step",
]
