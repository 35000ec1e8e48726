"""Written traces: what `read_trace` reads back, and what cannot be written."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_sched.trace import TraceRequest, read_trace, synthetic, write_trace
from tests.trace.support.files import fields, written


def workloads(ids: st.SearchStrategy[str], segments: st.SearchStrategy[list[int] | None]) -> st.SearchStrategy[list]:
    """Generate one to eight rows: id, arrival in nanoseconds, prompt tokens, output tokens, priority, hash ids."""
    lengths = (st.integers(1, 3000), st.integers(1, 2**31 - 1))
    request = st.tuples(ids, st.integers(0, 10**15), *lengths, st.integers(-(2**63), 2**63 - 1) | st.just(0), segments)
    return st.lists(request, min_size=1, max_size=8, unique_by=lambda request: request[0])


any_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
plain_ids = st.text("aZ7 ,;\"'{#\\\u00e4\u6f22", min_size=1, max_size=8).filter(lambda id: id == id.strip())
any_segments = st.none() | st.lists(st.integers(0, 2**53 - 1), min_size=6, max_size=8)


def requests_of(rows: list[tuple]) -> list[TraceRequest]:
    """Return the rows as requests, with arrivals relative to the earliest one."""
    zero = min(ns for _, ns, *_ in rows)
    return [
        TraceRequest(id, Decimal(ns - zero).scaleb(-9), prompt, output, priority=priority, hash_ids=segments)
        for id, ns, prompt, output, priority, segments in rows
    ]


@given(workloads(any_ids, any_segments), st.booleans())
def test_json_lines_read_back_equal(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple], compress: bool):
    path = tmp_path_factory.getbasetemp() / ("t.jsonl.gz" if compress else "t.jsonl")
    workload = requests_of(rows)
    write_trace(path, workload)
    assert fields(read_trace(path)) == fields(workload)


@given(workloads(plain_ids, st.none()), st.booleans())
def test_csv_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple], compress: bool):
    path = tmp_path_factory.getbasetemp() / ("t.csv.gz" if compress else "t.csv")
    workload = requests_of(rows)
    write_trace(path, workload)
    assert fields(read_trace(path)) == fields(workload)


def test_written_files_have_the_plain_format(tmp_path: Path):
    plain = [TraceRequest("0", "0", 10, 5), TraceRequest("1", "12.000000001", 20, 6)]
    write_trace(tmp_path / "t.csv", plain)
    assert (tmp_path / "t.csv").read_text() == "arrival_s,prompt_tokens,output_tokens\n0,10,5\n12.000000001,20,6\n"
    full = [TraceRequest("a", "0.5", 600, 5, priority=2, hash_ids=[3, 4])]
    write_trace(tmp_path / "t.jsonl", full)
    assert (tmp_path / "t.jsonl").read_text() == (
        '{"arrival_s": 0.5, "prompt_tokens": 600, "output_tokens": 5, "id": "a", "priority": 2, "hash_ids": [3, 4]}\n'
    )


def test_compression_is_deterministic(tmp_path: Path):
    for name in ("a.csv.gz", "b.csv.gz"):
        write_trace(tmp_path / name, synthetic(20, seed=1))
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        ("t.csv", TraceRequest("a", "0", 1, 1, hash_ids=[1]), "hash_ids: request 'a'"),
        ("t.csv", TraceRequest("a\nb", "0", 1, 1), r"id: 'a\\nb'"),
        ("t.csv", TraceRequest(" a", "0", 1, 1), "id: ' a'"),
        ("t.txt", TraceRequest("a", "0", 1, 1), "expected a name that ends in .csv, .jsonl"),
        ("t.gz", TraceRequest("a", "0", 1, 1), "expected a name that ends in .csv, .jsonl"),
    ],
)
def test_requests_that_cannot_be_written_leave_the_file_unchanged(
    tmp_path: Path, name: str, request_: TraceRequest, message: str
):
    path = written(tmp_path / name, "old content")
    with pytest.raises(ValueError, match=message):
        write_trace(path, [request_])
    assert path.read_text() == "old content"
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_an_item_that_is_not_a_request_is_named(tmp_path: Path, name: str):
    with pytest.raises(TypeError, match=r"^requests\[1\]: 1: expected a TraceRequest$"):
        write_trace(tmp_path / name, [TraceRequest("a", "0", 1, 1), 1])
    assert list(tmp_path.iterdir()) == []
