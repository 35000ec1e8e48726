"""Streaming sessions: their slot and KV blocks while paused, and their next inputs."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add
from tests.vllm.support.schedulers import (
    both_classes,
    build,
    build_ahead,
    every_engine,
    num_free_blocks,
    with_connector,
)


def session(name, prompt_len, max_tokens, resumable=True):
    """Return the first or the next input of a session. The last one is not `resumable`."""
    r = request(name, prompt_len, max_tokens)
    r.resumable = resumable
    return r


@every_engine
def test_a_paused_session_keeps_its_slot(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2)
    engine = Engine(s, ahead)
    s.add_request(session("s", 10, 2))
    add(s, a=(10, 30))
    for _ in range(5):
        engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    add(s, b=(10, 2))
    for _ in range(3):
        assert engine.step().num_scheduled_tokens == {"a": 1}
    assert (s.explain().id, s.explain().reason) == ("b", "slots")
    s.add_request(session("s", 1, 1, resumable=False))
    s.check()
    engine.run()
    assert engine.outputs == {"s": 2, "a": 30, "b": 2}


@both_classes
def test_a_session_reserves_blocks_for_max_model_len(cls):
    """With `max_model_len` 64, 4 of 6 usable blocks are reserved for the session, so b, which needs 3, waits."""
    s = build(cls, max_model_len=64, num_blocks=7)
    engine = Engine(s)
    s.add_request(session("s", 10, 2))
    engine.step()
    engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    add(s, b=(30, 10))
    assert engine.step().num_scheduled_tokens == {}
    explanation = s.explain()
    assert (explanation.id, explanation.reason, explanation.needed, explanation.reserved, explanation.usable) == (
        "b",
        "kv",
        3,
        4,
        6,
    )
    s.add_request(session("s", 1, 1, resumable=False))
    s.check()
    engine.run()
    assert engine.outputs == {"s": 2, "b": 10}


@every_engine
def test_a_session_continues_with_a_prefill_of_its_next_input(cls, ahead):
    """vLLM drops the last output of an input: 10 prompt tokens and 2 outputs are computed, and 20 tokens are new."""
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    s.add_request(session("s", 10, 3))
    add(s, a=(10, 30))
    for _ in range(7):
        engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    s.add_request(session("s", 20, 3))
    s.check()
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"s": 20}, {"s": 64})
    assert engine.step().num_scheduled_tokens == {"a": 1, "s": 1}
    for _ in range(4):
        engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    s.add_request(session("s", 1, 1, resumable=False))
    engine.run()
    assert engine.outputs == {"s": 6, "a": 30}
    assert num_free_blocks(s) == 399


@both_classes
def test_an_input_that_arrives_early_is_used_when_the_current_one_is_answered(cls):
    s = build(cls)
    engine = Engine(s)
    s.add_request(session("s", 10, 2))
    s.add_request(session("s", 6, 2))
    s.add_request(session("s", 1, 1, resumable=False))
    s.check()
    engine.run()
    assert engine.steps == [{"s": 10}, {"s": 1}, {"s": 6}, {"s": 1}]
    assert engine.outputs == {"s": 4}


@both_classes
@pytest.mark.parametrize("early", [False, True], ids=["late-input", "early-input"])
def test_a_session_continues_before_a_head_that_needs_its_blocks(cls, early):
    """4 of 7 usable blocks are reserved for the session. x needs 4, so it waits until the session has finished."""
    s = build(cls, max_model_len=64, num_blocks=8)
    engine = Engine(s)
    s.add_request(session("s", 10, 2))
    engine.step()
    add(s, x=(50, 10), y=(10, 2))
    if early:
        s.add_request(session("s", 5, 2))
    engine.step()
    if not early:
        assert engine.step().num_scheduled_tokens == {}
        assert (s.explain().id, s.explain().reason) == ("x", "kv")
        s.add_request(session("s", 5, 2))
    assert engine.step().num_scheduled_tokens == {"s": 5}
    engine.step()
    s.add_request(session("s", 1, 1, resumable=False))
    engine.run(limit=50)
    assert engine.outputs == {"s": 4, "x": 10, "y": 2}


@both_classes
@pytest.mark.parametrize("early", [False, True], ids=["late-input", "early-input"])
def test_a_session_continues_before_a_head_that_needs_its_slot(cls, early):
    """Sessions have both slots. p arrived before their next inputs and has blocks allocated, but no slot."""
    s = with_connector(cls, max_num_seqs=2)
    engine = Engine(s)
    s.connector.answers["p"] = (32, True)
    s.add_request(session("s", 10, 4))
    engine.step()
    add(s, p=(50, 2))
    assert engine.step().num_scheduled_tokens == {"s": 1}
    assert s.requests["p"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    s.add_request(session("t", 10, 1))
    if early:
        s.add_request(session("s", 5, 1))
    assert engine.step().num_scheduled_tokens == {"t": 10}
    assert engine.step().num_scheduled_tokens == {"s": 1}
    assert engine.step(received=["p"]).num_scheduled_tokens == {"s": 1}
    if not early:
        assert engine.step().num_scheduled_tokens == {}
        assert (s.explain().id, s.explain().reason) == ("p", "slots")
        s.add_request(session("s", 5, 1))
    assert list(engine.step().num_scheduled_tokens) == ["s"]
    for name in "st":
        s.add_request(session(name, 1, 1, resumable=False))
    engine.run(limit=50)
    assert engine.outputs["p"] == 2


@both_classes
def test_a_session_is_admitted_only_if_max_model_len_fits(cls):
    """3 of 6 usable blocks are reserved for a, and the session needs 4."""
    s = build(cls, max_model_len=64, num_blocks=7)
    engine = Engine(s)
    add(s, a=(30, 10))
    engine.step()
    s.add_request(session("s", 10, 1))
    assert engine.step().num_scheduled_tokens == {"a": 1}
    explanation = s.explain()
    assert (explanation.id, explanation.reason, explanation.needed, explanation.reserved, explanation.usable) == (
        "s",
        "kv",
        4,
        3,
        6,
    )


@every_engine
def test_an_aborted_paused_session_frees_its_slot_and_its_blocks(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=1)
    engine = Engine(s, ahead)
    s.add_request(session("s", 10, 2))
    for _ in range(4):
        engine.step()
    add(s, b=(10, 2))
    assert engine.step().num_scheduled_tokens == {}
    s.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    s.check()
    engine.run()
    assert engine.outputs == {"s": 2, "b": 2}
    assert num_free_blocks(s) == 399


@both_classes
def test_a_session_above_max_model_len_finishes_with_an_error(cls):
    """With `max_model_len` 256, the session has 200 tokens and a next input of 150. x is admitted afterwards."""
    s = build(cls, max_model_len=256, max_num_batched_tokens=64)
    engine = Engine(s)
    s.add_request(session("s", 200, 3))
    for _ in range(8):
        engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    s.add_request(session("s", 150, 3))
    add(s, x=(10, 2))
    s.check()
    engine.run()
    assert engine.errors == ["s"] and engine.outputs["x"] == 2
    assert num_free_blocks(s) == 399
