"""Requests, steps and outcomes of the exclusive oracle."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False)
class OracleRequest:
    id: str
    prompt: object  # a length, or token ids
    max_tokens: int
    priority: int = 0
    stop_token_ids: tuple = ()


@dataclass(eq=False)
class LiveRequest:
    id: str
    prompt_len: int
    ids: list | None  # prompt token ids, or None for a prompt given as a length
    max_outputs: int
    priority: int
    order: int  # number of requests added before
    stop: frozenset
    status: str = "waiting"
    cached_tokens: int = 0
    computed: int = 0
    outputs: list = field(default_factory=list)
    blocks: list = field(default_factory=list)

    def rest(self, computed):
        """Return the prompt tokens left to compute: all of them until the first chunk has run, even on a prefix hit."""
        return self.prompt_len if computed == self.cached_tokens else self.prompt_len - computed


class Outcome(NamedTuple):
    id: str
    token: int | None
    finish_reason: str | None


class Snapshot(NamedTuple):
    status: str
    num_computed_tokens: int
    output_token_ids: list
    block_ids: list


class Explanation(NamedTuple):
    id: str
    reason: str
    needed: int
    reserved: int
    usable: int


@dataclass(eq=False)
class OracleStep:
    kind: str
    rows: list  # (request, tokens, computed before, padded, blocks), in batch order
    num_seqs_padded: int
    finished: list
    decodes_due: int
    decode_ready: bool
    head_wait: tuple | None = None  # the head that stays waiting after this step, and the reason

    @property
    def num_scheduled_tokens(self):
        return {r.id: tokens for r, tokens, _, _, _ in self.rows}

    @property
    def num_computed_tokens(self):
        return {r.id: computed for r, _, computed, _, _ in self.rows}

    @property
    def num_scheduled_tokens_padded(self):
        return {r.id: padded for r, _, _, padded, _ in self.rows}

    @property
    def finished_ids(self):
        return [r.id for r in self.finished]

    def block_ids(self, request_id):
        return next(blocks for r, _, _, _, blocks in self.rows if r.id == request_id)
