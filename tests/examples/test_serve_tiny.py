"""Scheduler, padded inputs, compiled graphs and a model end to end: each request gets the tokens of the reference.

The reference computes each request alone, with dense attention and without padding or KV cache.

`CheckedModel` checks every step between inputs and model: only compiled shapes run, and the KV cache changes only in
the slots of the step's tokens, which lie in blocks of the step's requests. The KV cache is filled with NaN at the
start, so that reading an unwritten slot would change a token.
"""

import functools
import os
import random
import re
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

import serve_tiny
from neuron_sched import BucketScheduler, CompiledModel, NeuronConfig, PaddedInputs, Request
from serve_tiny import Arrival, emitted, iterations, serve, workload
from tiny_llama import TinyLlama, dense_logits, generate_reference

VOCAB = serve_tiny.VOCAB
# Padding and batching change a logit by less than 1e-4, as tests/examples/test_tiny_llama.py asserts.
MIN_MARGIN = 2e-4


@functools.cache
def reference_tokens(prompt, limit, stop_token_ids):
    """Return the tokens of the reference. The weights are the same in every test.

    Assert that the two largest logits of each token differ so much that no order of summation swaps them.
    """
    llama = TinyLlama(serve_tiny.CONFIG, vocab_size=VOCAB)
    tokens = generate_reference(llama, prompt, limit, stop_token_ids)
    first, second = dense_logits(llama, [*prompt, *tokens])[len(prompt) - 1 : -1].topk(2).values.unbind(dim=1)
    assert (first - second).min() > MIN_MARGIN, "near tie: choose another seed"
    return tokens


class CountedLlama(TinyLlama):
    """Counts the calls of `forward` in Python. A compiled graph makes none."""

    num_forwards = 0

    def forward(self, **tensors):
        self.num_forwards += 1
        return super().forward(**tensors)


class CheckedModel:
    """Padded inputs and a compiled model. Every fill is counted by its kind, and every call is checked."""

    def __init__(self, config, backend, buffers):
        self.backend, self.block_size = backend, config.block_size
        self.inputs = PaddedInputs(config, vocab_size=VOCAB, buffers=buffers)
        self.llama = CountedLlama(config, vocab_size=VOCAB)
        self.llama.kv_cache.fill_(torch.nan)
        self.model = CompiledModel(lambda: self.llama, config, backend=backend)
        self.last_bits = self.bits()
        self.model.warmup(progress=False)
        self.llama.num_forwards = 0
        self.started, self.counts, self.calls = set(), Counter(), Counter()

    def bits(self):
        """Return the bits of the KV cache, one row per slot."""
        return self.llama.kv_cache.movedim(2, 0).flatten(1).contiguous().view(torch.int32)

    def fill(self, step, tokens=None):
        batch = self.inputs.fill(step, tokens)
        self.slots = []
        for name, start in step.num_computed_tokens.items():
            blocks, size = step.block_ids(name), self.block_size
            for position in range(start, start + step.num_scheduled_tokens[name]):
                self.slots.append(blocks[position // size] * size + position % size)
            self.counts["prefix hits"] += name not in self.started and start > 0
            self.started.add(name)
        self.counts["chunks before the last"] += batch.emits.count(False)
        self.counts["prompts packed"] += step.kind == "prefill" and len(step) > 1
        self.counts[f"{step.kind} steps"] += 1
        self.counts[f"{step.kind} padding"] += batch.num_padded_tokens - batch.num_real_tokens
        return batch

    def __call__(self, batch):
        padding = len(batch.slot_mapping) - len(self.slots)
        assert batch.slot_mapping.tolist() == self.slots + [-1] * padding
        before = self.bits()
        assert before.equal(self.last_bits), "the KV cache changed between two steps, or during warm-up"
        self.calls[batch.shape] += 1
        logits = self.model(batch)
        self.last_bits = self.bits()
        changed = (self.last_bits != before).any(dim=1).nonzero()[:, 0].tolist()
        assert set(changed) <= set(self.slots)
        assert not self.llama.kv_cache[:, :, self.slots].isnan().any()
        assert not logits[: len(batch.emits)].isnan().any()
        return logits

    def check(self):
        """Assert that only graphs compiled by `warmup()` ran, and that traced models made no call in Python."""
        assert set(self.model.report().graphs) == set(self.inputs.shapes) >= self.calls.keys()
        assert self.llama.num_forwards == (self.calls.total() if self.backend == "eager" else 0)


def serve_ahead(scheduler, inputs, model, arrivals):
    """Serve like `serve`, but schedule and fill each step before the one in flight is completed.

    The step in flight has computed its tokens already; the next step takes them from its logits.
    """
    outcomes = {arrival.request.id: [] for arrival in arrivals}
    in_flight = deque()

    def last_tokens(names):
        _, batch, _, logits = in_flight[-1]
        inputs.counts["tokens requested"] += len(names)
        best = dict(zip(batch.request_ids, emitted(batch, logits), strict=True))
        return [best[name] for name in names]

    def complete_oldest():
        step, batch, filled, logits = in_flight.popleft()
        # With two buffer sets, filling the newer step leaves the arrays of the older one unchanged.
        assert all((array == filled[name]).all() for name, array in batch.arrays().items())
        for outcome in scheduler.complete(step, emitted(batch, logits)):
            outcomes[outcome.id].append(outcome)

    for _ in iterations(scheduler, arrivals):
        step = scheduler.schedule(ahead=bool(in_flight))
        if step.kind != "idle":
            batch = inputs.fill(step, last_tokens)
            in_flight.append((step, batch, batch.copy().arrays(), model(batch)))
        if len(in_flight) == 2 or (in_flight and step.kind == "idle"):
            complete_oldest()
    while in_flight:
        complete_oldest()
    return outcomes


def run(config, arrivals, backend="jit", loop=serve):
    """Serve the arrivals and compare all tokens. Return the counts of the steps and of the ends of requests."""
    scheduler = BucketScheduler(config)
    checked = CheckedModel(config, backend, buffers=2 if loop is serve_ahead else 1)
    outcomes = loop(scheduler, checked, checked, arrivals)
    for _, request, cancel_iteration in arrivals:
        tokens = [outcome.token for outcome in outcomes[request.id]]
        *earlier_reasons, reason = [None, *(outcome.finish_reason for outcome in outcomes[request.id])]
        limit = min(request.max_tokens, max(1, config.max_model_len - len(request.prompt)))
        expected = reference_tokens(tuple(request.prompt), limit, request.stop_token_ids)
        if reason is None:
            assert cancel_iteration is not None and tokens == expected[: len(tokens)], request.id
        else:
            ends = "stop" if expected[-1] in request.stop_token_ids else "length"
            assert (tokens, reason, set(earlier_reasons)) == (expected, ends, {None}), request.id
        checked.counts[reason or ("cancelled late" if tokens else "cancelled early")] += 1
    checked.check()
    scheduler.check()
    assert scheduler.free_blocks == config.num_blocks
    return checked.counts


def changed_config(**changes):
    return NeuronConfig(**{**serve_tiny.CONFIG.as_dict(), **changes})


VARIANTS = {
    "as in the example": {},
    "packed": {"max_prefills_per_batch": 3},
    "decode contexts": {"decode_context_length_buckets": [48, 130]},
    "few blocks": {"num_blocks": 26},
    "chunks on bucket edges": {"chunking": "bucket"},
    "prefills and decodes alternate": {"max_consecutive_prefill_steps": 1, "min_decode_steps": 2},
    "no prefix cache, one bucket of each kind": {
        "prefix_caching": False,
        "num_batched_tokens_buckets": [128],
        "num_seqs_buckets": [8],
    },
    "all options": {
        "max_prefills_per_batch": 3,
        "decode_context_length_buckets": [48, 130],
        "chunking": "bucket",
        "max_consecutive_prefill_steps": 2,
        "block_size": 8,
        "num_blocks": 90,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_the_reference(name):
    check_counts(run(changed_config(**VARIANTS[name]), workload()), name)


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_the_reference_with_a_step_planned_ahead(name):
    counts = run(changed_config(**VARIANTS[name]), workload(), loop=serve_ahead)
    check_counts(counts, name)
    assert counts["tokens requested"] > 100


@pytest.mark.parametrize("name", ["as in the example", "all options"])
@pytest.mark.parametrize("loop", [serve, serve_ahead])
def test_tokens_equal_the_reference_without_tracing(name, loop):
    check_counts(run(changed_config(**VARIANTS[name]), workload(), "eager", loop), name)


def check_counts(counts, name):
    """Assert that the run contained every situation that the test is about."""
    config = changed_config(**VARIANTS[name])
    assert counts["chunks before the last"] >= 10, counts
    assert counts["prefill padding"] > 500 and counts["decode padding"] > 10, counts
    assert counts["stop"] >= 5 and counts["cancelled early"] + counts["cancelled late"] >= 8, counts
    assert (counts["prefix hits"] >= 5) == config.prefix_caching, counts
    assert (counts["prompts packed"] >= 4) == (config.max_prefills_per_batch > 1), counts


@pytest.mark.parametrize("loop", [serve, serve_ahead])
@pytest.mark.parametrize("seed", [0, 2, 3, 4])  # seeds without near ties: see `reference_tokens`
def test_tokens_equal_the_reference_for_random_workloads(seed, loop):
    rng = random.Random(seed)
    longest, block_size = rng.choice([40, 100, 161]), rng.choice([1, 4, 7, 16])
    budget = rng.choice([24, 64, 128])
    config = NeuronConfig(
        max_num_seqs=rng.choice([3, 6, 8]),
        max_num_batched_tokens=budget,
        max_model_len=longest,
        block_size=block_size,
        num_blocks=-(-longest // block_size) * rng.choice([1, 2, 5]),
        num_batched_tokens_buckets=sorted({16, min(budget, longest)}),
        decode_context_length_buckets=rng.choice([None, [30]]),
        max_prefills_per_batch=rng.choice([1, 2, 4]),
        prefix_caching=rng.random() < 0.7,
        chunking=rng.choice(["fixed", "bucket"]),
        policy=rng.choice(["fcfs", "priority"]),
        max_consecutive_prefill_steps=rng.choice([None, 1, 3]),
        long_prefill_token_threshold=rng.choice([0, 11]),
    )
    prefix = rng.choices(range(VOCAB), k=longest // 2)
    arrivals = []
    for i in range(40):
        prompt = rng.choices(range(VOCAB), k=rng.randint(1, longest // 2))
        if rng.random() < 0.4:
            prompt = prefix[: rng.randint(1, len(prefix))] + prompt
        stops = rng.sample(range(VOCAB), 25) if rng.random() < 0.3 else []
        # Some requests would exceed `max_model_len`, which limits their outputs.
        request = Request(f"r{i}", prompt, rng.randint(1, 30), stop_token_ids=stops, priority=rng.randint(0, 2))
        iteration = (arrivals[-1].iteration if arrivals else 0) + rng.choice([0, 0, 1, 5])
        arrivals.append(Arrival(iteration, request, iteration + rng.randint(0, 20) if rng.random() < 0.2 else None))
    counts = run(config, arrivals, rng.choice(["jit", "eager"]), loop)
    assert counts["prefill steps"] >= 20 and counts["decode steps"] >= 20


def test_the_example_as_a_command():
    """It prints its results, and exits with status 0 if all tokens are equal."""
    folder = Path(serve_tiny.__file__).parent
    done = subprocess.run(
        [sys.executable, "examples/serve_tiny.py"],
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("requests with the tokens of the reference: 64 of 64\n")
    assert re.search(r"^graphs compiled while serving: 0$", done.stdout, re.MULTILINE)


def test_the_example_fails_when_a_token_differs(capsys, monkeypatch):
    """The reference is changed in its last token, which stands for any wrong token."""
    monkeypatch.setattr(serve_tiny, "generate_reference", lambda *args: [*generate_reference(*args)[:-1], -1])
    assert serve_tiny.main() == 1
    assert capsys.readouterr().out.endswith("reference: 12 of 64\n")


def test_r08_padding_rows_are_not_sampled():
    """No token is sampled from the NaN row of three decodes in a bucket of four, nor for chunks before the last."""
    config = NeuronConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=128,
        block_size=16,
        num_blocks=40,
        num_seqs_buckets=[4],
    )
    scheduler, inputs, llama = BucketScheduler(config), PaddedInputs(config), TinyLlama(config)
    prompts = {"a": [3, 4, 5], "b": [9] * 20, "c": [200, 7]}
    expected = {name: generate_reference(llama, prompt, 2) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        scheduler.add(Request(name, prompt, max_tokens=9))
        step = scheduler.schedule()
        batch = inputs.fill(step)
        outcomes = scheduler.complete(step, emitted(batch, llama(**batch.torch())))
        assert [(out.id, out.token) for out in outcomes] == [(name, expected[name][0])]

    step = scheduler.schedule()
    batch = inputs.fill(step)
    assert batch.shape == ("decode", 4, 128) and batch.num_real_tokens == 3
    logits = llama(**batch.torch())
    logits[3] = torch.nan
    tokens = emitted(batch, logits)
    assert tokens == [expected[name][1] for name in "abc"]
    assert [out.token for out in scheduler.complete(step, tokens)] == tokens

    scheduler.add(Request("long", list(range(80)), max_tokens=1))
    for start in (0, 32):
        step = scheduler.schedule()
        assert step.num_computed_tokens == {"long": start}
        batch = inputs.fill(step)
        tokens = emitted(batch, llama(**batch.torch()))
        assert tokens == [None] and scheduler.complete(step, tokens) == []
    batch = inputs.fill(scheduler.schedule())
    tokens = emitted(batch, llama(**batch.torch()))
    assert tokens == generate_reference(llama, range(80), 1)
