"""Replay of a real trace against a lean loop in pure Python, both from parsed requests to the summary."""

import gc
import math
from bisect import bisect_left
from collections import Counter, deque
from pathlib import Path
from time import perf_counter

import pytest

from neuron_sched import NeuronConfig
from neuron_sched.simulate import ConstantCost, replay
from neuron_sched.trace import TraceRequest, read_trace

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "azure2023_conv_first10min.csv"

CONFIG = NeuronConfig(max_num_seqs=96, max_num_batched_tokens=8192, max_model_len=16384, block_size=32, num_blocks=8192)
PREFILL_NS, DECODE_NS = 100_000_000, 25_000_000


def spread(counts: Counter[int]) -> dict[str, float | None]:
    if not counts:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    times = sorted(counts)
    ends, total = [], 0
    for time in times:
        total += counts[time]
        ends.append(total)

    def order(place: int) -> float:
        return times[bisect_left(ends, place + 1)] / 1e6

    def percentile(percent: int) -> float:
        place = (total - 1) * (percent / 100)
        low, high, share = order(int(place)), order(math.ceil(place)), place - int(place)
        return high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share

    mean = sum(time * count for time, count in counts.items()) / (total * 1e6)
    return {"mean": mean, "p50": percentile(50), "p90": percentile(90), "p99": percentile(99), "max": times[-1] / 1e6}


def lean(workload: list[TraceRequest]) -> dict[str, object]:
    """The exclusive scheduler at its simplest: first come first served, one prompt a step, one pass a step over the
    running requests. Every prompt of the trace is shorter than the token budget, so there are no chunks.
    """
    workload = sorted(workload, key=lambda request: request.arrival_ns)
    zero = workload[0].arrival_ns
    arrivals = [request.arrival_ns - zero for request in workload]
    prompts = [request.prompt_tokens for request in workload]
    outputs = [min(request.output_tokens, max(1, 16384 - request.prompt_tokens)) for request in workload]
    needs = [-(-(prompt + output - 1) // 32) for prompt, output in zip(prompts, outputs, strict=True)]
    token_buckets, seqs_buckets = CONFIG.num_batched_tokens_buckets, CONFIG.num_seqs_buckets
    left, last = outputs[:], [0] * len(workload)
    ttft, e2e, queue, gaps = Counter(), Counter(), Counter(), Counter()
    padding = {"prefill": {}, "decode": {}}
    waits = Counter()
    waiting, running = deque(), []
    now = seen = used = prompt_tokens = decoded = 0

    def count(kind, buckets, real):
        size = buckets[bisect_left(buckets, real)]
        bucket = padding[kind].setdefault(str(size), {"steps": 0, "real": 0, "padded": 0})
        bucket["steps"] += 1
        bucket["real"] += real
        bucket["padded"] += size

    while True:
        while seen < len(arrivals) and arrivals[seen] <= now:
            waiting.append(seen)
            seen += 1
        if waiting and len(running) < 96 and used + needs[waiting[0]] <= 8192:
            request = waiting.popleft()
            used += needs[request]
            queue[now - arrivals[request]] += 1
            if waiting:
                waits["slots" if len(running) == 95 else "prefill_batch_full"] += PREFILL_NS
            now += PREFILL_NS
            prompt_tokens += prompts[request]
            count("prefill", token_buckets, prompts[request])
            ttft[now - arrivals[request]] += 1
            last[request] = now
            left[request] -= 1
            if left[request]:
                running.append(request)
            else:
                e2e[now - arrivals[request]] += 1
                used -= needs[request]
        elif running:
            if waiting:
                waits["slots" if len(running) == 96 else "kv"] += DECODE_NS
            now += DECODE_NS
            decoded += len(running)
            count("decode", seqs_buckets, len(running))
            ended = False
            for request in running:
                gaps[now - last[request]] += 1
                last[request] = now
                left[request] -= 1
                if not left[request]:
                    ended = True
                    e2e[now - arrivals[request]] += 1
                    used -= needs[request]
            if ended:
                running = [request for request in running if left[request]]
        elif seen < len(arrivals):
            now = arrivals[seen]
        else:
            break

    def padded(kind):
        return sum(bucket["padded"] for bucket in padding[kind].values())

    return {
        "completed": len(workload),
        "rejected": 0,
        "rejections": [],
        "makespan_s": now / 1e9,
        "requests_per_s": len(workload) / (now / 1e9),
        "output_tokens_per_s": sum(outputs) / (now / 1e9),
        "ttft_ms": spread(ttft),
        "itl_ms": spread(gaps),
        "e2e_ms": spread(e2e),
        "queue_ms": spread(queue),
        "steps": {kind: sum(bucket["steps"] for bucket in padding[kind].values()) for kind in ("prefill", "decode")},
        "tokens": {
            "prompt": prompt_tokens,
            "prompt_padded": padded("prefill"),
            "decode": decoded,
            "decode_padded": padded("decode"),
        },
        "padding": padding,
        "wait_reasons": {name: time / 1e6 for name, time in waits.items()},
    }


@pytest.mark.skipif(not TRACE.exists(), reason=f"needs the trace {TRACE.name} in ../shared/traces")
def test_replay_of_ten_minutes_of_chat(ratio):
    workload = read_trace(TRACE)
    cost = ConstantCost(prefill_ms=100, decode_ms=25)

    def ours():
        return replay(workload, config=CONFIG, cost=cost).summary

    def pure_python():
        return lean(workload)

    assert ours() == pure_python()
    ratio(pure_python, ours, at_least=50)


def test_m08_time_grows_with_the_number_of_requests(note):
    cost = ConstantCost(prefill_ms=100, decode_ms=10)

    def seconds(count: int) -> float:
        workload = [TraceRequest(str(row), 0, 16, 1) for row in range(count)]
        gc.collect()
        start = perf_counter()
        report = replay(workload, config=CONFIG, cost=cost)
        assert report.summary["completed"] == count
        return perf_counter() - start

    few, many = (min(seconds(count) for _ in range(5)) for count in (1_000, 100_000))
    note(f"100,000 requests take {many / few:.0f} times as long as 1,000")
    assert many / few < 150
