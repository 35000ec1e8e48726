"""Faults found in use, V02 to V27, C02 and X03, each with the correct numbers, on vLLM's scheduler."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import gc
import inspect
import itertools
import time

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from tests.vllm.support import harness
from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import request
from tests.vllm.support.log import LogCapture
from tests.vllm.support.requests import add, request_ids, waiting_ids
from tests.vllm.support.schedulers import (
    both_classes,
    build,
    build_ahead,
    every_engine,
    num_free_blocks,
    with_connector,
)


def without_admission_check(cls):
    """Return a subclass whose `can_schedule()` admits every request."""
    return type(f"Unprotected{cls.__name__}", (cls,), {"can_schedule": lambda self, request: True})


# --- V02: a request that can never fit ---


@every_engine
def test_v02_a_request_that_never_fits_finishes_with_an_error_and_the_others_continue(cls, ahead):
    with LogCapture() as log:
        s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=128, num_blocks=5)
    (warning,) = log.warnings
    assert "128" in warning and "64" in warning
    engine = Engine(s, ahead)
    empty_steps_beside_a = []

    def record_empty(t):
        if engine.outs and not engine.outs[-1].num_scheduled_tokens and "a" in s.requests:
            empty_steps_beside_a.append(t)

    engine.run(
        {0: [request("a", 10, 6)], 1: [request("L", 70, 4)], 2: [request("c", 10, 2)]},
        before=record_empty,
    )
    assert engine.outputs == {"a": 6, "L": 0, "c": 2}
    assert engine.errors == ["L"]
    if not ahead:
        assert engine.finished_at["a"] <= 6 and engine.finished_at["c"] <= 8
        assert empty_steps_beside_a == []
        assert engine.steps == [{"a": 10}, {"a": 1}, {"c": 10}, {"a": 1, "c": 1}, {"a": 1}, {"a": 1}, {"a": 1}]


@both_classes
def test_v02_model_length_admission_refuses_the_configuration(cls):
    with pytest.raises(ValueError) as error:
        build(
            cls,
            max_num_batched_tokens=128,
            max_model_len=128,
            num_blocks=5,
            neuron_config={"kv_admission": "max_model_len"},
        )
    assert "max_model_len" in str(error.value)
    assert "128" in str(error.value) and "64" in str(error.value)


# --- V03: a prefill step that schedules no token ---


@every_engine
def test_v03_a_prefill_without_free_blocks_becomes_a_decode_step(cls, ahead):
    s = build_ahead(without_admission_check(cls), ahead, max_model_len=64, num_blocks=8)
    engine = Engine(s, ahead).run({0: [request("a", 60, 4)], 1: [request("b", 64, 1)]})
    assert engine.steps == [{"a": 60}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 64}]
    assert engine.outputs == {"a": 4, "b": 1}
    if not ahead:
        assert all(out.num_scheduled_tokens for out in engine.outs[:5]), "empty step"


# --- V08: order of the running requests ---


@every_engine
def test_v08_running_requests_stay_in_order_of_admission(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2)
    engine = Engine(s, ahead)
    order = []
    engine.run(
        {0: [request(name, 100, 3) for name in "abc"]},
        before=lambda t: order.append(request_ids(s.running)),
    )
    assert engine.steps == [
        {"a": 64},
        {"a": 36},
        {"b": 64},
        {"b": 36},
        {"a": 1, "b": 1},
        {"a": 1, "b": 1},
        {"c": 64},
        {"c": 36},
        {"c": 1},
        {"c": 1},
    ]
    assert sum(sum(step.values()) for step in engine.steps) == 306
    assert order[4] == ["a", "b"]
    assert engine.outs[4].scheduled_cached_reqs.req_ids == ["a", "b"]
    assert list(engine.outs[4].num_scheduled_tokens) == ["a", "b"]


# --- V09: the cap on long prompts ---


@every_engine
def test_v09_a_long_prompt_is_capped_while_decodes_are_hidden(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=512, max_model_len=1024, long_prefill_token_threshold=128)
    engine = Engine(s, ahead)
    engine.run({0: [request("a", 8, 20)], 2: [request("L", 400, 2)]})
    chunks = [out for out in engine.outs if "L" in out.num_scheduled_tokens and out.num_seqs_padded == 0]
    assert [out.num_scheduled_tokens for out in chunks] == [{"L": 128}, {"L": 128}, {"L": 128}, {"L": 16}]
    assert [out.num_scheduled_tokens_padded for out in chunks] == [{"L": 128}] * 4
    assert s.scheduler_config.long_prefill_token_threshold == 128


# --- V10, V11: the interleave bound ---


def stream(count):
    """Return arrivals: request a, and a new prompt before each of `count` steps."""
    return {t: ([request("a", 8, 4)] if t == 0 else []) + [request(f"x{t}", 8, 1)] for t in range(count)}


@every_engine
def test_v10_a_stream_of_prompts_delays_decodes_by_at_most_the_prefill_streak(cls, ahead):
    s = build_ahead(
        cls,
        ahead,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=1024,
        num_blocks=2000,
        neuron_config={"max_consecutive_prefill_steps": 2},
    )
    engine = Engine(s, ahead).run(stream(12))
    steps_of_a = [t for t, out in enumerate(engine.outs) if "a" in out.num_scheduled_tokens]
    assert engine.outputs["a"] == 4
    assert max(later - earlier - 1 for earlier, later in itertools.pairwise(steps_of_a)) <= 2
    if not ahead:
        assert steps_of_a[-1] <= 9


@both_classes
def test_v10_without_an_interleave_bound_prompts_come_first(cls):
    s = build(cls, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024, num_blocks=2000)
    engine = Engine(s)
    engine.run(stream(12))
    assert [t for t, out in enumerate(engine.outs) if "a" in out.num_scheduled_tokens][:2] == [0, 13]


@every_engine
def test_v11_decode_steps_before_a_prompt_arrives_do_not_extend_its_prefill_streak(cls, ahead):
    s = build_ahead(
        cls,
        ahead,
        max_num_batched_tokens=128,
        max_model_len=1024,
        neuron_config={"max_consecutive_prefill_steps": 2, "min_decode_steps": 2},
    )
    engine = Engine(s, ahead)
    s.add_request(request("a", 8, 100))
    for _ in range(51):
        engine.step()
    assert engine.kinds == ["P8"] + ["D"] * 50
    s.add_request(request("p", 300, 1))
    for _ in range(5):
        engine.step()
    assert engine.kinds[51:] == ["P128", "P128", "D", "D", "P44"]


# --- V12, V13: signatures, and the class for an engine ---


def arguments_of(config):
    """Return a value for each parameter of vLLM's scheduler."""
    caught = {}

    def construct(**kwargs):
        caught.update(kwargs)
        return Scheduler(**kwargs)

    base = harness.build(construct, **config)
    for name, parameter in inspect.signature(Scheduler.__init__).parameters.items():
        if name != "self" and name not in caught:
            value = getattr(base, name, parameter.default)
            caught[name] = parameter.default if value is None else value
    return caught


@both_classes
def test_v12_the_constructor_takes_the_arguments_of_the_base_class(cls):
    full = arguments_of({})
    needed = {
        name
        for name, parameter in inspect.signature(Scheduler.__init__).parameters.items()
        if name != "self" and parameter.default is inspect.Parameter.empty
    }
    assert isinstance(cls(**full), cls)
    assert isinstance(cls(**{name: full[name] for name in needed}), cls)
    in_order = [full[name] for name in inspect.signature(Scheduler.__init__).parameters if name != "self"]
    assert isinstance(cls(*in_order), cls)


@both_classes
def test_v12_an_unknown_argument_raises_the_error_of_the_base_class(cls):
    full = arguments_of({})
    with pytest.raises(TypeError) as stock_error:
        Scheduler(**full, no_such_argument=1)
    with pytest.raises(TypeError) as error:
        cls(**full, no_such_argument=1)
    assert "no_such_argument" in str(error.value)
    assert str(error.value).split(".")[-1] == str(stock_error.value).split(".")[-1]


@both_classes
def test_v12_finish_requests_returns_the_same_as_the_base_class(cls):
    returned = {}
    for scheduler_cls in (Scheduler, cls):
        s = harness.build(scheduler_cls)
        s.add_request(request("a", 10, 5))
        s.add_request(request("b", 10, 5))
        harness.step(s)
        results = (
            s.finish_requests("a", RequestStatus.FINISHED_ABORTED),
            s.finish_requests(["unknown"], RequestStatus.FINISHED_ABORTED),
            s.finish_requests(None, RequestStatus.FINISHED_ABORTED),
        )
        returned[scheduler_cls] = [
            [getattr(r, "request_id", r) for r in requests] if requests is not None else None for requests in results
        ]
    assert returned[cls] == returned[Scheduler]


def test_v13_the_sync_class_in_an_async_engine_is_refused_with_the_class_to_use():
    with pytest.raises(ValueError) as error:
        build(NeuronScheduler, async_scheduling=True)
    assert "neuron_sched.NeuronAsyncScheduler" in str(error.value)
    assert "--no-async-scheduling" in str(error.value)


def test_v13_the_async_class_is_a_vllm_async_scheduler_and_counts_placeholders():
    assert issubclass(NeuronAsyncScheduler, AsyncScheduler) and issubclass(NeuronAsyncScheduler, NeuronScheduler)
    assert not issubclass(NeuronScheduler, AsyncScheduler)
    s = build(NeuronAsyncScheduler, async_scheduling=True)
    a = request("a", 100, 4)
    s.add_request(a)
    s.schedule()
    assert a.num_output_placeholders == 0
    s.schedule()
    assert a.num_output_placeholders == 1


# --- V14, V27: chunks and the last step of a request one step ahead ---


def test_v14_only_the_last_chunk_of_a_prompt_adds_a_placeholder():
    s = build(NeuronAsyncScheduler, async_scheduling=True)
    engine = Engine(s, ahead=1)
    a = request("a", 100, 4)
    s.add_request(a)
    s.add_request(request("b", 10, 1))
    placeholders = []
    for _ in range(7):
        engine.schedule()
        placeholders.append(a.num_output_placeholders)
        engine.process_outputs()
        s.check()
    assert [dict(out.num_scheduled_tokens) for out in engine.outs] == [
        {"a": 64},
        {"a": 36},
        {"b": 10},
        {"a": 1},
        {"a": 1},
        {"a": 1},
        {},
    ]
    assert placeholders == [0, 1, 1, 1, 2, 2, 1]
    assert engine.outs[4].finished_req_ids == {"b"}
    engine.run()
    assert engine.outputs == {"a": 4, "b": 1}


@every_engine
def test_v27_no_row_beyond_the_last_token_and_no_further_step(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=100)
    engine = Engine(s, ahead).run({0: [request("a", 98, 10), request("b", 10, 3)]})
    assert engine.steps == [{"a": 98}, {"b": 10}, {"a": 1, "b": 1}, {"b": 1}]
    assert sum(sum(step.values()) for step in engine.steps) == 111
    assert engine.outputs == {"a": 2, "b": 3}
    assert engine.finished == {"a": "length", "b": "length"}


# --- V15, V22: slots ---


@every_engine
def test_v15_requests_with_one_token_take_one_step_each(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2)
    engine = Engine(s, ahead).run({0: [request(name, 10, 1) for name in "abc"]})
    assert engine.steps == [{"a": 10}, {"b": 10}, {"c": 10}]
    assert engine.kinds == ["P10", "P10", "P10"]
    assert engine.outputs == {"a": 1, "b": 1, "c": 1}
    assert engine.outs[1 + ahead].finished_req_ids == {"a"}


@every_engine
def test_v22_every_slot_is_used_and_decodes_follow_the_prefills(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead).run({0: [request(f"r{i}", 100, 3) for i in range(1, 6)]})
    prompts = [{f"r{i}": n} for i in range(1, 5) for n in (64, 36)]
    four = {f"r{i}": 1 for i in range(1, 5)}
    assert engine.steps == [*prompts, four, four, {"r5": 64}, {"r5": 36}, {"r5": 1}, {"r5": 1}]
    assert (len(engine.steps), sum(sum(step.values()) for step in engine.steps)) == (14, 510)


# --- V16: aborts ---


@both_classes
def test_v16_abort_of_a_prefilling_and_of_a_waiting_request(cls):
    s = build(cls, max_num_seqs=1)
    engine = Engine(s)
    add(s, a=(200, 5), b=(10, 2), h=(10, 2))
    assert num_free_blocks(s) == 399
    engine.step()
    engine.step()
    assert (s.requests["a"].num_computed_tokens, num_free_blocks(s)) == (128, 391)
    s.finish_requests(["a", "h"], RequestStatus.FINISHED_ABORTED)
    s.check()
    assert s.get_num_unfinished_requests() == 1
    s.finish_requests(["a", "h", "never seen"], RequestStatus.FINISHED_ABORTED)
    s.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    out = engine.schedule()
    assert (out.num_scheduled_tokens, out.finished_req_ids) == ({"b": 10}, {"a", "h"})
    assert num_free_blocks(s) == 398
    engine.process_outputs()
    assert engine.step().num_scheduled_tokens == {"b": 1}
    out = engine.step()
    assert (out.num_scheduled_tokens, num_free_blocks(s)) == ({}, 399)


def test_v16_abort_of_a_prefilling_and_of_a_waiting_request_one_step_ahead():
    s = build(NeuronAsyncScheduler, async_scheduling=True, max_num_seqs=1)
    engine = Engine(s, ahead=1)
    add(s, a=(200, 5), b=(10, 2), h=(10, 2))
    engine.step()
    engine.step()
    assert (s.requests["a"].num_computed_tokens, num_free_blocks(s)) == (128, 391)
    s.finish_requests(["a", "h"], RequestStatus.FINISHED_ABORTED)
    s.check()
    assert s.get_num_unfinished_requests() == 1
    out = engine.step()
    assert (out.num_scheduled_tokens, out.finished_req_ids) == ({"b": 10}, {"a", "h"})
    engine.run()
    assert engine.outputs == {"b": 2}
    assert num_free_blocks(s) == 399


# --- V17: the base class raises ---


@both_classes
def test_v17_a_transient_error_loses_no_request(cls, monkeypatch):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(10, 9))
    original = s.kv_cache_manager.allocate_slots

    def fail_once(*args, **kwargs):
        monkeypatch.setattr(s.kv_cache_manager, "allocate_slots", original)
        raise RuntimeError("allocation failed")

    monkeypatch.setattr(s.kv_cache_manager, "allocate_slots", fail_once)
    with pytest.raises(RuntimeError, match="allocation failed"):
        s.schedule()
    assert request_ids(s.running) == ["a"]
    assert waiting_ids(s) == ["b"]
    assert s.get_num_unfinished_requests() == 2
    s.check()
    assert engine.step().num_scheduled_tokens in ({"b": 10}, {"a": 1})
    engine.run()
    assert engine.outputs == {"a": 9, "b": 9}


# --- V18: priority ---


@every_engine
def test_v18_priority_orders_admission_and_preempts_no_request(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2, max_model_len=100, num_blocks=50, policy="priority")
    engine = Engine(s, ahead).run(
        {
            0: [
                request(name, 20, 4, priority=priority, arrival_time=1.0)
                for name, priority in {"lo": 5, "mid": 3, "hi": 0}.items()
            ]
        }
    )
    both = {"hi": 1, "mid": 1}
    assert engine.steps == [{"hi": 20}, {"mid": 20}, both, both, both, {"lo": 20}, *[{"lo": 1}] * 3]


@both_classes
def test_v18_a_request_of_better_priority_waits_for_a_slot(cls):
    s = build(cls, max_num_seqs=1, policy="priority")
    engine = Engine(s)
    s.add_request(request("lo", 20, 3, priority=5))
    engine.step()
    s.add_request(request("hi", 20, 1, priority=0))
    engine.run()
    assert engine.steps == [{"lo": 20}, {"lo": 1}, {"lo": 1}, {"hi": 20}]


# --- V19: prefix-cache hits ---


@every_engine
def test_v19_prefills_after_prefix_cache_hits_start_at_the_cached_tokens(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=512, max_model_len=1024, prefix_caching=True)
    tokens = list(range(1, 131))
    prompts = {"a": tokens, "b": tokens, "c": [*tokens[:128], 131], "d": tokens[:128]}
    engine = Engine(s, ahead).run({0: [request(n, token_ids=ids, max_tokens=1) for n, ids in prompts.items()]})
    assert engine.steps == [{"a": 130}, {"b": 2}, {"c": 1}, {"d": 16}]
    scheduled = [out for out in engine.outs if out.num_scheduled_tokens]
    assert [harness.computed_before(out) for out in scheduled] == [{"a": 0}, {"b": 128}, {"c": 128}, {"d": 112}]
    assert [out.num_scheduled_tokens_padded for out in scheduled] == [{"a": 256}, {"b": 128}, {"c": 128}, {"d": 128}]
    assert engine.kinds == ["P130", "P2", "P1", "P16"]
    assert engine.outputs == dict.fromkeys("abcd", 1)


@both_classes
def test_v19_a_fully_cached_prompt_computes_its_last_block(cls):
    s = build(cls, max_num_batched_tokens=512, max_model_len=1024, prefix_caching=True)
    tokens = list(range(1, 65))
    engine = Engine(s).run({0: [request(n, token_ids=tokens, max_tokens=1) for n in "ab"]})
    assert engine.steps == [{"a": 64}, {"b": 16}]
    assert harness.computed_before(engine.outs[1]) == {"b": 48}


# --- V20: chunked prefill off ---


def disable_chunked_prefill(vllm_config):
    vllm_config.scheduler_config.enable_chunked_prefill = False


@both_classes
def test_v20_without_chunked_prefill_a_budget_below_max_model_len_is_refused(cls):
    with pytest.raises(ValueError) as error:
        build(cls, edit=disable_chunked_prefill, max_num_batched_tokens=64, max_model_len=100)
    assert "64" in str(error.value) and "100" in str(error.value)


@every_engine
def test_v20_without_chunked_prefill_each_prompt_takes_one_step(cls, ahead):
    s = build_ahead(cls, ahead, edit=disable_chunked_prefill, max_num_batched_tokens=128, max_model_len=100)
    engine = Engine(s, ahead).run({0: [request("a", 90, 3), request("b", 60, 2)]})
    assert engine.steps == [{"a": 90}, {"b": 60}, {"a": 1, "b": 1}, {"a": 1}]


# --- V21: the first chunk, and blocks allocated to decodes ---


@both_classes
def test_v21_the_first_chunk_gets_the_whole_token_budget(cls):
    s = build(cls, max_num_batched_tokens=128, max_model_len=1024)
    engine = Engine(s)
    add(s, a=(32, 9))
    engine.step()
    engine.step()
    add(s, b=(300, 2))
    engine.run()
    assert [step["b"] for step in engine.steps if "b" in step][:3] == [128, 128, 44]


@every_engine
def test_v21_a_block_allocated_to_a_decode_is_in_the_output(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=1024)
    engine = Engine(s, ahead)
    add(s, a=(32, 4), b=(10, 2))
    first, second, third = (engine.step() for _ in range(3))
    assert [out.num_scheduled_tokens for out in (first, second, third)] == [{"a": 32}, {"b": 10}, {"a": 1, "b": 1}]
    assert first.scheduled_new_reqs[0].block_ids == ([1, 2],)
    assert second.scheduled_new_reqs[0].block_ids == ([3],)
    new_blocks = dict(zip(third.scheduled_cached_reqs.req_ids, third.scheduled_cached_reqs.new_block_ids, strict=True))
    assert new_blocks["a"] == ([4],)
    assert not new_blocks["b"] or new_blocks["b"] == ([],)
    assert s.kv_cache_manager.get_block_ids("a") == ([1, 2, 4],)


# --- V23: KV blocks of part of a prompt from another node ---


@every_engine
def test_v23_the_rest_of_a_remote_prompt_is_one_prefill_step(cls, ahead):
    s = with_connector(cls, async_scheduling=bool(ahead), max_num_batched_tokens=512, max_model_len=4096)
    engine = Engine(s, ahead)
    add(s, a=(8, 30))
    engine.step()
    engine.step()
    s.connector.answers["p"] = (2048, True)
    add(s, p=(2388, 2))
    for _ in range(3):
        assert engine.step().num_scheduled_tokens == {"a": 1}, "a decodes in each step of the load"
    engine.step(received=["p"])
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"p": 340}, {"p": 512})
    assert engine.step().num_scheduled_tokens == {"a": 1, "p": 1}
    engine.run()
    assert engine.outputs == {"a": 30, "p": 2}


# --- V24: empty prompts and duplicate ids ---


@every_engine
def test_v24_a_request_with_an_empty_prompt_finishes_with_an_error(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    s.add_request(request("e", 0, 3))
    s.add_request(request("b", 5, 2))
    engine.run()
    assert engine.errors == ["e"]
    assert engine.outputs == {"e": 0, "b": 2}
    assert engine.steps == [{"b": 5}, {"b": 1}]


@every_engine
def test_v24_a_request_with_the_id_of_an_unfinished_one_is_dropped(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    first = request("twin", 10, 3)
    s.add_request(first)
    with LogCapture() as log:
        s.add_request(request("twin", 10, 7))
    (error,) = log.errors
    assert "twin" in error
    assert s.requests["twin"] is first
    s.check()
    engine.run()
    assert engine.outputs == {"twin": 3}
    s.add_request(request("twin", 10, 3))
    engine.run()
    assert engine.outputs == {"twin": 6}


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_v24_vllm_refuses_max_tokens_below_1(max_tokens):
    with pytest.raises(Exception, match="max_tokens"):
        request("a", 10, max_tokens)


# --- V25: the last token needs no KV slot ---


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "steps"), [(60, 4, 4), (61, 4, 4), (62, 4, None), (64, 1, 1), (64, 2, None)]
)
@every_engine
def test_v25_a_request_may_fill_the_kv_cache_exactly(cls, ahead, prompt, max_tokens, steps):
    s = build_ahead(cls, ahead, max_num_seqs=1, max_num_batched_tokens=128, max_model_len=128, num_blocks=5)
    engine = Engine(s, ahead).run({0: [request("a", prompt, max_tokens)]})
    if steps is None:
        assert (engine.errors, engine.steps) == (["a"], [])
    else:
        assert (len(engine.steps), engine.outputs, engine.errors) == (steps, {"a": max_tokens}, [])


@pytest.mark.parametrize(("prompt", "outputs"), [(51, 49), (99, 1), (100, 1)])
@every_engine
def test_v25_outputs_stop_at_max_model_len(cls, ahead, prompt, outputs):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=100)
    engine = Engine(s, ahead).run({0: [request("a", prompt, 100)]})
    assert (engine.outputs, engine.finished) == ({"a": outputs}, {"a": "length"})


# --- V26: statistics ---


def prefix_counts(engine):
    """Return the total of prefix-cache queries and of hits, in tokens."""
    stats = [step.prefix_cache_stats for step in engine.stats]
    return sum(step.queries for step in stats), sum(step.hits for step in stats)


@every_engine
def test_v26_prefix_cache_statistics_count_a_waiting_request_once(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=1, prefix_caching=True)
    tokens = list(range(1, 65))
    engine = Engine(s, ahead).run(
        {0: [request("a", token_ids=tokens, max_tokens=6), request("b", token_ids=tokens, max_tokens=1)]}
    )
    assert engine.outputs == {"a": 6, "b": 1}
    assert prefix_counts(engine) == (128, 48)


@every_engine
def test_v26_prefix_cache_statistics_count_a_failed_allocation_once(cls, ahead):
    s = build_ahead(without_admission_check(cls), ahead, max_model_len=64, num_blocks=8, prefix_caching=True)
    engine = Engine(s, ahead).run({0: [request("a", 60, 4)], 1: [request("b", 64, 1)]})
    assert engine.steps == [{"a": 60}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 64}]
    assert prefix_counts(engine) == (124, 0)


@every_engine
def test_v26_padding_tokens_of_prefills_are_counted(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=1000, max_model_len=4096)
    assert s.num_batched_tokens_buckets == [128, 256, 512, 1000]
    Engine(s, ahead).run({0: [request("a", 2500, 3)]})
    assert (s.total_padding_tokens, s.total_scheduled_tokens) == (12, 2500)


# --- C02: the reason why a request waits ---


@both_classes
def test_c02_the_watchdog_names_a_request_whose_grammar_never_compiles(cls):
    s = build(cls)
    engine = Engine(s)
    s.add_request(request("the-waiting-request", 10, 3, grammar=True))
    with LogCapture() as log:
        for _ in range(99):
            engine.step()
        assert log.warnings == []
        assert (s.empty_steps, s.explain().id, s.explain().reason) == (99, "the-waiting-request", "blocked")
        engine.step()
        (warning,) = log.warnings
        assert "the-waiting-request" in warning and "blocked" in warning and "100" in warning
        for _ in range(99):
            engine.step()
        assert len(log.warnings) == 1, "a warning in each step"
    assert s.empty_steps == 199


@both_classes
def test_c02_the_watchdog_names_the_reason_of_an_overridden_refusal(cls):
    class Refusing(cls):
        def refusal(self, request):
            return "quota" if request.request_id == "the-waiting-request" else super().refusal(request)

    s = build(Refusing)
    engine = Engine(s)
    s.add_request(request("the-waiting-request", 10, 3))
    with LogCapture() as log:
        for _ in range(100):
            engine.step()
    (warning,) = log.warnings
    assert "the-waiting-request" in warning and "quota" in warning
    assert (s.explain().id, s.explain().reason) == ("the-waiting-request", "quota")
    assert s.empty_steps == 100


@both_classes
def test_c02_an_overridden_can_schedule_is_a_reason(cls):
    class Refusing(cls):
        def can_schedule(self, request):
            return request.request_id != "q" and super().can_schedule(request)

    s = build(Refusing)
    s.add_request(request("q", 10, 3))
    assert Engine(s).step().num_scheduled_tokens == {}
    assert (s.explain().id, s.explain().reason) == ("q", "can_schedule")


# --- X03: cost of a step with many waiting requests ---


def test_x03_the_time_of_a_step_does_not_depend_on_the_queue_length():
    """With 256 decoding requests, compare 10,000 and 100,000 waiting ones. The time in the base class is subtracted."""
    base_class_times = []

    class Timed(NeuronScheduler):
        def _call_base_schedule(self, *args, **kwargs):
            start = time.perf_counter()
            out = super()._call_base_schedule(*args, **kwargs)
            base_class_times.append(time.perf_counter() - start)
            return out

    def median_own_time():
        own_times = []
        for _ in range(1_000):
            base_class_times.clear()
            start = time.perf_counter()
            out = s.schedule()
            own_times.append(time.perf_counter() - start - sum(base_class_times))
            assert len(out.num_scheduled_tokens) == 256
            harness.finish(s, out)
        return sorted(own_times)[len(own_times) // 2]

    s = build(
        Timed, max_num_seqs=256, max_num_batched_tokens=256, max_model_len=4096, num_blocks=40_000, log_stats=False
    )
    for i in range(256):
        s.add_request(request(f"r{i}", 1, 2_300))
        harness.step(s)
    gc.disable()  # With so many objects, garbage collection would be most of the measured time.
    try:
        add(s, **{f"w{i}": (1, 1) for i in range(10_000)})
        short_queue = median_own_time()
        add(s, **{f"v{i}": (1, 1) for i in range(90_000)})
        long_queue = median_own_time()
    finally:
        gc.enable()
    assert long_queue < 2 * short_queue, (short_queue, long_queue)
