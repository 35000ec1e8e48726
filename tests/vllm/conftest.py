"""Fixtures of the tests with vLLM. This file does not import vLLM, which may not be installed."""

import logging

import pytest


@pytest.fixture(scope="module")
def quiet():
    """Silence vLLM's loggers for tests that create thousands of schedulers."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
