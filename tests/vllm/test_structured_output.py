"""Structured output: admission of requests that wait for a grammar, and the grammar bitmask of each step."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import numpy as np
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler
from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.grammar import FakeGrammar, set_compiled_grammar
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add, waiting_ids
from tests.vllm.support.schedulers import both_classes, build, build_ahead, every_engine

# --- requests that wait for a grammar ---


def grammar_request(name, prompt_len=10, max_tokens=2, **options):
    return request(name, prompt_len, max_tokens, grammar=True, **options)


@every_engine
def test_a_request_waiting_for_a_grammar_does_not_block_later_requests(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    g = grammar_request("g")
    s.add_request(g)
    add(s, a=(10, 2), b=(10, 2))
    for _ in range(6):
        engine.step()
    assert engine.steps == [{"a": 10}, {"b": 10}, {"a": 1, "b": 1}]
    set_compiled_grammar(g)
    engine.run()
    assert engine.outputs == {"a": 2, "b": 2, "g": 2}


@both_classes
def test_a_request_waiting_for_a_grammar_keeps_its_queue_position(cls):
    s = build(cls, max_num_seqs=1)
    engine = Engine(s)
    add(s, a=(10, 3))
    engine.step()
    g1, g2 = grammar_request("g1", max_tokens=1), grammar_request("g2", max_tokens=1)
    for r in (g1, request("b", 10, 1), g2, request("c", 10, 1)):
        s.add_request(r)
    engine.step()
    set_compiled_grammar(g2)
    set_compiled_grammar(g1)
    engine.run()
    assert engine.steps == [{"a": 10}, {"a": 1}, {"a": 1}, {"g1": 10}, {"b": 10}, {"g2": 10}, {"c": 10}]


@both_classes
def test_requests_are_admitted_in_order_of_arrival_not_of_compilation(cls):
    s = build(cls)
    engine = Engine(s)
    requests = [grammar_request(f"g{i}", max_tokens=1) for i in range(4)]
    for r in requests:
        s.add_request(r)
    engine.step()
    for i in (3, 1, 2, 0):
        set_compiled_grammar(requests[i])
    engine.run()
    assert engine.steps == [{f"g{i}": 10} for i in range(4)]


@both_classes
def test_only_requests_with_a_compiled_grammar_are_admitted_and_the_others_keep_their_order(cls):
    s = build(cls)
    engine = Engine(s)
    requests = [grammar_request(f"g{i}", max_tokens=1) for i in range(4)]
    for r in requests:
        s.add_request(r)
    set_compiled_grammar(requests[2])
    assert engine.step().num_scheduled_tokens == {"g2": 10}
    assert engine.step().num_scheduled_tokens == {}
    set_compiled_grammar(requests[3])
    set_compiled_grammar(requests[0])
    add(s, z=(10, 1))
    for _ in range(3):
        engine.step()
    assert engine.steps[1:] == [{"g0": 10}, {"g3": 10}, {"z": 10}]
    assert waiting_ids(s) == ["g1"]


@both_classes
def test_the_priority_order_includes_requests_that_waited_for_a_grammar(cls):
    s = build(cls, policy="priority", max_num_seqs=1)
    engine = Engine(s)
    g = grammar_request("g", max_tokens=1, priority=1)
    s.add_request(g)
    for name, priority in {"lo": 9, "mid": 3, "hi": 0}.items():
        s.add_request(request(name, 10, 1, priority=priority))
    assert engine.step().num_scheduled_tokens == {"hi": 10}
    set_compiled_grammar(g)
    engine.run()
    assert engine.steps[1:] == [{"g": 10}, {"mid": 10}, {"lo": 10}]


class CountingPolls:
    """A structured output request that counts the reads of its grammar."""

    def __init__(self, inner):
        self.inner = inner
        self.polls = 0

    @property
    def grammar(self):
        self.polls += 1
        return self.inner.grammar

    def __getattr__(self, name):
        return getattr(self.inner, name)


@both_classes
def test_each_request_waiting_for_a_grammar_is_polled_at_most_once_a_step(cls):
    s = build(cls)
    engine = Engine(s)
    requests = [grammar_request(f"g{i}") for i in range(5)]
    for r in requests:
        r.structured_output_request = CountingPolls(r.structured_output_request)
        s.add_request(r)
    add(s, a=(10, 9))
    for _ in range(4):
        engine.step()
    assert max(r.structured_output_request.polls for r in requests) <= 4


@both_classes
def test_requests_waiting_for_a_grammar_do_not_count_for_the_interleave_bound(cls):
    s = build(cls, neuron_config={"max_consecutive_prefill_steps": 1})
    engine = Engine(s)
    s.add_request(grammar_request("g"))
    add(s, a=(10, 5))
    for _ in range(3):
        engine.step()
    assert engine.kinds == ["P10", "D", "D"]
    assert (s.explain().id, s.explain().reason) == ("g", "blocked")
    add(s, b=(10, 1))
    assert engine.step().num_scheduled_tokens == {"b": 10}, "a decode step was due"


@every_engine
def test_abort_of_a_request_waiting_for_a_grammar(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    s.add_request(grammar_request("g"))
    add(s, a=(10, 3))
    engine.step()
    s.finish_requests("g", RequestStatus.FINISHED_ABORTED)
    s.check()
    assert waiting_ids(s) == []
    assert engine.step().finished_req_ids == {"g"}
    engine.run()
    assert engine.outputs == {"a": 3}


@both_classes
@pytest.mark.parametrize("num_decodes", [0, 5], ids=["alone", "with-a-decoding-request"])
def test_a_request_whose_grammar_cannot_be_compiled_finishes_with_an_error(cls, num_decodes):
    s = build(cls)
    if not hasattr(s, "grammar_compile_error_reqs"):
        pytest.skip("this vLLM raises when a grammar cannot be compiled")
    engine = Engine(s)
    if num_decodes:
        add(s, a=(10, num_decodes))
        engine.step()
    g = grammar_request("g")
    s.add_request(g)
    engine.step()
    set_compiled_grammar(g, ValueError("invalid grammar"))
    engine.run(limit=20)
    assert engine.errors == ["g"]
    assert engine.outputs == {"g": 0, **({"a": 5} if num_decodes else {})}


@both_classes
def test_no_request_is_polled_while_no_slot_is_free(cls):
    s = build(cls, max_num_seqs=1)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    g = grammar_request("g")
    g.structured_output_request = CountingPolls(g.structured_output_request)
    s.add_request(g)
    for _ in range(4):
        engine.step()
    assert g.structured_output_request.polls == 0


# --- grammar bitmask ---


def with_grammar(cls, ahead=0, masks=(5,), **config):
    s = build_ahead(cls, ahead, **config)
    engine = Engine(s, ahead)
    for i, mask in enumerate(masks):
        s.add_request(set_compiled_grammar(request(f"g{i}", 10, 4, grammar=True), FakeGrammar(mask)))
    return s, engine


@every_engine
def test_without_structured_output_the_bitmask_is_none(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead).run({0: [request("a", 100, 3)]})
    assert {(out._grammar_bitmask, out._structured_output_request_ids) for out in engine.outs} == {(None, None)}


@both_classes
def test_the_attached_bitmask_is_a_copy(cls):
    s, engine = with_grammar(cls, masks=(5, 6))
    add(s, a=(10, 9))
    for _ in range(4):
        out = engine.schedule()
        shared = s.structured_output_manager._grammar_bitmask
        if out._grammar_bitmask is not None:
            assert not np.shares_memory(out._grammar_bitmask, shared.numpy())
            ids, mask = out._structured_output_request_ids, np.array(out._grammar_bitmask)
            vllm_bitmask = s.get_grammar_bitmask(out)
            assert ids == vllm_bitmask.structured_output_request_ids
            assert (mask == vllm_bitmask.grammar_bitmask).all()
            shared.zero_()
            assert (out._grammar_bitmask == mask).all()
        engine.process_outputs()
    seen = [
        (
            out._structured_output_request_ids,
            None if out._grammar_bitmask is None else out._grammar_bitmask[:, 0].tolist(),
        )
        for out in engine.outs
    ]
    assert seen == [(["g0"], [5]), (["g1"], [6]), (None, None), (["g0", "g1"], [5, 6])]


@both_classes
def test_only_the_last_chunk_of_a_prompt_has_a_bitmask(cls):
    s = build(cls)
    engine = Engine(s)
    s.add_request(set_compiled_grammar(request("g", 100, 2, grammar=True)))
    first, second = engine.step(), engine.step()
    assert (first._grammar_bitmask, first._structured_output_request_ids) == (None, None)
    assert second._structured_output_request_ids == ["g"]


def test_the_bitmask_is_none_while_tokens_that_it_depends_on_are_in_flight():
    s, engine = with_grammar(NeuronAsyncScheduler, ahead=1)
    first = engine.step()
    second = engine.schedule()
    assert first._structured_output_request_ids == ["g0"]
    assert second.pending_structured_output_tokens
    assert (second._grammar_bitmask, second._structured_output_request_ids) == (None, None)
    engine.process_outputs()
    assert s.get_grammar_bitmask(second).structured_output_request_ids == ["g0"]
