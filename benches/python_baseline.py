"""The pure-Python baseline of the benchmarks: `BucketScheduler` and `replay` as efficient Python code.

Each step makes one pass over the running requests and computes nothing twice. The baseline covers the common case only:
prompts given as lengths, first come first served, one prompt per prefill step, chunks as large as the step, no checks.
The oracles in `tests/support/oracles` cover every option and are slower.
"""

from bisect import bisect_left
from collections import Counter, deque
from typing import NamedTuple


class BaselineRequest:
    __slots__ = ("arrival", "blocks", "capacity", "computed", "end", "id", "last", "need", "outputs", "prompt")

    def __init__(self, id, prompt, max_tokens, arrival=0):
        self.id, self.prompt, self.arrival = id, prompt, arrival
        self.end = prompt + max_tokens - 1  # tokens computed when the last output is emitted
        self.computed = self.capacity = 0
        self.outputs = []


class BaselineStep(NamedTuple):
    kind: str
    rows: list
    num_scheduled_tokens: dict
    num_scheduled_tokens_padded: dict
    num_seqs_padded: int
    finished_ids: list

    @property
    def num_computed_tokens(self):
        return {request.id: request.computed for request in self.rows}


class BaselineOutcome(NamedTuple):
    id: str
    token: int | None
    finish_reason: str | None


class BaselineScheduler:
    """Plan steps that are all prefill or all decode, as `BucketScheduler` does."""

    def __init__(self, config):
        self.max_num_seqs, self.block_size = config.max_num_seqs, config.block_size
        self.num_blocks, self.max_model_len = config.num_blocks, config.max_model_len
        self.token_buckets, self.seqs_buckets = config.num_batched_tokens_buckets, config.num_seqs_buckets
        self.budget = self.token_buckets[-1]
        self.free = list(range(config.num_blocks, 0, -1))
        self.waiting, self.running, self.finished_ids = deque(), [], []
        self.prefilling, self.reserved = None, 0

    def add(self, id, prompt, max_tokens):
        request = BaselineRequest(id, prompt, min(max_tokens, max(1, self.max_model_len - prompt)))
        request.need = -(-request.end // self.block_size)
        self.waiting.append(request)

    def schedule(self):
        if self.prefilling is None and self.waiting and len(self.running) < self.max_num_seqs:
            head = self.waiting[0]
            if self.reserved + head.need <= self.num_blocks:
                self.waiting.popleft()
                self.running.append(head)
                self.reserved += head.need
                self.prefilling, head.blocks = head, []
        if self.prefilling is not None:
            request = self.prefilling
            tokens = min(request.prompt - request.computed, self.budget)
            while request.capacity < request.computed + tokens:
                request.blocks.append(self.free.pop())
                request.capacity += self.block_size
            padded = self.token_buckets[bisect_left(self.token_buckets, tokens)]
            return BaselineStep("prefill", [request], {request.id: tokens}, {request.id: padded}, 0, self.finished_ids)
        rows = self.running
        if not rows:
            return BaselineStep("idle", rows, {}, {}, 0, self.finished_ids)
        scheduled = {}
        for request in rows:
            scheduled[request.id] = 1
            if request.computed == request.capacity:
                request.blocks.append(self.free.pop())
                request.capacity += self.block_size
        padded = self.seqs_buckets[bisect_left(self.seqs_buckets, len(rows))]
        return BaselineStep("decode", rows, scheduled, scheduled, padded, self.finished_ids)

    def complete(self, step, tokens=None):
        self.finished_ids = finished_ids = []
        outcomes = []
        if tokens is None:
            tokens = [None] * len(step.rows)
        if step.kind == "prefill":
            (request,) = step.rows
            request.computed += step.num_scheduled_tokens[request.id]
            if request.computed < request.prompt:
                return outcomes
            self.prefilling = None
        for request, token in zip(step.rows, tokens, strict=True):
            if step.kind == "decode":
                request.computed += 1
            request.outputs.append(token)
            if request.computed == request.end:
                outcomes.append(BaselineOutcome(request.id, token, "length"))
                finished_ids.append(request.id)
                self.reserved -= request.need
                self.free += reversed(request.blocks)
            else:
                outcomes.append(BaselineOutcome(request.id, token, None))
        if finished_ids:
            self.running = [request for request in self.running if request.computed < request.end]
        return outcomes


def spread(times_ns):
    """Return mean, linearly interpolated percentiles and maximum of `times_ns`, in milliseconds."""
    ordered = sorted(times_ns)

    def percentile(percent):
        index = (len(ordered) - 1) * (percent / 100)
        low, high = ordered[int(index)] / 1e6, ordered[min(int(index) + 1, len(ordered) - 1)] / 1e6
        fraction = index - int(index)
        return high - (high - low) * (1 - fraction) if fraction >= 0.5 else low + (high - low) * fraction

    mean = sum(ordered) / (len(ordered) * 1e6)
    return {"mean": mean, "p50": percentile(50), "p90": percentile(90), "p99": percentile(99), "max": ordered[-1] / 1e6}


def baseline_replay(arrivals, config, prefill_ns, decode_ns):
    """Replay requests on a virtual clock and return the summary, equal to `Report.summary`.

    `arrivals` are tuples (arrival in ns, prompt tokens, output tokens, id), in order of arrival.
    """
    token_buckets, seqs_buckets = config.num_batched_tokens_buckets, config.num_seqs_buckets
    block_size, max_model_len = config.block_size, config.max_model_len
    incoming, rejections = deque(), []
    for arrival, prompt, outputs, id in arrivals:
        request = BaselineRequest(id, prompt, min(outputs, max(1, max_model_len - prompt)), arrival)
        request.need = -(-request.end // block_size)
        if prompt > max_model_len:
            rejections.append({"id": id, "reason": "prompt_too_long"})
        elif request.need > config.num_blocks:
            rejections.append({"id": id, "reason": "kv_never_fits"})
        else:
            incoming.append(request)
    requests = list(incoming)
    waiting, running = deque(), []
    ttft, e2e, queued, gaps, padding = [], [], [], [], {"prefill": {}, "decode": {}}
    steps, tokens = Counter(prefill=0, decode=0), Counter(prompt=0, prompt_padded=0, decode=0, decode_padded=0)
    waits, prefilling, reserved, start = Counter(), None, 0, arrivals[0][0]
    now = start

    def pad(kind, buckets, real):
        size = buckets[bisect_left(buckets, real)]
        bucket = padding[kind].setdefault(str(size), {"steps": 0, "real": 0, "padded": 0})
        bucket["steps"] += 1
        bucket["real"] += real
        bucket["padded"] += size
        steps[kind] += 1
        return size

    while incoming or waiting or running:
        while incoming and incoming[0].arrival <= now:
            waiting.append(incoming.popleft())
        slot = prefilling is None and len(running) < config.max_num_seqs
        if slot and waiting and reserved + waiting[0].need <= config.num_blocks:
            prefilling = waiting.popleft()
            running.append(prefilling)
            reserved += prefilling.need
            queued.append(now - prefilling.arrival)
        if waiting:
            if len(running) >= config.max_num_seqs:
                reason = "slots"
            elif prefilling is not None:
                last_chunk = prefilling.prompt - prefilling.computed <= token_buckets[-1]
                reason = "prefill_batch_full" if last_chunk and not prefilling.computed else "prefill_in_progress"
            else:
                reason = "kv"
            waits[reason] += decode_ns if prefilling is None else prefill_ns
        ended = False
        if prefilling is not None:
            chunk = min(prefilling.prompt - prefilling.computed, token_buckets[-1])
            now += prefill_ns
            tokens["prompt"] += chunk
            tokens["prompt_padded"] += pad("prefill", token_buckets, chunk)
            prefilling.computed += chunk
            if prefilling.computed == prefilling.prompt:
                ttft.append(now - prefilling.arrival)
                prefilling.last = now
                ended = prefilling.computed == prefilling.end
                prefilling = None
        elif running:
            now += decode_ns
            tokens["decode"] += len(running)
            tokens["decode_padded"] += pad("decode", seqs_buckets, len(running))
            for request in running:
                gaps.append(now - request.last)
                request.last = now
                request.computed += 1
                if request.computed == request.end:
                    ended = True
        else:
            now = incoming[0].arrival
        if ended:
            for request in running:
                if request.computed == request.end:
                    e2e.append(now - request.arrival)
                    reserved -= request.need
            running = [request for request in running if request.computed != request.end]
    makespan_s = (now - start) / 1e9
    return {
        "completed": len(e2e),
        "rejected": len(rejections),
        "rejections": rejections,
        "makespan_s": makespan_s,
        "requests_per_s": len(e2e) / makespan_s,
        "output_tokens_per_s": sum(request.end - request.prompt + 1 for request in requests) / makespan_s,
        "ttft_ms": spread(ttft),
        "itl_ms": spread(gaps),
        "e2e_ms": spread(e2e),
        "queue_ms": spread(queued),
        "steps": dict(steps),
        "tokens": dict(tokens),
        "padding": padding,
        "wait_reasons": {reason: time / 1e6 for reason, time in waits.items()},
    }
