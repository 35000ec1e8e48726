"""Statistics of the compiled graphs of a model: how long each took to compile, and how much it was used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuron_sched.runner.shape import Shape, shape_name


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Statistics of one compiled graph.

    `seconds` is the time that warm-up spent on compiling the graph, or on loading it from disk if `cached`, and on its
    first run. `calls` counts the calls after warm-up. `real_tokens` and `padded_tokens` are the sums of
    `num_real_tokens` and `num_padded_tokens` over their batches: tokens of prefill steps, rows of decode steps.
    """

    seconds: float
    cached: bool
    calls: int
    real_tokens: int
    padded_tokens: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Snapshot of the graphs of a `CompiledModel`. `str()` formats it as a table.

    `backend` is the name of the backend, and `graphs` holds a `GraphReport` for each compiled shape, in the order of
    `PaddedInputs.shapes`.
    """

    backend: str
    graphs: Mapping[Shape, GraphReport]

    @property
    def seconds(self) -> float:
        """Time to compile or load all graphs, in seconds."""
        return sum(graph.seconds for graph in self.graphs.values())

    @property
    def calls(self) -> int:
        """Number of calls of all graphs after warm-up."""
        return sum(graph.calls for graph in self.graphs.values())

    @property
    def real_tokens(self) -> int:
        """Number of tokens in all calls, without padding."""
        return sum(graph.real_tokens for graph in self.graphs.values())

    @property
    def padded_tokens(self) -> int:
        """Number of tokens in all calls, including padding."""
        return sum(graph.padded_tokens for graph in self.graphs.values())

    @property
    def unused(self) -> tuple[Shape, ...]:
        """Shapes whose graph has not been called since warm-up."""
        return tuple(shape for shape, graph in self.graphs.items() if not graph.calls)

    def __str__(self) -> str:
        total = GraphReport(self.seconds, False, self.calls, self.real_tokens, self.padded_tokens)
        rows: list[tuple[str, ...]] = [("graph", "made", "seconds", "calls", "real", "padded", "padding")]
        rows += [
            (shape_name(shape), "read" if graph.cached else self.backend, *_number_cells(graph))
            for shape, graph in self.graphs.items()
        ]
        rows.append((f"{len(self.graphs)} graphs, {len(self.unused)} never used", "", *_number_cells(total)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
            for cells in (tuple(zip(row, widths, strict=True)) for row in rows)
        )


def _number_cells(graph: GraphReport) -> tuple[str, ...]:
    padding = 1 - graph.real_tokens / graph.padded_tokens if graph.padded_tokens else None
    return (
        f"{graph.seconds:.2f}",
        f"{graph.calls:,}",
        f"{graph.real_tokens:,}",
        f"{graph.padded_tokens:,}",
        "-" if padding is None else f"{100 * padding:.1f} %",
    )
