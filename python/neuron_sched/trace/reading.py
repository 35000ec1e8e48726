"""Reading of a trace file: from lines to rows, and from rows to requests with arrivals relative to the earliest one."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from neuron_sched._native import TraceRequest
from neuron_sched.trace.errors import BadRow, FieldError, TraceError
from neuron_sched.trace.fields import Moment, arrival, hash_ids, identifier, priority, seconds_text, token_count
from neuron_sched.trace.formats import Line, Parse, TraceFormat, recognise

ARRIVAL_NS_MAX = 2**63 - 1
"""Largest arrival in nanoseconds after time zero: about 292 years."""


class Trace(list[TraceRequest]):
    """The requests of a file, in row order. `skipped` is the number of invalid rows that were left out."""

    def __init__(self, requests: Iterable[TraceRequest] = (), *, skipped: int = 0) -> None:
        super().__init__(requests)
        self.skipped = skipped


def read_trace(path: str | os.PathLike[str], *, skip_bad: bool = False) -> Trace:
    """Read a trace file and return its requests in row order, with arrivals relative to the earliest one.

    Arrivals may be seconds (Mooncake: milliseconds), epoch times or date-times, in any order. An empty or absent
    arrival equals the arrival of the row before; in the first row, it is time zero. A request without an `id` gets its
    row number (from 0) as id. Raise `TraceError` if the file cannot be read, is not a trace or has no valid row, and,
    unless `skip_bad` is set, if any row is invalid.
    """
    name = os.fspath(path)
    lines = _lines(name)
    trace_format, parse, rows = recognise(name, lines)
    requests, bad_rows = _requests(name, trace_format, parse, rows)
    if bad_rows and not skip_bad:
        raise TraceError("\n".join(map(str, bad_rows)), bad_rows)
    if not requests:
        skipped = f" ({len(bad_rows)} rows skipped)" if bad_rows else ""
        raise TraceError(f"{name}: the trace has no requests{skipped}", bad_rows)
    return Trace(requests, skipped=len(bad_rows))


def _lines(name: str) -> list[Line]:
    """Return the non-blank lines of the file, at least one. Raise `TraceError` if the file has none or is not text."""
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
        raise TraceError(f"{name}: not a trace: byte {error.start} is not valid UTF-8") from error
    if "\0" in text:
        raise TraceError(f"{name}: not a trace: binary data")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line and not line.isspace()]
    if not numbered:
        raise TraceError(f"{name}: the file is empty")
    return numbered


@dataclass(frozen=True)
class _ValidRow:
    """A row whose fields are all valid. `moment` is `None` if neither this row nor a row before it has an arrival."""

    line: int
    moment: Moment | None
    id: str
    prompt_tokens: int
    output_tokens: int
    priority: int
    hash_ids: list[int] | None


class _RowReader:
    """Reader of the rows of a file, which are read in file order and collected in `valid` and `invalid`."""

    def __init__(self, trace_format: TraceFormat, parse: Parse) -> None:
        self.valid: list[_ValidRow] = []
        self.invalid: list[tuple[int, FieldError]] = []
        """Line number and first invalid field of each invalid row."""
        self._format = trace_format
        self._parse = parse
        self._moment: Moment | None = None
        self._line_of_id: dict[str, int] = {}

    def read(self, position: int, line: int, text: str) -> None:
        """Read one row: its position among the rows (from 0), its line number in the file (from 1), its text."""
        try:
            self.valid.append(self._parse_fields(position, line, text))
        except FieldError as error:
            self.invalid.append((line, error))

    def _parse_fields(self, position: int, line: int, text: str) -> _ValidRow:
        names = self._format
        row = self._parse(text)
        # Stored before the other fields are checked: a row without an arrival takes that of an invalid row too.
        self._moment = arrival(names.arrival, row.get(names.arrival), names.decimals, self._moment)
        prompt_tokens = token_count(names.prompt, row.get(names.prompt))
        valid = _ValidRow(
            line=line,
            moment=self._moment,
            prompt_tokens=prompt_tokens,
            output_tokens=token_count(names.output, row.get(names.output)),
            priority=priority("priority", row.get("priority")),
            hash_ids=hash_ids("hash_ids", row.get("hash_ids"), prompt_tokens),
            id=identifier("id", row.get("id"), default=str(position)),
        )
        first = self._line_of_id.setdefault(valid.id, line)
        if first != line:
            raise FieldError("id", valid.id, f"an id other than that of line {first}")
        return valid


def _requests(
    name: str, trace_format: TraceFormat, parse: Parse, lines: list[Line]
) -> tuple[list[TraceRequest], list[BadRow]]:
    """Return the requests, with arrivals relative to the earliest one, and the invalid rows, both in file order."""
    reader = _RowReader(trace_format, parse)
    for position, (line, text) in enumerate(lines):
        reader.read(position, line, text)
    invalid = reader.invalid
    requests = []
    for row, arrival_ns in zip(reader.valid, _arrivals_ns(reader.valid), strict=True):
        if arrival_ns > ARRIVAL_NS_MAX:
            expected = f"at most {ARRIVAL_NS_MAX // 10**9} s after the earliest one"
            invalid.append((row.line, FieldError(trace_format.arrival, arrival_ns // 10**9, expected)))
            continue
        requests.append(
            TraceRequest(
                row.id,
                seconds_text(arrival_ns),
                row.prompt_tokens,
                row.output_tokens,
                priority=row.priority,
                hash_ids=row.hash_ids,
            )
        )
    invalid.sort(key=lambda entry: entry[0])
    return requests, [BadRow(name, line, error.field, error.value_text, error.expected) for line, error in invalid]


def _arrivals_ns(rows: list[_ValidRow]) -> list[int]:
    """Return the arrival of each row in nanoseconds after the earliest one.

    Rows before the first arrival in the file arrive at the earliest date-time, or at 0 if the arrivals are numbers.
    """
    known = [row.moment.ns for row in rows if row.moment]
    has_date_times = any(row.moment.is_date_time for row in rows if row.moment)
    start = min(known, default=0) if has_date_times else 0
    absolute = [row.moment.ns if row.moment else start for row in rows]
    zero = min(absolute, default=0)
    return [ns - zero for ns in absolute]
