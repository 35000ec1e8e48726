"""Files that are either written whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file beside its place and moves it there; what stood there stays until the new one is whole.

    A link is followed, and the permission bits of what stood there are kept; what is no file (a device, a pipe) is
    written to. Raises OSError naming the path as it was given.
    """
    try:
        _write(Path(os.path.realpath(path)), data)
    except OSError as error:
        # The file beside is nothing that the caller knows.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _write(place: Path, data: bytes) -> None:
    if place.exists() and not place.is_file():
        place.write_bytes(data)
        return
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            if place.exists():
                # Before the content is there: it may be for the owner only.
                os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
            file.write(data)
        beside.replace(place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A place beside `path` to write a file at, which is moved to `path` when the block ends without an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
