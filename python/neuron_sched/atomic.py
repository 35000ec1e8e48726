"""Atomic writing of files: a file gets its complete new content, or keeps the old one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to a temporary file in the folder of `path`, and rename that file to `path` once it is complete.

    A symbolic link is followed, and the permission bits of an existing file are kept. If `path` exists and is not a
    regular file (a device, a pipe), the data is written to it directly. Raise `OSError`, with `path` as its file name.
    """
    try:
        _write(Path(os.path.realpath(path)), data)
    except OSError as error:
        # The error may name the temporary file, which the caller does not know.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _write(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    temporary = _temporary(path)
    try:
        with temporary.open("xb") as file:
            if path.exists():
                # Set before the content is written, because the existing file may be readable by its owner only.
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    """Return the path of a hidden file in the same folder, with the process id in its name."""
    return path.with_name(f".{path.name}.{os.getpid()}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the folder of `path`; rename it to `path` if the block raises no error."""
    temporary = _temporary(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
