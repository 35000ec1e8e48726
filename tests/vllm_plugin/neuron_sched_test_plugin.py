"""What tests must change in vLLM. With this folder on PYTHONPATH, vLLM finds the entry points in the dist-info beside
this file and calls them in every process that it starts."""

import logging


def keep_async():
    """Async scheduling on a CPU too: what the user asked for, or vLLM's default, survives the platform's hook."""
    from vllm.platforms.cpu import CpuPlatform

    hook = CpuPlatform.check_and_update_config.__func__
    if hook.__module__ == __name__:
        return

    def keep(cls, vllm_config):
        scheduler_config = vllm_config.scheduler_config
        asked = scheduler_config.async_scheduling
        hook(cls, vllm_config)
        scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(keep)


def allow_small_cache():
    """A KV cache too small for one request of max_model_len: newer releases refuse to start with it."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._check_enough_kv_cache_memory = lambda *_: None


def tell_batch_queue():
    """The engine's line about its batch queue in the log, without the thousands of other debug lines."""
    handler, log = logging.StreamHandler(), logging.getLogger("vllm.v1.engine.core")
    handler.addFilter(lambda record: record.getMessage().startswith("Batch queue is enabled"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
