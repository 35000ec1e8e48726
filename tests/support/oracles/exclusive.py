"""Oracle of `BucketScheduler`: a slow, obvious exclusive scheduler in pure Python.

It uses lists, dicts and loops, and stores no value that it can compute again. Cached content is the whole tuple of
tokens up to the end of a block, so that no hash can collide. Chunk plans are found by exhaustive search.
"""

from types import SimpleNamespace

from tests.support.oracles.block_pool import Pool
from tests.support.oracles.chunks import chunk_plan
from tests.support.oracles.sizes import ceil_div, doubling, fit
from tests.support.oracles.values import Explanation, LiveRequest, OracleStep, Outcome, Snapshot

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
    """Same interface and same results as `BucketScheduler`. Refusals are of the same type; their messages differ."""

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
        self.requests = {}  # by id, until a completed step has reported the end
        self.waiting, self.running, self.ended = [], [], []
        self.in_flight = []  # at most two steps: the older one and the one planned ahead
        self.arrivals = self.prefill_streak = self.decodes_due = 0
        self.state = "idle"

    num_waiting = property(lambda self: len(self.waiting))
    num_running = property(lambda self: len(self.running))
    free_blocks = property(lambda self: len(self.pool.free))
    reserved_blocks = property(lambda self: sum(self._needed_blocks(r) for r in self.running))

    # Requests

    def add(self, request):
        ids = None if isinstance(request.prompt, int) else list(request.prompt)
        length = request.prompt if ids is None else len(ids)
        previous = self.requests.get(request.id)
        if length < 1 or request.max_tokens < 1 or length > self.max_model_len:
            raise ValueError(f"{request.id!r}: prompt or max_tokens")
        if previous and previous.status not in ("finished", "cancelled"):
            raise ValueError(f"{request.id!r}: is live")
        outputs = min(request.max_tokens, max(1, self.max_model_len - length))
        priority = request.priority if self.options.policy == "priority" else 0
        stop = frozenset(request.stop_token_ids)
        live = LiveRequest(request.id, length, ids, outputs, priority, self.arrivals, stop)
        if self._needed_blocks(live) > self.num_blocks:
            raise ValueError(f"{request.id!r}: never fits")
        self.arrivals += 1
        self.requests[live.id] = live
        self.waiting = sorted([*self.waiting, live], key=lambda r: (r.priority, r.order))

    def cancel(self, request_id):
        live = self.requests.get(request_id)
        if live is None or live.status in ("finished", "cancelled"):
            return False
        self._end(live, "cancelled")
        return True

    def request(self, request_id):
        live = self.requests[request_id]
        return Snapshot(live.status, live.computed, list(live.outputs), list(live.blocks))

    def _end(self, live, status):
        (self.running if live in self.running else self.waiting).remove(live)
        self.pool.release(live.blocks)
        live.blocks = []
        live.status = status
        self.ended.append(live)

    def _needed_blocks(self, r):
        """Return the worst-case number of blocks. The last output token has no KV entry."""
        tokens = min(r.prompt_len + r.max_outputs - 1 + self.options.lookahead, self.max_model_len)
        return ceil_div(
            self.max_model_len if self.options.kv_admission == "max_model_len" else max(tokens, r.prompt_len),
            self.block_size,
        )

    # Decisions

    def schedule(self, throttle_prefills=False, ahead=False):
        if not ahead:
            self.in_flight = []
        elif len(self.in_flight) == 2:
            raise ValueError("one step ahead at most")
        computed, emitted, streak, due = self._project()
        unfinished = [r for r in self.running if computed[r] < r.prompt_len]
        ready = [r for r in self.running if computed[r] >= r.prompt_len and emitted[r] < r.max_outputs]
        prefills = self._pack(unfinished, computed) if unfinished else self._pack_heads()
        due = self._count_decodes_due(streak, due, ready, prefills)
        reported = [r for step in self.in_flight for r in step.finished]
        finished = [r for r in self.ended if r not in reported]
        if prefills and not (ready and (throttle_prefills or due > 0)):
            wait = "prefill_in_progress" if unfinished else self._next_wait_reason(prefills)
            step = OracleStep("prefill", self._prefill(prefills, computed), 0, finished, due, bool(ready))
        elif ready:
            rows = [(r, 1, computed[r], 1, self._grow(r, computed[r] + 1)) for r in ready]
            step = OracleStep("decode", rows, fit(self.seqs_buckets, len(rows)), finished, due, True)
        else:
            step = OracleStep("idle", [], 0, finished, due, False)
        if step.kind != "prefill":
            wait = self._wait_reason(unfinished) or ("interleave" if due else "throttled")
        step.head_wait = (self.waiting[0], wait) if self.waiting else None
        self.in_flight.append(step)
        return step

    def _project(self):
        """Return computed and emitted tokens by request, and the interleave counters, after all steps in flight."""
        computed, emitted = {r: r.computed for r in self.running}, {r: len(r.outputs) for r in self.running}
        streak, due = self.prefill_streak, self.decodes_due
        for step in self.in_flight:
            for r, tokens, _, _, _ in step.rows:
                if r in computed:
                    computed[r] += tokens
                    emitted[r] += computed[r] >= r.prompt_len
            streak, due = self._interleave_after(step, streak)
        return computed, emitted, streak, due

    def _count_decodes_due(self, streak, due, ready, prefills):
        """Return the number of decode steps due before the next prefill, given the counters before this decision."""
        if not ready or not prefills:
            return 0
        if (
            due == 0
            and self.options.max_consecutive_prefill_steps is not None
            and streak >= self.options.max_consecutive_prefill_steps
        ):
            return self.options.min_decode_steps
        return due

    def _interleave_after(self, step, streak):
        """Return the interleave counters after `step`: prefill streak and decode steps due."""
        if step.kind == "decode":
            return 0, max(0, step.decodes_due - 1)
        if step.kind == "prefill":
            return (streak + 1 if step.decode_ready else 0), step.decodes_due
        return streak, step.decodes_due

    def _threshold_active(self):
        return self.options.long_prefill_token_threshold > 0 and len(self.waiting) + len(self.running) > 1

    def _pack(self, candidates, computed):
        """Return the first candidate and those after it whose whole prompts fit in the same step."""
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
            reserved += self._needed_blocks(r)
            if len(self.running) + len(admissible) >= self.max_num_seqs or reserved > self.num_blocks:
                break
            admissible.append(r)
        return self._pack(admissible, {})

    def _wait_reason(self, unfinished):
        """Return why the head cannot be admitted, or `None`. Reasons are tested in the order of `BucketScheduler`."""
        if len(self.running) >= self.max_num_seqs:
            return "slots"
        if unfinished:
            return "prefill_in_progress"
        head = self.waiting[:1]
        return "kv" if head and self.reserved_blocks + self._needed_blocks(head[0]) > self.num_blocks else None

    def _next_wait_reason(self, chosen):
        """Return why the request after the `chosen` heads is not admitted with them."""
        if len(self.running) + len(chosen) >= self.max_num_seqs:
            return "slots"
        with_next = self.waiting[: len(chosen) + 1]
        return "prefill_batch_full" if self._pack(with_next, {}) == chosen else "kv"

    def _prefill(self, chosen, computed):
        for r in chosen:
            if r in self.waiting:
                self._admit(r)
                computed[r] = r.computed
        rows = []
        for r in chosen:
            tokens = r.prompt_len - computed[r]
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
        full_blocks = (r.prompt_len - 1) // self.block_size if self.options.prefix_caching and r.ids is not None else 0
        for i in range(full_blocks):
            block = self.pool.share(tuple(r.ids[: (i + 1) * self.block_size]))
            if block is None:
                break
            r.blocks.append(block)
        r.cached_tokens = r.computed = len(r.blocks) * self.block_size

    def _grow(self, r, tokens):
        """Allocate blocks for the first `tokens` tokens of `r` and the lookahead after them. Return its block table."""
        while len(r.blocks) < ceil_div(min(tokens + self.options.lookahead, self.max_model_len), self.block_size):
            r.blocks.append(self.pool.allocate())
        return r.blocks[: ceil_div(min(tokens + self.options.lookahead, self.max_model_len), self.block_size)]

    # Completion

    def complete(self, step, tokens=None):
        if not self.in_flight or step is not self.in_flight[0]:
            raise ValueError("step: not the oldest one in flight")
        if tokens is not None and len(tokens) != len(step.rows):
            raise ValueError("tokens: one entry per scheduled request")
        given = [None] * len(step.rows) if tokens is None else tokens
        live = [(r, n, token) for (r, n, _, _, _), token in zip(step.rows, given, strict=True) if r in self.running]
        for r, n, token in live:
            if r.computed + n < r.prompt_len and token is not None:
                raise ValueError(f"tokens: {r.id!r} emits nothing")
            if r.computed + n >= r.prompt_len and token is None and r.ids is not None:
                raise ValueError(f"tokens: {r.id!r} emits a token")
        self.in_flight.pop(0)
        self.prefill_streak, self.decodes_due = self._interleave_after(step, self.prefill_streak)
        for r in step.finished:
            self.ended.remove(r)
            if self.requests.get(r.id) is r:
                del self.requests[r.id]
        outcomes = []
        for r, n, token in live:
            r.computed += n
            if r.computed >= r.prompt_len:
                r.status = "decode"
                r.outputs.append(token)
                stopped, full = token in r.stop, len(r.outputs) == r.max_outputs
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
        """Register the content of full, computed blocks in the prefix cache."""
        if self.options.prefix_caching and r.ids is not None:
            tokens = r.ids + r.outputs
            for i in range(r.computed // self.block_size):
                self.pool.content.setdefault(r.blocks[i], tuple(tokens[: (i + 1) * self.block_size]))

    def explain(self):
        """Return why the head waits: the reason found when the newest step was planned, or that of the next step."""
        if not self.waiting:
            return None
        head = self.waiting[0]
        computed, _, streak, due = self._project()
        unfinished = [r for r in self.running if computed[r] < r.prompt_len]
        reason = self._wait_reason(unfinished)
        planned = self.in_flight[-1] if self.in_flight else None
        still_valid = planned and any(row[0] in self.running for row in planned.rows)
        planned_head, wait = (still_valid and planned.head_wait) or (None, None)
        if planned_head is not head:
            wait = None
        if reason in (None, "kv") and wait in ("prefill_in_progress", "prefill_batch_full"):
            reason = wait
        if reason is None and wait in ("interleave", "throttled"):
            reason = wait
        if reason is None and not self.in_flight:
            ready = [r for r in self.running if r.computed >= r.prompt_len]
            reason = "interleave" if self._count_decodes_due(streak, due, ready, [head]) else "ready"
        return Explanation(
            head.id, reason or "step_running", self._needed_blocks(head), self.reserved_blocks, self.num_blocks
        )

    def check(self):
        """Assert the invariants."""
        owners = [block for r in self.running for block in r.blocks]
        assert sorted(self.pool.free + list(set(owners))) == list(range(1, self.num_blocks + 1))
        assert all(owners.count(block) == n for block, n in self.pool.references.items())
        assert all(len(set(r.blocks)) == len(r.blocks) for r in self.running)
        assert self.reserved_blocks <= self.num_blocks
        assert len(self.running) <= self.max_num_seqs
        assert len(set(self.waiting + self.running + self.ended)) == len(self.waiting + self.running + self.ended)
