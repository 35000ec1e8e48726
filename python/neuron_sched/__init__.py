"""Continuous-batching scheduler for compiled-shape accelerators."""

from neuron_sched._native import Buckets, NeuronConfig, __version__, build_info

__all__ = ["Buckets", "NeuronConfig", "__version__", "build_info"]
