"""`Scheduler` and `Req`: worked cases, plans, and queues as sequences."""

import copy
from collections.abc import Sequence
from unittest.mock import ANY

import numpy as np
import pytest

from neuron_sched import Req, Scheduler
from tests.mixed.support.scheduler import by_rid, decoding, scheduler_with, step

# Worked examples


def test_decodes_are_scheduled_before_a_long_prompt():
    scheduler = decoding(512)
    scheduler.add(Req("long", 8192, 10))
    assert by_rid(scheduler.schedule()) == [*((i, 1) for i in range(64)), ("long", 448)]


def test_a_long_prompt_takes_19_chunks():
    scheduler = decoding(512)
    long = Req("long", 8192, 10)
    scheduler.add(long)
    chunks = []
    while long.prefilled < long.prompt_len:
        plan, emitted = step(scheduler)
        chunks.append(plan[-1][1])
        assert ("long" in emitted) == (long.prefilled == long.prompt_len)
    assert chunks == [448] * 18 + [128]
    assert long.generated == 1


def test_s01_reservations_fill_the_kv_cache_exactly():
    scheduler = scheduler_with(8, 4, 20, ("a", 6, 4), ("b", 6, 4), ("c", 2, 1))
    assert step(scheduler) == ([("a", 6), ("b", 2)], ["a"])
    assert scheduler.reserved == 20
    assert step(scheduler) == ([("a", 1), ("b", 4)], ["a", "b"])
    assert step(scheduler) == ([("a", 1), ("b", 1)], ["a", "b"])
    assert step(scheduler) == ([("a", 1), ("b", 1)], ["a", "b"])
    assert scheduler.reserved == 10
    assert step(scheduler) == ([("b", 1), ("c", 2)], ["b", "c"])
    assert scheduler.reserved == 0
    assert step(scheduler) == ([], [])


def test_s03_no_later_request_is_admitted_before_the_head():
    scheduler = scheduler_with(16, 4, 30, ("a", 10, 10), ("big", 8, 8), ("s", 2, 2))
    assert step(scheduler) == ([("a", 10)], ["a"])
    for _ in range(9):
        assert step(scheduler) == ([("a", 1)], ["a"])
    assert step(scheduler) == ([("big", 8), ("s", 2)], ["big", "s"])
    assert step(scheduler) == ([("big", 1), ("s", 1)], ["big", "s"])
    for _ in range(12, 18):
        assert step(scheduler) == ([("big", 1)], ["big"])
    assert (list(scheduler.running), scheduler.reserved) == ([], 0)


def test_s04_one_token_requests_need_no_decode():
    scheduler = scheduler_with(8, 2, 100, ("a", 3, 1), ("b", 3, 1), ("c", 3, 1))
    assert step(scheduler) == ([("a", 3), ("b", 3)], ["a", "b"])
    assert (len(scheduler.running), scheduler.reserved) == (0, 0)
    assert step(scheduler) == ([("c", 3)], ["c"])
    assert step(scheduler) == ([], [])


def test_s05_a_prefilling_request_keeps_the_only_slot():
    scheduler = scheduler_with(64, 1, 1000, ("p", 150, 2), ("q", 10, 1))
    assert [step(scheduler) for _ in range(5)] == [
        ([("p", 64)], []),
        ([("p", 64)], []),
        ([("p", 22)], ["p"]),
        ([("p", 1)], ["p"]),
        ([("q", 10)], ["q"]),
    ]
    assert not scheduler.running


def test_s06_the_remaining_budget_goes_to_the_next_prompt():
    scheduler = scheduler_with(8, 4, 100, ("p", 4, 1), ("q", 8, 1))
    assert [step(scheduler) for _ in range(2)] == [([("p", 4), ("q", 4)], ["p"]), ([("q", 4)], ["q"])]
    assert not scheduler.running


def test_s07_a_prefilling_request_is_scheduled_before_a_new_one():
    scheduler = scheduler_with(16, 8, 1000, ("d", 1, 9))
    step(scheduler)
    scheduler.add(Req("p", 20, 2))
    scheduler.add(Req("q", 4, 1))
    assert [step(scheduler) for _ in range(3)] == [
        ([("d", 1), ("p", 15)], ["d"]),
        ([("d", 1), ("p", 5), ("q", 4)], ["d", "p", "q"]),
        ([("d", 1), ("p", 1)], ["d", "p"]),
    ]


def test_s08_a_request_that_can_never_fit_is_refused_and_an_exact_fit_is_not():
    scheduler = Scheduler(8, 2, 16)
    impossible = Req("x", 10, 7)
    with pytest.raises(ValueError, match="kv: 17 tokens in the worst case: expected at most 16 tokens"):
        scheduler.add(impossible)
    assert (len(scheduler.waiting), scheduler.reserved, scheduler.cancel("x")) == (0, 0, False)
    scheduler.add(Req("y", 10, 6))
    steps = [step(scheduler) for _ in range(7)]
    assert steps == [([("y", 8)], []), ([("y", 2)], ["y"])] + [([("y", 1)], ["y"])] * 5
    assert (list(scheduler.running), scheduler.reserved) == ([], 0)
    larger = Scheduler(8, 2, 17)
    larger.add(impossible)
    assert larger.waiting == [impossible]


def test_s09_the_next_request_is_admitted_after_the_head_is_cancelled():
    scheduler = scheduler_with(16, 4, 30, ("a", 10, 10), ("big", 8, 8), ("s", 2, 2))
    step(scheduler)
    assert step(scheduler) == ([("a", 1)], ["a"])
    assert scheduler.cancel("big") is True
    assert step(scheduler) == ([("a", 1), ("s", 2)], ["a", "s"])
    assert scheduler.reserved == 24
    assert scheduler.cancel("a") is True
    assert scheduler.reserved == 4
    assert scheduler.cancel("a") is False
    assert scheduler.cancel("unknown") is False
    assert scheduler.reserved == 4


def test_s10_a_request_is_admitted_once_a_slot_is_free():
    scheduler = scheduler_with(64, 4, 10_000, *((i, 16, 3) for i in range(5)))
    four = [0, 1, 2, 3]
    assert step(scheduler) == ([(i, 16) for i in four], four)
    for _ in range(2):
        assert len(scheduler.running) == 4
        assert step(scheduler) == ([(i, 1) for i in four], four)
    assert [step(scheduler) for _ in range(3)] == [([(4, 16)], [4]), ([(4, 1)], [4]), ([(4, 1)], [4])]
    assert not scheduler.running


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (-1, 3), (3, -1)])
def test_s11_zero_and_negative_fields_are_refused(sizes):
    with pytest.raises(ValueError, match=r"(prompt_len|max_new): (0|-1): expected a whole number from 1 to"):
        Req("x", *sizes)


def test_s11_a_plan_is_completed_once_and_a_request_is_added_once():
    scheduler = Scheduler(8, 2, 100)
    a = Req("a", 3, 5)
    scheduler.add(a)
    with pytest.raises(ValueError, match="already live"):
        scheduler.add(a)
    with pytest.raises(ValueError, match="'a': expected a rid that is not already live"):
        scheduler.add(Req("a", 3, 5))
    with pytest.raises(ValueError, match="already live"):
        Scheduler(8, 2, 100).add(a)
    plan = scheduler.schedule()
    assert scheduler.complete(plan) == ["a"]
    for _ in range(2):
        with pytest.raises(ValueError, match="plan: "):
            scheduler.complete(plan)
    assert (a.prefilled, a.generated, scheduler.reserved, len(scheduler.waiting)) == (3, 1, 8, 0)
    with pytest.raises(ValueError, match="token_budget: 0: expected a whole number from 1 to"):
        Scheduler(0, 2, 100)


# Counters, requests added again, plans


def test_a_request_continues_from_its_counters():
    scheduler = Scheduler(8, 4, 100)
    decoding, prefilling = Req("d", 10, 5, 10, 3), Req("p", 10, 5, prefilled=7, generated=2)
    scheduler.add(decoding)
    scheduler.add(prefilling)
    assert step(scheduler) == ([("d", 1), ("p", 3)], ["d", "p"])
    assert (decoding.generated, prefilling.prefilled, prefilling.generated) == (4, 10, 3)


def test_a_cancelled_request_may_be_added_again():
    scheduler = scheduler_with(4, 4, 100)
    req = Req("a", 6, 5)
    scheduler.add(req)
    step(scheduler)
    assert scheduler.cancel("a")
    assert (req.prefilled, req.generated, scheduler.reserved) == (4, 0, 0)
    other = Scheduler(4, 4, 100)
    other.add(req)
    assert step(other) == ([("a", 2)], ["a"])
    step(other)
    other.cancel("a")
    scheduler.add(req)
    assert step(scheduler) == ([("a", 1)], ["a"])
    assert (req.prefilled, req.generated) == (6, 3)


def test_a_finished_request_keeps_its_counters_and_its_rid_may_be_reused():
    scheduler = Scheduler(8, 4, 100)
    req = Req("a", 2, 1)
    scheduler.add(req)
    step(scheduler)
    assert (req.prefilled, req.generated) == (2, 1)
    with pytest.raises(ValueError, match="generated: 1: expected a whole number from 0 to max_new - 1"):
        scheduler.add(req)
    scheduler.add(Req("a", 2, 1))
    assert step(scheduler) == ([("a", 2)], ["a"])


def test_scheduling_again_replaces_the_plan_and_keeps_admissions():
    scheduler = scheduler_with(8, 4, 100, ("a", 6, 3))
    old = scheduler.schedule()
    scheduler.add(Req("b", 6, 3))
    new = scheduler.schedule()
    assert (by_rid(old), by_rid(new)) == ([("a", 6)], [("a", 6), ("b", 2)])
    with pytest.raises(ValueError, match="plan: "):
        scheduler.complete(old)
    assert [req.rid for req in scheduler.running] == ["a", "b"]
    assert scheduler.complete(new) == ["a"]


def test_an_equal_copy_of_the_plan_is_accepted():
    scheduler = decoding(512)
    for copied in (list, copy.copy, lambda plan: [(req, tokens) for req, tokens in plan], lambda plan: plan):
        assert scheduler.complete(copied(scheduler.schedule())) == list(range(64))


def test_an_empty_plan_is_completed_like_any_other():
    scheduler = Scheduler(8, 4, 100)
    with pytest.raises(ValueError, match="plan: "):
        scheduler.complete([])
    assert scheduler.complete(scheduler.schedule()) == []
    with pytest.raises(ValueError, match="plan: "):
        scheduler.complete([])


def test_a_plan_that_is_not_the_last_one_is_refused_and_changes_nothing():
    scheduler = scheduler_with(8, 4, 100, ("a", 2, 5), ("b", 2, 5))
    twin = scheduler_with(8, 4, 100, ("a", 2, 5), ("b", 2, 5))
    plan = scheduler.schedule()
    (a, n), (b, m) = plan
    foreign = twin.schedule()
    wrong = [
        [],
        plan[:1],
        plan[::-1],
        [*plan, (a, 1)],
        [(a, n + 1), (b, m)],
        [(a, n), (a, m)],
        [(a, None), (b, m)],
        [(a,), (b, m)],
        [("a", n), ("b", m)],
        [None, None],
        foreign,
    ]
    for other in wrong:
        with pytest.raises(ValueError, match="plan: not due: expected the list of the last schedule"):
            scheduler.complete(other)
    for other in (None, 7, "plan", tuple(plan), iter(plan), {a: n}):
        with pytest.raises(TypeError, match=r"plan: .*: expected a list"):
            scheduler.complete(other)
    assert (a.prefilled, b.prefilled, scheduler.reserved) == (0, 0, 14)
    assert scheduler.complete(plan) == ["a", "b"]


def test_changing_returned_lists_does_not_change_the_scheduler():
    scheduler = decoding(512)
    for _ in range(3):
        plan = scheduler.schedule()
        copied = list(plan)
        plan.pop()
        with pytest.raises(ValueError, match="plan: "):
            scheduler.complete(plan)
        plan.clear()
        rids = scheduler.complete(copied)
        assert rids == list(range(64))
        rids.clear()


def test_the_plan_entry_of_a_cancelled_request_is_ignored():
    scheduler = scheduler_with(8, 4, 100, ("a", 2, 5), ("b", 2, 5), ("c", 2, 5))
    a, b, _ = scheduler.waiting
    plan = scheduler.schedule()
    assert scheduler.cancel("b")
    scheduler.add(b)
    assert scheduler.complete(plan) == ["a", "c"]
    assert (b.prefilled, list(scheduler.waiting), scheduler.reserved) == (0, [b], 14)
    step(scheduler)
    plan = scheduler.schedule()
    assert by_rid(plan) == [("a", 1), ("c", 1), ("b", 1)]
    scheduler.cancel("a")
    assert scheduler.complete(plan) == ["c", "b"]
    assert (a.generated, b.generated) == (2, 2)


def test_counters_are_correct_after_every_step_of_a_long_decode():
    scheduler = scheduler_with(8, 2, 1000, ("a", 1, 50), ("b", 1, 50))
    a, b = scheduler.waiting
    for done in range(1, 50):
        step(scheduler)
        assert (a.generated, b.generated) == (done, done)
    assert scheduler.cancel("b")
    assert (a.generated, b.generated) == (49, 49)
    assert step(scheduler) == ([("a", 1)], ["a"])
    assert a.generated == 50


# The queues as sequences


def test_queues_behave_as_sequences():
    reqs = [Req(i, 1, 5) for i in range(6)]
    scheduler = Scheduler(2, 2, 100)
    waiting, running = scheduler.waiting, scheduler.running
    assert (len(waiting), bool(waiting), bool(running)) == (0, False, False)
    for req in reqs:
        scheduler.add(req)
    assert isinstance(waiting, Sequence)
    assert (list(waiting), bool(waiting), len(waiting)) == (reqs, True, 6)
    scheduler.schedule()
    assert (list(running), list(waiting)) == (reqs[:2], reqs[2:])
    assert (waiting[0], waiting[-1], running[1], running[-2]) == (reqs[2], reqs[5], reqs[1], reqs[0])
    assert (waiting[1:3], waiting[::-2], waiting[9:]) == (reqs[3:5], [reqs[5], reqs[3]], [])
    assert waiting[np.int64(1)] is reqs[3]
    assert list(reversed(waiting)) == reqs[:1:-1]
    assert reqs[2] in waiting
    assert reqs[2] not in running
    assert Req(2, 1, 5) not in waiting
    assert 2 not in waiting
    assert ANY in waiting
    assert (waiting.index(reqs[4]), waiting.index(reqs[4], 1, 3), waiting.count(reqs[4])) == (2, 2, 1)
    assert waiting == reqs[2:]
    assert waiting == scheduler.waiting
    assert waiting != running
    assert waiting != reqs
    assert waiting != tuple(reqs[2:])
    assert repr(running) == "Requests([" + ", ".join(f"Req({i}, 1, 5, prefilled=0, generated=0)" for i in (0, 1)) + "])"
    for index in (4, -5, 2**70, -(2**70)):
        with pytest.raises(IndexError):
            waiting[index]
    for index in ("0", 1.0, None):
        with pytest.raises(TypeError):
            waiting[index]
    with pytest.raises(ValueError, match="not in list"):
        waiting.index(reqs[0])
    with pytest.raises(TypeError):
        hash(waiting)
    with pytest.raises(TypeError):
        waiting < running  # noqa: B015


def test_queues_may_change_during_iteration():
    scheduler = scheduler_with(4, 2, 100, *((i, 1, 5) for i in range(8)))
    scheduler.schedule()
    for req in scheduler.waiting:
        assert scheduler.cancel(req.rid)
    assert len(scheduler.waiting) == 0
    for req in scheduler.running:
        scheduler.add(Req(str(req.rid), 1, 1))
        scheduler.cancel(req.rid)
    assert [req.rid for req in scheduler.waiting] == ["0", "1"]


def test_positions_in_the_waiting_queue_after_cancellations():
    scheduler = scheduler_with(1, 1, 100, *((i, 1, 5) for i in range(10)))
    for rid in (0, 4, 5, 9):
        scheduler.cancel(rid)
    assert [scheduler.waiting[i].rid for i in range(-6, 6)] == [1, 2, 3, 6, 7, 8] * 2
