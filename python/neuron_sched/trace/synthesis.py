"""Synthetic chat workload, a function of its seed."""

from __future__ import annotations

import math
import random

from neuron_sched._native import TraceRequest
from neuron_sched.trace.fields import TOKENS_MAX, seconds_text

GRID_PER_S = 1_000_000
"""Resolution of arrival times, per second: whole microseconds, which a trace file keeps exactly."""

REQUESTS_MAX = 10_000_000
"""Largest number of requests, which takes more than a gigabyte of memory."""

RATE_PER_S_MIN = 1e-6

PROMPT_SIGMA = 0.85
OUTPUT_SIGMA = 0.65
"""Standard deviation of the natural logarithm of an output length; `PROMPT_SIGMA` is that of a prompt length."""


def synthetic(
    requests: int = 3000,
    *,
    seed: int = 0,
    rate_per_s: float = 5.0,
    prompt_tokens_median: int = 900,
    output_tokens_median: int = 180,
    prompt_tokens_max: int = 8192,
    output_tokens_max: int = 1024,
) -> list[TraceRequest]:
    """Return chat requests with Poisson arrivals and log-normal lengths; the same seed gives the same requests.

    The first request arrives at 0, and `rate_per_s` is the mean number of arrivals per second. One standard deviation
    is a factor of about 2.3 from the median for prompts and 1.9 for outputs; longer lengths are capped at
    `prompt_tokens_max` and `output_tokens_max`. Raise `ValueError` if an argument is invalid.
    """
    counts: dict[str, object] = {
        "requests": requests,
        "prompt_tokens_median": prompt_tokens_median,
        "output_tokens_median": output_tokens_median,
        "prompt_tokens_max": prompt_tokens_max,
        "output_tokens_max": output_tokens_max,
    }
    for name, count in counts.items():
        maximum = REQUESTS_MAX if name == "requests" else TOKENS_MAX
        if type(count) is not int or not 1 <= count <= maximum:
            raise ValueError(f"{name}: {count!r}: expected a whole number from 1 to {maximum}")
    if type(seed) is not int:
        raise ValueError(f"seed: {seed!r}: expected a whole number")
    if not RATE_PER_S_MIN <= rate_per_s <= GRID_PER_S:
        raise ValueError(f"rate_per_s: {rate_per_s!r}: expected a number from {RATE_PER_S_MIN} to {GRID_PER_S}")
    rng = random.Random(seed)
    workload = []
    arrival_ns = 0
    for position in range(requests):
        if position:
            arrival_ns += round(rng.expovariate(rate_per_s) * GRID_PER_S) * (10**9 // GRID_PER_S)
        prompt_tokens = _length(rng, prompt_tokens_median, PROMPT_SIGMA, prompt_tokens_max)
        output_tokens = _length(rng, output_tokens_median, OUTPUT_SIGMA, output_tokens_max)
        workload.append(TraceRequest(str(position), seconds_text(arrival_ns), prompt_tokens, output_tokens))
    return workload


def _length(rng: random.Random, median: int, sigma: float, maximum: int) -> int:
    return min(max(1, round(rng.lognormvariate(math.log(median), sigma))), maximum)
