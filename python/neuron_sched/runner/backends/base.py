"""The backend protocol, and helpers that all backends share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

Graph = Callable[..., Any]
"""Executable form of a module for one shape. Takes the tensors of a batch in their order, returns the logits."""

Tensors = Mapping[str, Any]
"""Tensors by name, in the order of the graph's arguments."""


class Backend(Protocol):
    """Interface between `CompiledModel` and a backend."""

    name: str

    warmup_calls: int
    """Number of calls after which a new graph is fully optimised."""

    def check(self, module: Any) -> None:
        """Raise `ValueError` if the backend cannot compile the module."""

    def compile(self, module: Any, tensors: Tensors) -> Graph:
        """Return the graph of `module` for tensors of these shapes and dtypes."""

    def attach(self, graph: Graph, module: Any) -> None:
        """Bind a new graph to the memory that all graphs share. Called before the first call of the graph."""

    def persistent_tensors(self, module: Any) -> dict[str, Any]:
        """Return the tensors that keep their content between calls, by name: those that the graphs currently use."""


def import_library(module: str, needed_by: str) -> Any:
    """Import a module. Raise `ImportError` naming `needed_by` if that fails."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{needed_by} needs {module}, which could not be imported ({error})") from error


def parameters_and_buffers(module: Any) -> dict[str, Any]:
    """Return the parameters and buffers of the module by name. A tensor with several names is listed once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
