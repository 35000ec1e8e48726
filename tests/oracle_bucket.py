"""A slow, obvious exclusive scheduler in pure Python, against which `BucketScheduler` is tested.

Lists, dicts and loops; nothing is kept that can be worked out again. Cached content is the whole tuple of tokens
up to the end of a block, so that no hash can collide, and chunk plans are found by trying everything.
"""

from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
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


OPTIONS = {
    "num_batched_tokens_buckets": None,
    "num_seqs_buckets": None,
    "decode_context_length_buckets": None,
    "kv_segment_size_buckets": None,
    "max_prefills_per_batch": 1,
    "kv_admission": "reserve",
    "max_consecutive_prefill_steps": None,
    "min_decode_steps": 1,
    "chunking": "fixed",
    "prefill_cost": None,
    "long_prefill_token_threshold": 0,
    "prefix_caching": False,
    "policy": "fcfs",
    "lookahead": 0,
    "dcp": 1,
}


class BucketOracle:
    def __init__(self, *, max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_blocks, **options):
        assert options.keys() <= OPTIONS.keys()
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.block_size, self.num_blocks = block_size, num_blocks
        self.options = cfg = SimpleNamespace(**{**OPTIONS, **options})
        default = doubling(128, min(max_num_batched_tokens, max_model_len))
        buckets = cfg.num_batched_tokens_buckets or cfg.kv_segment_size_buckets or default
        self.buckets = [size for size in buckets if cfg.dcp == 1 or size % (cfg.dcp * block_size) == 0]
        self.seqs_buckets = cfg.num_seqs_buckets or doubling(1, max_num_seqs)
        self.cost = cfg.prefill_cost or {size: size + 256 for size in self.buckets}
        self.pool = Pool(num_blocks)
        self.known = {}  # id -> request, until its end was delivered
        self.waiting, self.running, self.ended = [], [], []
        self.outstanding = []  # the pending step and the one ahead of it
        self.arrivals = self.run = self.owed = 0
        self.throttled = False
        self.state = "idle"

    num_waiting = property(lambda self: len(self.waiting))
    num_running = property(lambda self: len(self.running))
    free_blocks = property(lambda self: len(self.pool.free))
    reserved_blocks = property(lambda self: sum(self._need(r) for r in self.running))

    # Requests

    def add(self, request):
        ids = None if isinstance(request.prompt, int) else list(request.prompt)
        length = request.prompt if ids is None else len(ids)
        known = self.known.get(request.id)
        if length < 1 or request.max_tokens < 1 or length > self.max_model_len:
            raise ValueError(request)
        if known and known.status not in ("finished", "cancelled"):
            raise ValueError(f"{request.id} is live")
        outputs = min(request.max_tokens, max(1, self.max_model_len - length))
        priority = request.priority if self.options.policy == "priority" else 0
        stop = frozenset(request.stop_token_ids)
        live = Live(request.id, length, ids, outputs, priority, self.arrivals, stop)
        if self._need(live) > self.num_blocks:
            raise ValueError(f"{request.id} never fits")
        self.arrivals += 1
        self.known[live.id] = live
        self.waiting = sorted([*self.waiting, live], key=lambda r: (r.priority, r.order))

    def cancel(self, request_id):
        live = self.known.get(request_id)
        if live is None or live.status in ("finished", "cancelled"):
            return False
        self._end(live, "cancelled")
        return True

    def request(self, request_id):
        live = self.known[request_id]
        return Snapshot(live.status, live.computed, list(live.outputs), list(live.blocks))

    def _end(self, live, status):
        (self.running if live in self.running else self.waiting).remove(live)
        self.pool.release(live.blocks)
        live.blocks = []
        live.status = status
        self.ended.append(live)

    def _need(self, r):
        """Blocks at worst; the last output is never stored."""
        tokens = min(r.length + r.outputs_max - 1 + self.options.lookahead, self.max_model_len)
        return ceil_div(
            self.max_model_len if self.options.kv_admission == "max_model_len" else max(tokens, r.length),
            self.block_size,
        )

    # Decisions

    def schedule(self, throttle_prefills=False, ahead=False):
        if not ahead:
            self.outstanding = []
        elif len(self.outstanding) == 2:
            raise ValueError("one step ahead at most")
        computed, emitted = {r: r.computed for r in self.running}, {r: len(r.outputs) for r in self.running}
        run, owed = self.run, self.owed
        for step in self.outstanding:
            for r, tokens, _, _, _ in step.rows:
                if r in computed:
                    computed[r] += tokens
                    emitted[r] += computed[r] >= r.length
            run, owed = self._after(step, run)
        unfinished = [r for r in self.running if computed[r] < r.length]
        ready = [r for r in self.running if computed[r] >= r.length and emitted[r] < r.outputs_max]
        prefills = self._pack(unfinished, computed) if unfinished else self._pack_heads()
        owed = self._owed(run, owed, ready, prefills)
        carried = [r for step in self.outstanding for r in step.finished]
        finished = [r for r in self.ended if r not in carried]
        self.throttled = throttle_prefills
        if prefills and not (ready and (throttle_prefills or owed > 0)):
            step = OracleStep("prefill", self._prefill(prefills, computed), 0, finished, owed, bool(ready))
        elif ready:
            rows = [(r, 1, computed[r], 1, self._grow(r, computed[r] + 1)) for r in ready]
            step = OracleStep("decode", rows, fit(self.seqs_buckets, len(rows)), finished, owed, True)
        else:
            step = OracleStep("idle", [], 0, finished, owed, False)
        self.outstanding.append(step)
        return step

    def _owed(self, run, owed, ready, prefills):
        if not ready or not prefills:
            return 0
        if (
            owed == 0
            and self.options.max_consecutive_prefill_steps is not None
            and run >= self.options.max_consecutive_prefill_steps
        ):
            return self.options.min_decode_steps
        return owed

    def _after(self, step, run):
        """The interleave counters (run, owed) once `step` is completed."""
        if step.kind == "decode":
            return 0, max(0, step.owed - 1)
        if step.kind == "prefill":
            return (run + 1 if step.decode_ready else 0), step.owed
        return run, step.owed

    def _threshold_active(self):
        return self.options.long_prefill_token_threshold > 0 and len(self.waiting) + len(self.running) > 1

    def _pack(self, candidates, computed):
        """The first of `candidates`, and those behind it whose prompts run whole in the same step."""
        chosen, total = [], 0
        for r in candidates:
            total += r.rest(computed.get(r, 0))
            if chosen and (
                len(chosen) >= self.options.max_prefills_per_batch
                or total > self.buckets[-1]
                or self._threshold_active()
            ):
                break
            chosen.append(r)
        return chosen

    def _pack_heads(self):
        admissible, reserved = [], self.reserved_blocks
        for r in self.waiting:
            reserved += self._need(r)
            if len(self.running) + len(admissible) >= self.max_num_seqs or reserved > self.num_blocks:
                break
            admissible.append(r)
        return self._pack(admissible, {})

    def _prefill(self, chosen, computed):
        for r in chosen:
            if r in self.waiting:
                self._admit(r)
                computed[r] = r.computed
        rows = []
        for r in chosen:
            tokens = r.length - computed[r]
            if len(chosen) == 1:
                tokens = min(tokens, self._chunk(r.rest(computed[r])))
            rows.append([r, tokens, computed[r], tokens, self._grow(r, computed[r] + tokens)])
        total = sum(row[1] for row in rows)
        rows[-1][3] += fit(self.buckets, total) - total
        return rows

    def _chunk(self, rest):
        chunk = min(rest, self.buckets[-1])
        if self.options.chunking == "bucket":
            chunk = chunk_plan(rest, tuple(self.buckets), self.cost)[0]
        return min(chunk, self.options.long_prefill_token_threshold) if self._threshold_active() else chunk

    def _admit(self, r):
        self.waiting.remove(r)
        self.running.append(r)
        r.status = "prefill"
        whole_blocks = (r.length - 1) // self.block_size if self.options.prefix_caching and r.ids is not None else 0
        for i in range(whole_blocks):
            block = self.pool.share(tuple(r.ids[: (i + 1) * self.block_size]))
            if block is None:
                break
            r.blocks.append(block)
        r.hit = r.computed = len(r.blocks) * self.block_size

    def _grow(self, r, tokens):
        """Gives `r` the blocks for its first `tokens` tokens and the lookahead behind them."""
        while len(r.blocks) < ceil_div(min(tokens + self.options.lookahead, self.max_model_len), self.block_size):
            r.blocks.append(self.pool.take())
        return list(r.blocks)

    # Completion

    def complete(self, step, tokens=None):
        if not self.outstanding or step is not self.outstanding[0]:
            raise ValueError("not the step whose completion is due")
        if tokens is not None and len(tokens) != len(step.rows):
            raise ValueError("one entry a scheduled request")
        given = [None] * len(step.rows) if tokens is None else tokens
        live = [(r, n, token) for (r, n, _, _, _), token in zip(step.rows, given, strict=True) if r in self.running]
        for r, n, token in live:
            if r.computed + n < r.length and token is not None:
                raise ValueError(f"{r.id} emits nothing")
            if r.computed + n >= r.length and token is None and r.ids is not None:
                raise ValueError(f"{r.id} emits a token")
        self.outstanding.pop(0)
        self.run, self.owed = self._after(step, self.run)
        for r in step.finished:
            self.ended.remove(r)
            if self.known.get(r.id) is r:
                del self.known[r.id]
        outcomes = []
        for r, n, token in live:
            r.computed += n
            if r.computed >= r.length:
                r.status = "decode"
                r.outputs.append(token)
                stopped, full = token in r.stop, len(r.outputs) == r.outputs_max
                outcomes.append(Outcome(r.id, token, "stop" if stopped else "length" if full else None))
            self._register(r)
            if r.outputs and outcomes[-1].finish_reason:
                self._end(r, "finished")
        if not self.waiting and not self.running:
            self.state = "idle"
        elif step.kind != "idle":
            self.state = step.kind
        return outcomes

    def _register(self, r):
        """Makes the content of full, computed blocks available to others."""
        if self.options.prefix_caching and r.ids is not None:
            known = r.ids + r.outputs
            for i in range(r.computed // self.block_size):
                self.pool.content.setdefault(r.blocks[i], tuple(known[: (i + 1) * self.block_size]))

    def explain(self):
        if not self.waiting:
            return None
        head = self.waiting[0]
        needed, reserved = self._need(head), self.reserved_blocks
        ready = [r for r in self.running if r.computed >= r.length]
        if len(self.running) >= self.max_num_seqs:
            reason = "slots"
        elif len(ready) < len(self.running):
            reason = "prefill_in_progress"
        elif reserved + needed > self.num_blocks:
            reason = "kv"
        elif self._owed(self.run, self.owed, ready, [head]):
            reason = "interleave"
        elif self.throttled and ready:
            reason = "throttled"
        else:
            reason = "step_running" if self.outstanding else "ready"
        return Explanation(head.id, reason, needed, reserved, self.num_blocks)

    def check(self):
        """The conservation laws."""
        owners = [block for r in self.running for block in r.blocks]
        assert sorted(self.pool.free + list(set(owners))) == list(range(1, self.num_blocks + 1))
        assert all(owners.count(block) == n for block, n in self.pool.references.items())
        assert all(len(set(r.blocks)) == len(r.blocks) for r in self.running)
        assert self.reserved_blocks <= self.num_blocks and len(self.running) <= self.max_num_seqs
        assert len(set(self.waiting + self.running + self.ended)) == len(self.waiting + self.running + self.ended)
