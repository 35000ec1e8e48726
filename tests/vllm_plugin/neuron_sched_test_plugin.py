"""What tests must change in vLLM. With this folder on PYTHONPATH, vLLM finds the entry points in the dist-info beside
this file and calls them in every process that it starts."""

import os


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
    """A KV cache too small for one request of max_model_len, if asked for: newer releases refuse to start with it."""
    if os.environ.get("NEURON_SCHED_ALLOW_SMALL_CACHE"):
        from vllm.v1.core import kv_cache_utils

        for name in ("check_enough_kv_cache_memory", "_check_enough_kv_cache_memory"):
            if hasattr(kv_cache_utils, name):
                setattr(kv_cache_utils, name, lambda *_: None)


def tell_batches():
    """How many batches the engine keeps in flight, in the log (vLLM itself tells it among thousands of debug lines)."""
    from vllm.logger import init_logger
    from vllm.v1.engine.core import EngineCore

    logger, start = init_logger("vllm.neuron_sched_test_plugin"), EngineCore.__init__
    if start.__module__ == __name__:
        return

    def start_and_tell(self, *args, **kwargs):
        start(self, *args, **kwargs)
        logger.info("The engine keeps %d batches in flight", self.batch_queue_size)

    EngineCore.__init__ = start_and_tell
