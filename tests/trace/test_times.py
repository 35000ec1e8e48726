"""Arrival times of traces."""

from __future__ import annotations

import json
from decimal import Inexact, localcontext
from pathlib import Path

import pytest

from neuron_sched.trace import read_trace
from tests.trace.support.files import arrivals_ns, written


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["3", "1.5", "2"], [1_500_000_000, 0, 500_000_000]),
        (["", "2", "", "1"], [0, 2_000_000_000, 2_000_000_000, 1_000_000_000]),
        (["1700000000.123456789", "1700000000.123456790"], [0, 1]),
        (["1e-9", "0", "2.5E+1", ".5", "7."], [1, 0, 25_000_000_000, 500_000_000, 7_000_000_000]),
        (["0", "0.1", "0.2", "0.3"], [0, 100_000_000, 200_000_000, 300_000_000]),
        (["0", "0.0000000005", "0.00000000049999999999999999999999999999999999"], [0, 1, 0]),
        (["0", "9223372036"], [0, 9_223_372_036_000_000_000]),
    ],
    ids=["unsorted", "empty", "epoch", "notations", "decimals", "half up", "longest"],
)
def test_arrivals_in_seconds_are_exact(path: Path, cells: list[str], expected: list[int]):
    assert arrivals_ns(path, *cells) == expected


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46"], [680_590_000, 0]),
        (["2023-11-16T18:15:46Z", "2023-11-16T18:15:46.123456789Z"], [0, 123_456_789]),
        (["2023-11-16T18:15:46.12345678951Z", "2023-11-16 18:15:46"], [123_456_790, 0]),
        (
            ["2023-11-16T20:15:46+02:00", "2023-11-16 16:15:47-0200", "2023-11-16T18:15:48"],
            [0, 1_000_000_000, 2 * 10**9],
        ),
        (["2024-02-28 23:59:59", "2024-03-01 00:00:00"], [0, 86_401_000_000_000]),
        (["", "2023-11-16 18:15:47", "2023-11-16 18:15:46", ""], [0, 1_000_000_000, 0, 0]),
    ],
    ids=["azure", "nanoseconds", "half up", "offsets", "leap day", "empty"],
)
def test_arrivals_as_date_times_are_exact(path: Path, cells: list[str], expected: list[int]):
    assert arrivals_ns(path, *cells) == expected


def test_json_arrivals_do_not_pass_through_a_float(path: Path):
    rows = [
        f'{{"arrival_s": {cell}, "prompt_tokens": 1, "output_tokens": 1}}' for cell in ("0", "1700000000.123456789")
    ]
    assert read_trace(written(path, "\n".join(rows)))[1].arrival_ns == 1_700_000_000_123_456_789


def test_arrivals_do_not_depend_on_the_decimal_context(path: Path):
    with localcontext() as context:
        context.prec = 3
        context.traps[Inexact] = True
        assert arrivals_ns(path, "0", "1234567.123456789", "86400.0000000005") == [0, 1234567123456789, 86400000000001]


def test_an_absent_arrival_equals_that_of_the_row_before(path: Path):
    row = {"prompt_tokens": 1, "output_tokens": 1}
    rows = [row, row | {"arrival_s": 4}, row, row | {"arrival_s": None}, row | {"arrival_s": 2}, row]
    text = "\n".join(map(json.dumps, rows))
    assert [r.arrival_ns // 10**9 for r in read_trace(written(path, text))] == [0, 4, 4, 4, 2, 2]
    without_column = "prompt_tokens,output_tokens\n1,1\n2,2\n"
    assert [r.arrival_ns for r in read_trace(written(path, without_column))] == [0, 0]


def test_an_absent_arrival_equals_that_of_a_bad_row_before(path: Path):
    text = "arrival_s,prompt_tokens,output_tokens\n0,1,1\n3,0,1\n,1,1\n"
    assert [r.arrival_ns for r in read_trace(written(path, text), skip_bad=True)] == [0, 3_000_000_000]
