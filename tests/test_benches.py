"""Labels of the benchmarks."""

import importlib.util
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent.parent / "benches/conftest.py"


def test_a_label_has_the_names_of_file_and_test(request: pytest.FixtureRequest):
    spec = importlib.util.spec_from_file_location("benches_conftest", FIXTURES)
    fixtures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fixtures)
    assert fixtures.label(request) == "test_benches: test_a_label_has_the_names_of_file_and_test"
