"""The fields of a trace row: from text or JSON to a checked value, exactly, or a `FieldError`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation

TOKENS_MAX = 2**31 - 1
"""The largest count of tokens, as in `NeuronConfig`."""

SECONDS_MAX = 9_223_372_036
"""The latest arrival that is a number, so that nanoseconds fit in 63 bits; as an epoch time it lies in 2262."""

SEGMENT_TOKENS = 512
"""Prompt tokens that one hash id stands for (Mooncake)."""

HASH_ID_MAX = 2**53 - 1
"""The largest hash id, as in `TraceRequest`."""

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
WHOLE = re.compile(r"\s*[+-]?\d{1,30}\s*", re.ASCII)
EXACT = Context(prec=60)
"""Holds any arrival in whole nanoseconds; the caller's own decimal context does not matter."""

DATE_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?:[.,](?P<fraction>\d+))?"
    r"\s*(?:Z|UTC|(?P<sign>[+-])(?P<hours>[01]\d|2[0-3]):?(?P<minutes>[0-5]\d)?)?",
    re.ASCII | re.IGNORECASE,
)


class FieldError(Exception):
    """A value that a row may not have; `value` None is a field that is missing or empty."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(field, value, expected)
        self.field = field
        self.shown = _shown(value)
        self.expected = expected


def _shown(value: object) -> str:
    if value is None or value == "":
        return "missing"
    text = str(value) if isinstance(value, (int, Decimal)) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class Moment:
    """An arrival in nanoseconds: since year 1 when it was a date-time, else as the file counts."""

    ns: int
    dated: bool


def arrival(field: str, value: object, decimals: int, before: Moment | None) -> Moment | None:
    """When a request arrives; a number is in units of `decimals` digits to the nanosecond.

    An empty or absent value is `before`, the arrival of the row before.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return before
    moment = _date_time(value.strip()) if isinstance(value, str) else None
    if moment is None:
        moment = Moment(_nanoseconds(field, value, decimals), dated=False)
    if before is not None and moment.dated != before.dated:
        raise FieldError(field, value, f"a {'date-time' if before.dated else 'number'}, as in the rows before")
    return moment


def _nanoseconds(field: str, value: object, decimals: int) -> int:
    most = SECONDS_MAX * 10 ** (9 - decimals)
    number = exact(value.strip()) if isinstance(value, str) and NUMBER.fullmatch(value.strip()) else value
    if isinstance(number, int) and not isinstance(number, bool):
        number = Decimal(number)
    if not isinstance(number, Decimal) or not number.is_finite() or not 0 <= number <= most:
        raise FieldError(field, value, f"a date-time or a number from 0 to {most}")
    return _half_up(number, decimals)


def exact(text: str) -> Decimal | str:
    """The number that is spelt, or the text when its exponent is beyond all bounds."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return text


def seconds(ns: int) -> str:
    """Exact decimal seconds, without zeros at the end."""
    whole_s, rest = divmod(ns, 10**9)
    return f"{whole_s}.{rest:09d}".rstrip("0") if rest else str(whole_s)


def _half_up(number: Decimal, decimals: int) -> int:
    """The number times 10 to the power of `decimals`, halves rounded up."""
    return int(number.quantize(Decimal((0, (1,), -decimals)), ROUND_HALF_UP, EXACT).scaleb(decimals, EXACT))


def _date_time(text: str) -> Moment | None:
    match = DATE_TIME.fullmatch(text)
    if match is None:
        return None
    try:
        day = datetime.fromisoformat(f"{match['date']} {match['time']}")
    except ValueError:
        return None
    seconds = (day - datetime.min) // timedelta(seconds=1)
    if match["sign"]:
        offset_s = 3600 * int(match["hours"]) + 60 * int(match["minutes"] or 0)
        seconds -= offset_s if match["sign"] == "+" else -offset_s
    fraction = Decimal(f"0.{match['fraction'] or 0}")
    return Moment(seconds * 10**9 + _half_up(fraction, 9), dated=True)


def whole(text: str) -> int | str:
    """A whole number that a CSV cell spells, else the cell."""
    return int(text) if WHOLE.fullmatch(text) else text


def count(field: str, value: object) -> int:
    """A number of tokens; no float, bool or text."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= TOKENS_MAX:
        raise FieldError(field, value, f"a whole number from 1 to {TOKENS_MAX}")
    return value


def priority(field: str, value: object) -> int:
    """The lower the sooner; 0 when absent."""
    if value is None or value == "":
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise FieldError(field, value, "a whole number of 64 bits")
    return value


def identifier(field: str, value: object, default: str) -> str:
    """A request's id: text or a whole number; `default` when absent."""
    if value is None or value == "":
        return default
    if isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise FieldError(field, value, "text or a whole number")


def hash_ids(field: str, value: object, prompt_tokens: int) -> list[int] | None:
    """What the prompt consists of, an id for each 512 tokens begun; None when the trace does not tell."""
    if value is None:
        return None
    least = -(-prompt_tokens // SEGMENT_TOKENS)
    expected = f"a list of at least {least} whole numbers up to 2^53 - 1, one for each {SEGMENT_TOKENS} tokens"
    if not isinstance(value, list) or len(value) < least:
        raise FieldError(field, value, expected)
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= HASH_ID_MAX:
            raise FieldError(field, value, expected)
    return value
