"""Writing of requests as a plain trace, which `read_trace` reads back."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

from neuron_sched._native import TraceRequest
from neuron_sched.atomic import write_atomically
from neuron_sched.trace.fields import seconds_text


def write_trace(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> None:
    """Write requests as plain CSV (`.csv`) or JSON lines (`.jsonl`), compressed if the name also ends in `.gz`.

    `read_trace` returns equal requests if the earliest arrival is 0. Raise `ValueError` for any other suffix and for
    requests that CSV cannot hold (with `hash_ids`, or with ids such as `" a"`), `TypeError` for an item that is not a
    `TraceRequest`, and `OSError` if the file cannot be written. If an error is raised, an existing file is unchanged.
    """
    write_atomically(path, encode_trace(path, requests))


def encode_trace(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> bytes:
    """Return the bytes that `write_trace` writes to a file of that name. Raise its `ValueError` and `TypeError`."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compressed = suffixes[-1:] == [".gz"]
    kind = suffixes[-2:-1] if compressed else suffixes[-1:]
    if kind == [".csv"]:
        text = _csv_text(_checked(requests))
    elif kind == [".jsonl"]:
        text = _json_text(_checked(requests))
    else:
        raise ValueError(f"{os.fspath(path)}: expected a name that ends in .csv, .jsonl, .csv.gz or .jsonl.gz")
    data = text.encode()
    return gzip.compress(data, mtime=0) if compressed else data


def _checked(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    listed = list(requests)
    for position, request in enumerate(listed):
        if not isinstance(request, TraceRequest):
            raise TypeError(f"requests[{position}]: {request!r}: expected a TraceRequest")
    return listed


def _optional_fields(requests: list[TraceRequest]) -> tuple[bool, bool]:
    """Return whether ids and whether priorities must be written: only if one differs from the reader's default."""
    has_ids = any(request.id != str(position) for position, request in enumerate(requests))
    return has_ids, any(request.priority for request in requests)


def _csv_text(requests: list[TraceRequest]) -> str:
    with_id, with_priority = _optional_fields(requests)
    header = ["arrival_s", "prompt_tokens", "output_tokens"]
    header += ["id"] * with_id + ["priority"] * with_priority
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for request in requests:
        if request.hash_ids is not None:
            raise ValueError(f"hash_ids: request {request.id!r}: expected none in CSV; write .jsonl")
        row: list[object] = [seconds_text(request.arrival_ns), request.prompt_tokens, request.output_tokens]
        if with_id:
            row.append(_csv_id(request.id))
        if with_priority:
            row.append(request.priority)
        writer.writerow(row)
    return text.getvalue()


def _csv_id(id: str) -> str:
    """Return the id. Raise `ValueError` if a CSV reader may change it: line breaks, blanks at either end, no text."""
    if not id.isprintable() or id != id.strip() or not id:
        raise ValueError(f"id: {id!r}: expected printable text without blanks at either end in CSV; write .jsonl")
    return id


def _json_text(requests: list[TraceRequest]) -> str:
    with_id, with_priority = _optional_fields(requests)
    lines = []
    for request in requests:
        row: dict[str, object] = {"prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens}
        if with_id:
            row["id"] = request.id
        if with_priority:
            row["priority"] = request.priority
        if request.hash_ids is not None:
            row["hash_ids"] = list(request.hash_ids)
        # The json module writes no exact decimals, so the arrival is inserted as text.
        lines.append(f'{{"arrival_s": {seconds_text(request.arrival_ns)}, {json.dumps(row)[1:]}\n')
    return "".join(lines)
