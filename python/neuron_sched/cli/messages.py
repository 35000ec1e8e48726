"""Messages of the command line: faults of several checks, field names replaced by options, standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

NO_FLAGS: Mapping[str, str] = {}

T = TypeVar("T")


class UsageError(Exception):
    """Faults of the command line or its files, one per line of the message."""


def collect(faults: list[str], make: Callable[[], T], flags: Mapping[str, str] = NO_FLAGS) -> T | None:
    """Call `make` and return its result. If it raises an error, append the message to `faults` and return `None`.

    The caller can then report all faults of a command line at once. `flags` is as in `with_flags`.
    """
    try:
        return make()
    except (ValueError, OSError, UsageError) as error:
        faults.append(with_flags(error, flags))
        return None


def with_flags(error: Exception, flags: Mapping[str, str]) -> str:
    """Return the message of the error. A field name at the start of a line is replaced by its option in `flags`."""
    lines = (line.partition(": ") for line in str(error).splitlines())
    return "\n".join(f"{flags.get(field, field)}{colon}{rest}" for field, colon, rest in lines)


def print_stderr(line: str) -> None:
    """Print a line to standard error. Print nothing if standard error is closed."""
    if sys.stderr is not None:
        print(line, file=sys.stderr)


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, such as `1 request` or `3,000 requests`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
