"""Faults met in the field, each with the numbers that are right: V02 to V27, C02 and X03, on vLLM's own scheduler."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import gc
import inspect
import itertools
import time

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

import vllm_harness
from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import request
from vllm_setup import (
    Engine,
    Logged,
    add,
    both_classes,
    build,
    build_ahead,
    every_engine,
    names,
    queued,
    usable_free,
    with_connector,
)


def anything_may_start(cls):
    """A class whose protection is off."""
    return type(f"Unprotected{cls.__name__}", (cls,), {"can_schedule": lambda self, request: True})


# --- V02: a request that can never fit ---


@every_engine
def test_v02_never_fitting_request_ends_with_an_error_and_the_others_go_on(cls, ahead):
    with Logged() as log:
        s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=128, num_blocks=5)
    (said,) = log.warnings
    assert "128" in said and "64" in said
    engine = Engine(s, ahead)
    empty_while_a_runs = []

    def look(t):
        if engine.outs and not engine.outs[-1].num_scheduled_tokens and "a" in s.requests:
            empty_while_a_runs.append(t)

    engine.run(
        {0: [request("a", 10, 6)], 1: [request("L", 70, 4)], 2: [request("c", 10, 2)]},
        before=look,
    )
    assert engine.outputs == {"a": 6, "L": 0, "c": 2}
    assert engine.errors == ["L"]
    if not ahead:
        assert engine.finished_at["a"] <= 6 and engine.finished_at["c"] <= 8
        assert empty_while_a_runs == []
        assert engine.steps == [{"a": 10}, {"a": 1}, {"c": 10}, {"a": 1, "c": 1}, {"a": 1}, {"a": 1}, {"a": 1}]


@both_classes
def test_v02_model_length_admission_refuses_the_configuration(cls):
    with pytest.raises(ValueError) as refused:
        build(
            cls,
            max_num_batched_tokens=128,
            max_model_len=128,
            num_blocks=5,
            neuron_config={"kv_admission": "max_model_len"},
        )
    assert "max_model_len" in str(refused.value)
    assert "128" in str(refused.value) and "64" in str(refused.value)


# --- V03: the prefill turn that schedules nothing ---


@every_engine
def test_v03_a_prefill_that_cannot_be_placed_lets_the_decodes_run(cls, ahead):
    s = build_ahead(anything_may_start(cls), ahead, max_model_len=64, num_blocks=8)
    engine = Engine(s, ahead).run({0: [request("a", 60, 4)], 1: [request("b", 64, 1)]})
    assert engine.steps == [{"a": 60}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 64}]
    assert engine.outputs == {"a": 4, "b": 1}
    if not ahead:
        assert all(out.num_scheduled_tokens for out in engine.outs[:5]), "no step was empty"


# --- V08: order of the running list ---


@every_engine
def test_v08_running_keeps_the_order_of_admission(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2)
    engine = Engine(s, ahead)
    order = []
    engine.run(
        {0: [request(name, 100, 3) for name in "abc"]},
        before=lambda t: order.append(names(s.running)),
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
def test_v09_long_prompts_stay_capped_although_decodes_are_hidden(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=512, max_model_len=1024, long_prefill_token_threshold=128)
    engine = Engine(s, ahead)
    engine.run({0: [request("a", 8, 20)], 2: [request("L", 400, 2)]})
    chunks = [out for out in engine.outs if "L" in out.num_scheduled_tokens and out.num_seqs_padded == 0]
    assert [out.num_scheduled_tokens for out in chunks] == [{"L": 128}, {"L": 128}, {"L": 128}, {"L": 16}]
    assert [out.num_scheduled_tokens_padded for out in chunks] == [{"L": 128}] * 4
    assert s.scheduler_config.long_prefill_token_threshold == 128


# --- V10, V11: prefills and decodes take turns ---


def stream(count):
    return {t: ([request("a", 8, 4)] if t == 0 else []) + [request(f"x{t}", 8, 1)] for t in range(count)}


@every_engine
def test_v10_decodes_get_their_turn_under_a_stream_of_prompts(cls, ahead):
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
    tokens_of_a = [t for t, out in enumerate(engine.outs) if "a" in out.num_scheduled_tokens]
    assert engine.outputs["a"] == 4
    assert max(later - earlier - 1 for earlier, later in itertools.pairwise(tokens_of_a)) <= 2
    if not ahead:
        assert tokens_of_a[-1] <= 9


@both_classes
def test_v10_without_the_knob_a_prompt_always_wins(cls):
    s = build(cls, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024, num_blocks=2000)
    engine = Engine(s)
    engine.run(stream(12))
    assert [t for t, out in enumerate(engine.outs) if "a" in out.num_scheduled_tokens][:2] == [0, 13]


@every_engine
def test_v11_decode_steps_before_a_prompt_came_do_not_count_against_it(cls, ahead):
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


# --- V12, V13: signatures, and which class for which engine ---


def arguments_of(config):
    """Every argument that the base takes, as vLLM's engine would fill it."""
    caught = {}

    def construct(**kwargs):
        caught.update(kwargs)
        return Scheduler(**kwargs)

    base = vllm_harness.build(construct, **config)
    for name, parameter in inspect.signature(Scheduler.__init__).parameters.items():
        if name != "self" and name not in caught:
            value = getattr(base, name, parameter.default)
            caught[name] = parameter.default if value is None else value
    return caught


@both_classes
def test_v12_constructor_takes_what_the_base_takes(cls):
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
def test_v12_unknown_argument_gets_the_base_own_error(cls):
    full = arguments_of({})
    with pytest.raises(TypeError) as own:
        Scheduler(**full, no_such_argument=1)
    with pytest.raises(TypeError) as ours:
        cls(**full, no_such_argument=1)
    assert "no_such_argument" in str(ours.value)
    assert str(ours.value).split(".")[-1] == str(own.value).split(".")[-1]


@both_classes
def test_v12_abort_returns_what_the_base_returns(cls):
    returned = {}
    for kind in (Scheduler, cls):
        s = vllm_harness.build(kind)
        s.add_request(request("a", 10, 5))
        s.add_request(request("b", 10, 5))
        vllm_harness.step(s)
        one, unknown, rest = (
            s.finish_requests("a", RequestStatus.FINISHED_ABORTED),
            s.finish_requests(["nobody"], RequestStatus.FINISHED_ABORTED),
            s.finish_requests(None, RequestStatus.FINISHED_ABORTED),
        )
        returned[kind] = [
            [getattr(r, "request_id", r) for r in some] if some is not None else None for some in (one, unknown, rest)
        ]
    assert returned[cls] == returned[Scheduler]


def test_v13_sync_class_under_an_async_engine_is_refused_by_name():
    with pytest.raises(ValueError) as refused:
        build(NeuronScheduler, async_scheduling=True)
    assert "neuron_sched.NeuronAsyncScheduler" in str(refused.value)
    assert "--no-async-scheduling" in str(refused.value)


def test_v13_async_class_is_vllm_async_scheduler_and_its_hook_runs():
    assert issubclass(NeuronAsyncScheduler, AsyncScheduler) and issubclass(NeuronAsyncScheduler, NeuronScheduler)
    assert not issubclass(NeuronScheduler, AsyncScheduler)
    s = build(NeuronAsyncScheduler, async_scheduling=True)
    a = request("a", 100, 4)
    s.add_request(a)
    s.schedule()
    assert a.num_output_placeholders == 0
    s.schedule()
    assert a.num_output_placeholders == 1


# --- V14, V27: async, chunks and the end of a request ---


def test_v14_placeholders_of_chunks_under_async():
    s = build(NeuronAsyncScheduler, async_scheduling=True)
    engine = Engine(s, ahead=1)
    a = request("a", 100, 4)
    s.add_request(a)
    s.add_request(request("b", 10, 1))
    placeholders = []
    for _ in range(7):
        engine.schedule()
        placeholders.append(a.num_output_placeholders)
        engine.settle()
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
def test_v27_no_row_beyond_the_end_and_no_step_more_under_async(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=100)
    engine = Engine(s, ahead).run({0: [request("a", 98, 10), request("b", 10, 3)]})
    assert engine.steps == [{"a": 98}, {"b": 10}, {"a": 1, "b": 1}, {"b": 1}]
    assert sum(sum(step.values()) for step in engine.steps) == 111
    assert engine.outputs == {"a": 2, "b": 3}
    assert engine.finished == {"a": "length", "b": "length"}


# --- V15, V22: slots ---


@every_engine
def test_v15_one_token_requests_take_one_step_each(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2)
    engine = Engine(s, ahead).run({0: [request(name, 10, 1) for name in "abc"]})
    assert engine.steps == [{"a": 10}, {"b": 10}, {"c": 10}]
    assert engine.kinds == ["P10", "P10", "P10"]
    assert engine.outputs == {"a": 1, "b": 1, "c": 1}
    assert engine.outs[1 + ahead].finished_req_ids == {"a"}


@every_engine
def test_v22_every_slot_is_used_and_decodes_come_back(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead).run({0: [request(f"r{i}", 100, 3) for i in range(1, 6)]})
    prompts = [{f"r{i}": n} for i in range(1, 5) for n in (64, 36)]
    four = {f"r{i}": 1 for i in range(1, 5)}
    assert engine.steps == [*prompts, four, four, {"r5": 64}, {"r5": 36}, {"r5": 1}, {"r5": 1}]
    assert (len(engine.steps), sum(sum(step.values()) for step in engine.steps)) == (14, 510)


# --- V16: aborts ---


@both_classes
def test_v16_abort_mid_prefill_and_while_held_back(cls):
    s = build(cls, max_num_seqs=1)
    engine = Engine(s)
    add(s, a=(200, 5), b=(10, 2), h=(10, 2))
    assert usable_free(s) == 399
    engine.step()
    engine.step()
    assert (s.requests["a"].num_computed_tokens, usable_free(s)) == (128, 391)
    s.finish_requests(["a", "h"], RequestStatus.FINISHED_ABORTED)
    s.check()
    assert s.get_num_unfinished_requests() == 1
    s.finish_requests(["a", "h", "never seen"], RequestStatus.FINISHED_ABORTED)
    s.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    out = engine.schedule()
    assert (out.num_scheduled_tokens, out.finished_req_ids) == ({"b": 10}, {"a", "h"})
    assert usable_free(s) == 398
    engine.settle()
    assert engine.step().num_scheduled_tokens == {"b": 1}
    out = engine.step()
    assert (out.num_scheduled_tokens, usable_free(s)) == ({}, 399)


def test_v16_abort_one_step_ahead():
    s = build(NeuronAsyncScheduler, async_scheduling=True, max_num_seqs=1)
    engine = Engine(s, ahead=1)
    add(s, a=(200, 5), b=(10, 2), h=(10, 2))
    engine.step()
    engine.step()
    assert (s.requests["a"].num_computed_tokens, usable_free(s)) == (128, 391)
    s.finish_requests(["a", "h"], RequestStatus.FINISHED_ABORTED)
    s.check()
    assert s.get_num_unfinished_requests() == 1
    out = engine.step()
    assert (out.num_scheduled_tokens, out.finished_req_ids) == ({"b": 10}, {"a", "h"})
    engine.run()
    assert engine.outputs == {"b": 2}
    assert usable_free(s) == 399


# --- V17: the base raises ---


@both_classes
def test_v17_a_transient_error_loses_nobody(cls, monkeypatch):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(10, 9))
    original = s.kv_cache_manager.allocate_slots

    def fails(*args, **kwargs):
        monkeypatch.setattr(s.kv_cache_manager, "allocate_slots", original)
        raise RuntimeError("no block today")

    monkeypatch.setattr(s.kv_cache_manager, "allocate_slots", fails)
    with pytest.raises(RuntimeError, match="no block today"):
        s.schedule()
    assert names(s.running) == ["a"]
    assert queued(s) == ["b"]
    assert s.get_num_unfinished_requests() == 2
    s.check()
    assert engine.step().num_scheduled_tokens in ({"b": 10}, {"a": 1})
    engine.run()
    assert engine.outputs == {"a": 9, "b": 9}


# --- V18: priority ---


@every_engine
def test_v18_priority_orders_who_starts_and_evicts_nobody(cls, ahead):
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
def test_v18_a_better_priority_waits_for_a_slot(cls):
    s = build(cls, max_num_seqs=1, policy="priority")
    engine = Engine(s)
    s.add_request(request("lo", 20, 3, priority=5))
    engine.step()
    s.add_request(request("hi", 20, 1, priority=0))
    engine.run()
    assert engine.steps == [{"lo": 20}, {"lo": 1}, {"lo": 1}, {"hi": 20}]


# --- V19: prefix hits ---


@every_engine
def test_v19_prefix_hits_and_one_token_remainders(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=512, max_model_len=1024, prefix_caching=True)
    tokens = list(range(1, 131))
    prompts = {"a": tokens, "b": tokens, "c": [*tokens[:128], 131], "d": tokens[:128]}
    engine = Engine(s, ahead).run({0: [request(n, token_ids=ids, max_tokens=1) for n, ids in prompts.items()]})
    assert engine.steps == [{"a": 130}, {"b": 2}, {"c": 1}, {"d": 16}]
    scheduled = [out for out in engine.outs if out.num_scheduled_tokens]
    assert [vllm_harness.starts(out) for out in scheduled] == [{"a": 0}, {"b": 128}, {"c": 128}, {"d": 112}]
    assert [out.num_scheduled_tokens_padded for out in scheduled] == [{"a": 256}, {"b": 128}, {"c": 128}, {"d": 128}]
    assert engine.kinds == ["P130", "P2", "P1", "P16"]
    assert engine.outputs == dict.fromkeys("abcd", 1)


@both_classes
def test_v19_a_fully_cached_prompt_still_computes_its_last_block(cls):
    s = build(cls, max_num_batched_tokens=512, max_model_len=1024, prefix_caching=True)
    tokens = list(range(1, 65))
    engine = Engine(s).run({0: [request(n, token_ids=tokens, max_tokens=1) for n in "ab"]})
    assert engine.steps == [{"a": 64}, {"b": 16}]
    assert vllm_harness.starts(engine.outs[1]) == {"b": 48}


# --- V20: chunking off ---


def unchunked(vllm_config):
    vllm_config.scheduler_config.enable_chunked_prefill = False


@both_classes
def test_v20_no_chunking_and_a_budget_below_the_model_length_is_refused(cls):
    with pytest.raises(ValueError) as refused:
        build(cls, edit=unchunked, max_num_batched_tokens=64, max_model_len=100)
    assert "64" in str(refused.value) and "100" in str(refused.value)


@every_engine
def test_v20_no_chunking_and_room_for_every_prompt(cls, ahead):
    s = build_ahead(cls, ahead, edit=unchunked, max_num_batched_tokens=128, max_model_len=100)
    engine = Engine(s, ahead).run({0: [request("a", 90, 3), request("b", 60, 2)]})
    assert engine.steps == [{"a": 90}, {"b": 60}, {"a": 1, "b": 1}, {"a": 1}]


# --- V21: whole chunks, and blocks that reach the runner ---


@both_classes
def test_v21_first_chunk_gets_the_whole_budget(cls):
    s = build(cls, max_num_batched_tokens=128, max_model_len=1024)
    engine = Engine(s)
    add(s, a=(32, 9))
    engine.step()
    engine.step()
    add(s, b=(300, 2))
    engine.run()
    assert [step["b"] for step in engine.steps if "b" in step][:3] == [128, 128, 44]


@every_engine
def test_v21_blocks_granted_to_a_decode_are_told(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=1024)
    engine = Engine(s, ahead)
    add(s, a=(32, 4), b=(10, 2))
    first, second, third = (engine.step() for _ in range(3))
    assert [out.num_scheduled_tokens for out in (first, second, third)] == [{"a": 32}, {"b": 10}, {"a": 1, "b": 1}]
    assert first.scheduled_new_reqs[0].block_ids == ([1, 2],)
    assert second.scheduled_new_reqs[0].block_ids == ([3],)
    deltas = dict(zip(third.scheduled_cached_reqs.req_ids, third.scheduled_cached_reqs.new_block_ids, strict=True))
    assert deltas["a"] == ([4],)
    assert not deltas["b"] or deltas["b"] == ([],)
    assert s.kv_cache_manager.get_block_ids("a") == ([1, 2, 4],)


# --- V23: a partial load from another node ---


@every_engine
def test_v23_remainder_of_a_remote_load_is_a_lone_prefill(cls, ahead):
    s = with_connector(cls, async_scheduling=bool(ahead), max_num_batched_tokens=512, max_model_len=4096)
    engine = Engine(s, ahead)
    add(s, a=(8, 30))
    engine.step()
    engine.step()
    s.connector.answers["p"] = (2048, True)
    add(s, p=(2388, 2))
    for _ in range(3):
        assert engine.step().num_scheduled_tokens == {"a": 1}, "while the load is pending a decodes every step"
    engine.step(received=["p"])
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"p": 340}, {"p": 512})
    assert engine.step().num_scheduled_tokens == {"a": 1, "p": 1}
    engine.run()
    assert engine.outputs == {"a": 30, "p": 2}


# --- V24: empty prompts, double ids ---


@every_engine
def test_v24_empty_prompt_ends_with_an_error(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    s.add_request(request("e", 0, 3))
    s.add_request(request("b", 5, 2))
    engine.run()
    assert engine.errors == ["e"]
    assert engine.outputs == {"e": 0, "b": 2}
    assert engine.steps == [{"b": 5}, {"b": 1}]


@every_engine
def test_v24_second_request_under_a_living_id_is_dropped(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    first = request("twin", 10, 3)
    s.add_request(first)
    with Logged() as log:
        s.add_request(request("twin", 10, 7))
    (said,) = log.errors
    assert "twin" in said
    assert s.requests["twin"] is first
    s.check()
    engine.run()
    assert engine.outputs == {"twin": 3}
    s.add_request(request("twin", 10, 3))
    engine.run()
    assert engine.outputs == {"twin": 6}


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_v24_no_output_is_refused_before_the_scheduler(max_tokens):
    with pytest.raises(Exception, match="max_tokens"):
        request("a", 10, max_tokens)


# --- V25: the last token needs no slot ---


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "steps"), [(60, 4, 4), (61, 4, 4), (62, 4, None), (64, 1, 1), (64, 2, None)]
)
@every_engine
def test_v25_exact_fit(cls, ahead, prompt, max_tokens, steps):
    s = build_ahead(cls, ahead, max_num_seqs=1, max_num_batched_tokens=128, max_model_len=128, num_blocks=5)
    engine = Engine(s, ahead).run({0: [request("a", prompt, max_tokens)]})
    if steps is None:
        assert (engine.errors, engine.steps) == (["a"], [])
    else:
        assert (len(engine.steps), engine.outputs, engine.errors) == (steps, {"a": max_tokens}, [])


@pytest.mark.parametrize(("prompt", "outputs"), [(51, 49), (99, 1), (100, 1)])
@every_engine
def test_v25_length_cap(cls, ahead, prompt, outputs):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=100)
    engine = Engine(s, ahead).run({0: [request("a", prompt, 100)]})
    assert (engine.outputs, engine.finished) == ({"a": outputs}, {"a": "length"})


# --- V26: statistics ---


def prefix_counts(engine):
    stats = [one.prefix_cache_stats for one in engine.stats]
    return sum(one.queries for one in stats), sum(one.hits for one in stats)


@every_engine
def test_v26_prefix_statistics_count_once_for_a_waiter(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=1, prefix_caching=True)
    tokens = list(range(1, 65))
    engine = Engine(s, ahead).run(
        {0: [request("a", token_ids=tokens, max_tokens=6), request("b", token_ids=tokens, max_tokens=1)]}
    )
    assert engine.outputs == {"a": 6, "b": 1}
    assert prefix_counts(engine) == (128, 48)


@every_engine
def test_v26_prefix_statistics_count_once_for_failed_tries(cls, ahead):
    s = build_ahead(anything_may_start(cls), ahead, max_model_len=64, num_blocks=8, prefix_caching=True)
    engine = Engine(s, ahead).run({0: [request("a", 60, 4)], 1: [request("b", 64, 1)]})
    assert engine.steps == [{"a": 60}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 64}]
    assert prefix_counts(engine) == (124, 0)


@every_engine
def test_v26_padding_counter(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=1000, max_model_len=4096)
    assert s.num_batched_tokens_buckets == [128, 256, 512, 1000]
    Engine(s, ahead).run({0: [request("a", 2500, 3)]})
    assert (s.total_padding_tokens, s.total_scheduled_tokens) == (12, 2500)


# --- C02: say why a request waits ---


@both_classes
def test_c02_watchdog_names_a_grammar_that_never_compiles(cls):
    s = build(cls)
    engine = Engine(s)
    s.add_request(request("the-waiter", 10, 3, grammar=True))
    with Logged() as log:
        for _ in range(99):
            engine.step()
        assert log.warnings == []
        assert (s.empty_steps, s.explain().id, s.explain().reason) == (99, "the-waiter", "blocked")
        engine.step()
        (said,) = log.warnings
        assert "the-waiter" in said and "blocked" in said and "100" in said
        for _ in range(99):
            engine.step()
        assert len(log.warnings) == 1, "not one a step"
    assert s.empty_steps == 199


@both_classes
def test_c02_watchdog_names_a_refusal(cls):
    class Refuses(cls):
        def refusal(self, request):
            return "quota" if request.request_id == "the-waiter" else super().refusal(request)

    s = build(Refuses)
    engine = Engine(s)
    s.add_request(request("the-waiter", 10, 3))
    with Logged() as log:
        for _ in range(100):
            engine.step()
    (said,) = log.warnings
    assert "the-waiter" in said and "quota" in said
    assert (s.explain().id, s.explain().reason) == ("the-waiter", "quota")
    assert s.empty_steps == 100


@both_classes
def test_c02_an_overridden_can_schedule_has_a_reason_too(cls):
    class Refuses(cls):
        def can_schedule(self, request):
            return request.request_id != "q" and super().can_schedule(request)

    s = build(Refuses)
    s.add_request(request("q", 10, 3))
    assert Engine(s).step().num_scheduled_tokens == {}
    assert (s.explain().id, s.explain().reason) == ("q", "can_schedule")


# --- X03: cheap with many waiting ---


def test_x03_a_step_does_not_grow_with_the_queue():
    """256 requests decode, 10,000 and then 100,000 wait; measured is a step without the base's own part."""
    inner = []

    class Timed(NeuronScheduler):
        def _call_base_schedule(self, *args, **kwargs):
            start = time.perf_counter()
            out = super()._call_base_schedule(*args, **kwargs)
            inner.append(time.perf_counter() - start)
            return out

    def median_of_own_part():
        own = []
        for _ in range(1_000):
            inner.clear()
            start = time.perf_counter()
            out = s.schedule()
            own.append(time.perf_counter() - start - sum(inner))
            assert len(out.num_scheduled_tokens) == 256
            vllm_harness.finish(s, out)
        return sorted(own)[len(own) // 2]

    s = build(
        Timed, max_num_seqs=256, max_num_batched_tokens=256, max_model_len=4096, num_blocks=40_000, log_stats=False
    )
    for i in range(256):
        s.add_request(request(f"r{i}", 1, 2_300))
        vllm_harness.step(s)
    gc.disable()  # with so many objects alive it would be most of what is measured
    try:
        add(s, **{f"w{i}": (1, 1) for i in range(10_000)})
        few = median_of_own_part()
        add(s, **{f"v{i}": (1, 1) for i in range(90_000)})
        many = median_of_own_part()
    finally:
        gc.enable()
    assert many < 2 * few, (few, many)
