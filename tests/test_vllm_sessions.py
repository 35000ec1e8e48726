"""Sessions with streamed input: what they hold while they wait for more, and how they go on."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from vllm_harness import request
from vllm_setup import Engine, add, both_classes, build, build_ahead, every_engine, usable_free, with_connector


def session(name, prompt_len, max_tokens, resumable=True):
    r = request(name, prompt_len, max_tokens)
    r.resumable = resumable
    return r


@every_engine
def test_a_waiting_session_keeps_its_slot(cls, ahead):
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
def test_a_session_may_become_as_long_as_the_model_allows(cls):
    """6 usable blocks of 16, model length 64: the session counts 4, so b (3 blocks) has to wait."""
    s = build(cls, max_model_len=64, num_blocks=7)
    engine = Engine(s)
    s.add_request(session("s", 10, 2))
    engine.step()
    engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    add(s, b=(30, 10))
    assert engine.step().num_scheduled_tokens == {}
    why = s.explain()
    assert (why.id, why.reason, why.needed, why.reserved, why.usable) == ("b", "kv", 3, 4, 6)
    s.add_request(session("s", 1, 1, resumable=False))
    s.check()
    engine.run()
    assert engine.outputs == {"s": 2, "b": 10}


@every_engine
def test_a_session_goes_on_with_a_prefill_of_what_is_new(cls, ahead):
    """The last sampled token of a turn is dropped: 10 + 2 kept outputs are computed, 20 tokens are new."""
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
    assert usable_free(s) == 399


@both_classes
def test_input_that_came_early_is_used_when_the_turn_ends(cls):
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
@pytest.mark.parametrize("early", [False, True], ids=["input-comes-late", "input-came-early"])
def test_a_session_that_goes_on_does_not_wait_for_one_who_needs_its_blocks(cls, early):
    """7 usable blocks, 4 of them promised to the session: x (4) waits for its end, and must not keep it from ending."""
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
@pytest.mark.parametrize("early", [False, True], ids=["input-comes-late", "input-came-early"])
def test_a_session_that_goes_on_does_not_wait_for_one_who_needs_its_slot(cls, early):
    """Both slots belong to sessions; p came before their next turns and holds blocks, but has no slot."""
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
def test_a_session_starts_only_where_its_longest_fits(cls):
    """6 usable blocks, 3 of them a's: the session may become 4 blocks long."""
    s = build(cls, max_model_len=64, num_blocks=7)
    engine = Engine(s)
    add(s, a=(30, 10))
    engine.step()
    s.add_request(session("s", 10, 1))
    assert engine.step().num_scheduled_tokens == {"a": 1}
    why = s.explain()
    assert (why.id, why.reason, why.needed, why.reserved, why.usable) == ("s", "kv", 4, 3, 6)


@every_engine
def test_abort_of_a_session_that_waits_for_input(cls, ahead):
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
    assert usable_free(s) == 399


@both_classes
def test_a_session_that_outgrows_the_model_ends_with_an_error(cls):
    """200 tokens and a next prompt of 150, model length 256: the session ends, and nobody waits behind it."""
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
    assert usable_free(s) == 399
