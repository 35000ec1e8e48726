"""Fixtures for the tests of traces."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file whose name does not show the trace format."""
    return tmp_path / "trace.dat"
