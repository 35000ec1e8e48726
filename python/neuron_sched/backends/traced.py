"""What the two backends that trace have in common: how a module is handed over, and files of graphs."""

from __future__ import annotations

import functools
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuron_sched.backends.base import Graph


class Traced(ABC):
    """A backend whose graphs are TorchScript, which can be kept on disk."""

    name: str

    @abstractmethod
    def compiler(self) -> str:
        """Name and version of what compiles, as a part of cache keys."""

    def save(self, graph: Graph, path: Path) -> None:
        """Writes a graph that was not attached yet to a file."""
        import torch

        with quiet():
            torch.jit.save(graph, str(path))

    def load(self, path: Path) -> Graph:
        """Reads a graph from a file; raises what it likes when the file is damaged."""
        import torch

        # torch itself does not look at the checksums in the file.
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} in it is damaged")
        with quiet():
            graph: Graph = torch.jit.load(str(path))
        return graph


@functools.cache
def positional() -> Any:
    """The class of modules that hand positional tensors to another module by name; made when torch is there."""
    import torch

    class Positional(torch.nn.Module):
        def __init__(self, module: Any, names: tuple[str, ...]) -> None:
            super().__init__()
            self.module = module
            self.names = names

        def forward(self, *tensors: Any) -> Any:
            return self.module(**dict(zip(self.names, tensors, strict=True)))

    return Positional


@contextmanager
def quiet() -> Iterator[None]:
    """Without the advice to use torch.export instead of torch.jit, which whoever chose a backend cannot follow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        yield
