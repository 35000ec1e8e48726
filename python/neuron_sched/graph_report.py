"""What became of the compiled graphs of a model: how long each took, and how much it was used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuron_sched.runner import Shape


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph.

    `seconds` is what it took at warm-up to compile it, or to read it from disk (`cached`), and to run it for the first
    time. `calls` are those since; `real_tokens` and `padded_tokens` the sums of `num_real_tokens` and
    `num_padded_tokens` of their batches: tokens of a prefill, rows of a decode step.
    """

    seconds: float
    cached: bool
    calls: int
    real_tokens: int
    padded_tokens: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The graphs of a `CompiledModel` at one moment; as text, a table.

    `backend` is the name of what compiled them, and `graphs` holds a `GraphReport` for each shape, in the order of
    `PaddedInputs.shapes`.
    """

    backend: str
    graphs: Mapping[Shape, GraphReport]

    @property
    def seconds(self) -> float:
        """Of all graphs."""
        return sum(graph.seconds for graph in self.graphs.values())

    @property
    def calls(self) -> int:
        """Of all graphs."""
        return sum(graph.calls for graph in self.graphs.values())

    @property
    def real_tokens(self) -> int:
        """Of all calls."""
        return sum(graph.real_tokens for graph in self.graphs.values())

    @property
    def padded_tokens(self) -> int:
        """Of all calls, padding included."""
        return sum(graph.padded_tokens for graph in self.graphs.values())

    @property
    def unused(self) -> tuple[Shape, ...]:
        """The shapes whose graph was never called."""
        return tuple(shape for shape, graph in self.graphs.items() if not graph.calls)

    def __str__(self) -> str:
        total = GraphReport(self.seconds, False, self.calls, self.real_tokens, self.padded_tokens)
        rows: list[tuple[str, ...]] = [("graph", "made", "seconds", "calls", "real", "padded", "padding")]
        rows += [
            (shape_name(shape), "read" if graph.cached else self.backend, *_numbers(graph))
            for shape, graph in self.graphs.items()
        ]
        rows.append((f"{len(self.graphs)} graphs, {len(self.unused)} never used", "", *_numbers(total)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
            for cells in (tuple(zip(row, widths, strict=True)) for row in rows)
        )


def shape_name(shape: Shape) -> str:
    """The shape in words."""
    kind, size, *context = shape
    return f"{kind} {size}" + "".join(f", context {tokens}" for tokens in context)


def _numbers(graph: GraphReport) -> tuple[str, ...]:
    padding = 1 - graph.real_tokens / graph.padded_tokens if graph.padded_tokens else None
    return (
        f"{graph.seconds:.2f}",
        f"{graph.calls:,}",
        f"{graph.real_tokens:,}",
        f"{graph.padded_tokens:,}",
        "-" if padding is None else f"{100 * padding:.1f} %",
    )
