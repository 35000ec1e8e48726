"""Scheduler, padded inputs, compiled graphs and a model, end to end: every request gets the tokens of the reference,
which computes it alone, densely, without padding or cache.

`Watched` looks at every step from between runner and model: only compiled shapes, and not a bit of the KV cache changes
but in the slots of the step's tokens, which lie in blocks of the step's requests. The cache begins as NaN, so reading
a slot that nobody has written would show in a token.
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
from serve_tiny import Arrival, emitted, serve, turns, workload
from tiny_llama import TinyLlama, dense_logits, generate_reference

VOCAB = serve_tiny.VOCAB
# Padding and batching change a logit by less than 1e-4 (tests/test_torch_tiny_llama.py asserts that).
ROOM = 2e-4


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only wait for each other where matrices are this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def right(prompt, limit, stop_token_ids):
    """What the reference gives; the weights are the same in every test.

    At every token the best two are so far from each other that no order of summation makes another one the best.
    """
    llama = TinyLlama(serve_tiny.CONFIG, vocab_size=VOCAB)
    tokens = generate_reference(llama, prompt, limit, stop_token_ids)
    first, second = dense_logits(llama, [*prompt, *tokens])[len(prompt) - 1 : -1].topk(2).values.unbind(dim=1)
    assert (first - second).min() > ROOM, "another seed, please"
    return tokens


class CountedLlama(TinyLlama):
    """Knows how often Python ran it: a compiled graph does not."""

    forwards = 0

    def forward(self, **tensors):
        self.forwards += 1
        return super().forward(**tensors)


class Watched:
    """Padded inputs and a compiled model, of which every fill and every call is looked at."""

    def __init__(self, config, backend, buffers):
        self.backend, self.block_size = backend, config.block_size
        self.inputs = PaddedInputs(config, vocab_size=VOCAB, buffers=buffers)
        self.llama = CountedLlama(config, vocab_size=VOCAB)
        self.llama.kv_cache.fill_(torch.nan)
        self.model = CompiledModel(lambda: self.llama, config, backend=backend)
        self.last = self.bits()
        self.model.warmup(progress=False)
        self.llama.forwards = 0
        self.started, self.seen, self.calls = set(), Counter(), Counter()

    def bits(self):
        """The cache's bits, a row a slot."""
        return self.llama.kv_cache.movedim(2, 0).flatten(1).contiguous().view(torch.int32)

    def fill(self, step, tokens=None):
        batch = self.inputs.fill(step, tokens)
        self.slots = []
        for name, start in step.num_computed_tokens.items():
            blocks, size = step.block_ids(name), self.block_size
            for position in range(start, start + step.num_scheduled_tokens[name]):
                self.slots.append(blocks[position // size] * size + position % size)
            self.seen["prefix hits"] += name not in self.started and start > 0
            self.started.add(name)
        self.seen["chunks amid a prompt"] += batch.emits.count(False)
        self.seen["prompts packed"] += step.kind == "prefill" and len(step) > 1
        self.seen[f"{step.kind} steps"] += 1
        self.seen[f"{step.kind} padding"] += batch.num_padded_tokens - batch.num_real_tokens
        return batch

    def __call__(self, batch):
        padding = len(batch.slot_mapping) - len(self.slots)
        assert batch.slot_mapping.tolist() == self.slots + [-1] * padding
        before = self.bits()
        assert before.equal(self.last), "the cache changed between two steps, or in warm-up"
        self.calls[batch.shape] += 1
        logits = self.model(batch)
        self.last = self.bits()
        changed = (self.last != before).any(dim=1).nonzero()[:, 0].tolist()
        assert set(changed) <= set(self.slots)
        assert not self.llama.kv_cache[:, :, self.slots].isnan().any()
        assert not logits[: len(batch.emits)].isnan().any()
        return logits

    def check(self):
        """Nothing but the table of warm-up has run, and Python runs no model that was traced."""
        assert set(self.model.report().graphs) == set(self.inputs.shapes) >= self.calls.keys()
        assert self.llama.forwards == (self.calls.total() if self.backend == "eager" else 0)


def serve_ahead(scheduler, inputs, model, arrivals):
    """`serve` with one step planned and filled before the one in flight is completed.

    The tokens of that one are on the device already, where the next step may take them from.
    """
    told = {arrival.request.id: [] for arrival in arrivals}
    in_flight = deque()

    def last_tokens(names):
        _, batch, _, logits = in_flight[-1]
        inputs.seen["tokens asked for"] += len(names)
        best = dict(zip(batch.request_ids, emitted(batch, logits), strict=True))
        return [best[name] for name in names]

    def deliver():
        step, batch, kept, logits = in_flight.popleft()
        # Two buffers: what the older step was given is untouched by the newer one.
        assert all((array == kept[name]).all() for name, array in batch.arrays().items())
        for outcome in scheduler.complete(step, emitted(batch, logits)):
            told[outcome.id].append(outcome)

    for _ in turns(scheduler, arrivals):
        step = scheduler.schedule(ahead=bool(in_flight))
        if step.kind != "idle":
            batch = inputs.fill(step, last_tokens)
            in_flight.append((step, batch, batch.copy().arrays(), model(batch)))
        if len(in_flight) == 2 or (in_flight and step.kind == "idle"):
            deliver()
    while in_flight:
        deliver()
    return told


def run(config, arrivals, backend="jit", loop=serve):
    """Serves the arrivals and compares all tokens; what was seen, how each request ended too."""
    scheduler, watched = BucketScheduler(config), Watched(config, backend, buffers=2 if loop is serve_ahead else 1)
    told = loop(scheduler, watched, watched, arrivals)
    for _, request, cancel_turn in arrivals:
        tokens = [outcome.token for outcome in told[request.id]]
        *amid, reason = [None, *(outcome.finish_reason for outcome in told[request.id])]
        limit = min(request.max_tokens, max(1, config.max_model_len - len(request.prompt)))
        expected = right(tuple(request.prompt), limit, request.stop_token_ids)
        if reason is None:
            assert cancel_turn is not None and tokens == expected[: len(tokens)], request.id
        else:
            ends = "stop" if expected[-1] in request.stop_token_ids else "length"
            assert (tokens, reason, set(amid)) == (expected, ends, {None}), request.id
        watched.seen[reason or ("cancelled late" if tokens else "cancelled early")] += 1
    watched.check()
    scheduler.check()
    assert scheduler.free_blocks == config.num_blocks
    return watched.seen


def changed_config(**changes):
    return NeuronConfig(**{**serve_tiny.CONFIG.as_dict(), **changes})


VARIANTS = {
    "as in the example": {},
    "packed": {"max_prefills_per_batch": 3},
    "decode contexts": {"decode_context_length_buckets": [48, 130]},
    "hardly any blocks": {"num_blocks": 26},
    "chunks on bucket edges": {"chunking": "bucket"},
    "prefill and decode by turns": {"max_consecutive_prefill_steps": 1, "min_decode_steps": 2},
    "no prefix cache, one size of each": {
        "prefix_caching": False,
        "num_batched_tokens_buckets": [128],
        "num_seqs_buckets": [8],
    },
    "all at once": {
        "max_prefills_per_batch": 3,
        "decode_context_length_buckets": [48, 130],
        "chunking": "bucket",
        "max_consecutive_prefill_steps": 2,
        "block_size": 8,
        "num_blocks": 90,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_are_those_of_the_reference(name):
    check_seen(run(changed_config(**VARIANTS[name]), workload()), name)


@pytest.mark.parametrize("name", VARIANTS)
def test_one_step_planned_ahead(name):
    seen = run(changed_config(**VARIANTS[name]), workload(), loop=serve_ahead)
    check_seen(seen, name)
    assert seen["tokens asked for"] > 100


@pytest.mark.parametrize("name", ["as in the example", "all at once"])
@pytest.mark.parametrize("loop", [serve, serve_ahead])
def test_a_module_that_is_not_traced(name, loop):
    check_seen(run(changed_config(**VARIANTS[name]), workload(), "eager", loop), name)


def check_seen(seen, name):
    """The run had what it is meant to have; else nothing was shown."""
    config = changed_config(**VARIANTS[name])
    assert seen["chunks amid a prompt"] >= 10, seen
    assert seen["prefill padding"] > 500 and seen["decode padding"] > 10, seen
    assert seen["stop"] >= 5 and seen["cancelled early"] + seen["cancelled late"] >= 8, seen
    assert (seen["prefix hits"] >= 5) == config.prefix_caching, seen
    assert (seen["prompts packed"] >= 4) == (config.max_prefills_per_batch > 1), seen


@pytest.mark.parametrize("loop", [serve, serve_ahead])
@pytest.mark.parametrize("seed", [0, 2, 3, 4])  # no near ties: see `right`
def test_random_workloads(seed, loop):
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
        # Some would grow beyond the longest sequence, and are capped.
        request = Request(f"r{i}", prompt, rng.randint(1, 30), stop_token_ids=stops, priority=rng.randint(0, 2))
        turn = (arrivals[-1].turn if arrivals else 0) + rng.choice([0, 0, 1, 5])
        arrivals.append(Arrival(turn, request, turn + rng.randint(0, 20) if rng.random() < 0.2 else None))
    seen = run(config, arrivals, rng.choice(["jit", "eager"]), loop)
    assert seen["prefill steps"] >= 20 and seen["decode steps"] >= 20


def test_the_example_as_a_command():
    """It prints what it is about, and its exit status is that of a comparison that held."""
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
    """As it would with a cache that mixes up two blocks."""
    monkeypatch.setattr(serve_tiny, "generate_reference", lambda *args: [*generate_reference(*args)[:-1], -1])
    assert serve_tiny.main() == 1
    assert capsys.readouterr().out.endswith("reference: 12 of 64\n")


def test_r08_only_real_rows_are_sampled():
    """Three decodes in a bucket of four, the fourth row NaN; then a chunk in the middle of a prompt: no token."""
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
