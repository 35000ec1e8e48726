"""The logger of the vLLM classes."""

from vllm.logger import init_logger

__all__ = ["logger"]

# Below vLLM's own name, because vLLM installs its handlers on the logger `vllm` only.
logger = init_logger("vllm.neuron_sched")
