"""Trace files of the tests: their content, and functions that write and read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron_sched.trace import TraceError, TraceRequest, read_trace

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
    """Write the file and return its path."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def fields(requests: list[TraceRequest]) -> list[tuple[object, ...]]:
    """Return id, arrival in nanoseconds, prompt tokens, output tokens, priority and hash ids of each request."""
    return [
        (r.id, r.arrival_ns, r.prompt_tokens, r.output_tokens, r.priority, r.hash_ids and list(r.hash_ids))
        for r in requests
    ]


def arrivals_ns(path: Path, *cells: object) -> list[int]:
    """Return the arrivals, in nanoseconds, of a plain CSV trace with these arrival cells."""
    rows = "".join(f"{cell},1,1\n" for cell in cells)
    return [r.arrival_ns for r in read_trace(written(path, f"arrival_s,prompt_tokens,output_tokens\n{rows}"))]


def bad_rows(path: Path, text: str) -> list[tuple[int, str, str]]:
    """Return line, field and value of each bad row of the trace. Assert that the message has one line for each."""
    with pytest.raises(TraceError) as caught:
        read_trace(written(path, text))
    assert str(caught.value).splitlines() == [str(row) for row in caught.value.bad_rows]
    return [(row.line, row.field, row.value) for row in caught.value.bad_rows]
