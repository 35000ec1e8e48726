"""With reservations no request is preempted, for each KV cache size that holds at least one request."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import random
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronScheduler
from tests.vllm.support.drafts import enable_drafts, finish_with_drafts
from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import full_attention, request
from tests.vllm.support.invariants import run_and_check
from tests.vllm.support.schedulers import ENGINES, both_classes, build_ahead, every_engine, num_free_blocks
from tests.vllm.support.strategies import workloads

pytestmark = pytest.mark.usefixtures("quiet")

BLOCK = 16
MODEL_LEN = 96

engines = st.sampled_from(ENGINES)
lengths = st.tuples(st.integers(1, MODEL_LEN), st.integers(1, 40))


def worst_case_blocks(prompt, outputs):
    return -(-min(prompt + num_outputs(prompt, outputs) - 1, MODEL_LEN) // BLOCK)


def num_outputs(prompt, outputs):
    return min(outputs, max(1, MODEL_LEN - prompt))


class CheckedEngine(Engine):
    """An engine that asserts after each step that it preempted no request and, without `ahead`, was not idle."""

    def schedule(self, *args, **kwargs):
        out = super().schedule(*args, **kwargs)
        assert not out.preempted_req_ids
        if not self.ahead:
            assert out.num_scheduled_tokens or not self.sched.running, "an empty step while a request runs"
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
def test_no_request_is_preempted(engine, requests, more_blocks, max_num_seqs, neuron_config, prefix_caching, policy):
    cls, ahead = engine
    usable = max(worst_case_blocks(*lengths) for lengths in requests) + more_blocks
    s = scheduler(
        cls,
        ahead,
        usable,
        max_num_seqs=max_num_seqs,
        neuron_config=neuron_config,
        prefix_caching=prefix_caching,
        policy=policy,
    )
    shared = [3 + i for i in range(MODEL_LEN)]
    arrivals = {}
    for i, (prompt, outputs) in enumerate(requests):
        ids = {"token_ids": shared[:prompt]} if prefix_caching else {"prompt_len": prompt}
        arrivals.setdefault(i // 2, []).append(request(f"r{i}", max_tokens=outputs, priority=i % 3, **ids))
    done = CheckedEngine(s, ahead).run(arrivals)
    assert done.outputs == {f"r{i}": num_outputs(*lengths) for i, lengths in enumerate(requests)}
    assert done.errors == []
    assert num_free_blocks(s) == usable


@every_engine
@given(workload=workloads(prefix_caching=None))
@settings(max_examples=max(1, settings().max_examples // 20))
def test_no_request_is_preempted_at_any_block_count(cls, ahead, workload):
    """From the count at which the largest request fits to the count at which all requests fit at once."""
    needs = [workload.worst_case_blocks(arrival) for arrival in workload.arrivals().values()]
    for num_blocks in range(max(needs, default=2), sum(needs) + 2):
        run_and_check(replace(workload, num_blocks=num_blocks), cls, ahead=bool(ahead))


@given(engines, st.lists(lengths, min_size=2, max_size=7), st.integers(0, 6), st.randoms(use_true_random=False))
def test_no_request_is_preempted_if_others_are_aborted_or_can_never_run(engine, requests, more_blocks, rng):
    cls, ahead = engine
    usable = min(worst_case_blocks(*lengths) for lengths in requests) + more_blocks
    s = scheduler(cls, ahead, usable)
    engine = CheckedEngine(s, ahead)
    aborted = set()

    def abort(t):
        if rng.random() < 0.1 and s.requests:
            name = rng.choice(sorted(s.requests))
            aborted.add(name)
            s.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            s.check()

    engine.run({0: [request(f"r{i}", *lengths) for i, lengths in enumerate(requests)]}, before=abort)
    for i, lengths in enumerate(requests):
        name = f"r{i}"
        if worst_case_blocks(*lengths) > usable:
            assert name in aborted or name in engine.errors
        elif name not in aborted:
            assert engine.outputs[name] == num_outputs(*lengths)
    assert num_free_blocks(s) == usable


def window(tokens):
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=tokens)


@pytest.mark.parametrize("groups", [[32], [32, 48]], ids=["one-window", "two-windows"])
@every_engine
def test_no_request_is_preempted_with_sliding_windows_at_any_block_count(cls, ahead, groups):
    """All layer groups allocate from one block pool, and layers with a sliding window free blocks behind it."""
    rng = random.Random(5)
    requests = [(rng.randint(1, 80), rng.randint(1, 16)) for _ in range(6)]
    most_served = 0
    for usable in range(4, 40):
        s = scheduler(cls, ahead, usable, max_num_seqs=4, kv_groups=[full_attention(BLOCK), *map(window, groups)])
        done = CheckedEngine(s, ahead).run({0: [request(f"r{i}", *lengths) for i, lengths in enumerate(requests)]})
        served = {f"r{i}": num_outputs(*lengths) for i, lengths in enumerate(requests) if f"r{i}" not in done.errors}
        assert {name: n for name, n in done.outputs.items() if n} == served
        assert len(served) >= most_served, "a larger KV cache serves fewer requests"
        most_served = len(served)
        assert num_free_blocks(s) == usable
    assert most_served == len(requests)


@both_classes
def test_a_sliding_window_bounds_the_reservation(cls):
    """96 tokens reserve 6 blocks for full attention, and 2 to 6 blocks more for layers with a window of 32 tokens."""
    s = scheduler(cls, 0, 200, kv_groups=[full_attention(BLOCK), window(32)])
    s.add_request(request("long", 80, 16))
    with_window = s.explain().needed
    assert 6 + 2 <= with_window <= 6 + 6
    without_window = scheduler(cls, 0, 200)
    without_window.add_request(request("long", 80, 16))
    assert without_window.explain().needed == 6


@given(
    st.sampled_from(ENGINES),
    st.lists(lengths, min_size=1, max_size=6),
    st.integers(1, 16),
    st.randoms(use_true_random=False),
)
def test_no_request_is_preempted_with_draft_tokens(engine, requests, usable, rng):
    cls, ahead = engine
    s = scheduler(cls, ahead, usable, edit=enable_drafts)
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
            done = finish_with_drafts(s, in_flight.pop(0), lambda rid, drafts: 1 + rng.randint(0, drafts))
            for output in (output for client_outputs in done.values() for output in client_outputs.outputs):
                outputs[output.request_id] += len(output.new_token_ids)
                errors += [output.request_id] * (str(output.finish_reason) == "error")
        if cls is NeuronScheduler:
            decoding = [r.request_id for r in s.running if r.num_output_tokens]
            s.update_draft_token_ids(DraftTokenIds(decoding, [[7] * rng.randint(0, 3) for _ in decoding]))
        s.check()
    assert not s.requests
    for i, lengths in enumerate(requests):
        assert outputs[f"r{i}"] == (0 if f"r{i}" in errors else num_outputs(*lengths))
        if worst_case_blocks(*lengths) > usable:
            assert f"r{i}" in errors
    assert num_free_blocks(s) == usable
