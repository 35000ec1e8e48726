"""Serve 64 requests with a tiny Llama through compiled shapes only, and compare every token with a reference.

    python examples/serve_tiny.py

Requires torch. The exit status is 0 if all tokens are those of the reference and no graph was compiled while serving.
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
    """A request with the iterations of the serving loop in which it arrives and, if at all, is cancelled."""

    iteration: int
    request: Request
    cancel_iteration: int | None


def workload(seed: int = 11) -> list[Arrival]:
    """Return requests of mixed prompt lengths; some share a prefix, have stop tokens, or are cancelled."""
    rng = random.Random(seed)
    prefixes = [rng.choices(range(VOCAB), k=length) for length in (48, 80, 160)]
    arrivals = []
    for i in range(64):
        prompt = rng.choices(range(VOCAB), k=rng.choice([1, 2, 15, 16, 17, 32, 50, 64, 100, 127, 128, 129, 190]))
        if i % 3 == 0:
            prompt = rng.choice(prefixes) + prompt
        stops = rng.sample(range(VOCAB), 20) if i % 4 == 1 else []
        request = Request(f"r{i:02}", prompt, rng.randint(1, 24), stop_token_ids=stops)
        iteration = i // 3 * 5
        cancel_iteration = iteration + rng.choice([0, 2, 15, 30]) if i % 5 == 3 else None
        arrivals.append(Arrival(iteration, request, cancel_iteration))
    return arrivals


def emitted(batch: Batch, logits: torch.Tensor) -> list[int | None]:
    """Return the greedy token of each unpadded row, or None for a chunk in the middle of a prompt.

    The logits of padding rows are dropped.
    """
    best = logits[: len(batch.emits)].argmax(dim=-1).tolist()
    return [token if emits else None for token, emits in zip(best, batch.emits, strict=True)]


def iterations(scheduler: BucketScheduler, arrivals: Sequence[Arrival]) -> Iterator[None]:
    """Yield once per iteration of the serving loop, until no request is left.

    Before each yield, add the requests that arrive in the iteration and cancel those whose client disconnects.
    """
    iteration = 0
    while iteration <= arrivals[-1].iteration or scheduler.num_waiting or scheduler.num_running:
        for arrival in arrivals:
            if arrival.iteration == iteration:
                scheduler.add(arrival.request)
            if arrival.cancel_iteration == iteration:
                scheduler.cancel(arrival.request.id)
        yield
        iteration += 1


def serve(
    scheduler: BucketScheduler,
    inputs: PaddedInputs,
    model: Callable[[Batch], torch.Tensor],
    arrivals: Sequence[Arrival],
) -> dict[str, list[Outcome]]:
    """Serve all requests and return the outcomes of each; a request without a finish reason was cancelled."""
    outcomes: dict[str, list[Outcome]] = {arrival.request.id: [] for arrival in arrivals}
    for _ in iterations(scheduler, arrivals):
        step = scheduler.schedule()
        if step.kind == "idle":
            continue
        batch = inputs.fill(step)
        for outcome in scheduler.complete(step, emitted(batch, model(batch))):
            outcomes[outcome.id].append(outcome)
    return outcomes


def main() -> int:
    torch.set_num_threads(1)  # the matrices are too small for parallel execution
    llama = TinyLlama(CONFIG, vocab_size=VOCAB)
    model = CompiledModel(lambda: llama, CONFIG, backend="jit")
    model.warmup(progress=True)
    graphs = len(model.report().graphs)
    arrivals = workload()
    served = serve(BucketScheduler(CONFIG), PaddedInputs(CONFIG, vocab_size=VOCAB), model, arrivals)
    print(model.report())

    ends, equal = Counter[str](), 0
    for _, request, _ in arrivals:
        tokens = [outcome.token for outcome in served[request.id]]
        reason = served[request.id][-1].finish_reason if tokens else None
        expected = generate_reference(llama, request.prompt, request.max_tokens, request.stop_token_ids)
        equal += tokens == (expected if reason else expected[: len(tokens)])
        ends[reason or "cancelled"] += 1
    print("requests:", ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    print("graphs compiled while serving:", compiled := len(model.report().graphs) - graphs)
    print(f"requests with the tokens of the reference: {equal} of {len(arrivals)}")
    return 0 if equal == len(arrivals) and not compiled else 1


if __name__ == "__main__":
    sys.exit(main())
