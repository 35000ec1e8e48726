"""A made-up chat workload, the same for the same seed."""

from __future__ import annotations

import math
import random

from neuron_sched._native import TraceRequest
from neuron_sched.trace_fields import TOKENS_MAX, seconds

GRID_PER_S = 1_000_000
"""Arrivals are whole microseconds, so a written trace has the very same ones."""

REQUESTS_MAX = 10_000_000
"""So many take more than a gigabyte of memory."""

RATE_PER_S_MIN = 1e-6

PROMPT_SIGMA = 0.85
OUTPUT_SIGMA = 0.65
"""Spread of the natural logarithm of a length."""


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
    """Chat requests as they come to a server: Poisson arrivals, log-normal lengths with a long tail.

    The first one arrives at 0, the others `rate_per_s` a second on average. Lengths spread by a factor of about 2.3
    (prompts) and 1.9 (outputs) around their medians and end at their maxima. Raises ValueError naming what is wrong.
    """
    counts: dict[str, object] = {
        "requests": requests,
        "prompt_tokens_median": prompt_tokens_median,
        "output_tokens_median": output_tokens_median,
        "prompt_tokens_max": prompt_tokens_max,
        "output_tokens_max": output_tokens_max,
    }
    for name, count in counts.items():
        most = REQUESTS_MAX if name == "requests" else TOKENS_MAX
        if type(count) is not int or not 1 <= count <= most:
            raise ValueError(f"{name}: {count!r}: expected a whole number from 1 to {most}")
    if type(seed) is not int:
        raise ValueError(f"seed: {seed!r}: expected a whole number")
    if not RATE_PER_S_MIN <= rate_per_s <= GRID_PER_S:
        raise ValueError(f"rate_per_s: {rate_per_s!r}: expected a number from {RATE_PER_S_MIN} to {GRID_PER_S}")
    chance = random.Random(seed)
    made = []
    arrival_ns = 0
    for position in range(requests):
        if position:
            arrival_ns += round(chance.expovariate(rate_per_s) * GRID_PER_S) * (10**9 // GRID_PER_S)
        prompt_tokens = _length(chance, prompt_tokens_median, PROMPT_SIGMA, prompt_tokens_max)
        output_tokens = _length(chance, output_tokens_median, OUTPUT_SIGMA, output_tokens_max)
        made.append(TraceRequest(str(position), seconds(arrival_ns), prompt_tokens, output_tokens))
    return made


def _length(chance: random.Random, median: int, sigma: float, most: int) -> int:
    return min(max(1, round(chance.lognormvariate(math.log(median), sigma))), most)
