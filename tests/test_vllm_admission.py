"""Who may start, when it is a prompt's turn, and how much of it: throttling, pauses, slots, watermark, caps, turns."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronScheduler
from vllm_harness import request
from vllm_setup import (
    Engine,
    Logged,
    add,
    both_classes,
    build,
    build_ahead,
    compiled,
    every_engine,
    names,
    queued,
    since,
    usable_free,
    with_connector,
)


def why(sched):
    e = sched.explain()
    return e.id, e.reason, e.needed, e.reserved, e.usable


# --- the reasons of explain() ---


@both_classes
def test_nobody_waits_and_nothing_is_explained(cls):
    s = build(cls)
    assert s.explain() is None
    add(s, a=(30, 5))
    assert why(s) == ("a", "ready", 3, 0, 399)
    Engine(s).step()
    assert s.explain() is None


@both_classes
def test_explain_slots(cls):
    s = build(cls, max_num_seqs=1, num_blocks=10)
    add(s, a=(30, 5))
    Engine(s).step()
    add(s, b=(100, 5))
    assert why(s) == ("b", "slots", 7, 3, 9)
    assert s.at_capacity
    assert s.refusal(s.requests["b"]) == "slots"
    assert not s.can_schedule(s.requests["b"])


@both_classes
def test_explain_kv(cls):
    s = build(cls, num_blocks=10)
    add(s, a=(30, 5))
    engine = Engine(s)
    engine.step()
    add(s, b=(100, 5))
    assert why(s) == ("b", "kv", 7, 3, 9)
    assert [engine.step().num_scheduled_tokens for _ in range(4)] == [{"a": 1}] * 4
    assert why(s) == ("b", "ready", 7, 0, 9)


@both_classes
def test_explain_prefill_in_progress(cls):
    s = build(cls)
    add(s, a=(100, 5), b=(10, 5))
    Engine(s).step()
    assert why(s) == ("b", "prefill_in_progress", 1, 7, 399)
    assert s.has_prefill_in_running
    assert s._is_prefill_request(s.requests["a"])


@both_classes
def test_explain_interleave(cls):
    s = build(cls, neuron_config={"max_consecutive_prefill_steps": 1, "min_decode_steps": 2})
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9), c=(10, 9))
    engine.step()
    assert s.explain().reason == "ready"
    engine.step()
    assert why(s) == ("c", "interleave", 2, 4, 399)
    engine.step()
    assert s.explain().reason == "interleave"
    engine.step()
    assert s.explain().reason == "ready"
    engine.step()
    assert engine.kinds == ["P10", "P10", "D", "D", "P10"]


@both_classes
def test_explain_throttled(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(10, 9))
    assert engine.schedule(throttle_prefills=True).num_scheduled_tokens == {"a": 1}
    assert why(s) == ("b", "throttled", 2, 2, 399)
    engine.settle()
    assert s.explain().reason == "ready", "unless the next step is throttled too"
    engine.step()
    assert s.explain() is None


@both_classes
def test_explain_paused(cls):
    s = build(cls)
    add(s, a=(10, 9))
    s.set_pause_state(PauseState.PAUSED_ALL)
    assert why(s) == ("a", "paused", 2, 0, 399)
    s.set_pause_state(PauseState.UNPAUSED)
    assert s.explain().reason == "ready"


# --- throttle_prefills ---


@both_classes
@pytest.mark.parametrize(
    "call", [lambda e: e.step(True), lambda e: e.step(throttle_prefills=True)], ids=["positional", "keyword"]
)
def test_throttled_prefills_wait_for_decodes_but_never_idle(cls, call):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 3))
    assert call(engine).num_scheduled_tokens == {"a": 10}, "nothing to decode"
    add(s, b=(10, 1))
    assert call(engine).num_scheduled_tokens == {"a": 1}
    assert call(engine).num_scheduled_tokens == {"a": 1}
    assert call(engine).num_scheduled_tokens == {"b": 10}


@both_classes
def test_throttle_stops_a_prompt_in_the_middle(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 4))
    engine.step()
    add(s, b=(100, 1))
    engine.step()
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1}
    assert engine.step().num_scheduled_tokens == {"b": 36}
    assert names(s.running) == ["a"]


@both_classes
def test_a_saturated_rank_is_not_throttled(cls):
    """After a step that was free to prefill, ready requests were left: the next one prefills whatever it is told."""
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
def test_a_rank_that_drained_its_queue_is_throttled_again(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    engine.step()
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"b": 10}, "b was left over"
    add(s, c=(10, 9))
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "b": 1}
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "b": 1}
    assert engine.step().num_scheduled_tokens == {"c": 10}


@both_classes
def test_blocked_waiters_do_not_saturate(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    s.add_request(request("g", 10, 1, grammar=True))
    engine.step()
    add(s, b=(10, 9))
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1}


@both_classes
def test_waiters_that_became_ready_do_saturate(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    waiters = [request(name, 10, 9, grammar=True) for name in ("g", "h")]
    for r in waiters:
        s.add_request(r)
    engine.step()
    for r in waiters:
        compiled(r)
    assert engine.step().num_scheduled_tokens == {"g": 10}
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"h": 10}


@both_classes
def test_a_throttled_step_does_not_change_who_is_saturated(cls):
    s = build(cls, max_num_seqs=2)
    engine = Engine(s)
    add(s, a=(10, 3), b=(10, 9), c=(10, 9))
    engine.step()
    engine.step()
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "b": 1}, "no slot for c"
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "b": 1}
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"c": 10}, "c has waited since a free step"


@both_classes
@since(0, 33, "cadence of prefills of its own")
def test_the_engine_own_cadence_of_prefills(cls):
    """Every third step may prefill while somebody decodes, unless the queue could not be drained."""
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
    assert engine.kinds[7:] == ["D", "D", "P10", "D"], "no slot for e"


# --- watermark ---


@both_classes
@pytest.mark.parametrize(("prompt", "starts_at_once"), [(16 * 63, True), (16 * 64, False)])
def test_watermark_is_kept_free_beside_others(cls, prompt, starts_at_once):
    """100 blocks, a tenth of them (10) kept free: beside a's 26 there is room for 63 of 99, not 64."""
    s = build(cls, max_num_batched_tokens=2048, max_model_len=2048, num_blocks=100, watermark=0.1)
    engine = Engine(s)
    add(s, a=(400, 17))
    engine.step()
    assert s.kv_cache_manager.watermark_blocks == 10
    add(s, b=(prompt, 1))
    engine.step()
    assert engine.kinds[1] == (f"P{prompt}" if starts_at_once else "D")
    if not starts_at_once:
        assert (s.explain().reason, s.explain().needed) == ("kv", 64)
    engine.run()
    assert engine.outputs == {"a": 17, "b": 1}


@both_classes
def test_watermark_does_not_stop_who_is_alone(cls):
    s = build(cls, max_num_batched_tokens=2048, max_model_len=2048, num_blocks=100, watermark=0.1)
    engine = Engine(s)
    add(s, a=(16 * 99, 1))
    assert engine.step().num_scheduled_tokens == {"a": 16 * 99}


# --- pauses ---


@both_classes
def test_paused_for_all(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 4))
    engine.step()
    add(s, b=(10, 1))
    with Logged() as log:
        s.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(150):
            assert engine.step().num_scheduled_tokens == {}
    assert log.warnings == []
    assert s.empty_steps == 0
    assert s.get_num_unfinished_requests() == 0
    assert (names(s.running), queued(s)) == (["a"], ["b"])
    s.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.steps == [{"a": 10}, {"b": 10}, {"a": 1}, {"a": 1}, {"a": 1}]


@both_classes
def test_paused_for_new_ones(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(100, 2))
    engine.step()
    add(s, b=(10, 1))
    s.set_pause_state(PauseState.PAUSED_NEW)
    assert s.explain().reason == "paused"
    for _ in range(4):
        engine.step()
    assert engine.steps == [{"a": 64}, {"a": 36}, {"a": 1}]
    assert s.get_num_unfinished_requests() == 0
    assert queued(s) == ["b"]
    s.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.steps[3:] == [{"b": 10}]


@both_classes
def test_paused_for_new_ones_lets_who_holds_blocks_finish(cls):
    s = with_connector(cls)
    if not hasattr(s, "kv_holding_waiting"):
        pytest.skip("this vLLM admits nobody while new requests are paused (since 0.32 those with blocks)")
    engine = Engine(s)
    s.connector.answers["p"] = (32, True)
    add(s, p=(50, 2), b=(10, 1))
    s.connector.answers["b"] = (None, False)
    engine.step()
    assert s.requests["p"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    s.connector.answers.clear()
    s.set_pause_state(PauseState.PAUSED_NEW)
    engine.step(received=["p"])
    for _ in range(3):
        engine.step()
    assert engine.steps == [{"p": 18}, {"p": 1}]
    assert queued(s) == ["b"]


# --- slots ---


@every_engine
def test_slots_are_counted_with_those_that_are_hidden(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2, neuron_config={"max_consecutive_prefill_steps": 1})
    engine = Engine(s, ahead).run({t: [request(f"r{t}", 10 + 7 * t, 1 + t % 5)] for t in range(20)})
    assert engine.outputs == {f"r{t}": 1 + t % 5 for t in range(20)}
    assert max(len(step) for step in engine.steps) == 2


@both_classes
@since(0, 32, "limit of active requests")
def test_the_limit_of_active_requests_is_a_limit_of_slots(cls):
    s = build(cls, max_num_active_seqs=2)
    engine = Engine(s)
    add(s, a=(10, 3), b=(10, 3), c=(10, 3))
    engine.step()
    engine.step()
    assert s.explain().reason == "slots"
    assert s.max_num_active_reqs == 2
    engine.run()
    both = {"a": 1, "b": 1}
    assert engine.steps == [{"a": 10}, {"b": 10}, both, both, {"c": 10}, {"c": 1}, {"c": 1}]


@both_classes
def test_packed_prefills_take_no_more_slots_than_there_are(cls):
    s = build(cls, max_num_seqs=3, neuron_config={"max_prefills_per_batch": 4})
    engine = Engine(s)
    add(s, **{f"r{i}": (10, 3) for i in range(5)})
    assert engine.step().num_scheduled_tokens == {"r0": 10, "r1": 10, "r2": 10}
    engine.run()
    assert engine.outputs == {f"r{i}": 3 for i in range(5)}


# --- long_prefill_token_threshold ---


CAPPED = {"max_num_batched_tokens": 512, "max_model_len": 1024, "long_prefill_token_threshold": 128}


@both_classes
def test_a_prompt_that_is_alone_is_not_capped(cls):
    s = build(cls, **CAPPED)
    engine = Engine(s)
    add(s, a=(400, 1))
    engine.run()
    assert engine.steps == [{"a": 400}]


@both_classes
@pytest.mark.parametrize("other", ["decoding", "waiting", "blocked"])
def test_a_prompt_with_company_is_capped(cls, other):
    s = build(cls, **CAPPED)
    engine = Engine(s)
    if other == "decoding":
        add(s, b=(10, 20))
        engine.step()
    add(s, a=(400, 1))
    if other == "waiting":
        add(s, b=(10, 20))
    if other == "blocked":
        s.add_request(request("g", 10, 1, grammar=True))
    for _ in range(4):
        engine.step()
    assert [step for step in engine.steps if "a" in step] == [{"a": 128}, {"a": 128}, {"a": 128}, {"a": 16}]
    assert s.scheduler_config.long_prefill_token_threshold == 128


@both_classes
def test_the_cap_goes_with_the_company(cls):
    s = build(cls, **CAPPED)
    engine = Engine(s)
    add(s, a=(700, 1), b=(10, 1))
    engine.step()
    s.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.steps == [{"a": 128}, {"a": 512}, {"a": 60}]


@both_classes
def test_capped_prompts_are_not_packed(cls):
    s = build(cls, **CAPPED, neuron_config={"max_prefills_per_batch": 3})
    engine = Engine(s)
    add(s, a=(200, 1), b=(10, 1), c=(20, 1))
    assert engine.step().num_scheduled_tokens == {"a": 128}


@both_classes
@since(0, 32, "adaptive cap")
@pytest.mark.parametrize(("others", "chunk"), [(1, 256), (3, 128), (7, 64)])
@pytest.mark.parametrize("where", ["decoding", "waiting"])
def test_the_adaptive_cap_is_a_fair_share_of_all(cls, others, chunk, where):
    s = build(
        cls,
        **{**CAPPED, "long_prefill_token_threshold": 64},
        max_num_seqs=8,
        long_prefill_token_threshold_adaptive=True,
    )
    engine = Engine(s)
    if where == "decoding":
        add(s, **{f"d{i}": (10, 50) for i in range(others)})
        for _ in range(others):
            engine.step()
        add(s, a=(400, 1))
    else:
        add(s, a=(400, 1), **{f"d{i}": (10, 50) for i in range(others)})
    assert engine.step().num_scheduled_tokens == {"a": chunk}


# --- how a prompt is cut, and who shares a step ---


@both_classes
def test_fixed_chunks(cls):
    s = build(cls, max_num_batched_tokens=2048, max_model_len=16_384, num_blocks=2000)
    engine = Engine(s).run({0: [request("a", 10_000, 1)]})
    assert engine.kinds == ["P2048"] * 4 + ["P1808"]
    assert engine.padded == [{"a": 2048}] * 5


@both_classes
def test_chunks_that_end_on_buckets(cls):
    s = build(
        cls,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        num_blocks=2000,
        neuron_config={"chunking": "bucket"},
    )
    engine = Engine(s).run({0: [request("a", 5000, 2)]})
    assert engine.steps == [{"a": 4096}, {"a": 904}, {"a": 1}]
    assert engine.padded == [{"a": 4096}, {"a": 1024}, {"a": 1}]
    assert s.max_num_scheduled_tokens == 8192


@both_classes
def test_a_whole_prompt_in_one_bucket(cls):
    s = build(cls, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=2000)
    engine = Engine(s)
    add(s, a=(5000, 2))
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"a": 5000}, {"a": 8192})
    assert s.requests["a"].num_computed_tokens == 5000
    assert s._calculate_padded_count(5000) == 8192


@both_classes
def test_a_cached_prefix_is_not_padded(cls):
    s = build(cls, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=2000, prefix_caching=True, block_size=8)
    engine = Engine(s)
    tokens = [3 + i % 900 for i in range(5000)]
    for name, ids in {"a": tokens[:1000], "b": tokens}.items():
        s.add_request(request(name, token_ids=ids, max_tokens=1, block_size=8))
    engine.step()
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"b": 4000}, {"b": 4096})


@both_classes
def test_packed_prefills_share_a_bucket(cls):
    s = build(cls, max_num_batched_tokens=512, neuron_config={"max_prefills_per_batch": 3})
    engine = Engine(s)
    add(s, a=(10, 2), b=(150, 2), c=(40, 2), d=(10, 2))
    out = engine.step()
    assert out.num_scheduled_tokens == {"a": 10, "b": 150, "c": 40}
    assert out.num_scheduled_tokens_padded == {"a": 10, "b": 150, "c": 96}
    assert s.max_prefills_per_batch == 3


@both_classes
def test_a_prompt_that_does_not_fit_a_packed_step_whole_waits(cls):
    s = build(cls, max_num_batched_tokens=128, max_model_len=512, neuron_config={"max_prefills_per_batch": 3})
    engine = Engine(s)
    add(s, a=(100, 1), b=(29, 1), c=(5, 1), d=(300, 1))
    engine.run()
    assert engine.steps == [{"a": 100}, {"b": 29, "c": 5}, {"d": 128}, {"d": 128}, {"d": 44}]


# --- resumed requests ---


@both_classes
def test_a_reset_replays_prompts_and_outputs_as_prefills(cls):
    s = build(cls)
    engine = Engine(s)
    engine.may_preempt = True
    add(s, a=(10, 5), b=(10, 5))
    for _ in range(3):
        engine.step()
    add(s, c=(10, 1))
    assert s.reset_prefix_cache(reset_running_requests=True)
    s.check()
    assert queued(s) == ["a", "b", "c"]
    assert usable_free(s) == 399
    engine.run()
    assert engine.steps[3:] == [{"a": 12}, {"b": 12}, {"c": 10}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert engine.kinds[3:] == ["P12", "P12", "P10", "D", "D"]
    assert engine.outputs == {"a": 5, "b": 5, "c": 1}


@every_engine
def test_a_reset_at_any_time_loses_no_output(cls, ahead):
    for when in range(1, 8):
        s = build_ahead(cls, ahead, max_num_seqs=3)
        engine = Engine(s, ahead)
        engine.may_preempt = True

        def reset(t, s=s, when=when):
            if t == when:
                assert s.reset_prefix_cache(reset_running_requests=True)
                s.check()

        engine.run({0: [request("a", 100, 5), request("b", 10, 3), request("c", 20, 4)]}, before=reset)
        if ahead:
            assert all(engine.outputs[name] <= n for name, n in {"a": 5, "b": 3, "c": 4}.items())
            assert engine.finished == dict.fromkeys("abc", "length")
        else:
            assert engine.outputs == {"a": 5, "b": 3, "c": 4}
        assert usable_free(s) == 399


# --- priority ---


@both_classes
def test_priority_ties_go_by_arrival(cls):
    s = build(cls, policy="priority", max_num_seqs=1)
    for i, (name, priority) in enumerate({"a": 5, "b": 3, "c": 0, "d": 3}.items()):
        s.add_request(request(name, 10, 1, priority=priority, arrival_time=float(i)))
    engine = Engine(s).run()
    assert engine.steps == [{"c": 10}, {"b": 10}, {"d": 10}, {"a": 10}]


@both_classes
def test_nobody_running_makes_room_for_a_better_priority(cls):
    """Neither a slot nor blocks: 7 usable, lo may need 5."""
    s = build(cls, policy="priority", max_model_len=128, num_blocks=8)
    engine = Engine(s)
    s.add_request(request("lo", 60, 12, priority=9))
    engine.step()
    s.add_request(request("hi", 30, 20, priority=0))
    engine.run()
    assert engine.outputs == {"lo": 12, "hi": 20}
    assert engine.steps[:12] == [{"lo": 60}, *[{"lo": 1}] * 11]


# --- aborts ---


@every_engine
@pytest.mark.parametrize("when", range(9))
def test_an_abort_at_any_time_frees_everything(cls, ahead, when):
    s = build_ahead(cls, ahead, max_num_seqs=2, prefix_caching=False)
    engine = Engine(s, ahead)

    def abort(t):
        if t == when:
            gone = [name for name in ("b", "c") if name in s.requests]
            s.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            s.check()
            assert all(name not in names(s.running) + queued(s) for name in gone)

    engine.run({0: [request("a", 10, 6), request("b", 100, 4), request("c", 30, 2), request("d", 30, 2)]}, before=abort)
    assert engine.outputs["a"] == 6 and engine.outputs["d"] == 2
    assert usable_free(s) == 399
    assert NeuronScheduler.check(s) is None
