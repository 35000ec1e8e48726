"""What a module keeps between calls, above all its KV cache: did a call change it? For one thread at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from neuron_sched.backends.base import kept_tensors


def digests(tensors: Mapping[str, Any]) -> dict[str, bytes]:
    """A hash of the bits of each tensor, so NaNs count as what they are."""
    return {name: hashlib.blake2b(_bits(tensor).numpy()).digest() for name, tensor in tensors.items()}


def differing(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """The names under which not the same is found."""
    return [name for name in before if before[name] != after[name]]


@contextmanager
def scrambled(module: Any) -> Iterator[Callable[[], list[str]]]:
    """While the block runs, the module's KV cache holds random numbers.

    So what is written by mistake differs from what was there, as a zero in an empty cache would not. Yields a function
    that names the buffers whose bits have changed since; on exit they hold again what they held. Parameters that
    `state_names` has count as buffers.
    """
    import torch

    states = getattr(module, "state_names", None) or ()
    buffers = {
        name: tensor
        for name, tensor in kept_tensors(module).items()
        if (name in states or not isinstance(tensor, torch.nn.Parameter)) and not _expanded(tensor)
    }
    kept = {name: tensor.detach().clone() for name, tensor in buffers.items()}
    draw = torch.Generator().manual_seed(0)
    try:
        for tensor in buffers.values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=draw))
            elif tensor.dtype in (torch.int8, torch.uint8):  # a quantised cache; wider integers may be indices
                drawn = torch.randint(256, tensor.shape, generator=draw, dtype=torch.uint8)
                tensor.copy_(drawn.view(tensor.dtype))
        filled = {name: tensor.detach().clone() for name, tensor in buffers.items()}
        yield lambda: [name for name, tensor in buffers.items() if not torch.equal(_bits(tensor), _bits(filled[name]))]
    finally:
        for name, tensor in buffers.items():
            tensor.copy_(kept[name])


def _expanded(tensor: Any) -> bool:
    """Whether one element stands for many: nothing can be written to it."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
