"""The installed release of vLLM."""

import re

import pytest
import vllm

RELEASE = tuple(map(int, re.findall(r"\d+", vllm.__version__)[:2]))
"""Major and minor version, such as (0, 32)."""


def since(major, minor, what):
    """Return a mark that skips a test on releases before this one, which do not have `what`."""
    return pytest.mark.skipif(
        (major, minor) > RELEASE, reason=f"vLLM {vllm.__version__} has no {what} (since {major}.{minor})"
    )
