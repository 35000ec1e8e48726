"""Trace files: formats, times, bad rows, and writing."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal, Inexact, localcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_sched.trace import BadRow, TraceError, TraceRequest, read_trace, synthetic, write_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"

PLAIN_CSV = "arrival_s,prompt_tokens,output_tokens\n0,10,5\n0.25,20,6\n"
PLAIN_JSONL = (
    '{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 5}\n'
    '{"arrival_s": 0.25, "prompt_tokens": 20, "output_tokens": 6}\n'
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,5\n2023-11-16 18:15:46.9305900,20,6\n"
MOONCAKE = (
    '{"timestamp": 1500, "input_length": 10, "output_length": 5, "hash_ids": [7]}\n'
    '{"timestamp": 1750, "input_length": 20, "output_length": 6, "hash_ids": [8]}\n'
)


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def fields(requests: list[TraceRequest]) -> list[tuple[object, ...]]:
    return [
        (r.id, r.arrival_ns, r.prompt_tokens, r.output_tokens, r.priority, r.hash_ids and list(r.hash_ids))
        for r in requests
    ]


def arrivals_ns(path: Path, *cells: object) -> list[int]:
    """Arrivals of a plain CSV trace with these arrival cells."""
    rows = "".join(f"{cell},1,1\n" for cell in cells)
    return [r.arrival_ns for r in read_trace(written(path, f"arrival_s,prompt_tokens,output_tokens\n{rows}"))]


def bad_rows(path: Path, text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(TraceError) as caught:
        read_trace(written(path, text))
    assert str(caught.value).splitlines() == [str(row) for row in caught.value.bad_rows]
    return [(row.line, row.field, row.value) for row in caught.value.bad_rows]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A name that says nothing about the content."""
    return tmp_path / "trace.dat"


# Formats


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("text", "hash_ids"),
    [(PLAIN_CSV, None), (PLAIN_JSONL, None), (AZURE, None), (MOONCAKE, [[7], [8]])],
    ids=["csv", "jsonl", "azure", "mooncake"],
)
def test_formats_are_recognised_by_content(path: Path, text: str, hash_ids: list[list[int]] | None, compress: bool):
    data = gzip.compress(text.encode()) if compress else text.encode()
    first, second = hash_ids or [None, None]
    expected = [("0", 0, 10, 5, 0, first), ("1", 250_000_000, 20, 6, 0, second)]
    trace = read_trace(written(path, data))
    assert fields(trace) == expected
    assert trace.skipped == 0


@pytest.mark.parametrize("text", [PLAIN_CSV, PLAIN_JSONL, AZURE, MOONCAKE], ids=["csv", "jsonl", "azure", "mooncake"])
def test_byte_order_mark_crlf_and_blank_lines_mean_nothing(path: Path, text: str):
    expected = fields(read_trace(written(path, text)))
    odd = "\ufeff" + "\n" + text.replace("\n", "\r\n \r\n\r\n")
    assert fields(read_trace(written(path, odd))) == expected
    assert fields(read_trace(written(path, text.rstrip("\n")))) == expected


def test_header_in_any_case_with_blanks_and_further_columns(path: Path):
    text = "Output_Tokens, PROMPT_TOKENS ,model,Arrival_S\n5,10,llama,0\n6, 20 ,llama, 0.25 \n"
    assert fields(read_trace(written(path, text))) == [("0", 0, 10, 5, 0, None), ("1", 250_000_000, 20, 6, 0, None)]


def test_ids_and_priorities(path: Path):
    csv = 'arrival_s,prompt_tokens,output_tokens,id,priority\n0,1,1,a,-3\n0,1,1,,\n0,1,1,"x, y",7\n'
    expected = [("a", 0, 1, 1, -3, None), ("1", 0, 1, 1, 0, None), ("x, y", 0, 1, 1, 7, None)]
    assert fields(read_trace(written(path, csv))) == expected
    row = {"prompt_tokens": 1, "output_tokens": 1}
    jsonl = [
        row | {"id": "a", "priority": -3},
        row | {"id": None},
        row | {"id": "x, y", "priority": 7},
        row | {"id": 9},
    ]
    text = "\n".join(map(json.dumps, jsonl))
    assert fields(read_trace(written(path, text))) == [*expected, ("9", 0, 1, 1, 0, None)]


def test_a_first_row_that_is_bad_does_not_hide_the_format(path: Path):
    text = '{"timestamp": 5}\n' + MOONCAKE
    assert bad_rows(path, text) == [(1, "input_length", "missing")]
    assert [r.arrival_ns for r in read_trace(path, skip_bad=True)] == [0, 250_000_000]


# Times


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


def test_json_arrivals_never_pass_through_a_float(path: Path):
    rows = [
        f'{{"arrival_s": {cell}, "prompt_tokens": 1, "output_tokens": 1}}' for cell in ("0", "1700000000.123456789")
    ]
    assert read_trace(written(path, "\n".join(rows)))[1].arrival_ns == 1_700_000_000_123_456_789


def test_arrivals_do_not_depend_on_the_decimal_context(path: Path):
    with localcontext() as context:
        context.prec = 3
        context.traps[Inexact] = True
        assert arrivals_ns(path, "0", "1234567.123456789", "86400.0000000005") == [0, 1234567123456789, 86400000000001]


def test_an_absent_arrival_is_that_of_the_row_before(path: Path):
    row = {"prompt_tokens": 1, "output_tokens": 1}
    rows = [row, row | {"arrival_s": 4}, row, row | {"arrival_s": None}, row | {"arrival_s": 2}, row]
    text = "\n".join(map(json.dumps, rows))
    assert [r.arrival_ns // 10**9 for r in read_trace(written(path, text))] == [0, 4, 4, 4, 2, 2]
    without_column = "prompt_tokens,output_tokens\n1,1\n2,2\n"
    assert [r.arrival_ns for r in read_trace(written(path, without_column))] == [0, 0]


def test_the_row_before_counts_though_its_lengths_are_bad(path: Path):
    text = "arrival_s,prompt_tokens,output_tokens\n0,1,1\n3,0,1\n,1,1\n"
    assert [r.arrival_ns for r in read_trace(written(path, text), skip_bad=True)] == [0, 3_000_000_000]


# Bad rows


def test_m09_every_bad_row_is_listed(path: Path):
    text = (
        '{"arrival_s": 0, "prompt_tokens": 100, "output_tokens": 5}\n'
        "\n"
        '{"arrival_s": 1, "prompt_tokens": 100, "output_tokens": 5}\r\n'
        '{"arrival_s": 2, "prompt_tokens": 100}\n'
        '{"arrival_s": 3, "prompt_tokens": 0, "output_tokens": 5}\n'
        '{"arrival_s": 4, "prompt_tokens": 100, "output_tokens": 0}\n'
        '{"arrival_s": 5, "prompt_tokens": 100, "outp'
    )
    assert bad_rows(path, text) == [
        (4, "output_tokens", "missing"),
        (5, "prompt_tokens", "0"),
        (6, "output_tokens", "0"),
        (7, "row", """'{"arrival_s": 5, "prompt_tokens": 100, "outp'"""),
    ]
    trace = read_trace(path, skip_bad=True)
    assert fields(trace) == [("0", 0, 100, 5, 0, None), ("1", 1_000_000_000, 100, 5, 0, None)]
    assert trace.skipped == 4


@pytest.mark.parametrize(
    ("cells", "field", "value"),
    [
        ("nan,1,1", "arrival_s", "'nan'"),
        ("Infinity,1,1", "arrival_s", "'Infinity'"),
        ("-1,1,1", "arrival_s", "-1"),
        ("-0.5,1,1", "arrival_s", "'-0.5'"),
        ("soon,1,1", "arrival_s", "'soon'"),
        ("1_000,1,1", "arrival_s", "'1_000'"),
        ("9223372037,1,1", "arrival_s", "9223372037"),
        ("1e999999999,1,1", "arrival_s", "'1e999999999'"),
        ("1e-99999999999999999999,1,1", "arrival_s", "'1e-99999999999999999999'"),
        ("2023-11-16 18:15:46,1,1", "arrival_s", "'2023-11-16 18:15:46'"),
        ("2,,1", "prompt_tokens", "missing"),
        ("2,1.0,1", "prompt_tokens", "'1.0'"),
        ("2,1e3,1", "prompt_tokens", "'1e3'"),
        ("2,-5,1", "prompt_tokens", "-5"),
        ("2,many,1", "prompt_tokens", "'many'"),
        ("2,2147483648,1", "prompt_tokens", "2147483648"),
        ("2,1,0", "output_tokens", "0"),
        ("2,1,True", "output_tokens", "'True'"),
        ("2,1", "output_tokens", "missing"),
        ("2,1,1,1", "row", "'2,1,1,1'"),
        ('2,"1,1', "row", "'2,\"1,1'"),
    ],
)
def test_m09_bad_rows_of_csv(path: Path, cells: str, field: str, value: str):
    text = f"arrival_s,prompt_tokens,output_tokens\n0,1,1\n{cells}\n3,1,1\n"
    assert bad_rows(path, text) == [(3, field, value)]
    assert [r.id for r in read_trace(path, skip_bad=True)] == ["0", "2"]


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ('"arrival_s": NaN', "arrival_s", "NaN"),
        ('"arrival_s": -Infinity', "arrival_s", "-Infinity"),
        ('"arrival_s": -1', "arrival_s", "-1"),
        ('"arrival_s": 1e99999999999999999999', "arrival_s", "'1e99999999999999999999'"),
        ('"arrival_s": true', "arrival_s", "True"),
        ('"arrival_s": [1]', "arrival_s", "[1]"),
        ('"arrival_s": "2023-11-16"', "arrival_s", "'2023-11-16'"),
        ('"prompt_tokens": null', "prompt_tokens", "missing"),
        ('"prompt_tokens": 1.0', "prompt_tokens", "1.0"),
        ('"prompt_tokens": true', "prompt_tokens", "True"),
        ('"prompt_tokens": "7"', "prompt_tokens", "'7'"),
        ('"output_tokens": -1', "output_tokens", "-1"),
        ('"output_tokens": 1e400', "output_tokens", "1E+400"),
        ('"priority": 0.5', "priority", "0.5"),
        ('"priority": 9223372036854775808', "priority", "9223372036854775808"),
        ('"id": ["a"]', "id", "['a']"),
        ('"id": false', "id", "False"),
        ('"id": "\\ud800"', "id", "'\\ud800'"),
        ('"hash_ids": [1, 2]', "hash_ids", "[1, 2]"),
        ('"hash_ids": [1, 2, -3]', "hash_ids", "[1, 2, -3]"),
        ('"hash_ids": [1, 2, true]', "hash_ids", "[1, 2, True]"),
        ('"hash_ids": [1, 2, 9007199254740992]', "hash_ids", "[1, 2, 9007199254740992]"),
        ('"hash_ids": "1 2 3"', "hash_ids", "'1 2 3'"),
    ],
)
def test_m09_bad_rows_of_json_lines(path: Path, change: str, field: str, value: str):
    good = '{"arrival_s": 0, "prompt_tokens": 1025, "output_tokens": 1}'
    bad = good.replace("}", f", {change}}}")
    assert bad_rows(path, f"{good}\n{bad}\n{good}\n") == [(2, field, value)]
    assert [r.id for r in read_trace(path, skip_bad=True)] == ["0", "2"]


@pytest.mark.parametrize("line", ["5", "[1]", "null", "{", "{'arrival_s': 0}", "[" * 100_000, "9" * 5000])
def test_m09_rows_that_are_no_json_objects(path: Path, line: str):
    with pytest.raises(TraceError) as caught:
        read_trace(written(path, f"{PLAIN_JSONL}{line}\n"))
    (row,) = caught.value.bad_rows
    assert (row.line, row.field) == (3, "row")
    assert len(str(caught.value)) < 300, "a long row is shown shortened"


def test_bad_row_texts_name_file_line_field_value_and_expectation(path: Path):
    with pytest.raises(TraceError) as caught:
        read_trace(written(path, PLAIN_CSV + "1,0,1\n"))
    assert str(caught.value) == f"{path}:4: prompt_tokens: 0: expected a whole number from 1 to 2147483647"
    assert caught.value.bad_rows == (BadRow(str(path), 4, "prompt_tokens", "0", "a whole number from 1 to 2147483647"),)


def test_an_id_may_stand_only_once(path: Path):
    text = "arrival_s,prompt_tokens,output_tokens,id\n0,1,1,a\n0,1,1,2\n0,1,1,\n0,1,1,a\n"
    assert bad_rows(path, text) == [(4, "id", "'2'"), (5, "id", "'a'")]


def test_date_times_too_far_apart(path: Path):
    text = "arrival_s,prompt_tokens,output_tokens\n2023-11-16 18:15:46,1,1\n1600-01-01 00:00:00,1,1\n"
    assert [row[:2] for row in bad_rows(path, text)] == [(2, "arrival_s")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf\r\n \n", "the file is empty"),
        (b"a,b,c\n1,2,3\n", "unknown header 'a,b,c'"),
        (b"arrival_s,prompt_tokens\n1,2\n", "unknown header"),
        (b"prompt_tokens,output_tokens,prompt_tokens\n1,2,3\n", "unknown header"),
        (b'"arrival_s,prompt_tokens\n', "unknown header"),
        (b"arrival_s,prompt_tokens,output_tokens\n", "the trace has no requests"),
        (b'{"a": 1}\n{"b": 2}\n', "no row has the fields of a trace"),
        (b"\x7fELF\x00\x00", "binary data"),
        (b"\x89PNG\r\n", "byte 0 is no text"),
        (gzip.compress(PLAIN_CSV.encode())[:-9], "damaged gzip file"),
        (gzip.compress(PLAIN_CSV.encode())[:12] + b"\xff" * 20, "damaged gzip file"),
    ],
)
def test_files_that_are_no_traces_give_one_clear_message(path: Path, data: bytes, message: str):
    with pytest.raises(TraceError) as caught:
        read_trace(written(path, data), skip_bad=True)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(TraceError, match=r"absent\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_nothing_left_when_every_row_was_skipped(path: Path):
    with pytest.raises(TraceError, match=r"the trace has no requests \(1 rows skipped\)"):
        read_trace(written(path, "prompt_tokens,output_tokens\n0,0\n"), skip_bad=True)


# Writing


def workloads(ids: st.SearchStrategy[str], segments: st.SearchStrategy[list[int] | None]) -> st.SearchStrategy[list]:
    """The arguments of one to eight requests: id, arrival in nanoseconds, prompt, outputs, priority, hash ids."""
    lengths = (st.integers(1, 3000), st.integers(1, 2**31 - 1))
    request = st.tuples(ids, st.integers(0, 10**15), *lengths, st.integers(-(2**63), 2**63 - 1) | st.just(0), segments)
    return st.lists(request, min_size=1, max_size=8, unique_by=lambda request: request[0])


any_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
plain_ids = st.text("aZ7 ,;\"'{#\\\u00e4\u6f22", min_size=1, max_size=8).filter(lambda id: id == id.strip())
any_segments = st.none() | st.lists(st.integers(0, 2**53 - 1), min_size=6, max_size=8)


def made(rows: list[tuple]) -> list[TraceRequest]:
    """Requests whose earliest arrives at 0."""
    zero = min(ns for _, ns, *_ in rows)
    return [
        TraceRequest(id, Decimal(ns - zero).scaleb(-9), prompt, output, priority=priority, hash_ids=segments)
        for id, ns, prompt, output, priority, segments in rows
    ]


@given(workloads(any_ids, any_segments), st.booleans())
def test_json_lines_read_back_equal(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple], compress: bool):
    path = tmp_path_factory.getbasetemp() / ("t.jsonl.gz" if compress else "t.jsonl")
    workload = made(rows)
    write_trace(path, workload)
    assert fields(read_trace(path)) == fields(workload)


@given(workloads(plain_ids, st.none()), st.booleans())
def test_csv_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple], compress: bool):
    path = tmp_path_factory.getbasetemp() / ("t.csv.gz" if compress else "t.csv")
    workload = made(rows)
    write_trace(path, workload)
    assert fields(read_trace(path)) == fields(workload)


def test_written_text_is_plain(tmp_path: Path):
    plain = [TraceRequest("0", "0", 10, 5), TraceRequest("1", "12.000000001", 20, 6)]
    write_trace(tmp_path / "t.csv", plain)
    assert (tmp_path / "t.csv").read_text() == "arrival_s,prompt_tokens,output_tokens\n0,10,5\n12.000000001,20,6\n"
    full = [TraceRequest("a", "0.5", 600, 5, priority=2, hash_ids=[3, 4])]
    write_trace(tmp_path / "t.jsonl", full)
    assert (tmp_path / "t.jsonl").read_text() == (
        '{"arrival_s": 0.5, "prompt_tokens": 600, "output_tokens": 5, "id": "a", "priority": 2, "hash_ids": [3, 4]}\n'
    )


def test_compressed_traces_are_the_same_bytes_each_time(tmp_path: Path):
    for name in ("a.csv.gz", "b.csv.gz"):
        write_trace(tmp_path / name, synthetic(20, seed=1))
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        ("t.csv", TraceRequest("a", "0", 1, 1, hash_ids=[1]), "hash_ids: request 'a'"),
        ("t.csv", TraceRequest("a\nb", "0", 1, 1), r"id: 'a\\nb'"),
        ("t.csv", TraceRequest(" a", "0", 1, 1), "id: ' a'"),
        ("t.txt", TraceRequest("a", "0", 1, 1), "ends in .csv, .jsonl"),
        ("t.gz", TraceRequest("a", "0", 1, 1), "ends in .csv, .jsonl"),
    ],
)
def test_what_cannot_be_written_leaves_the_file_alone(tmp_path: Path, name: str, request_: TraceRequest, message: str):
    path = written(tmp_path / name, "as it was")
    with pytest.raises(ValueError, match=message):
        write_trace(path, [request_])
    assert path.read_text() == "as it was"
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_what_is_no_request_is_named(tmp_path: Path, name: str):
    with pytest.raises(TypeError, match=r"^requests\[1\]: 1: expected a TraceRequest$"):
        write_trace(tmp_path / name, [TraceRequest("a", "0", 1, 1), 1])
    assert list(tmp_path.iterdir()) == []


# The synthetic workload


def test_synthetic_depends_on_its_seed_only():
    assert fields(synthetic(50, seed=3)) == fields(synthetic(50, seed=3))
    assert fields(synthetic(50, seed=3)) != fields(synthetic(50, seed=4))
    assert fields(synthetic(50, seed=3)) == fields(synthetic(80, seed=3)[:50])


def test_synthetic_looks_like_chat():
    workload = synthetic(4000, seed=1, rate_per_s=8.0)
    assert workload[0].arrival_ns == 0
    assert all(request.arrival_ns % 1000 == 0 for request in workload), "whole microseconds"
    assert 7.5 < len(workload) / (workload[-1].arrival_ns / 1e9) < 8.5
    prompts = sorted(request.prompt_tokens for request in workload)
    outputs = sorted(request.output_tokens for request in workload)
    assert 850 < prompts[2000] < 950
    assert 170 < outputs[2000] < 190
    assert prompts[0] >= 1
    assert prompts[-1] <= 8192
    assert outputs[-1] <= 1024


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"requests": 0}, "requests"),
        ({"requests": 1.5}, "requests"),
        ({"requests": 10**12}, "requests"),
        ({"seed": None}, "seed"),
        ({"rate_per_s": 0}, "rate_per_s"),
        ({"rate_per_s": float("nan")}, "rate_per_s"),
        ({"prompt_tokens_median": -1}, "prompt_tokens_median"),
        ({"output_tokens_max": 2**31}, "output_tokens_max"),
    ],
)
def test_synthetic_refuses_bad_knobs(arguments: dict[str, object], field: str):
    with pytest.raises(ValueError, match=f"^{field}: "):
        synthetic(**arguments)


def test_synthetic_names_the_bound_of_its_size():
    with pytest.raises(ValueError, match=r"^requests: 10000001: expected a whole number from 1 to 10000000$"):
        synthetic(10_000_001)


# Published traces


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "rows", "last_ns"),
    [
        ("azure2023_conv_first10min.csv", 2867, 599_971_336_000),
        ("AzureLLMInferenceTrace_code.csv.gz", 8819, 3_435_948_056_000),
        ("mooncake_conversation_first10min.jsonl", 1750, 597_000_000_000),
    ],
)
def test_published_traces(name: str, rows: int, last_ns: int):
    trace = read_trace(TRACES / name)
    assert (len(trace), trace[0].arrival_ns, trace[-1].arrival_ns) == (rows, 0, last_ns)
