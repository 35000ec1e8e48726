"""Set-up of all tests: Hypothesis profiles, checks on the installed vLLM, timeouts.

The environment variable HYPOTHESIS_PROFILE selects the profile; no test sets a number of examples itself. `fast` runs
the same few hundred examples each time, `slow` generates new ones. `matrix` and `slow-vllm` are their counterparts for
tests that drive vLLM's scheduler, where an example takes a hundred times longer.
"""

import importlib.util
import logging
import os

import pytest
from hypothesis import HealthCheck, settings

# Failing assertions in helpers also show their values.
pytest.register_assert_rewrite(
    *(f"tests.{component}support" for component in ("", "cli.", "exclusive.", "mixed.", "runner.", "trace.", "vllm."))
)

settings.register_profile("fast", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("matrix", settings.get_profile("fast"), max_examples=60)
settings.register_profile(
    "slow", max_examples=100_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("slow-vllm", settings.get_profile("slow"), max_examples=3_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# Timeout in seconds by marker, for tests that load a model or start servers.
TIMEOUTS = {"engine": 300, "server": 600, "slow_server": 900}


def pytest_configure(config: pytest.Config):
    """If vLLM is installed, hide GPUs and the network from it, and check that it is the release under test."""
    wanted = os.environ.get("NEURON_SCHED_VLLM")
    if wanted is None and importlib.util.find_spec("vllm") is None:
        return
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    # Up to 0.30, importing vLLM binds its log handler to the current standard output, which pytest closes later.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CONFIGURE_LOGGING", "0")
        import vllm.logger
    if wanted not in {None, vllm.__version__.partition("+")[0]}:
        raise pytest.UsageError(
            f"NEURON_SCHED_VLLM: {wanted}: expected {vllm.__version__}, the release in {vllm.__file__}"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]):
    for item in items:
        limits = [seconds for marker, seconds in TIMEOUTS.items() if item.get_closest_marker(marker)]
        if limits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(limits)))
    items.sort(key=lambda item: item.get_closest_marker("llvm") is not None)


def pytest_runtest_setup():
    # vLLM disables propagation when it configures its log, but `caplog` needs it: its handler is on the root logger.
    logging.getLogger("vllm").propagate = True
