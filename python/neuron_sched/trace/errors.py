"""Errors of a trace: an invalid field, an invalid row, an invalid file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal


class FieldError(Exception):
    """A field with an invalid value. `None` and empty text mean that the field is missing."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(field, value, expected)
        self.field = field
        self.value_text = _value_text(value)
        self.expected = expected


@dataclass(frozen=True)
class BadRow:
    """An invalid row: `path` of the file, `line` number (from 1), `field`, its `value` as text, `expected` value."""

    path: str
    line: int
    field: str
    value: str
    expected: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.field}: {self.value}: expected {self.expected}"


class TraceError(ValueError):
    """A file that is not a trace, or a trace with invalid rows.

    `bad_rows` lists every invalid row, and the message has one line for each of them.
    """

    def __init__(self, message: str, bad_rows: Iterable[BadRow] = ()) -> None:
        super().__init__(message)
        self.bad_rows = tuple(bad_rows)


def _value_text(value: object) -> str:
    """Return the value as error messages show it, at most 80 characters."""
    if value is None or value == "":
        return "missing"
    text = str(value) if isinstance(value, (int, Decimal)) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
