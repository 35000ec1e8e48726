"""Interface of `BucketScheduler`: steps as values, void steps, planning ahead, ends of requests, statuses, tokens."""

import pytest

from tests.exclusive.support.scheduler import add, advance, both, make, steps_until_done
from tests.support.outcomes import as_tuples

pytestmark = both


def values_of(step, *ids):
    """Return every value of a step, with the block ids of the given requests."""
    return (
        step.kind,
        list(step.num_scheduled_tokens.items()),
        list(step.num_scheduled_tokens_padded.items()),
        list(step.num_computed_tokens.items()),
        step.num_seqs_padded,
        list(step.finished_ids),
        [step.block_ids(name) for name in ids],
    )


# Steps as values


def test_the_example_of_the_documentation(impl):
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "max_model_len": 4096, "block_size": 32}
    s = impl.new(**config, num_blocks=1024)
    add(impl, s, a=(1500, 16))
    step = s.schedule()
    blocks = list(range(1, 48))
    assert values_of(step, "a") == ("prefill", [("a", 1500)], [("a", 2048)], [("a", 0)], 0, [], [blocks])
    assert as_tuples(s.complete(step, [17])) == [("a", 17, None)]
    state = s.request("a")
    assert (state.status, state.num_computed_tokens) == ("decode", 1500)
    assert (list(state.output_token_ids), list(state.block_ids)) == ([17], blocks)
    step = s.schedule()
    assert values_of(step, "a") == ("decode", [("a", 1)], [("a", 1)], [("a", 1500)], 1, [], [blocks])


def test_counts_change_only_when_a_step_is_completed(impl):
    s = make(impl, num_blocks=20)
    add(impl, s, a=(40, 2), b=(10, 1))
    step = s.schedule()
    assert (s.state, s.num_waiting, s.num_running, s.free_blocks, s.reserved_blocks) == ("idle", 1, 1, 17, 3)
    assert (s.request("a").status, s.request("a").num_computed_tokens) == ("prefill", 0)
    s.complete(step)
    assert (s.state, s.request("a").status, s.request("a").num_computed_tokens) == ("prefill", "decode", 40)
    advance(s)
    assert list(s.schedule().finished_ids) == ["b"]


def test_an_idle_step_is_completed_without_tokens(impl):
    s = make(impl)
    for tokens in ([], None):
        step = s.schedule()
        assert (values_of(step), list(s.complete(step, tokens)), s.state) == (
            ("idle", [], [], [], 0, [], []),
            [],
            "idle",
        )


def test_the_values_of_a_step_never_change(impl):
    s = make(impl, num_blocks=8)
    add(impl, s, a=(40, 1), b=(30, 3))
    step = s.schedule()
    before = values_of(step, "a")
    s.cancel("b")
    assert values_of(step, "a") == before
    s.complete(step)
    assert values_of(step, "a") == before
    add(impl, s, c=(64, 9))
    s.schedule()
    try:
        later = values_of(step, "a")
    except ValueError:
        return
    assert later == before


def test_changing_the_returned_containers_does_not_change_the_step(impl):
    s = make(impl)
    add(impl, s, a=(10, 3), b=(10, 3))
    for _ in range(3):
        step = s.schedule()
        step.num_scheduled_tokens["a"] = 99
        step.num_scheduled_tokens_padded.clear()
        step.finished_ids.append("x")
        s.complete(step)
    assert steps_until_done(s) == [{"a": 1, "b": 1}]


# Void steps


def test_scheduling_again_makes_the_earlier_step_void(impl):
    s = make(impl)
    add(impl, s, a=(100, 2), b=(10, 2))
    first = s.schedule()
    second = s.schedule()
    assert values_of(second, "a") == values_of(first, "a")
    with pytest.raises(ValueError, match="step"):
        s.complete(first)
    s.complete(second)
    with pytest.raises(ValueError, match="step"):
        s.complete(second)
    assert s.request("a").num_computed_tokens == 64


def test_requests_admitted_by_a_void_step_stay_admitted(impl):
    s = make(impl, max_num_batched_tokens=128, max_prefills_per_batch=3, long_prefill_token_threshold=0)
    add(impl, s, a=(30, 1), b=(40, 1), c=(20, 1))
    s.schedule()
    assert (s.num_waiting, s.num_running) == (0, 3)
    s.cancel("a")
    add(impl, s, d=(5, 1))
    step = s.schedule()
    assert list(step.num_scheduled_tokens.items()) == [("b", 40), ("c", 20)], (
        "no request is admitted while others are prefilling"
    )
    assert s.explain().reason == "prefill_in_progress"


def test_a_void_step_does_not_count_towards_the_prefill_streak(impl):
    s = make(impl, max_consecutive_prefill_steps=1, min_decode_steps=1)
    add(impl, s, a=(10, 9), b=(10, 9), c=(10, 9))
    advance(s)
    for _ in range(5):
        assert s.schedule().num_scheduled_tokens == {"b": 10}
    assert advance(s)[0].num_scheduled_tokens == {"b": 10}
    assert advance(s)[0].kind == "decode"
    assert advance(s)[0].num_scheduled_tokens == {"c": 10}


def test_a_void_step_does_not_change_the_decode_steps_due(impl):
    s = make(impl, max_consecutive_prefill_steps=1, min_decode_steps=2)
    add(impl, s, a=(10, 9), b=(10, 9), c=(10, 9))
    assert [advance(s)[0].kind for _ in range(3)] == ["prefill", "prefill", "decode"]
    s.cancel("c")
    assert s.schedule().kind == "decode", "no request is waiting for a prefill"
    add(impl, s, d=(10, 9))
    assert [advance(s)[0].kind for _ in range(2)] == ["decode", "prefill"], "one decode step is still due"


# Planning ahead


def test_a_step_ahead_assumes_that_the_step_in_flight_is_completed(impl):
    s = make(impl)
    add(impl, s, a=(100, 4))
    first, second = s.schedule(), s.schedule(ahead=True)
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 64}, {"a": 36})
    assert second.num_computed_tokens == {"a": 64}
    with pytest.raises(ValueError, match="one step ahead"):
        s.schedule(ahead=True)
    with pytest.raises(ValueError, match="step"):
        s.complete(second)
    s.complete(first)
    third = s.schedule(ahead=True)
    assert (third.kind, third.num_computed_tokens) == ("decode", {"a": 100})
    s.complete(second)
    s.complete(third)
    assert s.request("a").num_computed_tokens == 101


def test_planning_ahead_without_a_step_in_flight_gives_an_ordinary_step(impl):
    s = make(impl)
    add(impl, s, a=(10, 1))
    assert as_tuples(s.complete(s.schedule(ahead=True))) == [("a", None, "length")]


def test_a_step_ahead_omits_requests_that_end_in_the_step_in_flight(impl):
    s = make(impl, max_num_seqs=2)
    add(impl, s, a=(10, 1), b=(10, 3), c=(10, 1))
    first = s.schedule()
    second = s.schedule(ahead=True)
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 10}, {"b": 10})
    assert (s.num_running, s.explain().reason) == (2, "slots"), "a keeps its slot until its step is completed"
    s.complete(first)
    assert list(second.finished_ids) == []
    third = s.schedule(ahead=True)
    assert (list(third.finished_ids), third.num_scheduled_tokens) == (["a"], {"c": 10})
    s.complete(second)
    s.complete(third)


def test_the_row_of_a_stopped_request_is_ignored_in_the_step_ahead(impl):
    s = make(impl)
    add(impl, s, a=([1, 2, 3], 9, {"stop_token_ids": (5,)}), b=([1, 2, 3], 9))
    advance(s, [0])
    advance(s, [0])
    first, second = s.schedule(), s.schedule(ahead=True)
    assert second.num_scheduled_tokens == {"a": 1, "b": 1}
    assert as_tuples(s.complete(first, [5, 6])) == [("a", 5, "stop"), ("b", 6, None)]
    with pytest.raises(ValueError, match="tokens"):
        s.complete(second, [7])
    assert as_tuples(s.complete(second, [7, 8])) == [("b", 8, None)]
    assert list(s.request("b").output_token_ids) == [0, 6, 8]
    assert s.request("a").status == "finished"


def test_scheduling_again_makes_both_steps_void(impl):
    s = make(impl)
    add(impl, s, a=(100, 2))
    old = s.schedule(), s.schedule(ahead=True)
    step = s.schedule()
    assert step.num_scheduled_tokens == {"a": 64}
    for void_step in old:
        with pytest.raises(ValueError, match="step"):
            s.complete(void_step)
    s.complete(step)


def test_overlapping_steps_do_not_report_an_end_twice(impl):
    s = make(impl)
    add(impl, s, a=(10, 1), b=(10, 9))
    advance(s)
    first = s.schedule()
    s.cancel("b")
    second = s.schedule(ahead=True)
    assert (list(first.finished_ids), list(second.finished_ids)) == (["a"], ["b"])
    s.complete(first)
    s.complete(second)
    assert list(s.schedule().finished_ids) == []


# Ends of requests


def test_ends_are_reported_until_a_step_that_reports_them_is_completed(impl):
    s = make(impl)
    add(impl, s, a=(10, 1), b=(10, 9), c=(10, 9))
    s.cancel("c")
    advance(s)
    assert list(s.schedule().finished_ids) == ["a"], "the completed step reported c"
    s.cancel("b")
    step = s.schedule()
    assert list(step.finished_ids) == ["a", "b"]
    assert (s.request("a").status, s.request("b").status) == ("finished", "cancelled")
    s.complete(step)
    for name in "abc":
        with pytest.raises(KeyError):
            s.request(name)
    assert list(s.schedule().finished_ids) == []


def test_statuses(impl):
    s = make(impl)
    add(impl, s, a=(100, 2))
    seen = [s.request("a").status]
    for _ in range(3):
        advance(s)
        seen.append(s.request("a").status)
    assert seen == ["waiting", "prefill", "decode", "finished"]
    assert list(s.request("a").block_ids) == []
    with pytest.raises(KeyError):
        s.request("b")


def test_cancel_frees_blocks_and_slot_at_once(impl):
    s = make(impl, num_blocks=10)
    add(impl, s, a=(100, 9), b=(10, 9))
    step = s.schedule()
    assert s.cancel("a")
    assert s.cancel("b")
    assert not s.cancel("a")
    assert not s.cancel("unknown")
    assert (s.free_blocks, s.reserved_blocks, s.num_running, s.num_waiting) == (10, 0, 0, 0)
    assert list(s.complete(step)) == []
    assert (s.state, list(s.schedule().finished_ids)) == ("idle", ["a", "b"])


def test_an_id_may_be_reused_after_its_request_has_ended(impl):
    s = make(impl)
    add(impl, s, a=(10, 1))
    advance(s)
    add(impl, s, a=(20, 2))
    step = s.schedule()
    assert (list(step.finished_ids), step.num_scheduled_tokens) == (["a"], {"a": 20})
    s.complete(step)
    assert (s.request("a").status, s.request("a").num_computed_tokens) == ("decode", 20)
    assert steps_until_done(s) == [{"a": 1}]


def test_a_request_cancelled_and_added_again_while_its_step_is_in_flight(impl):
    s = make(impl)
    add(impl, s, a=(10, 5))
    step = s.schedule()
    s.cancel("a")
    add(impl, s, a=(7, 1))
    assert list(s.complete(step)) == []
    assert s.request("a").status == "waiting"
    step = s.schedule()
    assert (list(step.finished_ids), step.num_scheduled_tokens) == (["a"], {"a": 7})


# Tokens


def test_tokens_are_required_exactly_for_rows_that_emit(impl):
    s = make(impl)
    add(impl, s, a=([1] * 70, 3))
    step = s.schedule()
    for wrong in ([5], [], [None, None]):
        with pytest.raises(ValueError, match="tokens"):
            s.complete(step, wrong)
    assert list(s.complete(step, [None])) == []
    step = s.schedule()
    for wrong in ([None], None, [], [5, 5]):
        with pytest.raises(ValueError, match="tokens"):
            s.complete(step, wrong)
    assert s.request("a").num_computed_tokens == 64
    assert as_tuples(s.complete(step, (5,))) == [("a", 5, None)]


def test_tokens_are_optional_for_prompts_given_as_lengths(impl):
    s = make(impl)
    add(impl, s, a=(10, 4))
    assert [as_tuples(advance(s, tokens)[1]) for tokens in (None, [5], [None])] == [
        [("a", None, None)],
        [("a", 5, None)],
        [("a", None, None)],
    ]
    assert list(s.request("a").output_token_ids) == [None, 5, None]


def test_finish_reason_stop_takes_precedence_over_length(impl):
    s = make(impl)
    add(impl, s, a=([1, 2], 2, {"stop_token_ids": [7, 8]}), b=(2, 1, {"stop_token_ids": [7]}))
    assert as_tuples(advance(s, [3])[1]) == [("a", 3, None)]
    assert as_tuples(advance(s, [7])[1]) == [("b", 7, "stop")]
    assert as_tuples(advance(s, [8])[1]) == [("a", 8, "stop")]
    assert s.request("a").status == "finished"
