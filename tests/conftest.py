"""Hypothesis profiles: `fast` tries the same few hundred examples on every run, `slow` looks for new ones.

Chosen by the environment variable HYPOTHESIS_PROFILE; tests leave the number of examples alone.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("fast", max_examples=300, deadline=None, derandomize=True)
settings.register_profile(
    "slow", max_examples=100_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
