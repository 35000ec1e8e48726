"""Scheduler, padded inputs, compiled graphs and a model, end to end: every request gets the tokens of the reference,
which computes it alone, densely, without padding or cache.

`Watched` looks at every step from between runner and model: only compiled shapes, and not a bit of the KV cache changes
but in the slots of the step's tokens, which lie in blocks of the step's requests, behind what they had computed.
"""

import functools
import random
from collections import Counter, deque

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

import serve_tiny
from neuron_sched import BucketScheduler, CompiledModel, NeuronConfig, PaddedInputs, Request
from serve_tiny import Arrival, emitted, serve, workload
from tiny_llama import TinyLlama, dense_logits, generate_reference

VOCAB = serve_tiny.VOCAB
NOISE = 5e-5  # above what another order of summation does to a logit


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only wait for each other where matrices are this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def right(prompt, limit, stop_token_ids):
    """What the reference gives; the weights are the same in every test."""
    return generate_reference(TinyLlama(serve_tiny.CONFIG, vocab_size=VOCAB), prompt, limit, stop_token_ids)


class Watched:
    """A compiled model whose every call is checked; the NaN in slots that nobody has written would show in a token."""

    def __init__(self, config, backend, scheduler):
        self.llama = TinyLlama(config, vocab_size=VOCAB)
        self.llama.kv_cache.fill_(torch.nan)
        self.scheduler, self.block_size = scheduler, config.block_size
        self.model = CompiledModel(lambda: self.llama, config, backend=backend)
        self.last = self.bits()
        self.model.warmup(progress=False)
        self.shapes = set(self.model.report().graphs)
        self.calls = Counter()
        self.states = set()

    def bits(self):
        """The cache's bits, a row a slot."""
        return self.llama.kv_cache.movedim(2, 0).flatten(1).contiguous().view(torch.int32)

    def __call__(self, batch):
        assert batch.shape in self.shapes
        self.calls[batch.shape] += 1
        before = self.bits()
        assert before.equal(self.last), "the cache changed between two steps, or in warm-up"
        logits = self.model(batch)
        self.last = self.bits()
        changed = set((self.last != before).any(dim=1).nonzero()[:, 0].tolist())
        assert changed <= set(batch.slot_mapping.tolist()) - {-1}
        own = set()
        for name in batch.request_ids:
            state = self.scheduler.request(name)
            for block in range(state.num_computed_tokens // self.block_size, len(state.block_ids)):
                first = state.block_ids[block] * self.block_size
                own |= set(range(first, first + self.block_size))
        assert changed <= own
        assert not logits[: len(batch.request_ids)].isnan().any()
        return logits


def serve_ahead(scheduler, inputs, model, arrivals, counts):
    """`serve` with one step planned and filled before the one in flight is completed.

    The tokens of that one are on the device already, where the next step may take them from.
    """
    told = {arrival.request.id: [] for arrival in arrivals}
    in_flight = deque()
    turn = 0

    def last_tokens(names):
        step, _, logits = in_flight[-1]
        best = dict(zip(step.num_scheduled_tokens, logits.argmax(dim=-1).tolist(), strict=False))
        counts["asked for"] += len(names)
        return [best[name] for name in names]

    def deliver():
        step, _, logits = in_flight.popleft()
        for outcome in scheduler.complete(step, emitted(scheduler, step, logits)):
            told[outcome.id].append(outcome.token)

    while turn <= arrivals[-1].turn or scheduler.num_waiting or scheduler.num_running:
        for arrival in arrivals:
            if arrival.turn == turn:
                scheduler.add(arrival.request)
            if arrival.cancel_turn == turn:
                counts["cancelled"] += scheduler.cancel(arrival.request.id)
        turn += 1
        step = scheduler.schedule(ahead=bool(in_flight))
        if step.kind == "idle":
            if in_flight:
                deliver()
            else:
                scheduler.complete(step)
            continue
        batch = inputs.fill(step, tokens=last_tokens)
        kept = {name: array.copy() for name, array in batch.arrays().items()}
        in_flight.append((step, (batch, kept), model(batch)))
        counts[f"{step.kind} steps"] += 1
        if len(in_flight) == 2:
            # Two buffers: what the older step was given is untouched by the newer one.
            old, kept = in_flight[0][1]
            assert all((array == kept[name]).all() for name, array in old.arrays().items())
            deliver()
    while in_flight:
        deliver()
    return told


def run(config, arrivals, backend="jit", loop=serve):
    """Serves the arrivals, compares all tokens; what happened, the model, and the scheduler."""
    scheduler, counts = BucketScheduler(config), Counter()
    model = Watched(config, backend, scheduler)
    inputs = PaddedInputs(config, vocab_size=VOCAB, buffers=2 if loop is serve_ahead else 1)
    told = loop(scheduler, inputs, model, arrivals, counts)
    for _, request, cancel_turn in arrivals:
        tokens = told[request.id]
        limit = min(request.max_tokens, max(1, config.max_model_len - len(request.prompt)))
        expected = right(tuple(request.prompt), limit, request.stop_token_ids)
        assert tokens == (expected if cancel_turn is None else expected[: len(tokens)]), request.id
    assert set(model.model.report().graphs) == model.shapes == set(inputs.shapes)
    scheduler.check()
    assert scheduler.free_blocks == config.num_blocks
    return counts, model, scheduler


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


@pytest.mark.parametrize("backend", ["jit", "eager"])
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_are_those_of_the_reference(name, backend):
    counts, model, _ = run(changed_config(**VARIANTS[name]), workload(), backend)
    assert counts["cancelled"] >= 4 and counts["stopped"] >= 5
    assert counts["prefill steps"] + counts["decode steps"] == model.calls.total() > 90
    # Real padding in both kinds, else nothing was shown.
    assert counts["prefill padded"] > 1.1 * counts["prefill real"]
    assert counts["decode padded"] > counts["decode real"]


@pytest.mark.parametrize("name", VARIANTS)
def test_one_step_planned_ahead(name):
    counts, model, _ = run(changed_config(**VARIANTS[name]), workload(), loop=serve_ahead)
    assert counts["cancelled"] >= 4
    assert counts["asked for"] > 100
    assert counts["prefill steps"] + counts["decode steps"] == model.calls.total()


@pytest.mark.parametrize("loop", [serve, serve_ahead])
@pytest.mark.parametrize("seed", range(6))
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
    counts, _, _ = run(config, arrivals, rng.choice(["jit", "eager"]), loop)
    assert counts["prefill steps"] >= 25 and counts["decode steps"] >= 20


def test_the_workload_has_what_it_is_meant_to_have():
    """Chunked prompts, hits in the prefix cache, cancels in every state; and room between the best two tokens."""
    config, arrivals = serve_tiny.CONFIG, workload()
    assert len(arrivals) == 64 and len({len(arrival.request.prompt) for arrival in arrivals}) > 20
    assert sum(len(arrival.request.prompt) > config.max_num_batched_tokens for arrival in arrivals) > 10
    scheduler, seen = BucketScheduler(config), Counter()

    class Looking:
        """Both the scheduler and the model."""

        def __getattr__(self, name):
            return getattr(scheduler, name)

        def cancel(self, name):
            try:
                seen[scheduler.request(name).status] += 1
            except KeyError:
                seen["forgotten"] += 1
            return scheduler.cancel(name)

        def __call__(self, batch):
            if batch.kind == "prefill":
                state = scheduler.request(batch.request_ids[0])
                new = batch.request_ids[0] not in started
                started.add(batch.request_ids[0])
                seen["hits"] += bool(new and batch.cached_seq_len[0, 0])
                seen["chunks"] += batch.cached_seq_len[0, 0] + batch.num_real_tokens < state.num_prompt_tokens
            return llama(**batch.torch())

    llama, looking, started = TinyLlama(config, vocab_size=VOCAB), Looking(), set()
    told = serve(looking, PaddedInputs(config), looking, arrivals, Counter())
    assert seen["hits"] >= 10 and seen["chunks"] >= 10, seen
    assert min(seen["waiting"], seen["prefill"], seen["decode"]) >= 1, seen
    for arrival in arrivals:
        prompt, tokens = arrival.request.prompt, told[arrival.request.id]
        if tokens:
            best = dense_logits(llama, prompt + tokens)[len(prompt) - 1 : -1].topk(2).values
            assert (best[:, 0] - best[:, 1]).min() > 20 * NOISE


def test_the_example_says_that_all_is_equal(capsys):
    assert serve_tiny.main() == 0
    out = capsys.readouterr().out
    assert "of 64 requests" in out and out.endswith("equal to the reference: yes\n")


def test_the_example_fails_when_a_token_differs(capsys, monkeypatch):
    """As it would with a cache that mixes up two blocks."""
    monkeypatch.setattr(serve_tiny, "generate_reference", lambda *args: [*generate_reference(*args)[:-1], -1])
    assert serve_tiny.main() == 1
    assert "equal to the reference: no" in capsys.readouterr().out


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
        logits = llama(**inputs.fill(step).torch())
        outcomes = scheduler.complete(step, emitted(scheduler, step, logits))
        assert [(out.id, out.token) for out in outcomes] == [(name, expected[name][0])]

    step = scheduler.schedule()
    batch = inputs.fill(step)
    assert batch.shape == ("decode", 4, 128) and batch.num_real_tokens == 3
    logits = llama(**batch.torch())
    logits[3] = torch.nan
    tokens = emitted(scheduler, step, logits)
    assert tokens == [expected[name][1] for name in "abc"]
    assert [out.token for out in scheduler.complete(step, tokens)] == tokens

    scheduler.add(Request("long", list(range(80)), max_tokens=1))
    for start in (0, 32):
        step = scheduler.schedule()
        assert step.num_computed_tokens == {"long": start}
        tokens = emitted(scheduler, step, llama(**inputs.fill(step).torch()))
        assert tokens == [None] and scheduler.complete(step, tokens) == []
    step = scheduler.schedule()
    tokens = emitted(scheduler, step, llama(**inputs.fill(step).torch()))
    assert tokens == generate_reference(llama, range(80), 1)
