"""Helpers for test bodies that run on both `BucketScheduler` and its oracle."""

from types import SimpleNamespace

import pytest

import neuron_sched
from tests.support.oracles.exclusive import BucketOracle
from tests.support.oracles.values import OracleRequest


def make_native(**config):
    return neuron_sched.BucketScheduler(neuron_sched.NeuronConfig(**config))


NATIVE = SimpleNamespace(new=make_native, request=neuron_sched.Request)
ORACLE = SimpleNamespace(new=BucketOracle, request=OracleRequest)

both = pytest.mark.parametrize("impl", [NATIVE, ORACLE], ids=["native", "oracle"])


def make(impl, **config):
    """Return a scheduler with capacity for the cases and blocks of 16 tokens. `config` overrides these values."""
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "block_size": 16,
        "num_blocks": 399,
    }
    return impl.new(**{**defaults, **config})


def add(impl, s, **requests):
    """Add requests by name. `add(impl, s, a=(6, 4))` adds request "a" with 6 prompt tokens and at most 4 output tokens.

    A list of token ids may stand for the prompt length, and a dict of further arguments may follow.
    """
    for name, (prompt, max_tokens, *rest) in requests.items():
        s.add(impl.request(name, prompt, max_tokens, **(rest[0] if rest else {})))


def advance(s, tokens=None):
    """Schedule and complete one step, check the invariants, and return the step and its outcomes."""
    step = s.schedule()
    outcomes = s.complete(step, tokens)
    s.check()
    return step, outcomes


def steps_until_done(s, arrivals=None, limit=200):
    """Run until no request is left and return the scheduled tokens of each step.

    `arrivals` maps step numbers to functions that are called before that step.
    """
    arrivals = dict(arrivals or {})
    steps = []
    while s.num_waiting or s.num_running or arrivals:
        arrivals.pop(len(steps), lambda: None)()
        step, _ = advance(s)
        steps.append(step.num_scheduled_tokens)
        assert len(steps) < limit
    return steps
