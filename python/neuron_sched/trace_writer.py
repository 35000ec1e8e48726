"""Writes requests as a plain trace that `read_trace` reads back."""

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
from neuron_sched.trace_fields import seconds


def write_trace(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> None:
    """Writes requests as plain CSV (`.csv`) or JSON lines (`.jsonl`), with `.gz` behind it compressed.

    `read_trace` gives equal requests back when the earliest arrives at 0. Raises ValueError for another suffix and for
    what CSV cannot hold (`hash_ids`, some ids), TypeError for what is no request, and OSError; the file is then left
    as it was.
    """
    write_atomically(path, encode_trace(path, requests))


def encode_trace(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> bytes:
    """The bytes that `write_trace` would write to that path."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compressed = suffixes[-1:] == [".gz"]
    kind = suffixes[-2:-1] if compressed else suffixes[-1:]
    if kind == [".csv"]:
        text = _csv_text(_checked(requests))
    elif kind == [".jsonl"]:
        text = _json_text(_checked(requests))
    else:
        raise ValueError(f"{os.fspath(path)}: the name of a trace to write ends in .csv, .jsonl, .csv.gz or .jsonl.gz")
    data = text.encode()
    return gzip.compress(data, mtime=0) if compressed else data


def _checked(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    listed = list(requests)
    for position, request in enumerate(listed):
        if not isinstance(request, TraceRequest):
            raise TypeError(f"requests[{position}]: {request!r}: expected a TraceRequest")
    return listed


def _optional(requests: list[TraceRequest]) -> tuple[bool, bool]:
    """Whether ids and priorities must be written: not when all are what the reader gives by default."""
    ids = any(request.id != str(position) for position, request in enumerate(requests))
    return ids, any(request.priority for request in requests)


def _csv_text(requests: list[TraceRequest]) -> str:
    with_id, with_priority = _optional(requests)
    header = ["arrival_s", "prompt_tokens", "output_tokens"]
    header += ["id"] * with_id + ["priority"] * with_priority
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for request in requests:
        if request.hash_ids is not None:
            raise ValueError(f"hash_ids: request {request.id!r} has them and CSV cannot hold them: write .jsonl")
        row: list[object] = [seconds(request.arrival_ns), request.prompt_tokens, request.output_tokens]
        if with_id:
            row.append(_csv_id(request.id))
        if with_priority:
            row.append(request.priority)
        writer.writerow(row)
    return text.getvalue()


def _csv_id(id: str) -> str:
    """Refuses what a reader that takes lines one by one, and blanks around a cell as nothing, would change."""
    if not id.isprintable() or id != id.strip() or not id:
        raise ValueError(f"id: {id!r} does not survive in CSV: write .jsonl")
    return id


def _json_text(requests: list[TraceRequest]) -> str:
    with_id, with_priority = _optional(requests)
    lines = []
    for request in requests:
        row: dict[str, object] = {"prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens}
        if with_id:
            row["id"] = request.id
        if with_priority:
            row["priority"] = request.priority
        if request.hash_ids is not None:
            row["hash_ids"] = list(request.hash_ids)
        # json has no exact decimals, so this number is put in as text.
        lines.append(f'{{"arrival_s": {seconds(request.arrival_ns)}, {json.dumps(row)[1:]}\n')
    return "".join(lines)
