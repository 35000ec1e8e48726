"""Cost profiles: TOML files with step times measured on a device."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table: TypeAlias = dict[int, int | Decimal]
"""Milliseconds by padded size."""

KEYS = ("description", "prefill", "decode")
"""Top-level keys that a profile may have."""

SUFFIX = ".toml"
SHIPPED = Path(__file__).parent / "profiles"


def profiles() -> list[str]:
    """Return the names of the profiles that ship with the package, sorted."""
    return sorted(file.stem for file in SHIPPED.glob(f"*{SUFFIX}"))


def load_profile(name: str) -> tuple[Table, Table]:
    """Return the prefill times by padded tokens and the decode times by padded rows, in milliseconds.

    `name` is that of a shipped profile or the path of a TOML file. Raise `ValueError` if neither exists, or if the
    content is not a profile.
    """
    source = SHIPPED / f"{name}{SUFFIX}" if name in profiles() else Path(name)
    try:
        content = tomllib.loads(source.read_text(encoding="utf-8"), parse_float=Decimal)
    except OSError as error:
        known = ", ".join(profiles())
        raise ValueError(f"cost: {name}: {error.strerror}; expected a TOML file, or one of {known}") from error
    except ValueError as error:
        raise ValueError(f"cost: {name}: not TOML: {error}") from error
    if unknown := [key for key in content if key not in KEYS]:
        raise ValueError(f"cost: {name}: {', '.join(unknown)}: expected {', '.join(KEYS)} only")
    return _table(name, content, "prefill"), _table(name, content, "decode")


def _table(name: str, content: dict[str, Any], field: str) -> Table:
    table = content.get(field)
    if not isinstance(table, dict):
        raise ValueError(f"cost: {name}: {field}: expected a table of padded sizes and milliseconds")
    bad = [size for size in table if not (size.isascii() and size.isdigit())]
    if bad:
        raise ValueError(f"cost: {name}: {field}: {bad[0]}: expected a whole number of tokens or rows")
    return {int(size): time for size, time in table.items()}
