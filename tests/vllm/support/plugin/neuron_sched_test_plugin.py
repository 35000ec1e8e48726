"""Changes to vLLM for the tests.

With this folder on PYTHONPATH, vLLM calls the entry points of the dist-info beside this file in each of its processes.
"""

import logging


def keep_async():
    """Keep `async_scheduling` as requested or as vLLM's default. The CPU platform's hook disables it otherwise."""
    from vllm.platforms.cpu import CpuPlatform

    hook = CpuPlatform.check_and_update_config.__func__
    if hook.__module__ == __name__:
        return

    def keep(cls, vllm_config):
        scheduler_config = vllm_config.scheduler_config
        requested = scheduler_config.async_scheduling
        hook(cls, vllm_config)
        scheduler_config.async_scheduling = requested

    CpuPlatform.check_and_update_config = classmethod(keep)


def allow_small_cache():
    """Allow a KV cache that is too small for a request of `max_model_len` tokens, which newer releases refuse."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._check_enough_kv_cache_memory = lambda *_: None


def tell_batch_queue():
    """Log the engine core's debug line about its batch queue, without its thousands of other debug lines."""
    handler, log = logging.StreamHandler(), logging.getLogger("vllm.v1.engine.core")
    handler.addFilter(lambda record: record.getMessage().startswith("Batch queue is enabled"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
