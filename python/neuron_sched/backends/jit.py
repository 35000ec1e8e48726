"""torch.jit.trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuron_sched.backends.base import Graph, Tensors, imported, kept_tensors
from neuron_sched.backends.traced import Traced, positional, quiet


class Jit(Traced):
    """torch.jit.trace. `options` are keyword arguments of it.

    All graphs, traced or loaded, use the parameters and buffers of the one module: what one writes to the KV cache, the
    others read. So a file holds the graph alone, without weights and cache. What the module keeps in other places (a
    plain tensor attribute, a Python number) is a constant of the graph, and in the file.
    """

    name = "jit"
    # The executor looks at the first call and optimises before the second.
    runs = 2

    def __init__(self, options: dict[str, Any]) -> None:
        # What the dummy rows compute may be NaN, which the check of the trace takes for a difference.
        self._options = {"check_trace": False, **options}

    def check(self, module: Any) -> None:
        """Tracing says itself what it cannot do."""

    def compiler(self) -> str:
        return f"torch.jit of torch {imported('torch', self.name).__version__}"

    def compile(self, module: Any, tensors: Tensors) -> Graph:
        import torch

        with quiet():
            graph: Graph = torch.jit.trace(
                positional()(module, tuple(tensors)), tuple(tensors.values()), **self._options
            )
        return graph

    def save(self, graph: Any, path: Path) -> None:
        """Writes the graph with an empty tensor for each parameter and buffer."""
        import torch

        own = list(_slots(graph))
        try:
            for part, _, name, tensor in own:
                part._c.setattr(name, torch.empty(0, dtype=tensor.dtype))
            super().save(graph, path)
        finally:
            for part, _, name, tensor in own:
                part._c.setattr(name, tensor)

    def attach(self, graph: Any, module: Any) -> None:
        """Puts the module's own tensors where a loaded graph has empty ones. A traced graph has them already."""
        own = dict(module.named_parameters(prefix="module", remove_duplicate=False))
        own |= dict(module.named_buffers(prefix="module", remove_duplicate=False))
        for part, place, name, _ in list(_slots(graph)):
            part._c.setattr(name, own[f"{place}.{name}"])

    def kept(self, module: Any) -> dict[str, Any]:
        return kept_tensors(module)


def _slots(graph: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """Where a graph holds parameters and buffers: its part, the part's place, the name there, the tensor."""
    for place, part in graph.named_modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in list(slots.items()):
                if tensor is not None:
                    yield part, place, name, tensor
