"""Configuration: the compiled sizes and the settings of the schedulers."""

from neuron_sched._native import Buckets, ConfigField, NeuronConfig

__all__ = ["Buckets", "ConfigField", "NeuronConfig"]
