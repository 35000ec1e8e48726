"""Configuration of the cases."""

from neuron_sched import NeuronConfig


def config_with(**changes) -> NeuronConfig:
    """Return the configuration of the cases with the given changes."""
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024, "block_size": 16}
    return NeuronConfig(**{**defaults, "num_blocks": 399, **changes})
