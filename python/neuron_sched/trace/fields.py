"""Fields of a trace row: each function converts text or a JSON value exactly, or raises `FieldError`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation

from neuron_sched.trace.errors import FieldError

TOKENS_MAX = 2**31 - 1
"""Largest number of tokens in a field, as in `NeuronConfig`."""

SECONDS_MAX = 9_223_372_036
"""Largest numeric arrival in seconds: its nanoseconds fit in 63 bits. As an epoch time it is in the year 2262."""

SEGMENT_TOKENS = 512
"""Number of prompt tokens for each hash id, as in Mooncake traces."""

HASH_ID_MAX = 2**53 - 1
"""Largest hash id, as in `TraceRequest`."""

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
INTEGER = re.compile(r"\s*[+-]?\d{1,30}\s*", re.ASCII)
DECIMAL_CONTEXT = Context(prec=60)
"""Decimal context with enough digits for any arrival in nanoseconds. Replaces the caller's own context."""

DATE_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?:[.,](?P<fraction>\d+))?"
    r"\s*(?:Z|UTC|(?P<sign>[+-])(?P<hours>[01]\d|2[0-3]):?(?P<minutes>[0-5]\d)?)?",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class Moment:
    """An arrival as the file states it, not yet relative to the earliest arrival of the trace."""

    ns: int
    """Nanoseconds since the start of the year 1 for a date-time, else since the zero of the file's own clock."""
    is_date_time: bool


def arrival(field: str, value: object, decimals: int, previous: Moment | None) -> Moment | None:
    """Return the arrival of a request, or `previous`, the arrival of the row before, if the value is empty or absent.

    The unit of a numeric value is 10^`decimals` nanoseconds. Raise `FieldError` if the value is invalid, or if it is a
    number after date-times or a date-time after numbers.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return previous
    moment = _date_time(value.strip()) if isinstance(value, str) else None
    if moment is None:
        moment = Moment(_nanoseconds(field, value, decimals), is_date_time=False)
    if previous is not None and moment.is_date_time != previous.is_date_time:
        raise FieldError(field, value, f"a {'date-time' if previous.is_date_time else 'number'}, as in the rows before")
    return moment


def _nanoseconds(field: str, value: object, decimals: int) -> int:
    maximum = SECONDS_MAX * 10 ** (9 - decimals)
    number = decimal_or_text(value.strip()) if isinstance(value, str) and NUMBER.fullmatch(value.strip()) else value
    if isinstance(number, int) and not isinstance(number, bool):
        number = Decimal(number)
    if not isinstance(number, Decimal) or not number.is_finite() or not 0 <= number <= maximum:
        raise FieldError(field, value, f"a date-time or a number from 0 to {maximum}")
    return _scaled_half_up(number, decimals)


def decimal_or_text(text: str) -> Decimal | str:
    """Return the text of a number as an exact decimal, or the text itself if `Decimal` cannot hold the exponent."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return text


def seconds_text(ns: int) -> str:
    """Return nanoseconds as exact decimal seconds, without trailing zeros."""
    whole_s, rest_ns = divmod(ns, 10**9)
    return f"{whole_s}.{rest_ns:09d}".rstrip("0") if rest_ns else str(whole_s)


def _scaled_half_up(number: Decimal, decimals: int) -> int:
    """Return the number times 10^`decimals`, rounded half up."""
    return int(
        number.quantize(Decimal((0, (1,), -decimals)), ROUND_HALF_UP, DECIMAL_CONTEXT).scaleb(decimals, DECIMAL_CONTEXT)
    )


def _date_time(text: str) -> Moment | None:
    match = DATE_TIME.fullmatch(text)
    if match is None:
        return None
    try:
        local = datetime.fromisoformat(f"{match['date']} {match['time']}")
    except ValueError:
        return None
    seconds = (local - datetime.min) // timedelta(seconds=1)
    if match["sign"]:
        offset_s = 3600 * int(match["hours"]) + 60 * int(match["minutes"] or 0)
        seconds -= offset_s if match["sign"] == "+" else -offset_s
    fraction = Decimal(f"0.{match['fraction'] or 0}")
    return Moment(seconds * 10**9 + _scaled_half_up(fraction, 9), is_date_time=True)


def int_or_text(text: str) -> int | str:
    """Return a CSV cell as an integer if it is the text of one, else the cell itself."""
    return int(text) if INTEGER.fullmatch(text) else text


def token_count(field: str, value: object) -> int:
    """Return a number of tokens. Raise `FieldError` if it is a float, a bool, text, or out of range."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= TOKENS_MAX:
        raise FieldError(field, value, f"a whole number from 1 to {TOKENS_MAX}")
    return value


def priority(field: str, value: object) -> int:
    """Return a request's priority (lower is scheduled first), 0 if the value is absent."""
    if value is None or value == "":
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise FieldError(field, value, "a whole number of 64 bits")
    return value


def identifier(field: str, value: object, default: str) -> str:
    """Return a request's id, which is text or a whole number, or `default` if the value is absent."""
    if value is None or value == "":
        return default
    if isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise FieldError(field, value, "text or a whole number")


def hash_ids(field: str, value: object, prompt_tokens: int) -> list[int] | None:
    """Return the content of the prompt, one id for each 512 tokens (rounded up), or `None` if the value is absent."""
    if value is None:
        return None
    minimum = -(-prompt_tokens // SEGMENT_TOKENS)
    expected = f"a list of at least {minimum} whole numbers up to 2^53 - 1, one for each {SEGMENT_TOKENS} tokens"
    if not isinstance(value, list) or len(value) < minimum:
        raise FieldError(field, value, expected)
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= HASH_ID_MAX:
            raise FieldError(field, value, expected)
    return value
