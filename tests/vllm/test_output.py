"""Errors for clients, log lines, the watchdog and request counts."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from tests.vllm.support import harness
from tests.vllm.support.engine_loop import Engine, finish
from tests.vllm.support.harness import request
from tests.vllm.support.log import LogCapture
from tests.vllm.support.requests import add, request_ids, waiting_ids
from tests.vllm.support.schedulers import both_classes, build, build_ahead, every_engine, num_free_blocks

# --- requests that can never run ---

# 4 usable KV blocks, 64 tokens.
SMALL = {"max_num_batched_tokens": 128, "max_model_len": 128, "num_blocks": 5}


@every_engine
def test_a_request_that_can_never_run_finishes_with_one_error_for_its_client(cls, ahead):
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
    assert num_free_blocks(s) == 4


@both_classes
def test_errors_are_in_the_same_message_as_the_outputs_of_the_client(cls):
    s = build(cls, **SMALL)
    add(s, a=(10, 3))
    out = s.schedule()
    add(s, big=(70, 4), huge=(100, 4))
    ((client, outputs),) = finish(s, out).items()
    assert client == 0
    assert [(o.request_id, str(o.finish_reason), len(o.new_token_ids)) for o in outputs.outputs] == [
        ("a", "None", 1),
        ("big", "error", 0),
        ("huge", "error", 0),
    ]
    assert finish(s, s.schedule())[0].outputs[0].request_id == "a"


@both_classes
def test_a_request_that_can_never_run_gets_its_error_without_other_requests(cls):
    s = build(cls, **SMALL)
    add(s, big=(70, 4))
    assert s.has_requests()
    out = s.schedule()
    assert out.num_scheduled_tokens == {}
    outputs = finish(s, out)
    assert [(o.request_id, str(o.finish_reason)) for o in outputs[0].outputs] == [("big", "error")]
    assert not s.has_unfinished_requests()
    s.check()
    assert s.schedule().finished_req_ids == {"big"}
    assert not s.requests


@both_classes
def test_a_request_that_can_never_run_is_in_the_finished_set_of_its_client(cls):
    def construct(**kwargs):
        return cls(**kwargs, include_finished_set=True)

    s = build(construct, **SMALL)
    big = request("big", 70, 4)
    big.client_index = 2
    s.add_request(big)
    outputs = finish(s, s.schedule())
    reported = {client: o.finished_requests for client, o in outputs.items() if o.finished_requests}
    assert {rid for ids in reported.values() for rid in ids} | s.finished_req_ids_dict.get(2, set()) == {"big"}


@every_engine
def test_an_abort_before_the_error_prevents_it(cls, ahead):
    s = build_ahead(cls, ahead, **SMALL)
    engine = Engine(s, ahead)
    add(s, a=(10, 3), big=(70, 4))
    engine.schedule()
    finished = s.finish_requests("big", RequestStatus.FINISHED_ABORTED)
    assert [getattr(r, "request_id", r[0] if isinstance(r, tuple) else r) for r in finished or ["big"]] == ["big"]
    s.check()
    engine.process_outputs()
    engine.run()
    assert (engine.errors, engine.outputs) == ([], {"a": 3})
    assert not s.requests and not s.has_requests()


@both_classes
def test_an_abort_after_the_error_has_no_effect(cls):
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
def test_an_abort_of_all_requests_includes_those_that_can_never_run(cls):
    s = build(cls, **SMALL)
    engine = Engine(s)
    add(s, a=(10, 3), big=(70, 4), b=(20, 3))
    engine.schedule()
    s.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    s.check()
    engine.process_outputs()
    assert (engine.errors, s.requests, request_ids(s.running), waiting_ids(s)) == ([], {}, [], [])
    assert num_free_blocks(s) == 4


@both_classes
def test_requests_that_can_never_run_block_no_other_request(cls):
    s = build(cls, **SMALL, max_num_seqs=1)
    engine = Engine(s)
    add(s, x=(70, 4), a=(10, 2), y=(80, 4), b=(10, 2))
    engine.run()
    assert engine.steps == [{"a": 10}, {"a": 1}, {"b": 10}, {"b": 1}]
    assert engine.errors == ["x", "y"]


@both_classes
def test_the_log_has_one_line_for_a_request_that_can_never_run(cls):
    s = build(cls, **SMALL)
    with LogCapture() as log:
        add(s, **{"the-big-one": (70, 4)})
        Engine(s).step()
    lines = log.warnings + log.errors
    assert len(lines) == 1
    assert "the-big-one" in lines[0] and "5" in lines[0] and "4" in lines[0]


@both_classes
def test_an_id_can_be_reused_after_its_error(cls):
    s = build(cls, **SMALL)
    engine = Engine(s)
    add(s, a=(70, 4))
    engine.step()
    add(s, a=(10, 2))
    engine.run()
    assert (engine.errors, engine.outputs) == (["a"], {"a": 2})


@both_classes
def test_the_worst_case_is_limited_by_max_model_len(cls):
    """With `max_tokens` 1,000,000 the worst case is 60 tokens, which 4 blocks hold."""
    s = build(cls, max_num_batched_tokens=64, max_model_len=60, num_blocks=5)
    engine = Engine(s)
    add(s, a=(50, 1_000_000))
    engine.run()
    assert engine.outputs == {"a": 10}


# --- unknown ids, duplicate ids and empty prompts raise nothing ---


@both_classes
def test_aborting_an_unknown_id_logs_no_error(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 3))
    engine.step()
    with LogCapture() as log:
        for ids in ("unknown", ["unknown", "unknown-2"], [], ["a", "unknown", "a"], "a"):
            s.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            s.check()
    assert log.errors == []
    assert engine.step().finished_req_ids == {"a"}
    assert not s.requests


@both_classes
def test_a_duplicate_id_is_dropped_while_the_first_is_waiting_running_or_can_never_run(cls):
    s = build(cls, **SMALL, max_num_seqs=1)
    engine = Engine(s)
    add(s, first=(10, 3), second=(10, 3), big=(70, 4))
    for name in ("first", "second", "big"):
        with LogCapture() as log:
            add(s, **{name: (10, 9)})
        assert len(log.errors) == 1 and name in log.errors[0]
        s.check()
    engine.step()
    with LogCapture() as log:
        add(s, first=(10, 9))
    assert len(log.errors) == 1
    engine.run()
    assert (engine.outputs, engine.errors) == ({"first": 3, "second": 3, "big": 0}, ["big"])


@both_classes
def test_empty_prompts_finish_with_errors(cls):
    s = build(cls)
    engine = Engine(s)
    for i in range(5):
        s.add_request(request(f"e{i}", 0, 3))
    add(s, a=(10, 2))
    s.check()
    engine.run()
    assert sorted(engine.errors) == [f"e{i}" for i in range(5)]
    assert engine.steps == [{"a": 10}, {"a": 1}]


# --- the watchdog ---


@both_classes
def test_a_scheduled_token_resets_the_watchdog(cls):
    s = build(cls)
    engine = Engine(s)
    s.add_request(request("blocked", 10, 3, grammar=True))
    with LogCapture() as log:
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
        assert len(log.warnings) == 2, "not one warning for each 100 consecutive empty steps"


@both_classes
def test_steps_without_requests_do_not_count_as_empty(cls):
    s = build(cls)
    engine = Engine(s)
    with LogCapture() as log:
        for _ in range(250):
            engine.step()
    assert (log.warnings, s.empty_steps) == ([], 0)


# --- the startup line ---


@both_classes
def test_one_line_logs_the_resolved_configuration(cls):
    import vllm

    with LogCapture() as log:
        build(cls, max_num_seqs=6, max_num_batched_tokens=1000, max_model_len=4096)
    (line,) = log.infos
    assert cls.__name__ in line
    assert "[128, 256, 512, 1000]" in line and "[1, 2, 4, 6]" in line
    assert vllm.__version__ in line
    assert "reserve" in line and "399" in line
    assert "\n" not in line


# --- request counts of the stock scheduler ---


@both_classes
def test_request_counts_include_all_queues(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9), c=(10, 9))
    s.add_request(request("g", 10, 3, grammar=True))
    engine.step()
    engine.step()
    stats = engine.stats[-1]
    assert stats.num_running_reqs == 2
    assert stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0) == 2
    assert s.get_num_unfinished_requests() == 4


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_the_harness_runs_a_workload_to_completion(cls):
    s = harness.build(cls, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, num_blocks=400)
    steps = harness.run(s, {0: [request(i, 100, 3) for i in "abc"]})
    assert len(steps) == 10
