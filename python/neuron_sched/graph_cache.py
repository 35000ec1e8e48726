"""Compiled graphs on disk: one file a graph, named by all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_sched._native import NeuronConfig, __version__
from neuron_sched.atomic import replaced
from neuron_sched.backends.base import Graph, Tensors
from neuron_sched.backends.traced import Traced

if TYPE_CHECKING:
    from neuron_sched.runner import Shape

CALLER = 4
"""Where a warning points to: `load` and `save` are called by `CompiledModel._compile`, that by `warmup()`."""


def default_directory() -> Path:
    """`neuron-sched/graphs` in XDG_CACHE_HOME, by default `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "neuron-sched" / "graphs"


class GraphCache:
    """The files of one model's graphs.

    A file is found again when all of this is the same: the model's own key, backend and compiler with their versions,
    compiler arguments and options, versions of torch and of this package, the module's parameters and buffers by name,
    dtype and shape, block size and longest sequence, the shape of the graph and its tensors.

    Files hold code that torch runs: nobody else should be able to write to the directory.
    """

    def __init__(
        self,
        directory: Path,
        backend: Traced,
        *,
        key: str,
        config: NeuronConfig,
        module: Any,
        compiler_args: Any,
        options: Mapping[str, Any] | None,
    ) -> None:
        """ValueError for arguments that are no plain values: they cannot be part of a name."""
        import torch

        self._directory = directory
        self._backend = backend
        self._parts = {
            "key": key,
            "backend": [backend.name, backend.compiler()],
            "torch": torch.__version__,
            "neuron_sched": __version__,
            "block_size": config.block_size,
            "max_model_len": config.max_model_len,
            "module": _signature(dict([*module.named_parameters(), *module.named_buffers()])),
            "states": list(getattr(module, "state_names", None) or ()),
            "compiler_args": compiler_args,
            "options": dict(options or {}),
        }
        try:
            _text(self._parts)
        except TypeError as error:
            raise ValueError(
                f"compiler_args, options: {error}: with a key, expected texts, numbers, paths, lists and dicts"
            ) from error

    def path(self, shape: Shape, tensors: Tensors) -> Path:
        """The file of a graph, whether it is there or not."""
        parts = {**self._parts, "shape": shape, "tensors": _signature(tensors)}
        return self._directory / f"{hashlib.sha256(_text(parts).encode()).hexdigest()}.pt"

    def load(self, path: Path) -> Graph | None:
        """The graph in the file; None when there is none, and, with a warning, when it is damaged."""
        if not path.exists():
            return None
        try:
            return self._backend.load(path)
        except Exception as error:
            warnings.warn(f"{path} cannot be read ({error}); the graph is compiled anew", stacklevel=CALLER)
            return None

    def save(self, graph: Graph, path: Path) -> None:
        """Writes the file, whole or not at all. A warning when that fails: the graph works all the same."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replaced(path) as beside:
                self._backend.save(graph, beside)
        except Exception as error:
            warnings.warn(f"{path} cannot be written ({error}); the graph will be compiled again", stacklevel=CALLER)


def _text(parts: Mapping[str, Any]) -> str:
    return json.dumps(parts, sort_keys=True, default=os.fspath)


def _signature(tensors: Tensors) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape, in their order."""
    return [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]
