"""One test body for two schedulers: the product's and the oracle."""

from types import SimpleNamespace

import pytest

import neuron_sched
from oracle_bucket import BucketOracle
from oracle_parts import OracleRequest


def native(**config):
    return neuron_sched.BucketScheduler(neuron_sched.NeuronConfig(**config))


NATIVE = SimpleNamespace(new=native, request=neuron_sched.Request)
ORACLE = SimpleNamespace(new=BucketOracle, request=OracleRequest)

both = pytest.mark.parametrize("impl", [NATIVE, ORACLE], ids=["native", "oracle"])


def make(impl, **config):
    """A roomy scheduler with blocks of 16 tokens, as the cases have it, with what they change."""
    roomy = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16, "num_blocks": 399}
    return impl.new(**{**roomy, **config})


def add(impl, s, **requests):
    """add(impl, s, a=(6, 4)): request "a" with a prompt of 6 tokens (or given tokens) and 4 outputs."""
    for name, (prompt, max_tokens, *rest) in requests.items():
        s.add(impl.request(name, prompt, max_tokens, **(rest[0] if rest else {})))


def advance(s, tokens=None):
    step = s.schedule()
    outcomes = s.complete(step, tokens)
    s.check()
    return step, outcomes


def steps_until_done(s, arrivals=None, limit=200):
    """Scheduled tokens of every step; `arrivals` are calls made before the step of that number."""
    arrivals = dict(arrivals or {})
    steps = []
    while s.num_waiting or s.num_running or arrivals:
        arrivals.pop(len(steps), lambda: None)()
        step, _ = advance(s)
        steps.append(step.num_scheduled_tokens)
        assert len(steps) < limit
    return steps


def counts(outcomes):
    return [(o.id, o.token, o.finish_reason) for o in outcomes]
