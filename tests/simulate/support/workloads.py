"""Workloads of the replay tests, with their configuration and cost."""

from neuron_sched import NeuronConfig
from neuron_sched.simulate import ConstantCost
from neuron_sched.trace import TraceRequest, synthetic

COST = ConstantCost(prefill_ms=100, decode_ms=10)


def config(**changed: object) -> NeuronConfig:
    """Return a small configuration with the given fields changed."""
    fields = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "block_size": 16,
        "num_blocks": 1024,
    }
    return NeuronConfig(**fields | changed)


def small_chat() -> list[TraceRequest]:
    return synthetic(requests=200, seed=42)


CHAT = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 16384, "num_blocks": 4096}
"""Fields of a configuration in which `small_chat` runs without rejections."""
