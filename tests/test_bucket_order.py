"""Who goes next in `BucketScheduler`, and the reasons that `explain()` gives for waiting."""

from bucket_setup import add, advance, both, make, steps_until_done

pytestmark = both


def test_priority_lower_first_then_arrival(impl):
    s = make(impl, policy="priority", max_num_seqs=1)
    for name, priority in {"a": 5, "b": 3, "c": 0, "d": 3}.items():
        add(impl, s, **{name: (10, 1, {"priority": priority})})
    assert steps_until_done(s) == [{"c": 10}, {"b": 10}, {"d": 10}, {"a": 10}]


def test_priority_is_ignored_when_first_come_is_first_served(impl):
    s = make(impl)
    add(impl, s, a=(10, 1, {"priority": 5}), b=(10, 1))
    assert steps_until_done(s) == [{"a": 10}, {"b": 10}]


def test_nobody_running_makes_room_for_a_better_priority(impl):
    s = make(impl, policy="priority", max_num_seqs=1)
    add(impl, s, a=(100, 2))
    advance(s)
    add(impl, s, b=(10, 1, {"priority": -1}))
    assert steps_until_done(s) == [{"a": 36}, {"a": 1}, {"b": 10}]


def test_throttled_prefills_wait_for_decodes_but_never_idle(impl):
    s = make(impl)
    add(impl, s, a=(10, 3), b=(10, 1))
    assert s.schedule(throttle_prefills=True).num_scheduled_tokens == {"a": 10}, "nothing to decode"
    advance(s)
    step = s.schedule(throttle_prefills=True)
    assert (step.num_scheduled_tokens, s.explain().reason) == ({"a": 1}, "throttled")
    s.complete(step)
    assert s.schedule().num_scheduled_tokens == {"b": 10}


def test_no_empty_step_while_somebody_could_decode(impl):
    s = make(impl, num_blocks=2)
    add(impl, s, a=(20, 5), b=(30, 2))
    advance(s)
    assert s.explain().reason == "kv"
    assert [advance(s)[0].kind for _ in range(4)] == ["decode"] * 4
    assert advance(s)[0].num_scheduled_tokens == {"b": 30}


def explained(s):
    e = s.explain()
    return e.id, e.reason, e.needed, e.reserved, e.usable


def test_explain_slots(impl):
    s = make(impl, max_num_seqs=1, num_blocks=9)
    assert s.explain() is None
    add(impl, s, a=(30, 5))
    assert explained(s) == ("a", "ready", 3, 0, 9)
    advance(s)
    assert s.explain() is None
    add(impl, s, b=(100, 5))
    assert explained(s) == ("b", "slots", 7, 3, 9)


def test_explain_kv(impl):
    s = make(impl, num_blocks=9)
    add(impl, s, a=(30, 5), b=(100, 5))
    advance(s)
    assert explained(s) == ("b", "kv", 7, 3, 9)


def test_explain_prefill_in_progress(impl):
    s = make(impl)
    add(impl, s, a=(100, 5), b=(10, 5))
    advance(s)
    assert explained(s) == ("b", "prefill_in_progress", 1, 7, 399)


def test_explain_while_a_batch_of_prefills_runs(impl):
    config = {"max_num_batched_tokens": 128, "max_prefills_per_batch": 2, "num_blocks": 9}
    for prompts, reason in (((10, 10, 10), "prefill_batch_full"), ((100, 29, 5), "prefill_batch_full")):
        s = make(impl, **config)
        add(impl, s, **{f"r{i}": (length, 1) for i, length in enumerate(prompts)})
        s.schedule()
        assert s.explain().reason == reason
    s = make(impl, **config)
    add(impl, s, a=(100, 1), b=(20, 30))
    s.schedule()
    assert explained(s) == ("b", "kv", 4, 7, 9), "the batch has room for it, the cache has not"


def test_explain_interleave_and_step_running(impl):
    s = make(impl, max_consecutive_prefill_steps=1, min_decode_steps=2)
    add(impl, s, a=(10, 9), b=(10, 9), c=(10, 9))
    advance(s)
    assert explained(s) == ("b", "ready", 2, 2, 399)
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


def test_model_length_admission_counts_sequences(impl):
    s = make(impl, kv_admission="max_model_len", max_model_len=64, num_blocks=9)
    add(impl, s, a=(10, 2), b=(10, 2), c=(10, 2))
    advance(s)
    advance(s)
    assert explained(s) == ("c", "kv", 4, 8, 9)
    assert steps_until_done(s) == [{"a": 1, "b": 1}, {"c": 10}, {"c": 1}]
