"""Serves 64 requests with a tiny Llama through compiled shapes only, and compares every token with a plain reference.

    python examples/serve_tiny.py

It needs torch. The exit status is 0 if every token is that of the reference and no graph was compiled on the way.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from neuron_sched import Batch, BucketScheduler, CompiledModel, NeuronConfig, Outcome, PaddedInputs, Request
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
        turn = i // 3 * 5
        arrivals.append(Arrival(turn, request, turn + rng.choice([0, 2, 15, 30]) if i % 5 == 3 else None))
    return arrivals


def emitted(batch: Batch, logits: torch.Tensor) -> list[int | None]:
    """The greedy token of each real row, None in the middle of a prompt. Nobody looks at the logits of padding."""
    best = logits[: len(batch.emits)].argmax(dim=-1).tolist()
    return [token if emits else None for token, emits in zip(best, batch.emits, strict=True)]


def turns(scheduler: BucketScheduler, arrivals: Sequence[Arrival]) -> Iterator[None]:
    """Turn after turn until everybody is served: adds who comes in it, and cancels whose client goes away."""
    turn = 0
    while turn <= arrivals[-1].turn or scheduler.num_waiting or scheduler.num_running:
        for arrival in arrivals:
            if arrival.turn == turn:
                scheduler.add(arrival.request)
            if arrival.cancel_turn == turn:
                scheduler.cancel(arrival.request.id)
        yield
        turn += 1


def serve(
    scheduler: BucketScheduler,
    inputs: PaddedInputs,
    model: Callable[[Batch], torch.Tensor],
    arrivals: Sequence[Arrival],
) -> dict[str, list[Outcome]]:
    """Serves all requests to their ends; what each was told. A request without a finish reason was cancelled."""
    told: dict[str, list[Outcome]] = {arrival.request.id: [] for arrival in arrivals}
    for _ in turns(scheduler, arrivals):
        step = scheduler.schedule()
        if step.kind == "idle":
            continue
        batch = inputs.fill(step)
        for outcome in scheduler.complete(step, emitted(batch, model(batch))):
            told[outcome.id].append(outcome)
    return told


def main() -> int:
    torch.set_num_threads(1)  # with matrices as small as these, threads only wait for each other
    llama = TinyLlama(CONFIG, vocab_size=VOCAB)
    model = CompiledModel(lambda: llama, CONFIG, backend="jit")
    model.warmup(progress=True)
    graphs = len(model.report().graphs)
    arrivals = workload()
    told = serve(BucketScheduler(CONFIG), PaddedInputs(CONFIG, vocab_size=VOCAB), model, arrivals)
    print(model.report())

    ends, equal = Counter[str](), 0
    for _, request, _ in arrivals:
        tokens = [outcome.token for outcome in told[request.id]]
        reason = told[request.id][-1].finish_reason if tokens else None
        right = generate_reference(llama, request.prompt, request.max_tokens, request.stop_token_ids)
        equal += tokens == (right if reason else right[: len(tokens)])
        ends[reason or "cancelled"] += 1
    print("requests:", ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    print("graphs compiled while serving:", compiled := len(model.report().graphs) - graphs)
    print(f"requests with the tokens of the reference: {equal} of {len(arrivals)}")
    return 0 if equal == len(arrivals) and not compiled else 1


if __name__ == "__main__":
    sys.exit(main())
