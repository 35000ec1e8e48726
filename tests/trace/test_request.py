"""`TraceRequest`: exact arrivals, checked fields, and comparison by value."""

from decimal import Decimal

import numpy as np
import pytest

from neuron_sched.trace import TraceRequest


@pytest.mark.parametrize("arrival_s", [0.1, "0.1", "1e-1", Decimal("0.1"), np.float64(0.1)])
def test_arrivals_are_exact(arrival_s):
    assert TraceRequest("a", arrival_s, 1, 1).arrival_ns == 100_000_000


def test_arrivals_may_be_integers_or_text_beyond_float_precision():
    assert TraceRequest("a", np.int64(3), 1, 1).arrival_ns == 3_000_000_000
    assert TraceRequest("a", "1700158546.680590001", 1, 1).arrival_ns == 1_700_158_546_680_590_001


BAD = [True, None, -1, "x", 1.5, float("nan"), float("inf"), 10**30, [], b"1"]


@pytest.mark.parametrize("field", ["id", "arrival_s", "prompt_tokens", "output_tokens", "priority", "hash_ids"])
@pytest.mark.parametrize("value", BAD, ids=repr)
def test_x01_bad_fields_are_named(field, value):
    fields = {"id": "a", "arrival_s": 0, "prompt_tokens": 600, "output_tokens": 3, "priority": 0, "hash_ids": [1, 2]}
    good = {("id", "x"), ("arrival_s", 1.5), ("priority", -1), ("priority", None), ("hash_ids", None)}
    if any(field == name and value is not True and value == fine for name, fine in good):
        TraceRequest(**fields | {field: value})
        return
    with pytest.raises(ValueError, match=f"^{field}: "):
        TraceRequest(**fields | {field: value})


def test_all_bad_fields_are_reported_at_once():
    with pytest.raises(ValueError, match="arrival_s: ") as caught:
        TraceRequest(1, -1, 0, 0)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "id",
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
    ]


def test_each_512_prompt_tokens_need_a_hash_id():
    assert TraceRequest("a", 0, 1024, 1, hash_ids=(1, 2, 3)).hash_ids == (1, 2, 3)
    with pytest.raises(ValueError, match=r"hash_ids: .*expected 3 ids, one for each 512 of 1025 prompt tokens"):
        TraceRequest("a", 0, 1025, 1, hash_ids=[1, 2])
    with pytest.raises(ValueError, match="hash_ids: -1: expected a whole number"):
        TraceRequest("a", 0, 5, 1, hash_ids=[-1])


def test_requests_are_immutable_and_compare_by_value():
    one, same = (TraceRequest("a", "0.5", 600, 3, priority=2, hash_ids=[1, 2]) for _ in range(2))
    assert (one, hash(one)) == (same, hash(same))
    assert one != TraceRequest("b", "0.5", 600, 3, priority=2, hash_ids=[1, 2])
    assert one != "a"
    assert repr(one) == (
        "TraceRequest(id='a', arrival_s=0.5, prompt_tokens=600, output_tokens=3, priority=2, hash_ids=[1, 2])"
    )
    with pytest.raises(AttributeError):
        one.priority = 3
