"""Base class of the two backends that trace: positional arguments for the module, and graphs in files."""

from __future__ import annotations

import functools
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuron_sched.runner.backends.base import Graph


class Traced(ABC):
    """A backend whose graphs are TorchScript and can be kept on disk."""

    name: str

    @abstractmethod
    def compiler(self) -> str:
        """Return name and version of the compiler, as part of the cache key."""

    def save(self, graph: Graph, path: Path) -> None:
        """Write a graph to a file. The graph must not have been attached yet."""
        import torch

        with without_deprecation_warnings():
            torch.jit.save(graph, str(path))

    def load(self, path: Path) -> Graph:
        """Read a graph from a file. The exception for a damaged file may be of any type."""
        import torch

        # torch.jit.load does not verify the checksums in the file.
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f"wrong checksum of {damaged}")
        with without_deprecation_warnings():
            graph: Graph = torch.jit.load(str(path))
        return graph


@functools.cache
def positional_class() -> Any:
    """Return the module class that takes tensors by position and passes them to another module by name.

    It is defined in a function because its base class needs torch.
    """
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
def without_deprecation_warnings() -> Iterator[None]:
    """Suppress the advice to use torch.export instead of torch.jit: the caller has chosen the backend."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        yield
