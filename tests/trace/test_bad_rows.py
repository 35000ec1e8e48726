"""Invalid rows, and files that are not traces."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from neuron_sched.trace import BadRow, TraceError, read_trace
from tests.trace.support.files import PLAIN_CSV, PLAIN_JSONL, bad_rows, fields, written


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
def test_m09_an_invalid_csv_field_is_named_with_its_line_and_value(path: Path, cells: str, field: str, value: str):
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
def test_m09_an_invalid_json_field_is_named_with_its_line_and_value(path: Path, change: str, field: str, value: str):
    good = '{"arrival_s": 0, "prompt_tokens": 1025, "output_tokens": 1}'
    bad = good.replace("}", f", {change}}}")
    assert bad_rows(path, f"{good}\n{bad}\n{good}\n") == [(2, field, value)]
    assert [r.id for r in read_trace(path, skip_bad=True)] == ["0", "2"]


@pytest.mark.parametrize("line", ["5", "[1]", "null", "{", "{'arrival_s': 0}", "[" * 100_000, "9" * 5000])
def test_m09_a_row_that_is_not_a_json_object_is_bad(path: Path, line: str):
    with pytest.raises(TraceError) as caught:
        read_trace(written(path, f"{PLAIN_JSONL}{line}\n"))
    (row,) = caught.value.bad_rows
    assert (row.line, row.field) == (3, "row")
    assert len(str(caught.value)) < 300, "the message shortens a long row"


def test_the_message_of_a_bad_row_has_file_line_field_value_and_expectation(path: Path):
    with pytest.raises(TraceError) as caught:
        read_trace(written(path, PLAIN_CSV + "1,0,1\n"))
    assert str(caught.value) == f"{path}:4: prompt_tokens: 0: expected a whole number from 1 to 2147483647"
    assert caught.value.bad_rows == (BadRow(str(path), 4, "prompt_tokens", "0", "a whole number from 1 to 2147483647"),)


def test_a_duplicate_id_makes_a_bad_row(path: Path):
    text = "arrival_s,prompt_tokens,output_tokens,id\n0,1,1,a\n0,1,1,2\n0,1,1,\n0,1,1,a\n"
    assert bad_rows(path, text) == [(4, "id", "'2'"), (5, "id", "'a'")]


def test_an_arrival_too_far_from_the_earliest_makes_a_bad_row(path: Path):
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
        (b"\x89PNG\r\n", "byte 0 is not valid UTF-8"),
        (gzip.compress(PLAIN_CSV.encode())[:-9], "damaged gzip file"),
        (gzip.compress(PLAIN_CSV.encode())[:12] + b"\xff" * 20, "damaged gzip file"),
    ],
)
def test_a_file_that_is_not_a_trace_gives_a_message_of_one_line(path: Path, data: bytes, message: str):
    with pytest.raises(TraceError) as caught:
        read_trace(written(path, data), skip_bad=True)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_gives_the_reason(tmp_path: Path):
    with pytest.raises(TraceError, match=r"absent\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_a_trace_with_bad_rows_only_is_an_error(path: Path):
    with pytest.raises(TraceError, match=r"the trace has no requests \(1 rows skipped\)"):
        read_trace(written(path, "prompt_tokens,output_tokens\n0,0\n"), skip_bad=True)
