"""The summary of a replay as tables for people. Needs rich, the extra `[cli]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Summary = Mapping[str, Any]
"""What `Report.summary` holds, and the JSON file."""

STATISTICS = ("mean", "p50", "p90", "p99", "max")

LATENCIES = (
    ("to first token", "ttft_ms"),
    ("between tokens", "itl_ms"),
    ("end to end", "e2e_ms"),
    ("queueing", "queue_ms"),
)

REASONS = {
    "slots": "every slot was taken",
    "kv": "KV blocks were promised to others",
    "budget": "no tokens left in the step",
    "prefill_in_progress": "another prompt was mid-prefill",
    "prefill_batch_full": "the step takes no more prompts",
    "interleave": "decode steps were owed",
}
"""What the reasons of a wait mean."""

BAR_WIDTH = 10

WIDTH_MIN = 80
"""Columns that the text may fill on any terminal: a narrower one breaks lines, but no number is cut."""

UNBOUNDED = 10_000
"""A width that no table has."""


def write_tables(summary: Summary, *, title: str, setting: Sequence[str] = (), file: TextIO | None = None) -> None:
    """Writes the tables to `file` (standard output): in colour on a terminal, else as plain text.

    Above them stand the title and, in lines of their own, the setting. All tables are equally wide.
    """
    file = file or sys.stdout
    console = Console(file=file, highlight=False)
    tables = [table for table in (_latencies(summary), _steps(summary, console), _waits(summary)) if table is not None]
    unbounded = console.options.update(max_width=UNBOUNDED)
    width = max(Measurement.get(console, unbounded, table).maximum for table in tables)
    for table in tables:
        table.width = width
    console.width = max(console.width, width, WIDTH_MIN)
    with console.capture() as captured:
        console.print(Text(title, style="bold"))
        for line in setting:
            console.print(Text(line, style="dim"))
        console.print("", _totals(summary))
        for table in tables:
            console.print("", table)
    # rich fills lines with blanks up to the table's edge.
    text = "\n".join(line.rstrip() for line in captured.get().rstrip().split("\n")) + "\n"
    # The title may name a file in letters that the output does not have.
    file.write(text.encode(console.encoding, "replace").decode(console.encoding))


@contextmanager
def progress_bar(total: int, label: str = "replaying") -> Iterator[Callable[..., None] | None]:
    """A bar on standard error while the block runs; None off a terminal. The callback (done, total, next) moves it."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, _total, following="": bar.update(task, completed=done, description=following)


def figures(number: float) -> str:
    """Three digits that count, all of them before the point."""
    decimals = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{decimals}f}"


def duration(ms: float) -> str:
    """Milliseconds below a second, seconds from there on."""
    return f"{figures(ms)} ms" if ms < 1000 else f"{figures(ms / 1000)} s"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")


def _add_rest(table: Table, min_width: int = 0) -> None:
    """Adds a column without a heading that takes what is left of the width."""
    table.add_column("", min_width=min_width, ratio=1)


def _totals(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    refused = f", {summary['rejected']:,} refused" if summary["rejected"] else ""
    table.add_row("requests", f"{summary['completed']:,} completed{refused}")
    table.add_row("time", duration(1000 * summary["makespan_s"]))
    rates = (("requests_per_s", "requests/s"), ("output_tokens_per_s", "output tokens/s"))
    table.add_row("throughput", ", ".join(f"{figures(summary[rate] or 0)} {unit}" for rate, unit in rates))
    return table


def _latencies(summary: Summary) -> Table:
    table = _table()
    table.add_column("latency", min_width=16)
    for statistic in STATISTICS:
        table.add_column(statistic, justify="right", min_width=10, no_wrap=True)
    _add_rest(table)
    for label, field in LATENCIES:
        values = (summary[field][statistic] for statistic in STATISTICS)
        table.add_row(label, *("-" if value is None else duration(value) for value in values))
    return table


def _steps(summary: Summary, console: Console) -> Table:
    """Steps by kind and, where they are padded, by bucket; without the columns of padding where nothing is."""
    steps, tokens = summary["steps"], summary["tokens"]
    padded_any = any(summary["padding"].values())
    bar = "#" if console.options.ascii_only else "\u2588"
    table = _table()
    table.add_column("steps", min_width=8)
    columns = (("bucket", 7), ("steps", 9), ("real", 12), ("padded", 12), ("padding", 8))
    for heading, width in columns if padded_any else (("steps", 9), ("tokens", 12)):
        table.add_column(heading, justify="right", min_width=width, no_wrap=True)
    _add_rest(table, BAR_WIDTH if padded_any else 0)

    def row(label: str, bucket: str, count: int, real: int, padded: int, style: str = "") -> None:
        if not padded_any:
            table.add_row(label, f"{count:,}", f"{real:,}", style=style)
            return
        padding = padded - real
        filled = round(BAR_WIDTH * padding / padded) if padded else 0
        cells = (label, bucket, f"{count:,}", f"{real:,}", f"{padded:,}", share(padding, padded))
        table.add_row(*cells, Text(bar * filled, style="yellow"), style=style)

    for kind, real, padded in (("prefill", "prompt", "prompt_padded"), ("decode", "decode", "decode_padded")):
        buckets = summary["padding"].get(kind, {})
        row(kind, "all" if buckets else "", steps[kind], tokens[real], tokens[padded], "bold")
        for bucket, padding in buckets.items():
            row("", f"{int(bucket):,}", padding["steps"], padding["real"], padding["padded"])
    return table


def _waits(summary: Summary) -> Table | None:
    waits = summary["wait_reasons"]
    if not waits:
        return None
    table = _table()
    table.add_column("the head waited for", min_width=20)
    table.add_column("time", justify="right", min_width=9, no_wrap=True)
    table.add_column("of the run", justify="right", min_width=8)
    _add_rest(table)
    for reason, ms in sorted(waits.items(), key=lambda wait: -wait[1]):
        gloss = Text(REASONS.get(reason, ""), style="dim")
        table.add_row(reason, duration(ms), share(ms, 1000 * summary["makespan_s"]), gloss)
    return table
