"""Schedulers that stand by themselves."""

from collections.abc import Sequence

from neuron_sched._native import Req, Requests, Scheduler

Sequence.register(Requests)

__all__ = ["Req", "Scheduler"]
