"""With the reservation rule nobody is preempted, at any size of the cache from "just one request fits" upwards."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import attention, request
from vllm_setup import Engine, accepted, both_classes, build_ahead, drafting, usable_free

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


# --- caches of several kinds, and drafts ---


def window(tokens):
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=tokens)


@pytest.mark.parametrize("groups", [[32], [32, 48]], ids=["one-window", "two-windows"])
@pytest.mark.parametrize(("cls", "ahead"), ENGINES, ids=["sync", "async-one-step", "async-ahead"])
def test_layers_with_windows_at_every_size_of_the_cache(cls, ahead, groups):
    """Each group of layers takes blocks of the same pool; those with a window give old ones back."""
    rng = random.Random(5)
    wanted = [(rng.randint(1, 80), rng.randint(1, 16)) for _ in range(6)]
    most = 0
    for usable in range(4, 40):
        s = scheduler(cls, ahead, usable, max_num_seqs=4, kv_groups=[attention(BLOCK), *map(window, groups)])
        done = Watched(s, ahead).run({0: [request(f"r{i}", *one) for i, one in enumerate(wanted)]})
        served = {f"r{i}": capped(*one) for i, one in enumerate(wanted) if f"r{i}" not in done.errors}
        assert {name: n for name, n in done.outputs.items() if n} == served
        assert len(served) >= most, "more cache serves more"
        most = len(served)
        assert usable_free(s) == usable
    assert most == len(wanted)


@both_classes
def test_a_window_bounds_what_is_promised(cls):
    """96 tokens: 6 blocks for the layers that see all, and for those with a window of 32 no more than its blocks."""
    s = scheduler(cls, 0, 200, kv_groups=[attention(BLOCK), window(32)])
    s.add_request(request("long", 80, 16))
    with_window = s.explain().needed
    assert 6 + 2 <= with_window <= 6 + 6
    alone = scheduler(cls, 0, 200)
    alone.add_request(request("long", 80, 16))
    assert alone.explain().needed == 6


@given(
    st.sampled_from(ENGINES),
    st.lists(lengths, min_size=1, max_size=6),
    st.integers(1, 16),
    st.randoms(use_true_random=False),
)
def test_nobody_is_preempted_for_drafts(engine, requests, usable, rng):
    cls, ahead = engine
    s = scheduler(cls, ahead, usable, edit=drafting)
    for i, lengths in enumerate(requests):
        s.add_request(request(f"r{i}", *lengths))
    outputs, errors, in_flight = dict.fromkeys((f"r{i}" for i in range(len(requests))), 0), [], []
    for _ in range(3_000):
        if not s.has_requests():
            break
        out = s.schedule()
        assert not out.preempted_req_ids
        assert ahead or out.num_scheduled_tokens or not s.running
        assert set(out.num_scheduled_tokens.values()) <= {1, 4} or out.num_seqs_padded == 0 or cls is NeuronScheduler
        in_flight.append(out)
        while len(in_flight) > ahead:
            done = accepted(s, in_flight.pop(0), lambda rid, drafts: 1 + rng.randint(0, drafts))
            for one in (one for of_client in done.values() for one in of_client.outputs):
                outputs[one.request_id] += len(one.new_token_ids)
                errors += [one.request_id] * (str(one.finish_reason) == "error")
        if cls is NeuronScheduler:
            decoding = [r.request_id for r in s.running if r.num_output_tokens]
            s.update_draft_token_ids(DraftTokenIds(decoding, [[7] * rng.randint(0, 3) for _ in decoding]))
        s.check()
    assert not s.requests
    for i, lengths in enumerate(requests):
        assert outputs[f"r{i}"] == (0 if f"r{i}" in errors else capped(*lengths))
        if worst_case(*lengths) > usable:
            assert f"r{i}" in errors
    assert usable_free(s) == usable
