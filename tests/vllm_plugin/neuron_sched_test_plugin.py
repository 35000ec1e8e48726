"""What tests must change in vLLM. With this folder on PYTHONPATH, vLLM finds the entry points in the dist-info beside
this file and calls them in every process that it starts."""

import functools
import os


def keep_async():
    """Async scheduling on a CPU too: what the user asked for, or vLLM's default, survives the platform's hook."""
    from vllm.platforms.cpu import CpuPlatform

    hook = CpuPlatform.check_and_update_config.__func__
    if hasattr(hook, "__wrapped__"):
        return

    @functools.wraps(hook)
    def keep(cls, vllm_config):
        scheduler_config = vllm_config.scheduler_config
        asked = scheduler_config.async_scheduling
        hook(cls, vllm_config)
        scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(keep)


def allow_small_cache():
    """A KV cache that cannot take one request of max_model_len, if asked for: newer releases refuse to start with it."""
    if os.environ.get("NEURON_SCHED_ALLOW_SMALL_CACHE"):
        from vllm.v1.core import kv_cache_utils

        for name in ("check_enough_kv_cache_memory", "_check_enough_kv_cache_memory"):
            if hasattr(kv_cache_utils, name):
                setattr(kv_cache_utils, name, lambda *_: None)
