"""Trace formats, recognised by content, and the published traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from neuron_sched.trace import read_trace
from tests.support.paths import TRACES
from tests.trace.support.files import AZURE, MOONCAKE, PLAIN_CSV, PLAIN_JSONL, bad_rows, fields, written

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
def test_byte_order_mark_crlf_and_blank_lines_are_ignored(path: Path, text: str):
    expected = fields(read_trace(written(path, text)))
    variant = "\ufeff" + "\n" + text.replace("\n", "\r\n \r\n\r\n")
    assert fields(read_trace(written(path, variant))) == expected
    assert fields(read_trace(written(path, text.rstrip("\n")))) == expected


def test_case_blanks_and_additional_columns_of_a_header_are_ignored(path: Path):
    text = "Output_Tokens, PROMPT_TOKENS ,model,Arrival_S\n5,10,llama,0\n6, 20 ,llama, 0.25 \n"
    assert fields(read_trace(written(path, text))) == [("0", 0, 10, 5, 0, None), ("1", 250_000_000, 20, 6, 0, None)]


def test_ids_and_priorities_are_optional(path: Path):
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


def test_the_format_is_recognised_after_a_bad_first_row(path: Path):
    text = '{"timestamp": 5}\n' + MOONCAKE
    assert bad_rows(path, text) == [(1, "input_length", "missing")]
    assert [r.arrival_ns for r in read_trace(path, skip_bad=True)] == [0, 250_000_000]


# Published traces


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not next to this checkout")
@pytest.mark.parametrize(
    ("name", "rows", "last_ns"),
    [
        ("azure2023_conv_first10min.csv", 2867, 599_971_336_000),
        ("AzureLLMInferenceTrace_code.csv.gz", 8819, 3_435_948_056_000),
        ("mooncake_conversation_first10min.jsonl", 1750, 597_000_000_000),
    ],
)
def test_published_traces_have_known_counts_and_durations(name: str, rows: int, last_ns: int):
    trace = read_trace(TRACES / name)
    assert (len(trace), trace[0].arrival_ns, trace[-1].arrival_ns) == (rows, 0, last_ns)
