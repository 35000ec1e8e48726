"""Padded inputs, the rows of a step as arrays of a compiled shape, and the compiled graphs that they go to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_sched._native import Batch, PaddedInputs
from neuron_sched.compiled import CompiledModel, ShapeError
from neuron_sched.graph_report import GraphReport, ModelReport

__all__ = [
    "Batch",
    "CompiledModel",
    "DecodeRow",
    "GraphReport",
    "Ids",
    "ModelReport",
    "PaddedInputs",
    "PrefillRow",
    "Shape",
    "ShapeError",
]

Shape = tuple[str, int] | tuple[str, int, int]
"""Key of a compiled graph: `("prefill", tokens)`, or `("decode", rows, context)` with the context in tokens."""

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""Ids of tokens or of KV blocks: a sequence, or an array of one dimension."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """What the rows of both kinds have."""

    top_k: int = -1
    top_p: float = 1.0
    temperature: float = 0.0
    request_id: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow(_Row):
    """The part of one prompt that a prefill step computes; checked when it is filled.

    `token_ids` are those to compute, at least one; `start` is the position of the first of them, so the number of
    tokens that the KV cache holds already; `block_ids` are the request's KV blocks, from 1, in order of position,
    enough for its last token. `emits` is false for a chunk in the middle of the prompt. For the sampler: `top_k` (-1
    and 0 are off), `top_p` (above 0; 1 is off), `temperature` (0 is greedy). `request_id` comes back in
    `Batch.request_ids`, `emits` in `Batch.emits`.
    """

    token_ids: Ids
    start: int
    block_ids: Ids
    emits: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRow(_Row):
    """One request in a decode step; checked when it is filled.

    `token_id` is its last token, whose KV entry the step computes, and `position` where that is in the sequence, from
    0; `block_ids` are the request's KV blocks, from 1, in order of position, enough for that position. `draft_tokens`
    are tried behind it in the same step: the context bucket must hold them too. `top_k`, `top_p`, `temperature` and
    `request_id` are as in `PrefillRow`.
    """

    token_id: int
    position: int
    block_ids: Ids
    draft_tokens: int = 0
