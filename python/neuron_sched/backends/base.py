"""What all backends have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

Graph = Callable[..., Any]
"""What a backend makes of a module for one shape."""

Tensors = Mapping[str, Any]
"""Tensors by name, in the order in which a graph takes them."""


class Backend(Protocol):
    """What `CompiledModel` asks of a backend."""

    name: str

    runs: int
    """Calls of a new graph until it is as fast as it gets."""

    def check(self, module: Any) -> None:
        """ValueError for a module that the backend cannot compile."""

    def compile(self, module: Any, tensors: Tensors) -> Graph:
        """The graph of `module` for tensors of these shapes and dtypes."""

    def attach(self, graph: Graph, module: Any) -> None:
        """Gives a new graph the memory that all graphs share, before it is called."""

    def kept(self, module: Any) -> dict[str, Any]:
        """The tensors that outlive a call, by name: those that the graphs read and write now."""


def imported(module: str, needed_by: str) -> Any:
    """The module; ImportError saying who needs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{needed_by} needs {module}, which could not be imported ({error})") from error


def kept_tensors(module: Any) -> dict[str, Any]:
    """Parameters and buffers by name; one that has several names comes once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
