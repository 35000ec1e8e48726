"""X01: invalid arguments of `Scheduler` and `Req` raise an exception that names them, and change nothing."""

import numpy as np
import pytest

from neuron_sched import Req, Scheduler
from tests.mixed.support.scheduler import scheduler_with, step

BIG = 2**53
NOT_WHOLE = [None, "7", b"7", 1.5, 7.0, float("nan"), float("inf"), True, [], 1j, np.float64(3), np.bool_(True)]
OUT_OF_RANGE = [-1, BIG + 1, 2**63, 2**64, -(2**80), 10**5000]


@pytest.mark.parametrize("field", ["prompt_len", "max_new", "prefilled", "generated"])
def test_x01_invalid_counts_of_a_request_are_refused(field):
    good = {"rid": "x", "prompt_len": 3, "max_new": 3}
    for value in NOT_WHOLE:
        with pytest.raises(TypeError, match=f"^{field}: .*: expected a whole number"):
            Req(**good | {field: value})
    for value in OUT_OF_RANGE:
        with pytest.raises(ValueError, match=f"^{field}: .*: expected a whole number from [01] to"):
            Req(**good | {field: value})


@pytest.mark.parametrize("field", ["token_budget", "max_seqs", "kv_tokens"])
def test_x01_invalid_counts_of_a_scheduler_are_refused(field):
    good = {"token_budget": 8, "max_seqs": 2, "kv_tokens": 100}
    for value in NOT_WHOLE:
        with pytest.raises(TypeError, match=f"^{field}: .*: expected a whole number"):
            Scheduler(**good | {field: value})
    for value in [*OUT_OF_RANGE, 0]:
        with pytest.raises(ValueError, match=f"^{field}: .*: expected a whole number from 1 to {BIG}"):
            Scheduler(**good | {field: value})


def test_x01_counters_beyond_the_lengths_of_the_request_are_refused():
    with pytest.raises(ValueError, match="prefilled: 4: expected a whole number from 0 to prompt_len = 3"):
        Req("x", 3, 3, 4)
    with pytest.raises(ValueError, match="generated: 3: expected a whole number from 0 to max_new - 1, max_new = 3"):
        Req("x", 3, 3, 0, 3)


def test_x01_the_largest_counts_are_exact():
    scheduler = Scheduler(2**40, BIG, BIG)
    req = Req("x", BIG - 1, 1, prefilled=BIG - 1 - 2**40)
    scheduler.add(req)
    assert step(scheduler) == ([("x", 2**40)], ["x"])
    assert (req.prefilled, req.generated, scheduler.reserved) == (BIG - 1, 1, 0)
    with pytest.raises(ValueError, match=f"kv: {2 * BIG} tokens"):
        scheduler.add(Req("y", BIG, BIG))


def test_x01_numpy_integers_are_accepted():
    scheduler = Scheduler(np.int64(8), np.uint8(2), np.int32(100))
    scheduler.add(Req("a", np.int64(3), np.int16(1)))
    assert step(scheduler) == ([("a", 3)], ["a"])


def test_x01_the_scheduler_stays_usable_after_invalid_calls():
    scheduler = Scheduler(8, 2, 100)
    other = scheduler_with(8, 2, 100, ("z", 3, 1))
    for bad in (None, "a", ("a", 3, 1), 7, Req):
        with pytest.raises(TypeError, match=r"req: .*: expected a Req"):
            scheduler.add(bad)
    for rid in ([], {}, ([],)):
        with pytest.raises(TypeError, match=r"rid: .*: expected a hashable value"):
            Req(rid, 3, 1)
        with pytest.raises(TypeError, match="unhashable"):
            scheduler.cancel(rid)
    scheduler.schedule()
    with pytest.raises(ValueError, match="plan: "):
        scheduler.complete(other.schedule())
    for name, value in {"prompt_len": 1, "rid": 1, "generated": 1, "extra": 1}.items():
        with pytest.raises(AttributeError):
            setattr(Req("a", 3, 1), name, value)
    for rid in "abc":
        scheduler.add(Req(rid, 3, 1))
    assert step(scheduler) == ([("a", 3), ("b", 3)], ["a", "b"])
    assert step(scheduler) == ([("c", 3)], ["c"])
    scheduler.check()


@pytest.mark.parametrize("rid", [None, "a", b"a", 1, 1.5, (1, "a"), frozenset({1}), object()])
def test_any_hashable_object_is_a_rid_and_is_returned_unchanged(rid):
    scheduler = Scheduler(8, 2, 100)
    scheduler.add(Req(rid, 3, 9))
    plan, emitted = step(scheduler)
    assert plan[0][0] is emitted[0] is scheduler.running[0].rid is rid
    assert scheduler.cancel(rid)


def test_rids_that_compare_equal_are_the_same_rid():
    scheduler = Scheduler(8, 2, 100)
    scheduler.add(Req(1, 3, 9))
    with pytest.raises(ValueError, match="rid: True: expected a rid that is not already live"):
        scheduler.add(Req(True, 3, 9))
    assert scheduler.cancel(1.0)
