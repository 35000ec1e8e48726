"""Admission: the reasons of `explain()`, watermark, pauses, slots, priority and aborts."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronScheduler
from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import request
from tests.vllm.support.log import LogCapture
from tests.vllm.support.release import since
from tests.vllm.support.requests import add, request_ids, waiting_ids
from tests.vllm.support.schedulers import (
    both_classes,
    build,
    build_ahead,
    every_engine,
    num_free_blocks,
    with_connector,
)


def explanation(sched):
    """Return the fields of `explain()` as a tuple."""
    e = sched.explain()
    return e.id, e.reason, e.needed, e.reserved, e.usable


# --- the reasons of explain() ---


@both_classes
def test_explain_is_none_while_no_request_waits(cls):
    s = build(cls)
    assert s.explain() is None
    add(s, a=(30, 5))
    assert explanation(s) == ("a", "ready", 3, 0, 399)
    Engine(s).step()
    assert s.explain() is None


@both_classes
def test_explain_slots_if_no_slot_is_free(cls):
    s = build(cls, max_num_seqs=1, num_blocks=10)
    add(s, a=(30, 5))
    Engine(s).step()
    add(s, b=(100, 5))
    assert explanation(s) == ("b", "slots", 7, 3, 9)
    assert s.at_capacity
    assert s.refusal(s.requests["b"]) == "slots"
    assert not s.can_schedule(s.requests["b"])


@both_classes
def test_explain_kv_if_too_few_blocks_are_unreserved(cls):
    s = build(cls, num_blocks=10)
    add(s, a=(30, 5))
    engine = Engine(s)
    engine.step()
    add(s, b=(100, 5))
    assert explanation(s) == ("b", "kv", 7, 3, 9)
    assert [engine.step().num_scheduled_tokens for _ in range(4)] == [{"a": 1}] * 4
    assert explanation(s) == ("b", "ready", 7, 0, 9)


@both_classes
def test_explain_prefill_in_progress_after_a_partial_prompt(cls):
    s = build(cls)
    add(s, a=(100, 5), b=(10, 5))
    Engine(s).step()
    assert explanation(s) == ("b", "prefill_in_progress", 1, 7, 399)
    assert s.has_prefill_in_running
    assert s._is_prefill_request(s.requests["a"])


@both_classes
def test_explain_interleave_if_decode_steps_are_due(cls):
    s = build(cls, neuron_config={"max_consecutive_prefill_steps": 1, "min_decode_steps": 2})
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9), c=(10, 9))
    engine.step()
    assert s.explain().reason == "ready"
    engine.step()
    assert explanation(s) == ("c", "interleave", 2, 4, 399)
    engine.step()
    assert s.explain().reason == "interleave"
    engine.step()
    assert s.explain().reason == "ready"
    engine.step()
    assert engine.kinds == ["P10", "P10", "D", "D", "P10"]


@both_classes
def test_explain_throttled_after_a_throttled_step(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(10, 9))
    assert engine.schedule(throttle_prefills=True).num_scheduled_tokens == {"a": 1}
    assert explanation(s) == ("b", "throttled", 2, 2, 399)
    engine.process_outputs()
    assert s.explain().reason == "ready", "no throttled step is in flight"
    engine.step()
    assert s.explain() is None


@both_classes
def test_explain_paused_while_the_scheduler_is_paused(cls):
    s = build(cls)
    add(s, a=(10, 9))
    s.set_pause_state(PauseState.PAUSED_ALL)
    assert explanation(s) == ("a", "paused", 2, 0, 399)
    s.set_pause_state(PauseState.UNPAUSED)
    assert s.explain().reason == "ready"


# --- watermark ---


@both_classes
@pytest.mark.parametrize(("prompt", "admitted_at_once"), [(16 * 63, True), (16 * 64, False)])
def test_watermark_blocks_stay_free_while_another_request_runs(cls, prompt, admitted_at_once):
    """The watermark is 10 blocks. Of 99 usable blocks, a reserves 26, so a prompt of 63 blocks fits, but not of 64."""
    s = build(cls, max_num_batched_tokens=2048, max_model_len=2048, num_blocks=100, watermark=0.1)
    engine = Engine(s)
    add(s, a=(400, 17))
    engine.step()
    assert s.kv_cache_manager.watermark_blocks == 10
    add(s, b=(prompt, 1))
    engine.step()
    assert engine.kinds[1] == (f"P{prompt}" if admitted_at_once else "D")
    if not admitted_at_once:
        assert (s.explain().reason, s.explain().needed) == ("kv", 64)
    engine.run()
    assert engine.outputs == {"a": 17, "b": 1}


@both_classes
def test_watermark_does_not_apply_to_the_only_request(cls):
    s = build(cls, max_num_batched_tokens=2048, max_model_len=2048, num_blocks=100, watermark=0.1)
    engine = Engine(s)
    add(s, a=(16 * 99, 1))
    assert engine.step().num_scheduled_tokens == {"a": 16 * 99}


# --- pauses ---


@both_classes
def test_paused_all_schedules_no_token(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 4))
    engine.step()
    add(s, b=(10, 1))
    with LogCapture() as log:
        s.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(150):
            assert engine.step().num_scheduled_tokens == {}
    assert log.warnings == []
    assert s.empty_steps == 0
    assert s.get_num_unfinished_requests() == 0
    assert (request_ids(s.running), waiting_ids(s)) == (["a"], ["b"])
    s.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.steps == [{"a": 10}, {"b": 10}, {"a": 1}, {"a": 1}, {"a": 1}]


@both_classes
def test_paused_new_admits_no_request(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(100, 2))
    engine.step()
    add(s, b=(10, 1))
    s.set_pause_state(PauseState.PAUSED_NEW)
    assert s.explain().reason == "paused"
    for _ in range(4):
        engine.step()
    assert engine.steps == [{"a": 64}, {"a": 36}, {"a": 1}]
    assert s.get_num_unfinished_requests() == 0
    assert waiting_ids(s) == ["b"]
    s.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.steps[3:] == [{"b": 10}]


@both_classes
def test_paused_new_lets_a_waiting_request_with_blocks_finish(cls):
    s = with_connector(cls)
    if not hasattr(s, "kv_holding_waiting"):
        pytest.skip("while new requests are paused, this vLLM admits none; since 0.32 it admits those with blocks")
    engine = Engine(s)
    s.connector.answers["p"] = (32, True)
    add(s, p=(50, 2), b=(10, 1))
    s.connector.answers["b"] = (None, False)
    engine.step()
    assert s.requests["p"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    s.connector.answers.clear()
    s.set_pause_state(PauseState.PAUSED_NEW)
    engine.step(received=["p"])
    for _ in range(3):
        engine.step()
    assert engine.steps == [{"p": 18}, {"p": 1}]
    assert waiting_ids(s) == ["b"]


# --- slots ---


@every_engine
def test_hidden_requests_occupy_slots(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2, neuron_config={"max_consecutive_prefill_steps": 1})
    engine = Engine(s, ahead).run({t: [request(f"r{t}", 10 + 7 * t, 1 + t % 5)] for t in range(20)})
    assert engine.outputs == {f"r{t}": 1 + t % 5 for t in range(20)}
    assert max(len(step) for step in engine.steps) == 2


@both_classes
@since(0, 32, "limit of active requests")
def test_the_limit_of_active_requests_limits_the_slots(cls):
    s = build(cls, max_num_active_seqs=2)
    engine = Engine(s)
    add(s, a=(10, 3), b=(10, 3), c=(10, 3))
    engine.step()
    engine.step()
    assert s.explain().reason == "slots"
    assert s.max_num_active_reqs == 2
    engine.run()
    both = {"a": 1, "b": 1}
    assert engine.steps == [{"a": 10}, {"b": 10}, both, both, {"c": 10}, {"c": 1}, {"c": 1}]


@both_classes
def test_packed_prefills_respect_the_free_slots(cls):
    s = build(cls, max_num_seqs=3, neuron_config={"max_prefills_per_batch": 4})
    engine = Engine(s)
    add(s, **{f"r{i}": (10, 3) for i in range(5)})
    assert engine.step().num_scheduled_tokens == {"r0": 10, "r1": 10, "r2": 10}
    engine.run()
    assert engine.outputs == {f"r{i}": 3 for i in range(5)}


# --- priority ---


@both_classes
def test_equal_priorities_are_admitted_in_order_of_arrival(cls):
    s = build(cls, policy="priority", max_num_seqs=1)
    for i, (name, priority) in enumerate({"a": 5, "b": 3, "c": 0, "d": 3}.items()):
        s.add_request(request(name, 10, 1, priority=priority, arrival_time=float(i)))
    engine = Engine(s).run()
    assert engine.steps == [{"c": 10}, {"b": 10}, {"d": 10}, {"a": 10}]


@both_classes
def test_a_running_request_is_not_preempted_by_a_better_priority(cls):
    """Request lo reserves 5 of 7 usable blocks, so hi waits until lo has finished."""
    s = build(cls, policy="priority", max_model_len=128, num_blocks=8)
    engine = Engine(s)
    s.add_request(request("lo", 60, 12, priority=9))
    engine.step()
    s.add_request(request("hi", 30, 20, priority=0))
    engine.run()
    assert engine.outputs == {"lo": 12, "hi": 20}
    assert engine.steps[:12] == [{"lo": 60}, *[{"lo": 1}] * 11]


# --- aborts ---


@every_engine
@pytest.mark.parametrize("abort_step", range(9))
def test_an_abort_in_any_step_frees_slot_and_blocks(cls, ahead, abort_step):
    s = build_ahead(cls, ahead, max_num_seqs=2, prefix_caching=False)
    engine = Engine(s, ahead)

    def abort(t):
        if t == abort_step:
            aborted = [name for name in ("b", "c") if name in s.requests]
            s.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
            s.check()
            assert all(name not in request_ids(s.running) + waiting_ids(s) for name in aborted)

    engine.run({0: [request("a", 10, 6), request("b", 100, 4), request("c", 30, 2), request("d", 30, 2)]}, before=abort)
    assert engine.outputs["a"] == 6 and engine.outputs["d"] == 2
    assert num_free_blocks(s) == 399
    assert NeuronScheduler.check(s) is None
