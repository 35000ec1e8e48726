"""Continuous-batching scheduler for compiled-shape accelerators."""

from neuron_sched._native import Buckets, NeuronConfig, __version__, build_info
from neuron_sched.scheduler import Req, Scheduler

__all__ = ["Buckets", "NeuronConfig", "Req", "Scheduler", "__version__", "build_info"]
