"""How a module becomes the graph of one shape: not at all, by torch.jit.trace, or by torch_neuronx.trace.

A graph takes the tensors of a batch one behind the other, in their order, and returns the logits. torch and
torch_neuronx are imported by those who ask for them. For one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_sched.backends.base import Backend, imported
from neuron_sched.backends.eager import Eager
from neuron_sched.backends.jit import Jit
from neuron_sched.backends.neuronx import NeuronX

BACKENDS = (Eager.name, Jit.name, NeuronX.name)


def make_backend(name: str, compiler_args: Any = None, options: Mapping[str, Any] | None = None) -> Backend:
    """The backend of that name, its libraries imported.

    ValueError for another name, and for arguments that the backend has no use for; ImportError when a library is
    missing.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: {name!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    if compiler_args is not None and name != NeuronX.name:
        raise ValueError(f"compiler_args: {compiler_args!r}: backend {name!r} has no compiler, only 'neuronx' has")
    if options and name == Eager.name:
        raise ValueError(f"options: {dict(options)!r}: backend 'eager' does not trace")
    imported("torch", "CompiledModel")
    if name == NeuronX.name:
        return NeuronX(compiler_args, dict(options or {}))
    return Jit(dict(options or {})) if name == Jit.name else Eager()
