"""Progress bar on a terminal. rich, which the extra `[cli]` installs, is imported only when a bar is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress_bar(total: int, label: str = "replaying") -> Iterator[Callable[..., None] | None]:
    """Show a bar on standard error during the block, and yield its callback `(done, total, description)`.

    Yield `None` if standard error is not a terminal or rich is not installed.
    """
    if sys.stderr is None or not sys.stderr.isatty() or find_spec("rich") is None:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, _total, description="": bar.update(task, completed=done, description=description)
