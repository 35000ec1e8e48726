"""Signature of a graph: name, dtype and shape of each input tensor, and messages for a batch that does not match it."""

from __future__ import annotations

from typing import Any

from neuron_sched.runner.backends.base import Tensors
from neuron_sched.runner.shape import Shape

Signature = list[tuple[str, Any, tuple[int, ...]]]
"""Name, dtype and shape of each input tensor, in the order of the graph's arguments."""


def signature_of(tensors: Tensors) -> Signature:
    """Return name, dtype and shape of each tensor, in order."""
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def no_graph_message(shape: Any, compiled: list[Shape]) -> str:
    """Return the message for a batch whose shape has no graph. It lists the compiled shapes of the same kind."""
    same_kind = [other for other in compiled if other[0] == shape[0]] or compiled
    return f"shape {shape}: no graph was compiled for it: expected one of {', '.join(map(str, same_kind))}"


def mismatch_message(shape: Shape, given: Signature, expected: Signature) -> str:
    """Return the message for a batch that has a compiled shape but other tensors. It names the first that differs."""
    given_names, expected_names = ([name for name, _, _ in tensors] for tensors in (given, expected))
    if given_names != expected_names:
        return f"shape {shape}: tensors {given_names}: its graph was compiled for {expected_names}"
    found, wanted = next(pair for pair in zip(given, expected, strict=True) if pair[0] != pair[1])
    (name, dtype, size), (_, wanted_dtype, wanted_size) = found, wanted
    return f"shape {shape}: {name}: {dtype} {list(size)}: its graph was compiled for {wanted_dtype} {list(wanted_size)}"
