"""Trace formats: the field names of each, and the two syntaxes, CSV and JSON lines.

To support other field names, add an entry to `FORMATS`. To support a third syntax, add a branch to `recognise`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from neuron_sched.trace.errors import FieldError, TraceError
from neuron_sched.trace.fields import decimal_or_text, int_or_text

Line = tuple[int, str]
"""Line number in the file (from 1), and text of the line."""

Row = dict[str, object]
"""Values of a row by field name in lower case. A CSV value is text or an integer; a JSON value is of any JSON type."""

Parse = Callable[[str], Row]
"""Function that parses the text of one row. It raises `FieldError` if the text is malformed."""


@dataclass(frozen=True)
class TraceFormat:
    """A trace format: the lower-case names of the fields that hold arrival, prompt tokens and output tokens."""

    arrival: str
    prompt: str
    output: str
    description: str
    """Text for the format in error messages."""
    decimals: int = 9
    """Unit of a numeric arrival, as a power of ten in nanoseconds: 9 for seconds, 6 for milliseconds."""


FORMATS = (
    TraceFormat(
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        description="arrival_s,prompt_tokens,output_tokens (CSV or JSON lines)",
    ),
    TraceFormat(
        "timestamp",
        "contexttokens",
        "generatedtokens",
        description="TIMESTAMP,ContextTokens,GeneratedTokens (Azure CSV)",
    ),
    TraceFormat(
        "timestamp",
        "input_length",
        "output_length",
        description="timestamp, input_length, output_length, hash_ids (Mooncake JSON lines)",
        decimals=6,
    ),
)

KNOWN_FORMATS = " or ".join([", ".join(known.description for known in FORMATS[:-1]), FORMATS[-1].description])


def recognise(name: str, lines: list[Line]) -> tuple[TraceFormat, Parse, list[Line]]:
    """Return the format of a file, the function that parses a row, and the lines that are rows.

    `lines` are the non-blank lines of the file, at least one. `name` is the file name in error messages; the format
    does not depend on it. Raise `TraceError` if the format is unknown.
    """
    if lines[0][1].lstrip().startswith("{"):
        return _json_format(name, lines), _json_row, lines
    header, *rows = lines
    return *_csv_format(name, header), rows


def _format_of(names: Iterable[str]) -> TraceFormat | None:
    """Return the format whose prompt or output field is among these names, or `None`."""
    present = set(names)
    return next((known for known in FORMATS if known.prompt in present or known.output in present), None)


def _csv_format(name: str, header: Line) -> tuple[TraceFormat, Parse]:
    number, line = header
    try:
        fields = [cell.strip().lower() for cell in _cells(line)]
    except FieldError:
        fields = []
    found = _format_of(fields)
    if found is None or not {found.prompt, found.output} <= set(fields) or len(set(fields)) < len(fields):
        shortened = line if len(line) <= 60 else f"{line[:60]}..."
        raise TraceError(f"{name}:{number}: unknown header {shortened!r}: expected {KNOWN_FORMATS}")
    return found, lambda line: _csv_row(fields, line)


def _csv_row(header: list[str], line: str) -> Row:
    cells = _cells(line)
    if len(cells) < len(header):
        raise FieldError(header[len(cells)], None, f"a row of {len(header)} fields")
    if any(cells[len(header) :]):
        raise FieldError("row", line, f"{len(header)} fields")
    row: Row = {field: cell if field == "id" else int_or_text(cell) for field, cell in zip(header, cells, strict=False)}
    return row


def _cells(line: str) -> list[str]:
    """Return the cells of one line. No cell continues on the next line, so an unclosed quote affects one row only."""
    try:
        return next(csv.reader([line], strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise FieldError("row", line, "a complete CSV row") from error


def _json_format(name: str, lines: list[Line]) -> TraceFormat:
    """Return the format of the first row that has a field of a known format. Rows before it may be invalid."""
    for _, line in lines:
        try:
            found = _format_of(_json_row(line))
        except FieldError:
            continue
        if found is not None:
            return found
    raise TraceError(f"{name}: no row has the fields of a trace: expected {KNOWN_FORMATS}")


def _json_row(line: str) -> Row:
    expected = "one complete JSON object"
    try:
        value = json.loads(line, parse_float=decimal_or_text, parse_constant=decimal_or_text)
    except (ValueError, RecursionError) as error:  # ValueError: malformed JSON, or an integer of thousands of digits
        raise FieldError("row", line, expected) from error
    if not isinstance(value, dict):
        raise FieldError("row", line, expected)
    return {field.lower(): value for field, value in value.items()}
