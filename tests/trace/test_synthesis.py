"""The synthetic workload."""

from __future__ import annotations

import pytest

from neuron_sched.trace import synthetic
from tests.trace.support.files import fields


def test_synthetic_depends_on_its_seed_only():
    assert fields(synthetic(50, seed=3)) == fields(synthetic(50, seed=3))
    assert fields(synthetic(50, seed=3)) != fields(synthetic(50, seed=4))
    assert fields(synthetic(50, seed=3)) == fields(synthetic(80, seed=3)[:50])


def test_synthetic_has_the_rate_and_the_lengths_of_its_arguments():
    workload = synthetic(4000, seed=1, rate_per_s=8.0)
    assert workload[0].arrival_ns == 0
    assert all(request.arrival_ns % 1000 == 0 for request in workload), "whole microseconds"
    assert 7.5 < len(workload) / (workload[-1].arrival_ns / 1e9) < 8.5
    prompts = sorted(request.prompt_tokens for request in workload)
    outputs = sorted(request.output_tokens for request in workload)
    assert 850 < prompts[2000] < 950
    assert 170 < outputs[2000] < 190
    assert prompts[0] >= 1
    assert prompts[-1] <= 8192
    assert outputs[-1] <= 1024


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"requests": 0}, "requests"),
        ({"requests": 1.5}, "requests"),
        ({"requests": 10**12}, "requests"),
        ({"seed": None}, "seed"),
        ({"rate_per_s": 0}, "rate_per_s"),
        ({"rate_per_s": float("nan")}, "rate_per_s"),
        ({"prompt_tokens_median": -1}, "prompt_tokens_median"),
        ({"output_tokens_max": 2**31}, "output_tokens_max"),
    ],
)
def test_synthetic_rejects_invalid_arguments(arguments: dict[str, object], field: str):
    with pytest.raises(ValueError, match=f"^{field}: "):
        synthetic(**arguments)


def test_synthetic_names_the_largest_number_of_requests():
    with pytest.raises(ValueError, match=r"^requests: 10000001: expected a whole number from 1 to 10000000$"):
        synthetic(10_000_001)
