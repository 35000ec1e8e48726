"""What leaves the scheduler beside its steps: errors to the right client, masks, what it says in the log."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import numpy as np
from vllm.v1.request import RequestStatus

import vllm_harness
from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import request
from vllm_setup import (
    Engine,
    FakeGrammar,
    Logged,
    add,
    both_classes,
    build,
    build_ahead,
    compiled,
    every_engine,
    finish,
    names,
    queued,
    usable_free,
)

# --- requests that can never fit ---

SMALL = {"max_num_batched_tokens": 128, "max_model_len": 128, "num_blocks": 5}  # 64 usable tokens


@every_engine
def test_an_impossible_request_ends_with_one_error_for_its_client(cls, ahead):
    s = build_ahead(cls, ahead, **SMALL)
    engine = Engine(s, ahead)
    big = request("big", 70, 4)
    big.client_index = 3
    a = request("a", 10, 3)
    a.client_index = 1
    s.add_request(big)
    s.add_request(a)
    assert s.get_num_unfinished_requests() == 2
    s.check()
    engine.run()
    assert (engine.errors, engine.outputs) == (["big"], {"big": 0, "a": 3})
    assert (engine.clients["big"], engine.clients["a"]) == (3, 1)
    assert s.get_num_unfinished_requests() == 0
    assert not s.has_requests()
    assert usable_free(s) == 4


@both_classes
def test_errors_join_the_outputs_that_the_client_gets_anyway(cls):
    s = build(cls, **SMALL)
    add(s, a=(10, 3))
    out = s.schedule()
    add(s, big=(70, 4), huge=(100, 4))
    ((client, outputs),) = finish(s, out).items()
    assert client == 0
    assert [(one.request_id, str(one.finish_reason), len(one.new_token_ids)) for one in outputs.outputs] == [
        ("a", "None", 1),
        ("big", "error", 0),
        ("huge", "error", 0),
    ]
    assert finish(s, s.schedule())[0].outputs[0].request_id == "a"


@both_classes
def test_an_impossible_request_alone_gets_its_error(cls):
    s = build(cls, **SMALL)
    add(s, big=(70, 4))
    assert s.has_requests()
    out = s.schedule()
    assert out.num_scheduled_tokens == {}
    outputs = finish(s, out)
    assert [(one.request_id, str(one.finish_reason)) for one in outputs[0].outputs] == [("big", "error")]
    assert not s.has_unfinished_requests()
    s.check()
    assert s.schedule().finished_req_ids == {"big"}
    assert not s.requests


@both_classes
def test_the_frontend_of_several_engines_is_told_who_finished(cls):
    caught = {}

    def construct(**kwargs):
        caught["s"] = cls(**kwargs, include_finished_set=True)
        return caught["s"]

    s = build(construct, **SMALL)
    big = request("big", 70, 4)
    big.client_index = 2
    s.add_request(big)
    outputs = finish(s, s.schedule())
    told = {client: one.finished_requests for client, one in outputs.items() if one.finished_requests}
    assert {rid for ids in told.values() for rid in ids} | s.finished_req_ids_dict.get(2, set()) == {"big"}


@every_engine
def test_an_abort_before_the_error_leaves_no_trace(cls, ahead):
    s = build_ahead(cls, ahead, **SMALL)
    engine = Engine(s, ahead)
    add(s, a=(10, 3), big=(70, 4))
    engine.schedule()
    gone = s.finish_requests("big", RequestStatus.FINISHED_ABORTED)
    assert [getattr(r, "request_id", r[0] if isinstance(r, tuple) else r) for r in gone or ["big"]] == ["big"]
    s.check()
    engine.settle()
    engine.run()
    assert (engine.errors, engine.outputs) == ([], {"a": 3})
    assert not s.requests and not s.has_requests()


@both_classes
def test_an_abort_after_the_error_is_nothing(cls):
    s = build(cls, **SMALL)
    engine = Engine(s)
    add(s, a=(10, 3), big=(70, 4))
    engine.step()
    assert engine.errors == ["big"]
    s.finish_requests("big", RequestStatus.FINISHED_ABORTED)
    s.check()
    engine.run()
    assert (engine.errors, engine.outputs) == (["big"], {"big": 0, "a": 3})


@both_classes
def test_an_abort_of_everybody_takes_the_impossible_too(cls):
    s = build(cls, **SMALL)
    engine = Engine(s)
    add(s, a=(10, 3), big=(70, 4), b=(20, 3))
    engine.schedule()
    s.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    s.check()
    engine.settle()
    assert (engine.errors, s.requests, names(s.running), queued(s)) == ([], {}, [], [])
    assert usable_free(s) == 4


@both_classes
def test_impossible_requests_hold_nobody_up(cls):
    s = build(cls, **SMALL, max_num_seqs=1)
    engine = Engine(s)
    add(s, x=(70, 4), a=(10, 2), y=(80, 4), b=(10, 2))
    engine.run()
    assert engine.steps == [{"a": 10}, {"a": 1}, {"b": 10}, {"b": 1}]
    assert engine.errors == ["x", "y"]


@both_classes
def test_an_impossible_request_in_the_middle_of_others_is_told_in_the_log(cls):
    s = build(cls, **SMALL)
    with Logged() as log:
        add(s, **{"the-big-one": (70, 4)})
        Engine(s).step()
    said = log.warnings + log.errors
    assert len(said) == 1
    assert "the-big-one" in said[0] and "5" in said[0] and "4" in said[0]


@both_classes
def test_an_id_is_free_again_after_its_error(cls):
    s = build(cls, **SMALL)
    engine = Engine(s)
    add(s, a=(70, 4))
    engine.step()
    add(s, a=(10, 2))
    engine.run()
    assert (engine.errors, engine.outputs) == (["a"], {"a": 2})


@both_classes
def test_a_length_cap_makes_a_request_possible(cls):
    """max_tokens of a million is cut by the model length, and 3 of 4 blocks remain enough."""
    s = build(cls, max_num_batched_tokens=64, max_model_len=60, num_blocks=5)
    engine = Engine(s)
    add(s, a=(50, 1_000_000))
    engine.run()
    assert engine.outputs == {"a": 10}


# --- what nothing may raise about ---


@both_classes
def test_unknown_ids_are_aborted_in_silence(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 3))
    engine.step()
    with Logged() as log:
        for ids in ("nobody", ["nobody", "no one"], [], ["a", "nobody", "a"], "a"):
            s.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            s.check()
    assert log.errors == []
    assert engine.step().finished_req_ids == {"a"}
    assert not s.requests


@both_classes
def test_a_double_id_while_the_first_waits_runs_or_was_impossible(cls):
    s = build(cls, **SMALL, max_num_seqs=1)
    engine = Engine(s)
    add(s, first=(10, 3), second=(10, 3), big=(70, 4))
    for name in ("first", "second", "big"):
        with Logged() as log:
            add(s, **{name: (10, 9)})
        assert len(log.errors) == 1 and name in log.errors[0]
        s.check()
    engine.step()
    with Logged() as log:
        add(s, first=(10, 9))
    assert len(log.errors) == 1
    engine.run()
    assert (engine.outputs, engine.errors) == ({"first": 3, "second": 3, "big": 0}, ["big"])


@both_classes
def test_many_empty_prompts(cls):
    s = build(cls)
    engine = Engine(s)
    for i in range(5):
        s.add_request(request(f"e{i}", 0, 3))
    add(s, a=(10, 2))
    s.check()
    engine.run()
    assert sorted(engine.errors) == [f"e{i}" for i in range(5)]
    assert engine.steps == [{"a": 10}, {"a": 1}]


# --- masks of structured output ---


def with_grammar(cls, ahead=0, masks=(5,), **config):
    s = build_ahead(cls, ahead, **config)
    engine = Engine(s, ahead)
    for i, mask in enumerate(masks):
        s.add_request(compiled(request(f"g{i}", 10, 4, grammar=True), FakeGrammar(mask)))
    return s, engine


@every_engine
def test_without_structured_output_there_is_no_mask(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead).run({0: [request("a", 100, 3)]})
    assert {(out._grammar_bitmask, out._structured_output_request_ids) for out in engine.outs} == {(None, None)}


@both_classes
def test_the_mask_is_attached_as_a_copy(cls):
    s, engine = with_grammar(cls, masks=(5, 6))
    add(s, a=(10, 9))
    for _ in range(4):
        out = engine.schedule()
        own = s.structured_output_manager._grammar_bitmask
        if out._grammar_bitmask is not None:
            assert not np.shares_memory(out._grammar_bitmask, own.numpy())
            ids, mask = out._structured_output_request_ids, np.array(out._grammar_bitmask)
            asked_by_the_engine = s.get_grammar_bitmask(out)
            assert ids == asked_by_the_engine.structured_output_request_ids
            assert (mask == asked_by_the_engine.grammar_bitmask).all()
            own.zero_()
            assert (out._grammar_bitmask == mask).all()
        engine.settle()
    seen = [
        (
            out._structured_output_request_ids,
            None if out._grammar_bitmask is None else out._grammar_bitmask[:, 0].tolist(),
        )
        for out in engine.outs
    ]
    assert seen == [(["g0"], [5]), (["g1"], [6]), (None, None), (["g0", "g1"], [5, 6])]


@both_classes
def test_a_chunk_that_is_not_the_last_has_no_mask(cls):
    s = build(cls)
    engine = Engine(s)
    s.add_request(compiled(request("g", 100, 2, grammar=True)))
    first, second = engine.step(), engine.step()
    assert (first._grammar_bitmask, first._structured_output_request_ids) == (None, None)
    assert second._structured_output_request_ids == ["g"]


def test_the_mask_waits_for_tokens_that_are_still_in_flight():
    s, engine = with_grammar(NeuronAsyncScheduler, ahead=1)
    first = engine.step()
    second = engine.schedule()
    assert first._structured_output_request_ids == ["g0"]
    assert second.pending_structured_output_tokens
    assert (second._grammar_bitmask, second._structured_output_request_ids) == (None, None)
    engine.settle()
    assert s.get_grammar_bitmask(second).structured_output_request_ids == ["g0"]


# --- the watchdog ---


@both_classes
def test_the_watchdog_starts_anew_with_every_scheduled_token(cls):
    s = build(cls)
    engine = Engine(s)
    s.add_request(request("the-waiter", 10, 3, grammar=True))
    with Logged() as log:
        for _ in range(60):
            engine.step()
        add(s, a=(10, 1))
        for _ in range(100):
            engine.step()
        assert log.warnings == []
        assert s.empty_steps == 159
        engine.step()
        assert len(log.warnings) == 1
        add(s, b=(10, 1))
        for _ in range(100):
            engine.step()
        assert len(log.warnings) == 1
        engine.step()
        assert len(log.warnings) == 2, "one for each hundred in a row"


@both_classes
def test_idle_steps_are_no_stall(cls):
    s = build(cls)
    engine = Engine(s)
    with Logged() as log:
        for _ in range(250):
            engine.step()
    assert (log.warnings, s.empty_steps) == ([], 0)


# --- the line at the start ---


@both_classes
def test_one_line_tells_what_was_resolved(cls):
    import vllm

    with Logged() as log:
        build(cls, max_num_seqs=6, max_num_batched_tokens=1000, max_model_len=4096)
    (line,) = log.infos
    assert cls.__name__ in line
    assert "[128, 256, 512, 1000]" in line and "[1, 2, 4, 6]" in line
    assert vllm.__version__ in line
    assert "reserve" in line and "399" in line
    assert "\n" not in line


# --- stock numbers ---


@both_classes
def test_counts_of_requests_are_those_of_all_queues(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9), c=(10, 9))
    s.add_request(request("g", 10, 3, grammar=True))
    engine.step()
    engine.step()
    last = engine.stats[-1]
    assert last.num_running_reqs == 2
    assert last.num_waiting_reqs + getattr(last, "num_skipped_waiting_reqs", 0) == 2
    assert s.get_num_unfinished_requests() == 4


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_the_harness_of_the_documentation_runs(cls):
    s = vllm_harness.build(cls, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, num_blocks=400)
    steps = vllm_harness.run(s, {0: [request(i, 100, 3) for i in "abc"]})
    assert len(steps) == 10
