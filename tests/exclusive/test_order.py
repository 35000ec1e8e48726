"""Order of requests in `BucketScheduler`, and the reasons for waiting that `explain()` returns."""

from tests.exclusive.support.scheduler import add, advance, both, make, steps_until_done

pytestmark = both


def test_lower_priority_numbers_come_first_then_earlier_arrivals(impl):
    s = make(impl, policy="priority", max_num_seqs=1)
    for name, priority in {"a": 5, "b": 3, "c": 0, "d": 3}.items():
        add(impl, s, **{name: (10, 1, {"priority": priority})})
    assert steps_until_done(s) == [{"c": 10}, {"b": 10}, {"d": 10}, {"a": 10}]


def test_policy_fcfs_ignores_priorities(impl):
    s = make(impl)
    add(impl, s, a=(10, 1, {"priority": 5}), b=(10, 1))
    assert steps_until_done(s) == [{"a": 10}, {"b": 10}]


def test_a_running_request_is_never_preempted_by_a_better_priority(impl):
    s = make(impl, policy="priority", max_num_seqs=1)
    add(impl, s, a=(100, 2))
    advance(s)
    add(impl, s, b=(10, 1, {"priority": -1}))
    assert steps_until_done(s) == [{"a": 36}, {"a": 1}, {"b": 10}]


def test_throttling_delays_prefills_only_while_a_request_can_decode(impl):
    s = make(impl)
    add(impl, s, a=(10, 3), b=(10, 1))
    assert s.schedule(throttle_prefills=True).num_scheduled_tokens == {"a": 10}, "no request is decoding"
    advance(s)
    step = s.schedule(throttle_prefills=True)
    assert (step.num_scheduled_tokens, s.explain().reason) == ({"a": 1}, "throttled")
    s.complete(step)
    assert s.schedule().num_scheduled_tokens == {"b": 10}


def test_no_step_is_idle_while_a_request_can_decode(impl):
    s = make(impl, num_blocks=2)
    add(impl, s, a=(20, 5), b=(30, 2))
    advance(s)
    assert s.explain().reason == "kv"
    assert [advance(s)[0].kind for _ in range(4)] == ["decode"] * 4
    assert advance(s)[0].num_scheduled_tokens == {"b": 30}


def explanation(s):
    e = s.explain()
    return e.id, e.reason, e.needed, e.reserved, e.usable


def test_explain_slots(impl):
    s = make(impl, max_num_seqs=1, num_blocks=9)
    assert s.explain() is None
    add(impl, s, a=(30, 5))
    assert explanation(s) == ("a", "ready", 3, 0, 9)
    advance(s)
    assert s.explain() is None
    add(impl, s, b=(100, 5))
    assert explanation(s) == ("b", "slots", 7, 3, 9)


def test_explain_kv(impl):
    s = make(impl, num_blocks=9)
    add(impl, s, a=(30, 5), b=(100, 5))
    advance(s)
    assert explanation(s) == ("b", "kv", 7, 3, 9)


def test_explain_prefill_in_progress(impl):
    s = make(impl)
    add(impl, s, a=(100, 5), b=(10, 5))
    advance(s)
    assert explanation(s) == ("b", "prefill_in_progress", 1, 7, 399)


def test_explain_while_several_prompts_are_prefilled(impl):
    config = {"max_num_batched_tokens": 128, "max_prefills_per_batch": 2, "num_blocks": 9}
    for prompts, reason in (((10, 10, 10), "prefill_batch_full"), ((100, 29, 5), "prefill_batch_full")):
        s = make(impl, **config)
        add(impl, s, **{f"r{i}": (length, 1) for i, length in enumerate(prompts)})
        s.schedule()
        assert s.explain().reason == reason
    s = make(impl, **config)
    add(impl, s, a=(100, 1), b=(20, 30))
    s.schedule()
    assert explanation(s) == ("b", "kv", 4, 7, 9), "it fits into the batch but not into the KV cache"


def test_explain_interleave_and_step_running(impl):
    s = make(impl, max_consecutive_prefill_steps=1, min_decode_steps=2)
    add(impl, s, a=(10, 9), b=(10, 9), c=(10, 9))
    advance(s)
    assert explanation(s) == ("b", "ready", 2, 2, 399)
    advance(s)
    assert s.explain().reason == "interleave"
    step = s.schedule()
    assert (step.kind, s.explain().reason) == ("decode", "interleave")
    s.complete(step)
    assert s.explain().reason == "interleave"
    advance(s)
    assert s.explain().reason == "ready"
    advance(s)
    assert s.explain() is None
    s.schedule()
    add(impl, s, d=(10, 9))
    assert s.explain().reason == "step_running"


def test_admission_by_model_length_counts_sequences(impl):
    s = make(impl, kv_admission="max_model_len", max_model_len=64, num_blocks=9)
    add(impl, s, a=(10, 2), b=(10, 2), c=(10, 2))
    advance(s)
    advance(s)
    assert explanation(s) == ("c", "kv", 4, 8, 9)
    assert steps_until_done(s) == [{"a": 1, "b": 1}, {"c": 10}, {"c": 1}]
