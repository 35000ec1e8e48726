"""The module itself."""

from __future__ import annotations

from typing import Any

from neuron_sched.backends.base import Graph, Tensors, kept_tensors


class Eager:
    """The module itself, called step by step: for looking for faults, and where nothing can be compiled."""

    name = "eager"
    runs = 1

    def check(self, module: Any) -> None:
        """Every module will do."""

    def compile(self, module: Any, tensors: Tensors) -> Graph:
        names = tuple(tensors)

        def graph(*values: Any) -> Any:
            return module(**dict(zip(names, values, strict=True)))

        return graph

    def attach(self, graph: Graph, module: Any) -> None:
        """The graph is the module, so it has its memory."""

    def kept(self, module: Any) -> dict[str, Any]:
        return kept_tensors(module)
