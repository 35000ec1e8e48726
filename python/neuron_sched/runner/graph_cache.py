"""Compiled graphs on disk, one file for each graph. The file name is a hash of everything the graph depends on."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuron_sched._native import NeuronConfig, __version__
from neuron_sched.atomic import replacing
from neuron_sched.runner.backends.base import Graph, Tensors
from neuron_sched.runner.backends.traced import Traced
from neuron_sched.runner.shape import Shape

WARNING_STACKLEVEL = 4
"""Makes warnings point to the caller of `CompiledModel.warmup()`, which calls `_compile`, which calls the cache."""


def default_directory() -> Path:
    """Return `neuron-sched/graphs` under `XDG_CACHE_HOME`, or under `~/.cache` if that is not set."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "neuron-sched" / "graphs"


class GraphCache:
    """Graph files of one model.

    A file is reused only if all of these are the same: the model's key; backend and compiler with their versions;
    compiler arguments and options; versions of torch and of this package; name, dtype and shape of the module's
    parameters and buffers; block size and `max_model_len`; the shape of the graph; name, dtype and shape of its inputs.

    The files contain code that torch executes. Only trusted users may have write access to the directory.
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
        """Raise `ValueError` if `compiler_args` or `options` cannot be serialised, and so not become part of a name."""
        import torch

        self._directory = directory
        self._backend = backend
        self._key_fields = {
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
            _serialise(self._key_fields)
        except TypeError as error:
            raise ValueError(
                f"compiler_args, options: {error}: with a key, expected strings, numbers, paths, lists and dicts"
            ) from error

    def path(self, shape: Shape, tensors: Tensors) -> Path:
        """Return the path of a graph's file, whether the file exists or not."""
        key_fields = {**self._key_fields, "shape": shape, "tensors": _signature(tensors)}
        return self._directory / f"{hashlib.sha256(_serialise(key_fields).encode()).hexdigest()}.pt"

    def load(self, path: Path) -> Graph | None:
        """Return the graph in the file, or `None` if there is no file. Warn and return `None` if it is damaged."""
        if not path.exists():
            return None
        try:
            return self._backend.load(path)
        except Exception as error:
            warnings.warn(
                f"{path} cannot be read ({error}); the graph is compiled again", stacklevel=WARNING_STACKLEVEL
            )
            return None

    def save(self, graph: Graph, path: Path) -> None:
        """Write the graph to the file, whole or not at all. Warn if that fails, because the graph itself is usable."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path) as temporary:
                self._backend.save(graph, temporary)
        except Exception as error:
            warnings.warn(
                f"{path} cannot be written ({error}); the graph will be compiled again", stacklevel=WARNING_STACKLEVEL
            )


def _serialise(key_fields: Mapping[str, Any]) -> str:
    return json.dumps(key_fields, sort_keys=True, default=os.fspath)


def _signature(tensors: Tensors) -> list[tuple[str, str, list[int]]]:
    """Return name, dtype and shape of each tensor in a form that JSON can hold."""
    return [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]
