"""Backends: each turns a module into the graph of one shape, by `torch.jit.trace`, `torch_neuronx.trace` or not at all.

A graph takes the tensors of a batch as positional arguments, in their order, and returns the logits. torch and
torch_neuronx are imported when a backend that needs them is made. Backends are not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_sched.runner.backends.base import Backend, import_library
from neuron_sched.runner.backends.eager import Eager
from neuron_sched.runner.backends.jit import Jit
from neuron_sched.runner.backends.neuronx import NeuronX

BACKENDS = (Eager.name, Jit.name, NeuronX.name)


def make_backend(name: str, compiler_args: Any = None, options: Mapping[str, Any] | None = None) -> Backend:
    """Return the backend of that name and import its libraries.

    Raise `ValueError` for an unknown name and for arguments that the backend does not take, and `ImportError` if a
    library is missing.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: {name!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    if compiler_args is not None and name != NeuronX.name:
        raise ValueError(f"compiler_args: {compiler_args!r}: expected None, because backend {name!r} has no compiler")
    if options and name == Eager.name:
        raise ValueError(f"options: {dict(options)!r}: expected none, because backend 'eager' does not trace")
    import_library("torch", "CompiledModel")
    if name == NeuronX.name:
        return NeuronX(compiler_args, dict(options or {}))
    return Jit(dict(options or {})) if name == Jit.name else Eager()
