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
    that names the tensors whose bits have changed since; on exit they hold again what they held. A KV cache is a buffer
    of floating point, or such a parameter that `state_names` has.
    """
    import torch

    states = getattr(module, "state_names", None) or ()
    caches = {
        name: tensor
        for name, tensor in kept_tensors(module).items()
        if tensor.is_floating_point()
        and tensor.is_contiguous()
        and (name in states or not isinstance(tensor, torch.nn.Parameter))
    }
    kept = {name: tensor.detach().clone() for name, tensor in caches.items()}
    draw = torch.Generator().manual_seed(0)
    try:
        for tensor in caches.values():
            tensor.copy_(torch.rand(tensor.shape, generator=draw))
        filled = {name: tensor.detach().clone() for name, tensor in caches.items()}
        yield lambda: [name for name, tensor in caches.items() if not torch.equal(_bits(tensor), _bits(filled[name]))]
    finally:
        for name, tensor in caches.items():
            tensor.copy_(kept[name])


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
