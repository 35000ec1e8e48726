"""A slow, obvious exclusive scheduler in pure Python, against which `BucketScheduler` is tested.

Lists, dicts and loops; nothing is kept that can be worked out again. Cached content is the whole tuple of tokens
up to the end of a block, so that no hash can collide, and chunk plans are found by trying everything.
"""

from types import SimpleNamespace

from oracle_parts import (
    Explanation,
    Live,
    OracleStep,
    Outcome,
    Pool,
    Snapshot,
    ceil_div,
    chunk_plan,
    doubling,
    fit,
)

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
            raise ValueError(f"{request.id!r}: prompt or max_tokens")
        if known and known.status not in ("finished", "cancelled"):
            raise ValueError(f"{request.id!r}: is live")
        outputs = min(request.max_tokens, max(1, self.max_model_len - length))
        priority = request.priority if self.options.policy == "priority" else 0
        stop = frozenset(request.stop_token_ids)
        live = Live(request.id, length, ids, outputs, priority, self.arrivals, stop)
        if self._need(live) > self.num_blocks:
            raise ValueError(f"{request.id!r}: never fits")
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
        computed, emitted, run, owed = self._project()
        unfinished = [r for r in self.running if computed[r] < r.length]
        ready = [r for r in self.running if computed[r] >= r.length and emitted[r] < r.outputs_max]
        prefills = self._pack(unfinished, computed) if unfinished else self._pack_heads()
        owed = self._owed(run, owed, ready, prefills)
        carried = [r for step in self.outstanding for r in step.finished]
        finished = [r for r in self.ended if r not in carried]
        if prefills and not (ready and (throttle_prefills or owed > 0)):
            left = "prefill_in_progress" if unfinished else self._next_refusal(prefills)
            step = OracleStep("prefill", self._prefill(prefills, computed), 0, finished, owed, bool(ready))
        elif ready:
            rows = [(r, 1, computed[r], 1, self._grow(r, computed[r] + 1)) for r in ready]
            step = OracleStep("decode", rows, fit(self.seqs_buckets, len(rows)), finished, owed, True)
        else:
            step = OracleStep("idle", [], 0, finished, owed, False)
        if step.kind != "prefill":
            left = self._refusal(unfinished) or ("interleave" if owed else "throttled")
        step.left = (self.waiting[0], left) if self.waiting else None
        self.outstanding.append(step)
        return step

    def _project(self):
        """Computed and emitted tokens and the interleave counters once the outstanding steps have run."""
        computed, emitted = {r: r.computed for r in self.running}, {r: len(r.outputs) for r in self.running}
        run, owed = self.run, self.owed
        for step in self.outstanding:
            for r, tokens, _, _, _ in step.rows:
                if r in computed:
                    computed[r] += tokens
                    emitted[r] += computed[r] >= r.length
            run, owed = self._after(step, run)
        return computed, emitted, run, owed

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

    def _refusal(self, unfinished):
        """Why the head may not start, in the order in which the reasons are tested."""
        if len(self.running) >= self.max_num_seqs:
            return "slots"
        if unfinished:
            return "prefill_in_progress"
        head = self.waiting[:1]
        return "kv" if head and self.reserved_blocks + self._need(head[0]) > self.num_blocks else None

    def _next_refusal(self, chosen):
        """Why the head behind the `chosen` ones does not start with them."""
        if len(self.running) + len(chosen) >= self.max_num_seqs:
            return "slots"
        behind = self.waiting[: len(chosen) + 1]
        return "prefill_batch_full" if self._pack(behind, {}) == chosen else "kv"

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
        return r.blocks[: ceil_div(min(tokens + self.options.lookahead, self.max_model_len), self.block_size)]

    # Completion

    def complete(self, step, tokens=None):
        if not self.outstanding or step is not self.outstanding[0]:
            raise ValueError("step: not the one that is due")
        if tokens is not None and len(tokens) != len(step.rows):
            raise ValueError("tokens: one entry a scheduled request")
        given = [None] * len(step.rows) if tokens is None else tokens
        live = [(r, n, token) for (r, n, _, _, _), token in zip(step.rows, given, strict=True) if r in self.running]
        for r, n, token in live:
            if r.computed + n < r.length and token is not None:
                raise ValueError(f"tokens: {r.id!r} emits nothing")
            if r.computed + n >= r.length and token is None and r.ids is not None:
                raise ValueError(f"tokens: {r.id!r} emits a token")
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
        """Why the head waits: what the step that is planned left it waiting for, or what the next one will."""
        if not self.waiting:
            return None
        head = self.waiting[0]
        computed, _, run, owed = self._project()
        unfinished = [r for r in self.running if computed[r] < r.length]
        reason = self._refusal(unfinished)
        planned = self.outstanding[-1] if self.outstanding else None
        last = planned.left if planned and any(row[0] in self.running for row in planned.rows) else None
        left = last[1] if last and last[0] is head else None
        if reason in (None, "kv") and left in ("prefill_in_progress", "prefill_batch_full"):
            reason = left
        if reason is None and left in ("interleave", "throttled"):
            reason = left
        if reason is None and not self.outstanding:
            ready = [r for r in self.running if r.computed >= r.length]
            reason = "interleave" if self._owed(run, owed, ready, [head]) else "ready"
        return Explanation(head.id, reason or "step_running", self._need(head), self.reserved_blocks, self.num_blocks)

    def check(self):
        """The conservation laws."""
        owners = [block for r in self.running for block in r.blocks]
        assert sorted(self.pool.free + list(set(owners))) == list(range(1, self.num_blocks + 1))
        assert all(owners.count(block) == n for block, n in self.pool.references.items())
        assert all(len(set(r.blocks)) == len(r.blocks) for r in self.running)
        assert self.reserved_blocks <= self.num_blocks
        assert len(self.running) <= self.max_num_seqs
        assert len(set(self.waiting + self.running + self.ended)) == len(self.waiting + self.running + self.ended)
