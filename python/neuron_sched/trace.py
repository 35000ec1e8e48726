"""Traces: who arrives when, with how many prompt and output tokens.

`read_trace` recognises a file by its content, not by its name:

* Azure LLM inference CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`;
* Mooncake JSON lines: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`;
* plain CSV or JSON lines: `arrival_s`, `prompt_tokens`, `output_tokens`, and if wanted `id`, `priority`, `hash_ids`;

each of them compressed with gzip or not. Times are exact: text to whole nanoseconds, never through a float.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from neuron_sched._native import TraceRequest
from neuron_sched.synthetic import synthetic
from neuron_sched.trace_fields import (
    FieldError,
    Moment,
    arrival,
    count,
    exact,
    hash_ids,
    identifier,
    priority,
    seconds,
    whole,
)
from neuron_sched.trace_writer import encode_trace, write_trace

__all__ = ["BadRow", "Trace", "TraceError", "TraceRequest", "encode_trace", "read_trace", "synthetic", "write_trace"]

ARRIVAL_NS_MAX = 2**63 - 1
"""Latest arrival after time zero: about 292 years."""

KNOWN_FORMATS = (
    "arrival_s,prompt_tokens,output_tokens (CSV or JSON lines), TIMESTAMP,ContextTokens,GeneratedTokens (Azure CSV) "
    "or timestamp, input_length, output_length, hash_ids (Mooncake JSON lines)"
)

Row = dict[str, object]
"""Field names in lower case to values: text from CSV, whatever JSON says from JSON lines."""

Parse = Callable[[str], Row]
"""Reads the text of a row; raises `FieldError`."""

Line = tuple[int, str]
"""Its number in the file, from 1, and its text."""


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be used: its line (from 1), the field, what stood there and what was expected."""

    path: str
    line: int
    field: str
    value: str
    expected: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.field}: {self.value}: expected {self.expected}"


class TraceError(ValueError):
    """A file that is no trace, or a trace with bad rows; `bad_rows` lists all of them, the text one a line."""

    def __init__(self, message: str, bad_rows: Iterable[BadRow] = ()) -> None:
        super().__init__(message)
        self.bad_rows = tuple(bad_rows)


class Trace(list[TraceRequest]):
    """The requests of a file in row order; `skipped` tells how many bad rows were left out."""

    def __init__(self, requests: Iterable[TraceRequest] = (), *, skipped: int = 0) -> None:
        super().__init__(requests)
        self.skipped = skipped


@dataclass(frozen=True)
class Columns:
    """The names, in lower case, that a format gives to the three fields of every row."""

    arrival: str
    prompt: str
    output: str
    decimals: int = 9
    """Digits between the unit of an arrival that is a number and the nanosecond: 9 for seconds."""


FORMATS = (
    Columns("arrival_s", "prompt_tokens", "output_tokens"),
    Columns("timestamp", "contexttokens", "generatedtokens"),
    Columns("timestamp", "input_length", "output_length", decimals=6),
)


def read_trace(path: str | os.PathLike[str], *, skip_bad: bool = False) -> Trace:
    """Reads a trace; requests come in row order, their arrivals counted from the earliest one.

    Arrivals may be seconds (Mooncake: milliseconds), epoch times or date-times, sorted or not. An empty or absent
    arrival is that of the row before, in the first row it is time zero. A request without an `id` gets its row number,
    from 0. Raises `TraceError` for a file that cannot be read as a trace and, unless `skip_bad`, for bad rows.
    """
    name = os.fspath(path)
    lines = _lines(name)
    if lines[0][1].lstrip().startswith("{"):
        columns: Columns = _json_format(name, lines)
        parse: Parse = _json_row
    else:
        columns, parse = _csv_format(name, lines.pop(0))
    requests, bad_rows = _requests(name, columns, parse, lines)
    if bad_rows and not skip_bad:
        raise TraceError("\n".join(map(str, bad_rows)), bad_rows)
    if not requests:
        skipped = f" ({len(bad_rows)} rows skipped)" if bad_rows else ""
        raise TraceError(f"{name}: the trace has no requests{skipped}", bad_rows)
    return Trace(requests, skipped=len(bad_rows))


def _lines(name: str) -> list[Line]:
    """The lines of the file that are not blank; at least one."""
    try:
        data = Path(name).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{name}: damaged gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"{name}: cannot be read: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not a trace: byte {error.start} is no text in UTF-8") from error
    if "\0" in text:
        raise TraceError(f"{name}: not a trace: binary data")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line and not line.isspace()]
    if not numbered:
        raise TraceError(f"{name}: the file is empty")
    return numbered


def _recognise(names: Iterable[str]) -> Columns | None:
    present = set(names)
    return next((columns for columns in FORMATS if columns.prompt in present or columns.output in present), None)


def _csv_format(name: str, first: Line) -> tuple[Columns, Parse]:
    number, line = first
    try:
        header = [cell.strip().lower() for cell in _cells(line)]
    except FieldError:
        header = []
    columns = _recognise(header)
    if columns is None or not {columns.prompt, columns.output} <= set(header) or len(set(header)) < len(header):
        shown = line if len(line) <= 60 else f"{line[:60]}..."
        raise TraceError(f"{name}:{number}: unknown header {shown!r}: expected {KNOWN_FORMATS}")
    return columns, lambda line: _csv_row(header, line)


def _csv_row(header: list[str], line: str) -> Row:
    cells = _cells(line)
    if len(cells) < len(header):
        raise FieldError(header[len(cells)], None, f"a row of {len(header)} fields")
    if any(cells[len(header) :]):
        raise FieldError("row", line, f"{len(header)} fields")
    row: Row = {field: cell if field == "id" else whole(cell) for field, cell in zip(header, cells, strict=False)}
    return row


def _cells(line: str) -> list[str]:
    """The cells of one line. A quoted cell cannot go on in the next line, so a stray quote spoils one row only."""
    try:
        return next(csv.reader([line], strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise FieldError("row", line, "a whole row of CSV") from error


def _json_format(name: str, lines: list[Line]) -> Columns:
    """The format of the first row that can be told."""
    for _, line in lines:
        try:
            columns = _recognise(_json_row(line))
        except FieldError:
            continue
        if columns is not None:
            return columns
    raise TraceError(f"{name}: no row has the fields of a trace: expected {KNOWN_FORMATS}")


def _json_row(line: str) -> Row:
    expected = "one whole JSON object"
    try:
        value = json.loads(line, parse_float=exact, parse_constant=exact)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, and a number of thousands of digits
        raise FieldError("row", line, expected) from error
    if not isinstance(value, dict):
        raise FieldError("row", line, expected)
    return {field.lower(): value for field, value in value.items()}


@dataclass(frozen=True)
class _Checked:
    """A row with nothing wrong in it; `moment` is None where no row up to it has an arrival."""

    line: int
    moment: Moment | None
    id: str
    prompt_tokens: int
    output_tokens: int
    priority: int
    hash_ids: list[int] | None


class _Rows:
    """The rows of a file, read one after the other; good and bad ones, in the order of the file."""

    def __init__(self, columns: Columns, parse: Parse) -> None:
        self.good: list[_Checked] = []
        self.bad: list[tuple[int, FieldError]] = []
        self._columns = columns
        self._parse = parse
        self._moment: Moment | None = None
        self._line_of_id: dict[str, int] = {}

    def read(self, position: int, line: int, text: str) -> None:
        try:
            self.good.append(self._checked(position, line, text))
        except FieldError as fault:
            self.bad.append((line, fault))

    def _checked(self, position: int, line: int, text: str) -> _Checked:
        names = self._columns
        row = self._parse(text)
        # Kept though another field may be bad: the next row may have none and mean this one.
        self._moment = arrival(names.arrival, row.get(names.arrival), names.decimals, self._moment)
        prompt_tokens = count(names.prompt, row.get(names.prompt))
        checked = _Checked(
            line=line,
            moment=self._moment,
            prompt_tokens=prompt_tokens,
            output_tokens=count(names.output, row.get(names.output)),
            priority=priority("priority", row.get("priority")),
            hash_ids=hash_ids("hash_ids", row.get("hash_ids"), prompt_tokens),
            id=identifier("id", row.get("id"), default=str(position)),
        )
        first = self._line_of_id.setdefault(checked.id, line)
        if first != line:
            raise FieldError("id", checked.id, f"an id that line {first} does not have")
        return checked


def _requests(name: str, columns: Columns, parse: Parse, lines: list[Line]) -> tuple[list[TraceRequest], list[BadRow]]:
    """The good rows as requests, counted from time zero, and the bad rows; both in the order of the file."""
    rows = _Rows(columns, parse)
    for position, (line, text) in enumerate(lines):
        rows.read(position, line, text)
    bad = rows.bad
    requests = []
    for request, arrival_ns in zip(rows.good, _arrivals_ns(rows.good), strict=True):
        if arrival_ns > ARRIVAL_NS_MAX:
            most = f"at most {ARRIVAL_NS_MAX // 10**9} s after the earliest one"
            bad.append((request.line, FieldError(columns.arrival, arrival_ns // 10**9, most)))
            continue
        requests.append(
            TraceRequest(
                request.id,
                seconds(arrival_ns),
                request.prompt_tokens,
                request.output_tokens,
                priority=request.priority,
                hash_ids=request.hash_ids,
            )
        )
    bad.sort(key=lambda row: row[0])
    return requests, [BadRow(name, line, fault.field, fault.shown, fault.expected) for line, fault in bad]


def _arrivals_ns(checked: list[_Checked]) -> list[int]:
    """Nanoseconds from the earliest arrival. Rows before the first arrival of the file came at second 0, or, where
    the file has date-times, with the earliest.
    """
    known = [row.moment.ns for row in checked if row.moment]
    dated = any(row.moment.dated for row in checked if row.moment)
    start = min(known, default=0) if dated else 0
    absolute = [row.moment.ns if row.moment else start for row in checked]
    zero = min(absolute, default=0)
    return [ns - zero for ns in absolute]
