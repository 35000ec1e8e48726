"""Backend "jit": `torch.jit.trace`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuron_sched.runner.backends.base import Graph, Tensors, import_library, parameters_and_buffers
from neuron_sched.runner.backends.traced import Traced, positional_class, without_deprecation_warnings


class Jit(Traced):
    """Compiles with `torch.jit.trace`. `options` are keyword arguments of it.

    All graphs, traced or loaded, share the parameters and buffers of the one module: what one graph writes to the KV
    cache, the others read. A file therefore contains the graph only, without weights and KV cache. Anything else that
    the module holds (a tensor in a plain attribute, a Python number) is a constant of the graph, and part of the file.
    """

    name = "jit"
    # The first call records the shapes, the second one optimises the graph for them.
    warmup_calls = 2

    def __init__(self, options: dict[str, Any]) -> None:
        # Logits of padding rows may be NaN, which `check_trace` reports as a difference.
        self._options = {"check_trace": False, **options}

    def check(self, module: Any) -> None:
        """Accept every module: `torch.jit.trace` reports what it cannot trace."""

    def compiler(self) -> str:
        return f"torch.jit of torch {import_library('torch', self.name).__version__}"

    def compile(self, module: Any, tensors: Tensors) -> Graph:
        import torch

        with without_deprecation_warnings():
            graph: Graph = torch.jit.trace(
                positional_class()(module, tuple(tensors)), tuple(tensors.values()), **self._options
            )
        return graph

    def save(self, graph: Any, path: Path) -> None:
        """Write the graph to a file, with an empty tensor in place of each parameter and buffer."""
        import torch

        stored = list(_stored_tensors(graph))
        try:
            for submodule, _, name, tensor in stored:
                submodule._c.setattr(name, torch.empty(0, dtype=tensor.dtype))
            super().save(graph, path)
        finally:
            for submodule, _, name, tensor in stored:
                submodule._c.setattr(name, tensor)

    def attach(self, graph: Any, module: Any) -> None:
        """Set the parameters and buffers of a loaded graph to the module's. A traced graph has these already."""
        tensors = dict(module.named_parameters(prefix="module", remove_duplicate=False))
        tensors |= dict(module.named_buffers(prefix="module", remove_duplicate=False))
        for submodule, prefix, name, _ in list(_stored_tensors(graph)):
            submodule._c.setattr(name, tensors[f"{prefix}.{name}"])

    def persistent_tensors(self, module: Any) -> dict[str, Any]:
        return parameters_and_buffers(module)


def _stored_tensors(graph: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """Yield submodule, name of the submodule, name of the tensor, and tensor for each parameter and buffer."""
    for prefix, submodule in graph.named_modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    yield submodule, prefix, name, tensor
