"""Scheduling one step ahead, and draft tokens: which requests can decode, and how many tokens a decode row has."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import random

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from tests.vllm.support.drafts import DRAFTS, enable_drafts, finish_with_drafts
from tests.vllm.support.engine_loop import Engine, check_padding, step_kind
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add, request_ids, waiting_ids
from tests.vllm.support.schedulers import build, num_free_blocks


def async_engine():
    """Return an async scheduler and an engine that runs one step ahead."""
    s = build(NeuronAsyncScheduler, async_scheduling=True)
    return s, Engine(s, ahead=1)


# --- requests that can decode ---


def test_a_request_whose_last_token_is_in_flight_is_not_scheduled():
    s, engine = async_engine()
    add(s, a=(10, 3), b=(10, 6))
    scheduled = [engine.step().num_scheduled_tokens for _ in range(8)]
    both = {"a": 1, "b": 1}
    assert scheduled == [{"a": 10}, {"b": 10}, both, both, {"b": 1}, {"b": 1}, {"b": 1}, {}]
    engine.run()
    assert engine.outputs == {"a": 3, "b": 6}


def test_a_request_that_reaches_max_model_len_in_flight_is_not_scheduled():
    s = build(NeuronAsyncScheduler, async_scheduling=True, max_model_len=64)
    engine = Engine(s, ahead=1)
    add(s, a=(60, 50))
    assert [engine.step().num_scheduled_tokens for _ in range(5)] == [{"a": 60}, {"a": 1}, {"a": 1}, {"a": 1}, {}]
    assert engine.outputs == {"a": 4}


def test_throttling_does_not_apply_if_no_request_can_decode():
    """The last token of a is in flight, so no request can decode, and a throttled step prefills b."""
    s, engine = async_engine()
    add(s, a=(10, 1))
    engine.step()
    add(s, b=(10, 2))
    assert s.running == [s.requests["a"]]
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"b": 10}


def test_the_interleave_bound_counts_only_requests_that_can_decode():
    s = build(NeuronAsyncScheduler, async_scheduling=True, neuron_config={"max_consecutive_prefill_steps": 1})
    engine = Engine(s, ahead=1)
    add(s, a=(10, 1), b=(10, 1), c=(10, 1), d=(10, 1))
    assert [engine.step().num_scheduled_tokens for _ in range(4)] == [{n: 10} for n in "abcd"]


@pytest.mark.parametrize("abort_step", range(8))
def test_aborts_while_a_step_is_in_flight(abort_step):
    s, engine = async_engine()

    def abort(t):
        if t == abort_step:
            s.finish_requests(["a", "c"], RequestStatus.FINISHED_ABORTED)
            s.check()

    engine.run({0: [request("a", 100, 4), request("b", 10, 4), request("c", 20, 4)]}, before=abort)
    assert engine.outputs["b"] == 4
    assert (request_ids(s.running), waiting_ids(s), num_free_blocks(s)) == ([], [], 399)


def test_an_id_is_reused_after_an_abort_in_flight():
    s, engine = async_engine()
    add(s, b=(10, 9))
    engine.step()
    add(s, a=(10, 4))
    engine.step()
    s.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.step()
    add(s, a=(10, 4))
    s.check()
    engine.run()
    assert engine.outputs["b"] == 9
    assert engine.finished["a"] == "length"
    assert num_free_blocks(s) == 399


@pytest.mark.parametrize("seed", range(20))
def test_random_workloads_one_step_ahead(seed):
    rng = random.Random(seed)
    s = build(
        NeuronAsyncScheduler,
        async_scheduling=True,
        max_num_seqs=rng.choice([1, 2, 4]),
        num_blocks=rng.choice([18, 40, 400]),
        prefix_caching=rng.random() < 0.5,
        neuron_config={
            "max_consecutive_prefill_steps": rng.choice([None, 1, 2]),
            "max_prefills_per_batch": rng.choice([1, 2]),
        },
    )
    free = num_free_blocks(s)
    lengths = {f"r{i}": (rng.randint(1, 150), rng.randint(1, 12)) for i in range(12)}
    arrivals = {}
    for name, prompt_and_outputs in lengths.items():
        arrivals.setdefault(rng.randint(0, 30), []).append(request(name, *prompt_and_outputs))
    engine = Engine(s, ahead=1).run(arrivals)
    assert engine.outputs == {name: outputs for name, (_, outputs) in lengths.items()}
    assert num_free_blocks(s) == free


# --- drafts ---


@pytest.mark.parametrize("seed", range(12))
def test_each_decode_row_has_all_drafts_or_none(seed):
    """Near `max_model_len` a request gets no more drafts, so each row has a compiled number of tokens."""
    rng = random.Random(seed)
    model_len = 128
    s = build(
        NeuronAsyncScheduler,
        edit=enable_drafts,
        async_scheduling=True,
        max_model_len=model_len,
        max_num_batched_tokens=128,
    )
    a = request("a", 20, 500)
    s.add_request(a)
    widths, computed, in_flight = [], [], []
    while s.requests:
        out = s.schedule()
        if out.num_scheduled_tokens:
            kind = step_kind(s, out)
            check_padding(s, out, kind)
            widths.append(out.num_scheduled_tokens["a"])
            computed.append(a.num_computed_tokens)
        in_flight.append(out)
        if len(in_flight) > 1:
            finish_with_drafts(s, in_flight.pop(0), lambda rid, drafts: 1 + rng.randint(0, drafts))
        s.check()
        assert len(widths) < 300
    assert a.num_output_tokens == model_len - 20
    widths, computed = widths[1:], computed[:-1]
    assert set(widths) <= {1, 1 + DRAFTS}
    assert widths == sorted(widths, reverse=True), "a request without drafts gets none later"
    limit = model_len - 3 - 2 * DRAFTS
    first_narrow = widths.index(1)
    assert max(computed[:first_narrow], default=0) <= limit < computed[first_narrow]


def test_rows_with_drafts_are_decode_rows_in_the_sync_class():
    s = build(NeuronScheduler, edit=enable_drafts, max_model_len=128, max_num_batched_tokens=128)
    add(s, a=(20, 20), b=(20, 20))
    for _ in range(2):
        finish_with_drafts(s, s.schedule(), lambda rid, drafts: 1)
    s.update_draft_token_ids(DraftTokenIds(["a", "b"], [[7, 7, 7], []]))
    out = s.schedule()
    assert step_kind(s, out) == "D"
    assert out.num_scheduled_tokens == out.num_scheduled_tokens_padded == {"a": 4, "b": 1}
    assert out.num_seqs_padded == 2
    finish_with_drafts(s, out, lambda rid, drafts: 1 + drafts)
    assert s.requests["a"].num_output_tokens == 5
    s.check()
