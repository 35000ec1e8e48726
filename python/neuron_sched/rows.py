"""Rows of a step, passed to `PaddedInputs` by a caller that makes its own scheduling decisions.

The native module reads them by attribute, so this module imports nothing from the package.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DecodeRow", "Ids", "PrefillRow", "StepTokens"]

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids or KV block ids: a sequence of ints or a one-dimensional integer array."""

StepTokens = Sequence[int | None] | Ids | Callable[[list[str]], Sequence[int | None] | Ids]
"""Tokens for the decode rows of a step with an unknown token: a sequence with one entry per row, a token id or `None`;
or a callable that takes the ids of these requests and returns their token ids."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """Fields that rows of both kinds share."""

    top_k: int = -1
    top_p: float = 1.0
    temperature: float = 0.0
    request_id: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow(_Row):
    """The part of one prompt that a prefill step computes. `PaddedInputs.prefill` checks it.

    `token_ids` are the tokens to compute, at least one. `start` is the position of the first of them, which equals the
    number of tokens already in the KV cache. `block_ids` are the KV blocks of the request, numbered from 1, in order of
    position; they must hold the last token. `emits` is false for a chunk that does not end the prompt, and is returned
    in `Batch.emits`.

    `top_k` (-1 and 0 disable it), `top_p` (above 0; 1 disables it) and `temperature` (0 is greedy) are passed to the
    sampler. `request_id` is returned in `Batch.request_ids`.
    """

    token_ids: Ids
    start: int
    block_ids: Ids
    emits: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRow(_Row):
    """One request in a decode step. `PaddedInputs.decode` checks it.

    `token_id` is the last token of the request, whose KV entry the step computes, and `position` is its position in the
    sequence, from 0. `block_ids` are the KV blocks of the request, numbered from 1, in order of position; they must
    hold `position`. `draft_tokens` is the number of draft tokens that follow it in the same step; the context bucket
    must hold them too. `top_k`, `top_p`, `temperature` and `request_id` are as in `PrefillRow`.
    """

    token_id: int
    position: int
    block_ids: Ids
    draft_tokens: int = 0
