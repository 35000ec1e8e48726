"""Schedulers of both classes with the default limits of the tests."""

import pytest
from vllm.config import KVTransferConfig, LoRAConfig

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from tests.vllm.support import harness
from tests.vllm.support.grammar import FakeBackend

# In an engine that does not run ahead, both classes take the same steps.
both_classes = pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler], ids=["sync", "async"])

ENGINES = [(NeuronScheduler, 0), (NeuronAsyncScheduler, 0), (NeuronAsyncScheduler, 1)]
"""Pairs of a class and the number of steps that its engine runs ahead."""

# Also one step ahead, for results that do not depend on when an output is processed.
every_engine = pytest.mark.parametrize(("cls", "ahead"), ENGINES, ids=["sync", "async-one-step", "async-ahead"])


def with_edited_config(cls, edit):
    """Return a constructor that applies `edit` to the validated vLLM configuration, as a platform's hook does."""

    def construct(*, vllm_config, **rest):
        edit(vllm_config)
        return cls(vllm_config=vllm_config, **rest)

    return construct


def build(cls=NeuronScheduler, *, edit=None, **config):
    """Return a scheduler with 400 KV blocks of 16 tokens. `config` overrides the defaults."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 400}
    constructor = cls if edit is None else with_edited_config(cls, edit)
    sched = harness.build(constructor, **{**defaults, **config})
    sched.structured_output_manager.backend = FakeBackend()
    return sched


def build_ahead(cls, ahead, **config):
    """Return a scheduler for an engine that runs `ahead` steps ahead, with `async_scheduling` if that is not 0."""
    return build(cls, async_scheduling=bool(ahead), **config)


def with_connector(cls, *, failed_load="recompute", **config):
    """Return a scheduler whose `connector` is a `FakeConnector`. `failed_load` is its load failure policy."""

    def edit(vllm_config):
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="FakeConnector",
            kv_connector_module_path="tests.vllm.support.connector",
            kv_role="kv_both",
            kv_load_failure_policy=failed_load,
        )

    return build(cls, edit=edit, **config)


def with_lora(cls, max_loras=1, **config):
    """Return a scheduler with LoRA enabled."""

    def edit(vllm_config):
        vllm_config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=max_loras, max_cpu_loras=8)

    return build(cls, edit=edit, **config)


def num_free_blocks(sched):
    """Return the number of free KV blocks."""
    return sched.kv_cache_manager.block_pool.get_num_free_blocks()
