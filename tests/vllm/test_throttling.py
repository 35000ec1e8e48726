"""Prefills that the engine throttles among data-parallel ranks."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.grammar import set_compiled_grammar
from tests.vllm.support.harness import request
from tests.vllm.support.release import since
from tests.vllm.support.requests import add, request_ids
from tests.vllm.support.schedulers import both_classes, build


@both_classes
@pytest.mark.parametrize(
    "call", [lambda e: e.step(True), lambda e: e.step(throttle_prefills=True)], ids=["positional", "keyword"]
)
def test_throttled_prefills_run_only_if_no_request_is_decoding(cls, call):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 3))
    assert call(engine).num_scheduled_tokens == {"a": 10}, "no prefill although no request is decoding"
    add(s, b=(10, 1))
    assert call(engine).num_scheduled_tokens == {"a": 1}
    assert call(engine).num_scheduled_tokens == {"a": 1}
    assert call(engine).num_scheduled_tokens == {"b": 10}


@both_classes
def test_throttling_interrupts_a_chunked_prefill(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 4))
    engine.step()
    add(s, b=(100, 1))
    engine.step()
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1}
    assert engine.step().num_scheduled_tokens == {"b": 36}
    assert request_ids(s.running) == ["a"]


@both_classes
def test_a_rank_bound_by_prefill_capacity_is_not_throttled(cls):
    """If ready requests remain after a step that is not throttled, the next step prefills even if it is throttled."""
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(10, 9), c=(10, 9), d=(10, 9))
    throttled = [engine.step(throttle_prefills=t).num_scheduled_tokens for t in (False, True, True, True, True)]
    assert throttled == [
        {"b": 10},
        {"c": 10},
        {"d": 10},
        {"a": 1, "b": 1, "c": 1, "d": 1},
        {"a": 1, "b": 1, "c": 1, "d": 1},
    ]


@both_classes
def test_a_rank_that_has_admitted_all_ready_requests_is_throttled_again(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    engine.step()
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"b": 10}, (
        "b remained after a step that was not throttled"
    )
    add(s, c=(10, 9))
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "b": 1}
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "b": 1}
    assert engine.step().num_scheduled_tokens == {"c": 10}


@both_classes
def test_a_rank_with_blocked_requests_only_is_throttled(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    s.add_request(request("g", 10, 1, grammar=True))
    engine.step()
    add(s, b=(10, 9))
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1}


@both_classes
def test_a_rank_with_requests_that_became_ready_is_not_throttled(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    blocked = [request(name, 10, 9, grammar=True) for name in ("g", "h")]
    for r in blocked:
        s.add_request(r)
    engine.step()
    for r in blocked:
        set_compiled_grammar(r)
    assert engine.step().num_scheduled_tokens == {"g": 10}
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"h": 10}


@both_classes
def test_a_throttled_step_does_not_change_whether_the_rank_is_bound_by_prefill_capacity(cls):
    s = build(cls, max_num_seqs=2)
    engine = Engine(s)
    add(s, a=(10, 3), b=(10, 9), c=(10, 9))
    engine.step()
    engine.step()
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "b": 1}, (
        "c was admitted without a free slot"
    )
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "b": 1}
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"c": 10}, (
        "c remained after a step that was not throttled"
    )


@both_classes
@since(0, 33, "prefill_schedule_interval")
def test_prefill_schedule_interval_throttles_while_a_request_decodes(cls):
    """While a request is decoding, two prefill steps are at least three steps apart."""
    s = build(cls, prefill_schedule_interval=3)
    engine = Engine(s)
    add(s, a=(10, 20))
    engine.step()
    add(s, b=(10, 20))
    for _ in range(3):
        engine.step()
    add(s, c=(10, 20))
    for _ in range(3):
        engine.step()
    assert engine.kinds == ["P10", "D", "D", "P10", "D", "D", "P10"]
    add(s, d=(10, 20), e=(10, 2))
    for _ in range(4):
        engine.step()
    assert engine.kinds[7:] == ["D", "D", "P10", "D"], "e was admitted without a free slot"
