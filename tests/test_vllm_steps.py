"""What one call of `schedule()` does to vLLM's own bookkeeping: nothing twice, nothing lost, everything put back."""

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
from vllm_harness import request
from vllm_setup import (
    Engine,
    add,
    both_classes,
    build,
    build_ahead,
    every_engine,
    names,
    queued,
    since,
    usable_free,
    with_connector,
)


def refuse_new(sched):
    """From now on vLLM finds no blocks for anybody who is not running yet; the returned function ends that."""
    original = sched.kv_cache_manager.allocate_slots

    def allocate(req, *args, **kwargs):
        return original(req, *args, **kwargs) if req.status == RequestStatus.RUNNING else None

    sched.kv_cache_manager.allocate_slots = allocate

    def end():
        sched.kv_cache_manager.allocate_slots = original

    return end


def decoding(cls, build=build, **config):
    """Two requests decode, and a third waits that the base will not be able to place."""
    s = build(cls, **config)
    engine = Engine(s)
    add(s, a=(10, 40), b=(10, 40))
    for _ in range(3):
        engine.step()
    add(s, c=(10, 2))
    return s, engine, refuse_new(s)


# --- an empty prefill pass, and the decode pass after it ---


@both_classes
def test_empty_prefill_pass_becomes_a_decode_pass(cls):
    s, engine, end = decoding(cls)
    before = s.current_step
    running, waiting = s.running, s.waiting
    for n in range(1, 4):
        out = engine.step()
        assert out.num_scheduled_tokens == {"a": 1, "b": 1}
        assert s.current_step == before + n
        assert s.running is running and s.waiting is waiting
        assert (names(s.running), queued(s)) == (["a", "b"], ["c"])
    end()
    assert engine.step().num_scheduled_tokens == {"c": 10}
    engine.run()
    assert engine.outputs == {"a": 40, "b": 40, "c": 2}


@both_classes
def test_decodes_are_not_taken_for_newcomers_after_an_empty_pass(cls):
    """All tokens of a request are sent again only if it had no part in the step before."""
    s, engine, _ = decoding(cls)
    for _ in range(3):
        cached = engine.step().scheduled_cached_reqs
        assert cached.req_ids == ["a", "b"]
        assert not cached.all_token_ids
        assert not cached.resumed_req_ids
    if not s.use_v2_model_runner:  # the newer runner keeps this itself
        assert s.prev_step_scheduled_req_ids == {"a", "b"}


@both_classes
def test_finished_ids_are_told_once(cls):
    s, engine, end = decoding(cls)
    s.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert engine.step().finished_req_ids == {"b"}
    assert engine.step().finished_req_ids == set()
    end()
    assert engine.step().finished_req_ids == set()


@both_classes
@since(0, 28, "report of requests that were preempted between steps")
def test_preempted_ids_are_told_once(cls):
    s, engine, end = decoding(cls)
    engine.may_preempt = True
    b = s.running.pop()
    s._preempt_request(b, time.monotonic())
    s.check()
    assert queued(s) == ["b", "c"]
    out = engine.step()
    assert (out.num_scheduled_tokens, out.preempted_req_ids) == ({"a": 1}, {"b"})
    out = engine.step()
    assert (out.num_scheduled_tokens, out.preempted_req_ids) == ({"a": 1}, set())
    end()
    assert engine.step().num_scheduled_tokens == {"b": 12}
    engine.run()
    assert engine.outputs == {"a": 40, "b": 40, "c": 2}


def twice(first, second):
    """A method that gives `first`, then `second`, then nothing."""
    left = [first, second]

    def take():
        return left.pop(0) if left else type(first)()

    return take


@both_classes
def test_freed_encoder_outputs_of_both_passes_are_told(cls, monkeypatch):
    s, engine, _ = decoding(cls)
    monkeypatch.setattr(s.encoder_cache_manager, "get_freed_mm_hashes", twice(["h1", "h2"], ["h3"]))
    assert engine.step().free_encoder_mm_hashes == ["h1", "h2", "h3"]
    assert engine.step().free_encoder_mm_hashes == []


@both_classes
def test_block_ids_to_zero_of_both_passes_are_told(cls, monkeypatch):
    s, engine, _ = decoding(cls)
    monkeypatch.setattr(s, "needs_kv_cache_zeroing", True)
    monkeypatch.setattr(s.kv_cache_manager, "take_new_block_ids", twice([7, 8], [9]))
    assert engine.step().new_block_ids_to_zero == [7, 8, 9]
    assert not engine.step().new_block_ids_to_zero


@both_classes
def test_block_ids_to_zero_survive_an_empty_second_list(cls, monkeypatch):
    s, engine, _ = decoding(cls)
    monkeypatch.setattr(s, "needs_kv_cache_zeroing", True)
    monkeypatch.setattr(s.kv_cache_manager, "take_new_block_ids", twice([7], []))
    assert engine.step().new_block_ids_to_zero == [7]


@both_classes
def test_block_copies_of_both_passes_are_told(cls, monkeypatch):
    s, engine, _ = decoding(cls)
    if not hasattr(s.kv_cache_manager, "take_kv_cache_block_copies"):
        pytest.skip("this vLLM copies no blocks")
    freed = []
    monkeypatch.setattr(s, "_free_cow_retained_blocks", lambda blocks, seq: freed.append(blocks))
    left = [([("x", 1)], ["r1"]), ([("y", 2)], ["r2"])]
    monkeypatch.setattr(s.kv_cache_manager, "take_kv_cache_block_copies", lambda: left.pop(0) if left else ([], []))
    assert engine.step().kv_cache_block_copies == [("x", 1), ("y", 2)]
    assert freed == [["r1"], ["r2"]]
    assert not engine.step().kv_cache_block_copies


@both_classes
def test_connector_metadata_is_built_once_and_for_the_whole_step(cls):
    s, engine, end = decoding(cls, build=with_connector)
    s.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    s.connector.built.clear()
    out = engine.step()
    (meta,) = s.connector.built
    assert out.kv_connector_metadata is meta
    assert (meta.scheduled, meta.finished) == ({"a": 1}, {"b"})
    end()
    s.connector.built.clear()
    out = engine.step()
    (meta,) = s.connector.built
    assert (out.kv_connector_metadata is meta, meta.scheduled, meta.finished) == (True, {"c": 10}, set())


@both_classes
def test_connector_metadata_is_built_when_nothing_is_hidden(cls):
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
    from test_vllm_waiters import EncoderConnector

    s, engine, _ = decoding(cls)
    s.ec_connector = EncoderConnector()
    out = engine.step()
    assert (out.ec_connector_metadata, s.ec_connector.built) == ("meta 1", 1)


@both_classes
def test_lookups_of_a_failed_pass_are_not_counted(cls):
    _s, engine, end = decoding(cls, prefix_caching=True)
    engine.stats.clear()
    for _ in range(3):
        engine.step()
    assert sum(one.prefix_cache_stats.queries for one in engine.stats) == 0
    assert sum(one.prefix_cache_stats.requests for one in engine.stats) == 0
    end()
    engine.step()
    assert sum(one.prefix_cache_stats.queries for one in engine.stats) == 10
    assert sum(one.prefix_cache_stats.requests for one in engine.stats) == 1


@both_classes
def test_an_empty_step_with_nobody_to_decode_stays_empty(cls):
    s = build(cls)
    engine = Engine(s)
    end = refuse_new(s)
    add(s, c=(10, 2))
    for n in range(1, 4):
        assert engine.step().num_scheduled_tokens == {}
        assert (s.empty_steps, s.current_step) == (n, n)
    end()
    engine.run()
    assert engine.outputs == {"c": 2}


@both_classes
def test_an_empty_prefill_pass_is_no_prefill_step_for_the_turns(cls):
    _s, engine, end = decoding(cls, neuron_config={"max_consecutive_prefill_steps": 1, "min_decode_steps": 2})
    for _ in range(3):
        engine.step()
    end()
    assert engine.step().num_scheduled_tokens == {"c": 10}


@both_classes
def test_the_state_follows_the_pass_that_counted(cls):
    s, engine, end = decoding(cls)
    engine.step()
    assert s.state == SchedulerState.ACTIVE_DECODE
    end()
    engine.step()
    assert s.state == SchedulerState.ACTIVE_PREFILL


@both_classes
def test_offloads_of_both_passes_reach_the_connector(cls, monkeypatch):
    s, engine, _ = decoding(cls, build=with_connector)
    if not hasattr(s.kv_cache_manager, "take_boundary_state_offloads"):
        pytest.skip("this vLLM hands no recurrent states to connectors")
    left = [{"a": [(0, 1, 2)]}, {"a": [(0, 3, 4)], "b": [(0, 5, 6)]}]
    monkeypatch.setattr(s.kv_cache_manager, "take_boundary_state_offloads", lambda: left.pop(0) if left else {})
    seen = []
    build_meta = s.connector.build_connector_meta

    def looks(out):
        state = out.kv_connector_block_state
        seen.append((set(state.req_ids), dict(state.boundary_state_offloads)))
        return build_meta(out)

    monkeypatch.setattr(s.connector, "build_connector_meta", looks)
    out = engine.step()
    assert seen == [({"a", "b"}, {"a": [(0, 1, 2), (0, 3, 4)], "b": [(0, 5, 6)]})]
    assert out.kv_connector_block_state is None


# --- a step with nothing to hide ---


@every_engine
def test_a_decode_step_swaps_nothing(cls, ahead):
    seen = []

    class Spy(cls):
        def _call_base_schedule(self, *args, **kwargs):
            seen.append((self.running, self.waiting, list(self.running)))
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
    ((base_running, base_waiting, requests),) = seen
    assert base_running is running and requests == running
    assert names(running) == ["a", "b"]
    assert s.waiting is waiting and names(waiting) == ["w"]
    assert out.num_scheduled_tokens_padded == out.num_scheduled_tokens
    assert out.num_scheduled_tokens_padded is not out.num_scheduled_tokens
    del base_waiting


@both_classes
def test_no_decode_is_seen_by_the_base_in_a_prefill_step(cls):
    seen = []

    class Spy(cls):
        def _call_base_schedule(self, *args, **kwargs):
            seen.append((names(self.running), names(self.waiting), self.max_num_running_reqs))
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
def test_decode_batches_have_their_bucket(cls):
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
def test_padding_of_a_prompt(cls, prompt, padded):
    s = build(cls, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=1000)
    engine = Engine(s)
    add(s, a=(prompt, 2))
    assert engine.step().num_scheduled_tokens_padded == {"a": padded}
    assert (s.total_padding_tokens, s.total_scheduled_tokens) == (padded - prompt, prompt)
    engine.step()
    assert (s.total_padding_tokens, s.total_scheduled_tokens) == (padded - prompt, prompt), "decodes have no padding"


@both_classes
def test_states(cls):
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
    engine.settle()
    assert s.state == SchedulerState.IDLE
    s.add_request(request("h", 10, 1, grammar=True))
    engine.step()
    assert s.state in (SchedulerState.IDLE, SchedulerState.ACTIVE_DECODE), "an empty step changes nothing"


def test_buckets_as_the_documentation_names_them():
    assert get_default_num_batched_tokens_buckets(3000) == [128, 256, 512, 1024, 2048, 3000]
    assert get_default_num_batched_tokens_buckets(64) == [64]
    assert get_default_num_seqs_buckets(6) == [1, 2, 4, 6]
    buckets = [128, 256, 512, 1000]
    assert [get_bucket_for_count(n, buckets) for n in (0, 1, 128, 129, 1000)] == [0, 128, 128, 256, 1000]
    for n in (-1, 1001):
        with pytest.raises(ValueError):
            get_bucket_for_count(n, buckets)


# --- turns ---


@every_engine
@pytest.mark.parametrize(("p", "d"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_turns_are_bounded(cls, ahead, p, d):
    """Between two decode chances of a ready request lie at most p prefill steps, and between prefills d decodes."""
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
def test_a_throttled_decode_step_pays_what_is_owed(cls):
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


# --- async: what is ready for a token ---


def test_ahead_nobody_is_scheduled_beyond_the_end():
    """One in flight is enough to know that the last token is on its way: no step, no slot given away."""
    s = build_ahead(NeuronAsyncScheduler, 1, max_num_seqs=1)
    engine = Engine(s, ahead=1)
    add(s, a=(10, 2), b=(10, 2))
    scheduled = [engine.step().num_scheduled_tokens for _ in range(6)]
    assert scheduled == [{"a": 10}, {"a": 1}, {}, {"b": 10}, {"b": 1}, {}]
    assert usable_free(s) == 399
    assert engine.outputs == {"a": 2, "b": 2}
