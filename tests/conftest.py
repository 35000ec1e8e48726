"""What all tests share: Hypothesis profiles, and how vLLM is met where it is installed.

The profile is chosen by the environment variable HYPOTHESIS_PROFILE; tests leave the number of examples alone.
`fast` tries the same few hundred examples on every run, `slow` looks for new ones. `matrix` and `slow-vllm` are the
same for tests that drive vLLM's scheduler, where an example takes a hundred times longer.
"""

import importlib.util
import logging
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("fast", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("matrix", settings.get_profile("fast"), max_examples=60)
settings.register_profile(
    "slow", max_examples=100_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("slow-vllm", settings.get_profile("slow"), max_examples=3_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# Seconds that a test with the marker may take: loading a model, starting servers.
TIMEOUTS = {"engine": 300, "server": 600, "slow_server": 900}


def pytest_configure(config: pytest.Config):
    """vLLM, if it is there, is the release that was asked for, and sees neither a GPU nor the network."""
    wanted = os.environ.get("NEURON_SCHED_VLLM")
    if wanted is None and importlib.util.find_spec("vllm") is None:
        return
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    # Up to 0.30 importing vLLM fastens its log to the standard output of the moment, which pytest closes.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CONFIGURE_LOGGING", "0")
        import vllm.logger
    if wanted not in {None, vllm.__version__.partition("+")[0]}:
        raise pytest.UsageError(f"vLLM {wanted} was asked for, {vllm.__version__} is imported from {vllm.__file__}")


def pytest_collection_modifyitems(items: list[pytest.Item]):
    for item in items:
        limits = [seconds for marker, seconds in TIMEOUTS.items() if item.get_closest_marker(marker)]
        if limits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(limits)))
    items.sort(key=lambda item: item.get_closest_marker("llvm") is not None)


def pytest_runtest_setup():
    # vLLM switches this off where it sets its log up; `caplog` listens at the root.
    logging.getLogger("vllm").propagate = True
