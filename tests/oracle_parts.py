"""What the oracle is made of: its values, the block pool, and the cheapest chunks."""

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple


def doubling(first, last):
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def fit(buckets, count):
    return 0 if count == 0 else next(size for size in buckets if size >= count)


def ceil_div(tokens, size):
    return -(-tokens // size)


def chunk_plan(rest, buckets, cost):
    """The cheapest way to compute `rest` prompt tokens: full buckets, largest first, then whatever is left.

    Among equal costs the fewest calls, then the lexicographically largest list.
    """

    @cache
    def best(rest, largest):
        plans = [(cost[fit(buckets, rest)], 1, (-rest,))] if rest <= buckets[-1] else []
        for size in buckets:
            if size <= largest and size < rest:
                later, calls, chunks = best(rest - size, size)
                plans.append((cost[size] + later, calls + 1, (-size, *chunks)))
        return min(plans) if plans else (float("inf"), 0, ())

    return [-chunk for chunk in best(rest, buckets[-1])[2]]


@dataclass(eq=False)
class OracleRequest:
    id: str
    prompt: object  # a length, or token ids
    max_tokens: int
    priority: int = 0
    stop_token_ids: tuple = ()


@dataclass(eq=False)
class Live:
    id: str
    length: int
    ids: list | None
    outputs_max: int
    priority: int
    order: int
    stop: frozenset
    status: str = "waiting"
    hit: int = 0
    computed: int = 0
    outputs: list = field(default_factory=list)
    blocks: list = field(default_factory=list)

    def rest(self, computed):
        """Prompt tokens to come; the whole prompt until a first chunk has run, whatever the cache held."""
        return self.length if computed == self.hit else self.length - computed


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
    owed: int
    decode_ready: bool
    left: tuple | None = None  # the head that was left waiting, and why

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


class Pool:
    """KV blocks 1, 2, ...: the free queue (its front is handed out next), references, cached content."""

    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks + 1))
        self.references = dict.fromkeys(self.free, 0)
        self.content = {}  # block -> all tokens up to its end, in order of registration

    def take(self):
        block = self.free.pop(0)
        self.content.pop(block, None)
        self.references[block] = 1
        return block

    def share(self, content):
        """The block registered first for `content`, with one reference more; None on a miss."""
        for block, held in self.content.items():
            if held == content:
                if self.references[block] == 0:
                    self.free.remove(block)
                self.references[block] += 1
                return block
        return None

    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
        gone = [block for block in reversed(blocks) if self.references[block] == 0]
        unhashed = [block for block in gone if block not in self.content]
        self.free = unhashed + self.free + [block for block in gone if block in self.content]
