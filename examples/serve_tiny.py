"""Serves 64 requests with a tiny Llama through compiled shapes only, and compares every token with a plain reference.

    python examples/serve_tiny.py

It needs torch. The exit status is 0 if every token is that of the reference and no graph was compiled on the way.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from neuron_sched import Batch, BucketScheduler, CompiledModel, NeuronConfig, PaddedInputs, Request, Step
from tiny_llama import TinyLlama, generate_reference

VOCAB = 256
CONFIG = NeuronConfig(
    max_num_seqs=8,
    max_num_batched_tokens=128,
    num_batched_tokens_buckets=[32, 64, 128],
    max_model_len=384,
    block_size=16,
    num_blocks=96,
    prefix_caching=True,
)


class Arrival(NamedTuple):
    """A request, the turn in which it comes, and the turn in which its client goes away, if it does."""

    turn: int
    request: Request
    cancel_turn: int | None


def workload(seed: int = 11) -> list[Arrival]:
    """Prompts of mixed lengths; some begin alike, some have stop tokens, some are given up."""
    rng = random.Random(seed)
    prefixes = [rng.choices(range(VOCAB), k=length) for length in (48, 80, 160)]
    arrivals = []
    for i in range(64):
        prompt = rng.choices(range(VOCAB), k=rng.choice([1, 2, 15, 16, 17, 32, 50, 64, 100, 127, 128, 129, 190]))
        if i % 3 == 0:
            prompt = rng.choice(prefixes) + prompt
        stops = rng.sample(range(VOCAB), 20) if i % 4 == 1 else []
        request = Request(f"r{i:02}", prompt, rng.randint(1, 24), stop_token_ids=stops)
        arrivals.append(Arrival(2 * i, request, 2 * i + rng.choice([0, 2, 9, 30]) if i % 5 == 3 else None))
    return arrivals


def emitted(scheduler: BucketScheduler, step: Step, logits: torch.Tensor) -> list[int | None]:
    """The greedy token of each real row, None in the middle of a prompt. Nobody looks at the logits of padding."""
    best, before = logits[: len(step)].argmax(dim=-1).tolist(), step.num_computed_tokens
    ends = [before[name] + count for name, count in step.num_scheduled_tokens.items()]
    prompts = [scheduler.request(name).num_prompt_tokens for name in before]
    return [token if end >= prompt else None for token, end, prompt in zip(best, ends, prompts, strict=True)]


def serve(
    scheduler: BucketScheduler,
    inputs: PaddedInputs,
    model: Callable[[Batch], torch.Tensor],
    arrivals: Sequence[Arrival],
    counts: Counter[str],
) -> dict[str, list[int]]:
    """Serves all requests to their ends and returns the tokens of each; `counts` adds up what happened."""
    told: dict[str, list[int]] = {arrival.request.id: [] for arrival in arrivals}
    turn = 0
    while turn <= arrivals[-1].turn or scheduler.num_waiting or scheduler.num_running:
        for arrival in arrivals:
            if arrival.turn == turn:
                scheduler.add(arrival.request)
            if arrival.cancel_turn == turn:
                counts["cancelled"] += scheduler.cancel(arrival.request.id)
        turn += 1
        step = scheduler.schedule()
        if step.kind == "idle":
            scheduler.complete(step)
            continue
        batch = inputs.fill(step)
        for outcome in scheduler.complete(step, emitted(scheduler, step, model(batch))):
            told[outcome.id].append(outcome.token)
            counts["tokens"] += 1
            counts["stopped"] += outcome.finish_reason == "stop"
        counts[f"{step.kind} steps"] += 1
        counts[f"{step.kind} real"] += batch.num_real_tokens
        counts[f"{step.kind} padded"] += batch.num_padded_tokens
    return told


def main() -> int:
    torch.set_num_threads(1)  # with matrices as small as these, threads only wait for each other
    arrivals, counts = workload(), Counter()
    llama = TinyLlama(CONFIG, vocab_size=VOCAB)
    model = CompiledModel(lambda: llama, CONFIG, backend="jit")
    model.warmup(progress=True)
    graphs = len(model.report().graphs)
    told = serve(BucketScheduler(CONFIG), PaddedInputs(CONFIG, vocab_size=VOCAB), model, arrivals, counts)

    equal = graphs == len(model.report().graphs)
    for _, request, cancel_turn in arrivals:
        right = generate_reference(llama, request.prompt, request.max_tokens, request.stop_token_ids)
        equal &= told[request.id] == (right if cancel_turn is None else right[: len(told[request.id])])
    print("{tokens} tokens of 64 requests; {cancelled} were cancelled, {stopped} stopped".format_map(counts))
    for kind in ("prefill", "decode"):
        steps, real, padded = (counts[f"{kind} {what}"] for what in ("steps", "real", "padded"))
        print(f"{steps} {kind} steps of {real:,} rows in {padded:,}: {1 - real / padded:.1%} padding")
    print(f"graphs: {graphs} after warm-up, {len(model.report().graphs)} now")
    print(f"equal to the reference: {'yes' if equal else 'no'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
