"""X01: Python code that runs during a call of `Scheduler`, threads, and garbage collection."""

import contextlib
import gc
import threading
import weakref

import pytest

from neuron_sched import Req, Scheduler
from tests.mixed.support.scheduler import scheduler_with, step

# Python code that runs during a call


class Rid:
    """A rid whose hash equals that of the others, and whose comparison calls `before` first."""

    def __init__(self, name, before=lambda: None):
        self.name = name
        self.before = before

    def __hash__(self):
        return 7

    def __eq__(self, other):
        self.before()
        other.before()
        return self.name == other.name


def once_without_error(call):
    """Return a function that runs `call` the first time only, and ignores its `ValueError`."""
    calls = [call]

    def once():
        if calls:
            with contextlib.suppress(ValueError):
                calls.pop()()

    return once


def test_x01_a_rid_that_adds_an_equal_rid_while_it_is_added():
    scheduler = Scheduler(8, 4, 100)
    scheduler.add(Req(Rid("first"), 1, 5))
    rid = Rid("twin")
    rid.before = once_without_error(lambda: scheduler.add(Req(Rid("twin"), 2, 5)))
    with pytest.raises(ValueError, match="already live"):
        scheduler.add(Req(rid, 1, 5))
    assert [(req.rid.name, req.prompt_len) for req in scheduler.waiting] == [("first", 1), ("twin", 2)]


def test_x01_a_rid_that_adds_its_own_request_while_it_is_added():
    scheduler = Scheduler(8, 4, 100)
    scheduler.add(Req(Rid("first"), 1, 5))
    rid = Rid("self")
    req = Req(rid, 1, 5)
    rid.before = once_without_error(lambda: scheduler.add(req))
    scheduler.add(req)
    assert len(scheduler.waiting) == 2


def test_x01_a_rid_that_cancels_a_request_and_runs_a_step_while_it_is_compared():
    scheduler = Scheduler(8, 4, 100)
    first = Rid("first")
    scheduler.add(Req(first, 1, 5))
    rid = Rid("second")

    def cancel_and_step():
        scheduler.cancel(first)
        step(scheduler)

    rid.before = once_without_error(cancel_and_step)
    scheduler.add(Req(rid, 1, 5))
    rid.before = once_without_error(cancel_and_step)
    assert scheduler.cancel(rid) is True
    assert (len(scheduler.waiting), len(scheduler.running), scheduler.reserved) == (0, 0, 0)
    scheduler.check()


def test_x01_a_rid_whose_comparison_fails():
    scheduler = Scheduler(8, 4, 100)
    scheduler.add(Req(Rid("first"), 1, 5))

    def fail():
        raise RuntimeError("comparison failed")

    req = Req(Rid("second", fail), 1, 5)
    with pytest.raises(RuntimeError, match="comparison failed"):
        scheduler.add(req)
    assert len(scheduler.waiting) == 1
    req.rid.before = lambda: None
    scheduler.add(req)
    assert len(scheduler.waiting) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_x01_a_rid_whose_comparison_fails_when_its_request_ends():
    scheduler = Scheduler(8, 4, 100)
    scheduler.add(Req(Rid("first"), 1, 5))
    rid = Rid("second")
    scheduler.add(Req(rid, 1, 1))

    def fail():
        raise RuntimeError("comparison failed")

    rid.before = fail
    plan = scheduler.schedule()
    assert [emitted.name for emitted in scheduler.complete(plan)] == ["first", "second"]
    rid.before = lambda: None
    scheduler.add(Req(Rid("second"), 1, 1))
    assert [req.rid.name for req in scheduler.waiting] == ["second"]


def test_x01_a_plan_entry_that_completes_the_plan_while_it_is_compared():
    scheduler = scheduler_with(8, 4, 100, ("a", 2, 5), ("b", 2, 5))
    plan = scheduler.schedule()

    class Entry:
        def __eq__(self, other):
            scheduler.complete(plan)
            return True

        __hash__ = None

    with pytest.raises(ValueError, match="plan: "):
        scheduler.complete([Entry(), plan[1]])
    assert [req.generated for req in scheduler.running] == [1, 1]


def test_x01_a_plan_entry_whose_comparison_fails():
    scheduler = scheduler_with(8, 4, 100, ("a", 2, 5))
    plan = scheduler.schedule()

    class Entry:
        def __eq__(self, other):
            raise RuntimeError("comparison failed")

        __hash__ = None

    with pytest.raises(RuntimeError, match="comparison failed"):
        scheduler.complete([Entry()])
    assert scheduler.complete(plan) == ["a"]


def test_x01_a_finaliser_may_call_the_scheduler_during_garbage_collection():
    scheduler = Scheduler(4096, 4096, 10**7)
    finalised = []

    class Loop:
        def __init__(self):
            self.me = self

        def __del__(self):
            scheduler.cancel(len(finalised))
            finalised.append(scheduler.reserved)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for rid in range(300):
            Loop()
            scheduler.add(Req(rid, 1, 50))
            if rid % 10 == 0:
                plan = scheduler.schedule()
                try:
                    scheduler.complete(plan)
                except ValueError:
                    assert finalised
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(finalised) == 300
    scheduler.check()


# Threads and memory


def test_x01_calls_from_several_threads():
    scheduler = Scheduler(64, 8, 10_000)
    threads, each = 4, 200
    emitted = []
    failures = []
    cancelled = []

    def serve(name):
        try:
            for i in range(each):
                scheduler.add(Req((name, i), 1 + i % 5, 1 + i % 7))
                if i % 17 == 0 and scheduler.cancel((name, i)):
                    cancelled.append((name, i))
                plan = scheduler.schedule()
                with contextlib.suppress(ValueError):  # another thread planned or completed in between
                    emitted.extend(scheduler.complete(plan))
                list(scheduler.waiting)
                assert all(req.generated <= req.max_new for req in scheduler.running)
                scheduler.check()
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=serve, args=(name,)) for name in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    while scheduler.waiting or scheduler.running:
        emitted.extend(step(scheduler)[1])
    expected = {(name, i): 1 + i % 7 for name in range(threads) for i in range(each)}
    counted = {rid: emitted.count(rid) for rid in expected}
    assert all(counted[rid] == outputs for rid, outputs in expected.items() if rid not in cancelled)
    assert scheduler.reserved == 0


def test_ended_requests_are_freed():
    scheduler = Scheduler(64, 8, 1000)
    requests = [Req(i, 2, 3) for i in range(4)]
    references = [weakref.ref(req) for req in requests]
    for req in requests:
        scheduler.add(req)
    del requests, req
    step(scheduler)
    step(scheduler)
    assert all(ref() is not None for ref in references)
    scheduler.cancel(3)
    assert references[3]() is None, "cancelled"
    step(scheduler)
    assert [ref() for ref in references] == [None] * 4


def test_requests_stay_valid_after_their_scheduler_is_freed():
    scheduler = scheduler_with(8, 4, 100, ("a", 2, 5), ("b", 2, 5))
    step(scheduler)
    a, _ = running = scheduler.running
    reference = weakref.ref(scheduler)
    del scheduler, running
    assert reference() is None
    assert (a.rid, a.prefilled, a.generated) == ("a", 2, 1)


def test_a_reference_cycle_through_a_rid_is_collected():
    class Owner:
        pass

    owner = Owner()
    owner.scheduler = Scheduler(8, 4, 100)
    owner.scheduler.add(Req(owner, 2, 5))
    owner.plan = owner.scheduler.schedule()
    owner.queue = owner.scheduler.running
    reference = weakref.ref(owner)
    del owner
    gc.collect()
    assert reference() is None
