"""The summary of a replay as tables. Imports rich, which the extra `[cli]` installs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Summary = Mapping[str, Any]
"""Value of `Report.summary`, which is also the content of the JSON file."""

STATISTICS = ("mean", "p50", "p90", "p99", "max")

LATENCIES = (
    ("to first token", "ttft_ms"),
    ("between tokens", "itl_ms"),
    ("end to end", "e2e_ms"),
    ("queueing", "queue_ms"),
)

REASONS = {
    "slots": "every slot was taken",
    "kv": "too few unreserved KV blocks",
    "budget": "no tokens left in the step",
    "prefill_in_progress": "another prompt was mid-prefill",
    "prefill_batch_full": "the step takes no more prompts",
    "interleave": "the interleave bound was reached",
}
"""Explanation of each wait reason, in the last column of the table."""

BAR_WIDTH = 10

WIDTH_MIN = 80
"""Smallest width of the output in columns. A narrower terminal wraps the lines, and no number is truncated."""

UNBOUNDED = 10_000
"""Sentinel: no table is this wide."""


def write_tables(summary: Summary, *, title: str, settings: Sequence[str] = (), file: TextIO | None = None) -> None:
    """Write the tables to `file` (default: standard output), in colour on a terminal and as plain text otherwise.

    The title and the lines of `settings` precede the tables. All tables have the same width.
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
        for line in settings:
            console.print(Text(line, style="dim"))
        console.print("", _totals(summary))
        for table in tables:
            console.print("", table)
    # rich pads each line with blanks to the width of the table.
    text = "\n".join(line.rstrip() for line in captured.get().rstrip().split("\n")) + "\n"
    # The title is a file name, which may have characters that the encoding of the output lacks.
    file.write(text.encode(console.encoding, "replace").decode(console.encoding))


def figures(number: float) -> str:
    """Return the number with three significant digits, and with every digit before the decimal point."""
    decimals = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{decimals}f}"


def duration(ms: float) -> str:
    """Return a time in milliseconds if it is below one second, else in seconds."""
    return f"{figures(ms)} ms" if ms < 1000 else f"{figures(ms / 1000)} s"


def share(part: float, whole: float) -> str:
    """Return `part` as a percentage of `whole`, or `-` if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")


def _add_filler(table: Table, min_width: int = 0) -> None:
    """Add a column without a heading that takes the remaining width."""
    table.add_column("", min_width=min_width, ratio=1)


def _totals(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    rejected = f", {summary['rejected']:,} rejected" if summary["rejected"] else ""
    table.add_row("requests", f"{summary['completed']:,} completed{rejected}")
    table.add_row("time", duration(1000 * summary["makespan_s"]))
    rates = (("requests_per_s", "requests/s"), ("output_tokens_per_s", "output tokens/s"))
    table.add_row("throughput", ", ".join(f"{figures(summary[rate] or 0)} {unit}" for rate, unit in rates))
    return table


def _latencies(summary: Summary) -> Table:
    table = _table()
    table.add_column("latency", min_width=16)
    for statistic in STATISTICS:
        table.add_column(statistic, justify="right", min_width=10, no_wrap=True)
    _add_filler(table)
    for label, field in LATENCIES:
        values = (summary[field][statistic] for statistic in STATISTICS)
        table.add_row(label, *("-" if value is None else duration(value) for value in values))
    return table


def _steps(summary: Summary, console: Console) -> Table:
    """Return the table of steps by kind and bucket. If no step is padded, it has no buckets and no padding columns."""
    steps, tokens = summary["steps"], summary["tokens"]
    has_padding = any(summary["padding"].values())
    bar = "#" if console.options.ascii_only else "\u2588"
    table = _table()
    table.add_column("steps", min_width=8)
    columns = (("bucket", 7), ("steps", 9), ("unpadded", 12), ("padded", 12), ("padding", 8))
    for heading, width in columns if has_padding else (("steps", 9), ("tokens", 12)):
        table.add_column(heading, justify="right", min_width=width, no_wrap=True)
    _add_filler(table, BAR_WIDTH if has_padding else 0)

    def row(label: str, bucket: str, count: int, unpadded: int, padded: int, style: str = "") -> None:
        if not has_padding:
            table.add_row(label, f"{count:,}", f"{unpadded:,}", style=style)
            return
        padding = padded - unpadded
        filled = round(BAR_WIDTH * padding / padded) if padded else 0
        cells = (label, bucket, f"{count:,}", f"{unpadded:,}", f"{padded:,}", share(padding, padded))
        table.add_row(*cells, Text(bar * filled, style="yellow"), style=style)

    for kind, unpadded, padded in (("prefill", "prompt", "prompt_padded"), ("decode", "decode", "decode_padded")):
        buckets = summary["padding"].get(kind, {})
        row(kind, "all" if buckets else "", steps[kind], tokens[unpadded], tokens[padded], "bold")
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
    _add_filler(table)
    for reason, ms in sorted(waits.items(), key=lambda wait: -wait[1]):
        explanation = Text(REASONS.get(reason, ""), style="dim")
        table.add_row(reason, duration(ms), share(ms, 1000 * summary["makespan_s"]), explanation)
    return table
