"""Padded inputs: the rows of a step as arrays of a compiled shape."""

from collections.abc import Sequence
from dataclasses import dataclass

from neuron_sched._native import Batch, PaddedInputs

__all__ = ["Batch", "DecodeRow", "PaddedInputs", "PrefillRow", "Shape"]

Shape = tuple[str, int] | tuple[str, int, int]
"""Key of a compiled graph: `("prefill", tokens)`, or `("decode", rows, context)` with the context in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What the rows of both kinds have: sampling parameters, and a name."""

    top_k: int = -1
    """-1 is off."""
    top_p: float = 1.0
    """Above 0; 1 is off."""
    temperature: float = 0.0
    """0 is greedy."""
    request_id: str | None = None
    """Comes back in `Batch.request_ids`."""


@dataclass(frozen=True, slots=True)
class PrefillRow(_Row):
    """The part of one prompt that a prefill step computes. Checked when it is filled."""

    token_ids: Sequence[int]
    """The tokens to compute, at least one; the prompt's earlier ones are left out. An array will do."""
    start: int
    """Position of the first of them: tokens that are in the KV cache already."""
    block_ids: Sequence[int]
    """The request's KV blocks, from 1, in order of position; enough for its last token."""


@dataclass(frozen=True, slots=True)
class DecodeRow(_Row):
    """One request in a decode step. Checked when it is filled."""

    token_id: int
    """Its last token, whose KV entry the step computes."""
    position: int
    """Position of that token in its sequence, from 0."""
    block_ids: Sequence[int]
    """The request's KV blocks, from 1, in order of position; enough for that position."""
    draft_tokens: int = 0
    """Tokens that are tried behind it in the same step: the context bucket must hold them too."""
