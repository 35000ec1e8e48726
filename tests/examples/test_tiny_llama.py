"""The model of `examples/tiny_llama.py` on padded inputs gives the logits of dense attention over each sequence.

Slots of the KV cache that were never written hold NaN.
"""

import random

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

from neuron_sched import BucketScheduler, DecodeRow, NeuronConfig, PaddedInputs, PrefillRow, Request
from tiny_llama import TinyLlama, dense_logits, generate_reference, write

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

VOCAB = 256
# Logits have a range of about 10. Another order of summation changes them by about 1e-5.
CLOSE = {"rtol": 0, "atol": 1e-4}
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 160}
CONFIGS = {
    "blocks of 16": {"block_size": 16, "num_blocks": 60},
    "blocks of 1": {"block_size": 1, "num_blocks": 1000},
    "blocks of 7": {"block_size": 7, "num_blocks": 140},
    "blocks longer than a sequence": {"block_size": 200, "num_blocks": 8},
    "packed": {"block_size": 16, "num_blocks": 60, "max_prefills_per_batch": 3},
    "contexts": {"block_size": 16, "num_blocks": 60, "decode_context_length_buckets": [20, 64]},
    "one size": {"block_size": 16, "num_blocks": 60, "num_seqs_buckets": [8], "num_batched_tokens_buckets": [64]},
}


def configured(**changes):
    return NeuronConfig(**{**SIZES, **CONFIGS["blocks of 16"], **changes})


def nan_filled(config, **sizes):
    """Return a model whose KV cache is filled with NaN."""
    model = TinyLlama(config, **sizes)
    model.kv_cache.fill_(torch.nan)
    return model


def bits(model):
    """Return the bits of the KV cache, one row per slot. As bits, NaN equals itself and -0 differs from 0."""
    return model.kv_cache.movedim(2, 0).flatten(1).contiguous().view(torch.int32).clone()


class Sequences:
    """Random sequences, computed in random steps with given tokens. `computed` counts the tokens of each so far."""

    def __init__(self, config, seed, count=6):
        self.config, self.rng = config, random.Random(seed)
        self.tokens = [self.rng.choices(range(VOCAB), k=config.max_model_len) for _ in range(count)]
        self.computed = [0] * count
        self.blocks = [[] for _ in range(count)]
        self.free = self.rng.sample(range(1, config.num_blocks + 1), config.num_blocks)

    def allocated(self, i, end):
        """Return the block table of a sequence, extended to hold `end` tokens."""
        while len(self.blocks[i]) * self.config.block_size < end:
            self.blocks[i].append(self.free.pop())
        return self.blocks[i]

    def slots(self, i, start, end):
        size = self.config.block_size
        return [self.blocks[i][at // size] * size + at % size for at in range(start, end)]

    def step(self, inputs):
        """Return the batch of a random step, and sequence, last position and written slots of each row."""
        order = self.rng.sample(range(len(self.tokens)), len(self.tokens))
        decodes = [i for i in order if 0 < self.computed[i] < len(self.tokens[i])]
        if decodes and self.rng.random() < 0.7:
            chosen = [(i, 1) for i in decodes[: self.rng.randint(1, len(decodes))]]
            rows = [DecodeRow(self.tokens[i][at := self.computed[i]], at, self.allocated(i, at + 1)) for i, _ in chosen]
            return inputs.decode(rows), self.advance(chosen)
        chosen, budget = [], self.config.max_num_batched_tokens
        for i in order[: self.rng.randint(1, self.config.max_prefills_per_batch)]:
            left = min(budget, len(self.tokens[i]) - self.computed[i])
            if left:
                count = self.rng.choice([1, left, self.rng.randint(1, left), self.rng.randint(1, left)])
                chosen.append((i, count))
                budget -= count
        rows = []
        for i, count in chosen:
            start, end = self.computed[i], self.computed[i] + count
            rows.append(PrefillRow(self.tokens[i][start:end], start, self.allocated(i, end)))
        return (inputs.prefill(rows) if rows else None), self.advance(chosen)

    def advance(self, chosen):
        rows = []
        for i, count in chosen:
            start = self.computed[i]
            self.computed[i] += count
            rows.append((i, self.computed[i] - 1, self.slots(i, start, self.computed[i])))
        return rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_kv_cache_of_random_steps(name, seed):
    config = configured(**CONFIGS[name])
    model, inputs, sequences = nan_filled(config), PaddedInputs(config), Sequences(config, seed)
    expected = [dense_logits(model, tokens) for tokens in sequences.tokens]
    seen = set()
    for _ in range(80):
        batch, rows = sequences.step(inputs)
        if batch is None:
            continue
        seen.add(batch.shape)
        before = bits(model)
        logits = model(**batch.torch())
        assert logits.shape == (len(batch.logits_index), VOCAB)
        torch.testing.assert_close(logits[: len(rows)], torch.stack([expected[i][at] for i, at, _ in rows]), **CLOSE)
        assert not logits.isnan().any()
        written = [slot for *_, slots in rows for slot in slots]
        changed = (bits(model) != before).any(dim=1).nonzero()[:, 0].tolist()
        assert changed == sorted(written)
    assert len(seen) >= min(4, len(inputs.shapes))


def test_packed_prompts_do_not_affect_each_other():
    """Three prompts in one step give the same keys, values and logits as each of them alone."""
    config = configured(max_prefills_per_batch=3)
    alone, packed, inputs = nan_filled(config), nan_filled(config), PaddedInputs(config)
    tokens = Sequences(config, seed=5).tokens
    rows = [
        PrefillRow(tokens[0][:20], 0, [3, 9]),
        PrefillRow(tokens[1][:1], 0, [1]),
        PrefillRow(tokens[2][:33], 0, [60, 2, 59]),
    ]
    # Then a second chunk of each prompt, so that cached tokens of three lengths are read.
    second_chunks = [
        PrefillRow(tokens[0][20:40], 20, [3, 9, 4]),
        PrefillRow(tokens[1][1:30], 1, [1, 8]),
        PrefillRow(tokens[2][33:40], 33, [60, 2, 59]),
    ]
    for prefill in (rows, second_chunks):
        separate = [alone(**inputs.prefill([row]).torch())[0] for row in prefill]
        torch.testing.assert_close(packed(**inputs.prefill(prefill).torch()), torch.stack(separate), **CLOSE)
    written = ~packed.kv_cache.isnan()
    assert written.equal(~alone.kv_cache.isnan()) and written.any()
    torch.testing.assert_close(packed.kv_cache, alone.kv_cache, equal_nan=True, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_traced_graphs_give_the_logits_of_the_module(name):
    """Graphs traced with dummy batches contain no constants that depend on values."""
    config = configured(**CONFIGS[name])
    model, inputs, sequences = nan_filled(config), PaddedInputs(config), Sequences(config, seed=7)
    graphs = {shape: traced(model, inputs.dummy(shape).torch()) for shape in inputs.shapes}
    assert model.kv_cache.isnan().all()
    untraced = nan_filled(config)
    for _ in range(40):
        batch, rows = sequences.step(inputs)
        if batch is not None:
            logits = graphs[batch.shape](*batch.torch().values())
            expected = untraced(**batch.torch())
            torch.testing.assert_close(logits[: len(rows)], expected[: len(rows)], **CLOSE)
    torch.testing.assert_close(model.kv_cache, untraced.kv_cache, equal_nan=True, rtol=0, atol=1e-5)


def traced(model, example):
    class Positional(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *tensors):
            return self.model(**dict(zip(example, tensors, strict=True)))

    return torch.jit.trace(Positional(), tuple(example.values()), check_trace=False)


def test_r03_slot_minus_one_is_not_the_last_slot():
    cache = torch.full((64, 2, 4), 7.0)
    write(cache, torch.tensor([16, 17, 18, -1]), torch.ones(4, 2, 4))
    assert cache[16:19].eq(1).all()
    assert cache[:16].eq(7).all() and cache[19:].eq(7).all()


@pytest.mark.parametrize("content", [torch.nan, torch.inf, -0.0])
def test_r03_the_first_slot_keeps_its_bits(content):
    cache = torch.full((64, 2, 4), content)
    before = cache.view(torch.int32).clone()
    write(cache, torch.tensor([-1, 63, -1]), torch.ones(3, 2, 4))
    assert cache[63].eq(1).all()
    assert cache[:63].view(torch.int32).equal(before[:63])


def test_r07_dummy_batches_leave_the_kv_cache_unchanged():
    config = configured(max_prefills_per_batch=2, decode_context_length_buckets=[20, 64])
    model, inputs, scheduler = TinyLlama(config), PaddedInputs(config), BucketScheduler(config)
    model.kv_cache.copy_(torch.arange(model.kv_cache.numel()).view_as(model.kv_cache))
    scheduler.add(Request("a", [5] * 40, max_tokens=4))
    scheduler.complete(scheduler.schedule(), [1])
    free, before = scheduler.free_blocks, bits(model)
    assert free == config.num_blocks - 3
    prefills = [("prefill", tokens) for tokens in config.num_batched_tokens_buckets]
    pairs = [("decode", rows, context) for rows in (1, 2, 4, 8) for context in (20, 64, 160)]
    assert list(inputs.shapes) == prefills + pairs
    for shape in (*inputs.shapes, ("decode", 4, 160)):
        batch = inputs.dummy(shape)
        assert (batch.slot_mapping == -1).all() and (batch.block_table == -1).all()
        assert not model(**batch.torch()).isnan().any()
        assert bits(model).equal(before), shape
    assert scheduler.free_blocks == free


def test_every_position_of_the_prompt_affects_the_logits():
    config = configured()
    model, prompt = TinyLlama(config), Sequences(config, seed=2).tokens[0]
    expected = dense_logits(model, prompt)[-1]
    for position in (0, 1, 50, 100, len(prompt) - 1):
        changed = [*prompt[:position], prompt[position] ^ 1, *prompt[position + 1 :]]
        difference = (dense_logits(model, changed)[-1] - expected).abs().max()
        assert difference > 100 * CLOSE["atol"], position


def test_logits_equal_those_of_transformers():
    """The logits equal those of the Llama of transformers with the same weights."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: make vllm-env")
    config = configured()
    model, tokens = TinyLlama(config, width=32, inner=48, layers=3, heads=4, kv_heads=1), [7, 0, 255, 3, 9] * 8
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            max_position_embeddings=config.max_model_len,
        )
    )
    llama.load_state_dict({name: model.state_dict()[own_name(name)] for name in llama.state_dict()})
    with torch.no_grad():
        expected = llama(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(dense_logits(model, tokens), expected, **CLOSE)


def own_name(name):
    """Return the name in this model of a weight of the Llama of transformers."""
    return name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")


def test_generate_reference():
    config = configured()
    model, prompt = TinyLlama(config), Sequences(config, seed=3).tokens[0][:50]
    tokens = generate_reference(model, prompt, 12)
    assert len(tokens) == 12 and len(set(tokens)) > 6
    assert tokens[0] == int(dense_logits(model, prompt)[-1].argmax())
    assert tokens[5:] == generate_reference(model, prompt + tokens[:5], 7)
    first = tokens.index(tokens[3])
    assert generate_reference(model, prompt, 12, stop_token_ids=[tokens[3]]) == tokens[: first + 1]
    assert generate_reference(TinyLlama(config), prompt, 12) == tokens
    assert generate_reference(TinyLlama(config, seed=2), prompt, 12) != tokens
