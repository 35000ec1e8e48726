"""Files that are either written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file beside its place and moves it there; what stood there stays until the new one is whole.

    A link is followed; what is no file (a device, a pipe) is written to. Raises OSError.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        place.write_bytes(data)
        return
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            file.write(data)
        beside.replace(place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
