"""Checks whether a call changed the state of a module: its parameters and buffers, above all the KV cache.

Not thread-safe: no other thread may call the module meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from neuron_sched.runner.backends.base import parameters_and_buffers


def digests(tensors: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a hash of the bits of each tensor. NaNs with equal bits hash equally."""
    return {name: hashlib.blake2b(_bits(tensor).numpy()).digest() for name, tensor in tensors.items()}


def changed_names(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Return the names whose digests differ."""
    return [name for name in before if before[name] != after[name]]


@contextmanager
def randomised_buffers(module: Any) -> Iterator[Callable[[], list[str]]]:
    """Fill the module's KV cache with random numbers while the block runs, and restore its content afterwards.

    With random content every wrong write changes bits; in an empty cache, writing a zero would go unnoticed. Yield a
    function that returns the names of the buffers whose bits have changed since. Parameters listed in `state_names`
    count as buffers.
    """
    import torch

    states = getattr(module, "state_names", None) or ()
    buffers = {
        name: tensor
        for name, tensor in parameters_and_buffers(module).items()
        if (name in states or not isinstance(tensor, torch.nn.Parameter)) and not _expanded(tensor)
    }
    original = {name: tensor.detach().clone() for name, tensor in buffers.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        for tensor in buffers.values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
            elif tensor.dtype in (torch.int8, torch.uint8):  # a quantised cache; wider integers may be indices
                random_bytes = torch.randint(256, tensor.shape, generator=generator, dtype=torch.uint8)
                tensor.copy_(random_bytes.view(tensor.dtype))
        filled = {name: tensor.detach().clone() for name, tensor in buffers.items()}
        yield lambda: [name for name, tensor in buffers.items() if not torch.equal(_bits(tensor), _bits(filled[name]))]
    finally:
        for name, tensor in buffers.items():
            tensor.copy_(original[name])


def _expanded(tensor: Any) -> bool:
    """Return whether several elements share one memory location. torch refuses to write to such a tensor in place."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
