"""Backend "eager": the module itself, without compilation."""

from __future__ import annotations

from typing import Any

from neuron_sched.runner.backends.base import Graph, Tensors, parameters_and_buffers


class Eager:
    """Calls the module without compiling it. For debugging, and for machines where nothing can be compiled."""

    name = "eager"
    warmup_calls = 1

    def check(self, module: Any) -> None:
        """Accept every module."""

    def compile(self, module: Any, tensors: Tensors) -> Graph:
        names = tuple(tensors)

        def graph(*values: Any) -> Any:
            return module(**dict(zip(names, values, strict=True)))

        return graph

    def attach(self, graph: Graph, module: Any) -> None:
        """Do nothing: the graph calls the module and so uses its memory."""

    def persistent_tensors(self, module: Any) -> dict[str, Any]:
        return parameters_and_buffers(module)
