"""With the reservation rule nobody is preempted, at any size of the cache from "just one request fits" upwards."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import random

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import request
from vllm_setup import Engine, build_ahead, usable_free

BLOCK = 16
MODEL_LEN = 96
ENGINES = [(NeuronScheduler, 0), (NeuronAsyncScheduler, 0), (NeuronAsyncScheduler, 1)]

engines = st.sampled_from(ENGINES)
lengths = st.tuples(st.integers(1, MODEL_LEN), st.integers(1, 40))


def worst_case(prompt, outputs):
    return -(-min(prompt + capped(prompt, outputs) - 1, MODEL_LEN) // BLOCK)


def capped(prompt, outputs):
    return min(outputs, max(1, MODEL_LEN - prompt))


class Watched(Engine):
    """Says of each sync step that was empty although somebody ran."""

    def schedule(self, *args, **kwargs):
        out = super().schedule(*args, **kwargs)
        assert not out.preempted_req_ids
        if not self.ahead:
            assert out.num_scheduled_tokens or not self.sched.running, "an empty step while somebody runs"
        return out


def scheduler(cls, ahead, usable, **config):
    return build_ahead(
        cls, ahead, max_num_batched_tokens=64, max_model_len=MODEL_LEN, num_blocks=usable + 1, log_stats=False, **config
    )


@given(
    engines,
    st.lists(lengths, min_size=1, max_size=8),
    st.integers(0, 12),
    st.integers(1, 4),
    st.sampled_from([{}, {"max_prefills_per_batch": 3}, {"max_consecutive_prefill_steps": 1, "min_decode_steps": 2}]),
    st.booleans(),
    st.sampled_from(["fcfs", "priority"]),
)
def test_nobody_is_preempted(engine, requests, more_blocks, seats, neuron_config, prefix_caching, policy):
    cls, ahead = engine
    usable = max(worst_case(*lengths) for lengths in requests) + more_blocks
    s = scheduler(
        cls,
        ahead,
        usable,
        max_num_seqs=seats,
        neuron_config=neuron_config,
        prefix_caching=prefix_caching,
        policy=policy,
    )
    shared = [3 + i for i in range(MODEL_LEN)]
    arrivals = {}
    for i, (prompt, outputs) in enumerate(requests):
        ids = {"token_ids": shared[:prompt]} if prefix_caching else {"prompt_len": prompt}
        arrivals.setdefault(i // 2, []).append(request(f"r{i}", max_tokens=outputs, priority=i % 3, **ids))
    done = Watched(s, ahead).run(arrivals)
    assert done.outputs == {f"r{i}": capped(*lengths) for i, lengths in enumerate(requests)}
    assert done.errors == []
    assert usable_free(s) == usable


@pytest.mark.parametrize(("cls", "ahead"), ENGINES, ids=["sync", "async-one-step", "async-ahead"])
@pytest.mark.parametrize("seed", range(3))
def test_every_size_of_the_cache(cls, ahead, seed):
    rng = random.Random(seed)
    wanted = [(rng.randint(1, 80), rng.randint(1, 30)) for _ in range(7)]
    least = max(worst_case(*one) for one in wanted)
    for usable in range(least, sum(worst_case(*one) for one in wanted) + 2):
        s = scheduler(cls, ahead, usable, max_num_seqs=5)
        done = Watched(s, ahead).run({0: [request(f"r{i}", *one) for i, one in enumerate(wanted)]})
        assert done.outputs == {f"r{i}": capped(*one) for i, one in enumerate(wanted)}
        assert usable_free(s) == usable


@given(engines, st.lists(lengths, min_size=2, max_size=7), st.integers(0, 6), st.randoms(use_true_random=False))
def test_nobody_is_preempted_when_others_are_aborted_or_impossible(engine, requests, more_blocks, rng):
    cls, ahead = engine
    usable = min(worst_case(*lengths) for lengths in requests) + more_blocks
    s = scheduler(cls, ahead, usable)
    engine = Watched(s, ahead)
    aborted = set()

    def abort(t):
        if rng.random() < 0.1 and s.requests:
            gone = rng.choice(sorted(s.requests))
            aborted.add(gone)
            s.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            s.check()

    engine.run({0: [request(f"r{i}", *lengths) for i, lengths in enumerate(requests)]}, before=abort)
    for i, lengths in enumerate(requests):
        name = f"r{i}"
        if worst_case(*lengths) > usable:
            assert name in aborted or name in engine.errors
        elif name not in aborted:
            assert engine.outputs[name] == capped(*lengths)
    assert usable_free(s) == usable
