"""A vLLM plugin for tests: async scheduling on a CPU, which vLLM's CPU platform switches off.

With this folder on PYTHONPATH, vLLM finds the entry point in the dist-info beside this file and calls `register` in
every process. What the user asked for, or vLLM's default, then survives the platform's hook.
"""

import functools


def register():
    from vllm.platforms.cpu import CpuPlatform  # vLLM is importable only once its plugins load

    hook = CpuPlatform.check_and_update_config.__func__
    if hasattr(hook, "__wrapped__"):
        return

    @functools.wraps(hook)
    def keep_async(cls, vllm_config):
        scheduler_config = vllm_config.scheduler_config
        asked = scheduler_config.async_scheduling
        hook(cls, vllm_config)
        scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(keep_async)
