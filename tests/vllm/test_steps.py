"""Output fields, attributes and counters of vLLM's scheduler after a call of `schedule()`.

A step may call the base class twice, for an empty prefill and for a decode. Each one-time field is reported exactly
once, and the attributes of the base class are restored.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import time

from vllm.v1.request import RequestStatus

from neuron_sched.vllm.buckets import (
    get_bucket_for_count,
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)
from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, SchedulerState
from tests.vllm.support.encoder_connector import EncoderConnector
from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import request
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


def fail_new_allocations(sched):
    """Let `allocate_slots` fail for requests that are not running. Return a function that undoes this."""
    original = sched.kv_cache_manager.allocate_slots

    def allocate(req, *args, **kwargs):
        return original(req, *args, **kwargs) if req.status == RequestStatus.RUNNING else None

    sched.kv_cache_manager.allocate_slots = allocate

    def restore():
        sched.kv_cache_manager.allocate_slots = original

    return restore


def decoding_with_blocked_head(cls, build=build, **config):
    """Return a scheduler with two decoding requests and a head for which the base class finds no blocks.

    Also return its engine and a function that makes the blocks available.
    """
    s = build(cls, **config)
    engine = Engine(s)
    add(s, a=(10, 40), b=(10, 40))
    for _ in range(3):
        engine.step()
    add(s, c=(10, 2))
    return s, engine, fail_new_allocations(s)


# --- an empty prefill call, and the decode call after it ---


@both_classes
def test_a_decode_call_follows_an_empty_prefill_call(cls):
    s, engine, restore = decoding_with_blocked_head(cls)
    before = s.current_step
    running, waiting = s.running, s.waiting
    for n in range(1, 4):
        out = engine.step()
        assert out.num_scheduled_tokens == {"a": 1, "b": 1}
        assert s.current_step == before + n
        assert s.running is running and s.waiting is waiting
        assert (request_ids(s.running), waiting_ids(s)) == (["a", "b"], ["c"])
    restore()
    assert engine.step().num_scheduled_tokens == {"c": 10}
    engine.run()
    assert engine.outputs == {"a": 40, "b": 40, "c": 2}


@both_classes
def test_decoding_requests_are_not_resent_after_an_empty_prefill_call(cls):
    """vLLM sends all tokens of a request again only if the step before did not schedule it."""
    s, engine, _ = decoding_with_blocked_head(cls)
    for _ in range(3):
        cached = engine.step().scheduled_cached_reqs
        assert cached.req_ids == ["a", "b"]
        assert not cached.all_token_ids
        assert not cached.resumed_req_ids
    if not s.use_v2_model_runner:  # The newer model runner tracks this itself.
        assert s.prev_step_scheduled_req_ids == {"a", "b"}


@both_classes
def test_finished_ids_are_reported_once(cls):
    s, engine, restore = decoding_with_blocked_head(cls)
    s.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert engine.step().finished_req_ids == {"b"}
    assert engine.step().finished_req_ids == set()
    restore()
    assert engine.step().finished_req_ids == set()


@both_classes
@since(0, 28, "report of requests that were preempted between steps")
def test_preempted_ids_are_reported_once(cls):
    s, engine, restore = decoding_with_blocked_head(cls)
    engine.allow_preemption = True
    b = s.running.pop()
    s._preempt_request(b, time.monotonic())
    s.check()
    assert waiting_ids(s) == ["b", "c"]
    out = engine.step()
    assert (out.num_scheduled_tokens, out.preempted_req_ids) == ({"a": 1}, {"b"})
    out = engine.step()
    assert (out.num_scheduled_tokens, out.preempted_req_ids) == ({"a": 1}, set())
    restore()
    assert engine.step().num_scheduled_tokens == {"b": 12}
    engine.run()
    assert engine.outputs == {"a": 40, "b": 40, "c": 2}


def returning(first, second):
    """Return a function that returns `first`, then `second`, then empty values."""
    values = [first, second]

    def take():
        return values.pop(0) if values else type(first)()

    return take


@both_classes
def test_freed_encoder_outputs_of_both_calls_are_reported(cls, monkeypatch):
    s, engine, _ = decoding_with_blocked_head(cls)
    monkeypatch.setattr(s.encoder_cache_manager, "get_freed_mm_hashes", returning(["h1", "h2"], ["h3"]))
    assert engine.step().free_encoder_mm_hashes == ["h1", "h2", "h3"]
    assert engine.step().free_encoder_mm_hashes == []


@both_classes
def test_block_ids_to_zero_of_both_calls_are_reported(cls, monkeypatch):
    s, engine, _ = decoding_with_blocked_head(cls)
    monkeypatch.setattr(s, "needs_kv_cache_zeroing", True)
    monkeypatch.setattr(s.kv_cache_manager, "take_new_block_ids", returning([7, 8], [9]))
    assert engine.step().new_block_ids_to_zero == [7, 8, 9]
    assert not engine.step().new_block_ids_to_zero


@both_classes
def test_block_ids_to_zero_are_reported_if_the_second_call_has_none(cls, monkeypatch):
    s, engine, _ = decoding_with_blocked_head(cls)
    monkeypatch.setattr(s, "needs_kv_cache_zeroing", True)
    monkeypatch.setattr(s.kv_cache_manager, "take_new_block_ids", returning([7], []))
    assert engine.step().new_block_ids_to_zero == [7]


@both_classes
def test_block_copies_of_both_calls_are_reported(cls, monkeypatch):
    s, engine, _ = decoding_with_blocked_head(cls)
    if not hasattr(s.kv_cache_manager, "take_kv_cache_block_copies"):
        pytest.skip("this vLLM has no block copies")
    freed = []
    monkeypatch.setattr(s, "_free_cow_retained_blocks", lambda blocks, seq: freed.append(blocks))
    copies = [([("x", 1)], ["r1"]), ([("y", 2)], ["r2"])]
    monkeypatch.setattr(s.kv_cache_manager, "take_kv_cache_block_copies", lambda: copies.pop(0) if copies else ([], []))
    assert engine.step().kv_cache_block_copies == [("x", 1), ("y", 2)]
    assert freed == [["r1"], ["r2"]]
    assert not engine.step().kv_cache_block_copies


@both_classes
def test_connector_metadata_is_built_once_for_the_whole_step(cls):
    s, engine, restore = decoding_with_blocked_head(cls, build=with_connector)
    s.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    s.connector.built.clear()
    out = engine.step()
    (meta,) = s.connector.built
    assert out.kv_connector_metadata is meta
    assert (meta.scheduled, meta.finished) == ({"a": 1}, {"b"})
    restore()
    s.connector.built.clear()
    out = engine.step()
    (meta,) = s.connector.built
    assert (out.kv_connector_metadata is meta, meta.scheduled, meta.finished) == (True, {"c": 10}, set())


@both_classes
def test_connector_metadata_is_built_for_an_empty_step(cls):
    s = with_connector(cls)
    engine = Engine(s)
    s.connector.answers["p"] = (32, True)
    add(s, p=(50, 2))
    out = engine.step()
    assert out.num_scheduled_tokens == {}
    assert out.kv_connector_metadata is s.connector.built[0]
    assert len(s.connector.built) == 1


@both_classes
def test_encoder_connector_metadata_is_built_once(cls):
    s, engine, _ = decoding_with_blocked_head(cls)
    s.ec_connector = EncoderConnector()
    out = engine.step()
    assert (out.ec_connector_metadata, s.ec_connector.built) == ("meta 1", 1)


@both_classes
def test_prefix_cache_lookups_of_an_empty_prefill_call_are_not_counted(cls):
    _s, engine, restore = decoding_with_blocked_head(cls, prefix_caching=True)
    engine.stats.clear()
    for _ in range(3):
        engine.step()
    assert sum(stats.prefix_cache_stats.queries for stats in engine.stats) == 0
    assert sum(stats.prefix_cache_stats.requests for stats in engine.stats) == 0
    restore()
    engine.step()
    assert sum(stats.prefix_cache_stats.queries for stats in engine.stats) == 10
    assert sum(stats.prefix_cache_stats.requests for stats in engine.stats) == 1


@both_classes
def test_an_empty_prefill_call_without_decoding_requests_is_an_empty_step(cls):
    s = build(cls)
    engine = Engine(s)
    restore = fail_new_allocations(s)
    add(s, c=(10, 2))
    for n in range(1, 4):
        assert engine.step().num_scheduled_tokens == {}
        assert (s.empty_steps, s.current_step) == (n, n)
    restore()
    engine.run()
    assert engine.outputs == {"c": 2}


@both_classes
def test_an_empty_prefill_call_does_not_count_for_the_interleave_bound(cls):
    _s, engine, restore = decoding_with_blocked_head(
        cls, neuron_config={"max_consecutive_prefill_steps": 1, "min_decode_steps": 2}
    )
    for _ in range(3):
        engine.step()
    restore()
    assert engine.step().num_scheduled_tokens == {"c": 10}


@both_classes
def test_the_state_is_the_phase_of_the_call_that_scheduled_tokens(cls):
    s, engine, restore = decoding_with_blocked_head(cls)
    engine.step()
    assert s.state == SchedulerState.ACTIVE_DECODE
    restore()
    engine.step()
    assert s.state == SchedulerState.ACTIVE_PREFILL


@both_classes
def test_boundary_state_offloads_of_both_calls_reach_the_connector(cls, monkeypatch):
    s, engine, _ = decoding_with_blocked_head(cls, build=with_connector)
    if not hasattr(s.kv_cache_manager, "take_boundary_state_offloads"):
        pytest.skip("this vLLM passes no boundary states to connectors")
    offloads = [{"a": [(0, 1, 2)]}, {"a": [(0, 3, 4)], "b": [(0, 5, 6)]}]
    monkeypatch.setattr(s.kv_cache_manager, "take_boundary_state_offloads", lambda: offloads.pop(0) if offloads else {})
    seen = []
    build_meta = s.connector.build_connector_meta

    def recording(out):
        state = out.kv_connector_block_state
        seen.append((set(state.req_ids), dict(state.boundary_state_offloads)))
        return build_meta(out)

    monkeypatch.setattr(s.connector, "build_connector_meta", recording)
    out = engine.step()
    assert seen == [({"a", "b"}, {"a": [(0, 1, 2), (0, 3, 4)], "b": [(0, 5, 6)]})]
    assert out.kv_connector_block_state is None


# --- what the base class sees ---


@every_engine
def test_a_decode_step_replaces_no_list(cls, ahead):
    seen = []

    class Spy(cls):
        def _call_base_schedule(self, *args, **kwargs):
            seen.append((self.running, list(self.running)))
            return super()._call_base_schedule(*args, **kwargs)

    s = build_ahead(Spy, ahead, max_num_seqs=2)
    engine = Engine(s, ahead)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(3):
        engine.step()
    add(s, w=(10, 9))
    seen.clear()
    running, waiting = s.running, s.waiting
    out = engine.step()
    ((base_running, visible),) = seen
    assert base_running is running and visible == running
    assert request_ids(running) == ["a", "b"]
    assert s.waiting is waiting and request_ids(waiting) == ["w"]
    assert out.num_scheduled_tokens_padded == out.num_scheduled_tokens
    assert out.num_scheduled_tokens_padded is not out.num_scheduled_tokens


@both_classes
def test_decoding_requests_are_hidden_from_the_base_class_in_a_prefill_step(cls):
    seen = []

    class Spy(cls):
        def _call_base_schedule(self, *args, **kwargs):
            seen.append((request_ids(self.running), request_ids(self.waiting), self.max_num_running_reqs))
            return super()._call_base_schedule(*args, **kwargs)

    s = build(Spy, max_num_seqs=4)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(100, 9), c=(10, 9))
    engine.step()
    engine.step()
    assert seen[0] == ([], ["a"], 4)
    assert seen[1] == ([], ["b"], 3)
    assert seen[2][0] == ["b"] and seen[2][2] <= 3
    assert s.max_num_running_reqs == 4


@both_classes
def test_decode_rows_are_padded_to_a_batch_bucket(cls):
    s = build(cls, max_num_seqs=6)
    engine = Engine(s).run({0: [request(f"r{i}", 10, 3) for i in range(5)]})
    assert s.num_seqs_buckets == [1, 2, 4, 6]
    assert [(len(out.num_scheduled_tokens), out.num_seqs_padded) for out in engine.outs[5:7]] == [(5, 6), (5, 6)]
    assert [out.num_seqs_padded for out in engine.outs[:5]] == [0] * 5
    s = build(cls, max_num_seqs=8, neuron_config={"num_seqs_buckets": [4, 8]})
    engine = Engine(s).run({0: [request("r", 10, 2)]})
    assert [out.num_seqs_padded for out in engine.outs[:2]] == [0, 4]


@both_classes
@pytest.mark.parametrize(
    ("prompt", "padded"), [(50, 128), (127, 128), (128, 128), (129, 256), (1500, 2048), (5000, 8192)]
)
def test_a_prompt_is_padded_to_a_token_bucket(cls, prompt, padded):
    s = build(cls, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=1000)
    engine = Engine(s)
    add(s, a=(prompt, 2))
    assert engine.step().num_scheduled_tokens_padded == {"a": padded}
    assert (s.total_padding_tokens, s.total_scheduled_tokens) == (padded - prompt, prompt)
    engine.step()
    assert (s.total_padding_tokens, s.total_scheduled_tokens) == (padded - prompt, prompt), (
        "a decode changed the padding count"
    )


@both_classes
def test_the_state_is_the_phase_of_the_last_step_or_idle(cls):
    s = build(cls)
    engine = Engine(s)
    assert s.state == SchedulerState.IDLE
    add(s, a=(100, 2), g=(10, 1))
    engine.step()
    assert s.state == SchedulerState.ACTIVE_PREFILL
    assert s.has_prefill_in_running and s._is_prefill_request(s.requests["a"])
    engine.step()
    assert s.state == SchedulerState.ACTIVE_PREFILL
    assert not s.has_prefill_in_running and not s._is_prefill_request(s.requests["a"])
    engine.step()
    assert s.state == SchedulerState.ACTIVE_PREFILL
    engine.schedule()
    assert s.state == SchedulerState.ACTIVE_DECODE
    engine.process_outputs()
    assert s.state == SchedulerState.IDLE
    s.add_request(request("h", 10, 1, grammar=True))
    engine.step()
    assert s.state in (SchedulerState.IDLE, SchedulerState.ACTIVE_DECODE), "an empty step changed the state to prefill"


def test_default_buckets_and_bucket_lookup():
    assert get_default_num_batched_tokens_buckets(3000) == [128, 256, 512, 1024, 2048, 3000]
    assert get_default_num_batched_tokens_buckets(64) == [64]
    assert get_default_num_seqs_buckets(6) == [1, 2, 4, 6]
    buckets = [128, 256, 512, 1000]
    assert [get_bucket_for_count(n, buckets) for n in (0, 1, 128, 129, 1000)] == [0, 128, 128, 256, 1000]
    for n in (-1, 1001):
        with pytest.raises(ValueError):
            get_bucket_for_count(n, buckets)


# --- interleave bound ---


@every_engine
@pytest.mark.parametrize(("p", "d"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_prefill_and_decode_streaks_are_bounded(cls, ahead, p, d):
    """A decode follows after at most p prefill steps, and a prefill after at most d decode steps."""
    s = build_ahead(
        cls,
        ahead,
        max_num_seqs=64,
        max_model_len=512,
        num_blocks=4000,
        neuron_config={"max_consecutive_prefill_steps": p, "min_decode_steps": d},
    )
    engine = Engine(s, ahead)
    add(s, a=(8, 400))
    engine.step()
    for t in range(40):
        add(s, **{f"x{t}": (100 if t % 3 == 0 else 20, 400)})
        engine.step()
    kinds = "".join(kind[0] for kind in engine.kinds[1:])
    assert "P" * (p + 1) not in kinds
    assert "D" * (d + 1) not in kinds


@both_classes
def test_a_throttled_decode_step_counts_towards_min_decode_steps(cls):
    s = build(cls, neuron_config={"max_consecutive_prefill_steps": 1, "min_decode_steps": 2})
    engine = Engine(s)
    add(s, a=(10, 30))
    engine.step()
    add(s, b=(10, 1))
    engine.step()
    add(s, c=(10, 1))
    engine.step(throttle_prefills=True)
    engine.step()
    engine.step()
    assert engine.kinds == ["P10", "P10", "D", "D", "P10"]


# --- steps in flight ---


def test_no_request_is_scheduled_after_its_last_token_is_in_flight():
    """The request keeps its slot until its last output is processed, so b is admitted afterwards."""
    s = build_ahead(NeuronAsyncScheduler, 1, max_num_seqs=1)
    engine = Engine(s, ahead=1)
    add(s, a=(10, 2), b=(10, 2))
    scheduled = [engine.step().num_scheduled_tokens for _ in range(6)]
    assert scheduled == [{"a": 10}, {"a": 1}, {}, {"b": 10}, {"b": 1}, {}]
    assert num_free_blocks(s) == 399
    assert engine.outputs == {"a": 2, "b": 2}
