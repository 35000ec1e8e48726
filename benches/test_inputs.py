"""`PaddedInputs.fill` against the numpy baselines, and against a plain copy of the bytes that a fill writes."""

from functools import cache

import numpy as np
import pytest
from numpy_baseline import (
    DecodeColumns,
    PersistentDecode,
    PlainCopy,
    Prompt,
    TunedPrefill,
    decode_from_flat,
    prefill_allocating,
)

from neuron_sched import BucketScheduler, NeuronConfig, PaddedInputs, Request
from tests.support.oracles import inputs as oracle_inputs

VOCAB = 128_256
BLOCK_SIZE = 16
ROWS = 1024
WIDTH = 256


def token_ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


# Prefill: 8,192 tokens of one prompt, known to the scheduler


class Prefill:
    """A planned prefill step, and its prompt in the form of the baselines."""

    def __init__(self, count):
        self.config = NeuronConfig(
            max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=16384, block_size=32, num_blocks=1024
        )
        self.ids = token_ids(count)
        self.scheduler = BucketScheduler(self.config)
        self.scheduler.add(Request("a", self.ids, 4, top_k=40, top_p=0.5, temperature=0.25))
        self.step = self.scheduler.schedule()
        assert (self.step.kind, self.step.num_scheduled_tokens) == ("prefill", {"a": count})
        blocks = np.array(self.step.block_ids("a"), np.int32)
        self.prompt = Prompt(np.array(self.ids, np.int32), 0, blocks, np.array([40, 0.5, 0.25], np.float32))
        sampling = {"a": (40, 0.5, 0.25)}
        self.expected = oracle_inputs.of_step(self.config, self.step, {"a": self.ids}, sampling)[1]

    def ours(self, **options):
        inputs, step = PaddedInputs(self.config, **options), self.step
        oracle_inputs.assert_equal(inputs.fill(step).arrays(), self.expected)
        return lambda: inputs.fill(step)


@pytest.fixture(scope="module")
def prefill():
    return Prefill(8192)


def test_prefill_of_8192_against_allocating_numpy(ratio, prefill):
    config, prompt, ours = prefill.config, prefill.prompt, prefill.ours()
    oracle_inputs.assert_equal(prefill_allocating(config, prompt), prefill.expected)
    ratio(lambda: prefill_allocating(config, prompt), ours, at_least=5)


def test_prefill_of_8192_against_tuned_numpy(ratio, prefill):
    tuned, prompt, ours = TunedPrefill(prefill.config), prefill.prompt, prefill.ours()
    oracle_inputs.assert_equal(tuned.fill(prompt), prefill.expected)
    ratio(lambda: tuned.fill(prompt), ours, at_least=2.5)


def test_prefill_of_8192_against_a_copy_of_its_bytes(ratio, prefill):
    plain, ours = PlainCopy(prefill.expected), prefill.ours()
    ratio(ours, plain.fill, below=3)


def test_prefill_of_8192_with_vocab_size_against_tuned_numpy(ratio, prefill):
    tuned, prompt, ours = TunedPrefill(prefill.config), prefill.prompt, prefill.ours(vocab_size=VOCAB)
    oracle_inputs.assert_equal(tuned.fill(prompt), prefill.expected)
    ratio(lambda: tuned.fill(prompt), ours)


def test_prefill_of_5000_in_8192_against_tuned_numpy(ratio):
    padded = Prefill(5000)
    tuned, prompt, ours = TunedPrefill(padded.config), padded.prompt, padded.ours()
    oracle_inputs.assert_equal(tuned.fill(prompt), padded.expected)
    oracle_inputs.assert_equal(prefill_allocating(padded.config, prompt), padded.expected)
    ratio(lambda: tuned.fill(prompt), ours)


# Decode: 1,024 rows of nearly 4,096 tokens, in tables of 256 blocks


class Decoding:
    """A planned decode step of 1,024 requests of different lengths, and its rows in the form of the baselines.

    If `allocating` is given, the following step allocates a block for that row only; by default, for about one row in
    sixteen. `seed` determines the lengths, and thereby the blocks, of the rows.
    """

    def __init__(self, allocating=None, seed=0):
        self.config = NeuronConfig(
            max_num_seqs=ROWS,
            max_num_batched_tokens=BLOCK_SIZE * WIDTH,
            max_model_len=BLOCK_SIZE * WIDTH,
            block_size=BLOCK_SIZE,
            num_blocks=ROWS * WIDTH,
        )
        self.scheduler = BucketScheduler(self.config)
        lengths = np.random.default_rng(seed).integers(3700, 4080, ROWS)
        if allocating is not None:
            lengths -= lengths % BLOCK_SIZE
            lengths[allocating] += BLOCK_SIZE - 1
        ids = token_ids(BLOCK_SIZE * WIDTH)
        self.sequences = {}
        for row, length in enumerate(lengths.tolist()):
            name = f"request-{row}"
            self.scheduler.add(Request(name, ids[:length], 12, top_k=row + 1, temperature=0.5))
            step = self.scheduler.schedule()
            self.scheduler.complete(step, [row])
            self.sequences[name] = [*ids[:length], row]
        self.sampling = {f"request-{row}": (row + 1, 1.0, 0.5) for row in range(ROWS)}
        self.step = self.scheduler.schedule()
        assert (self.step.kind, len(self.step)) == ("decode", ROWS)
        self.lengths = lengths

        self.expected = oracle_inputs.of_step(self.config, self.step, self.sequences, self.sampling)[1]

    def rows(self, later=0):
        """Return the columns of the step `later` steps after this one; each row emits its row number in every step."""
        numbers = np.arange(ROWS)
        sampling = np.stack([numbers + 1, np.ones(ROWS), np.full(ROWS, 0.5)], axis=1).astype(np.float32)
        return DecodeColumns(numbers.astype(np.int32), self.lengths + later, sampling)

    def blocks(self):
        return [self.step.block_ids(f"request-{row}") for row in range(ROWS)]

    def persistent(self, numbers=None):
        """Return a `PersistentDecode` with the blocks of each request in the table row given by `numbers`."""
        persistent = PersistentDecode(self.config)
        for number, blocks in zip(range(ROWS) if numbers is None else numbers, self.blocks(), strict=True):
            persistent.table[number, : len(blocks)] = blocks
        return persistent

    def ours(self, **options):
        inputs, step = PaddedInputs(self.config, **options), self.step
        oracle_inputs.assert_equal(inputs.fill(step).arrays(), self.expected)
        return lambda: inputs.fill(step)


@cache
def decoding():
    return Decoding()


def test_decode_of_1024_against_numpy_from_flat_ids(ratio):
    state, rows = decoding(), decoding().rows()
    lists = state.blocks()
    flat, lengths = np.array([block for blocks in lists for block in blocks], np.int32), np.array([*map(len, lists)])
    oracle_inputs.assert_equal(decode_from_flat(state.config, rows, flat, lengths), state.expected)
    ratio(lambda: decode_from_flat(state.config, rows, flat, lengths), state.ours(), at_least=5)


def test_decode_of_1024_against_numpy_from_a_padded_table(ratio):
    state, rows, persistent = decoding(), decoding().rows(), decoding().persistent()
    oracle_inputs.assert_equal(persistent.fill(rows), state.expected)
    ratio(lambda: persistent.fill(rows), state.ours(), at_least=1.3)


def test_decode_of_1024_against_numpy_that_gathers_from_a_padded_table(ratio):
    """A request keeps its row of the persistent table, so the rows of a step are gathered from the table."""
    numbers = np.random.default_rng(0).permutation(ROWS)
    state, rows, persistent = decoding(), decoding().rows(), decoding().persistent(numbers)
    oracle_inputs.assert_equal(persistent.fill(rows, numbers), state.expected)
    ratio(lambda: persistent.fill(rows, numbers), state.ours())


def test_decode_of_1024_against_a_copy_of_its_bytes(ratio):
    plain, ours = PlainCopy(decoding().expected), decoding().ours()
    ratio(ours, plain.fill, below=3)


def test_decode_of_1024_with_vocab_size_against_numpy_from_a_padded_table(ratio):
    state, rows, persistent = decoding(), decoding().rows(), decoding().persistent()
    oracle_inputs.assert_equal(persistent.fill(rows), state.expected)
    ratio(lambda: persistent.fill(rows), state.ours(vocab_size=VOCAB))


def test_decode_of_1024_in_which_one_row_allocates_a_block(ratio):
    """Two alternating steps whose block tables differ in one block; the second step is planned ahead.

    Neither side relies on the previous content of its block table: `fill` compares every row, and numpy rewrites it.
    """
    allocating = ROWS // 2
    state = Decoding(allocating)
    persistent, steps = state.persistent(), (state.step, state.scheduler.schedule(ahead=True))
    sampled = list(range(ROWS))
    inputs, columns = PaddedInputs(state.config), (state.rows(), state.rows(1))
    later = {name: [*tokens, row] for row, (name, tokens) in enumerate(state.sequences.items())}
    expected = state.expected, oracle_inputs.of_step(state.config, steps[1], later, state.sampling)[1]
    tables = [arrays["block_table"] for arrays in expected]
    cell = allocating, int(state.lengths[allocating]) // BLOCK_SIZE + 1
    assert np.argwhere(tables[0] != tables[1]).tolist() == [list(cell)]
    blocks = [int(table[cell]) for table in tables]

    def numpy_fills():
        for block, rows in zip(blocks, columns, strict=True):
            persistent.table[cell] = block
            yield persistent.fill(rows)

    def our_fills():
        yield inputs.fill(steps[0])
        yield inputs.fill(steps[1], sampled)

    for _ in range(3):
        for ours, baseline, arrays in zip(our_fills(), numpy_fills(), expected, strict=True):
            oracle_inputs.assert_equal(ours.arrays(), arrays)
            oracle_inputs.assert_equal(baseline, arrays)
    ratio(lambda: list(numpy_fills()), lambda: list(our_fills()))


def test_decode_of_1024_in_which_every_row_changes(ratio):
    """Alternating steps of two schedulers: every row of the block table but the first differs from the step before."""
    states = decoding(), Decoding(seed=1)
    persistent, rows = [state.persistent() for state in states], [state.rows() for state in states]
    inputs = PaddedInputs(states[0].config)
    tables = [state.expected["block_table"] for state in states]
    assert (tables[0] != tables[1])[1:].any(axis=1).all()

    def numpy_fills():
        return [table.fill(columns) for table, columns in zip(persistent, rows, strict=True)]

    for state, baseline in zip(states, numpy_fills(), strict=True):
        oracle_inputs.assert_equal(inputs.fill(state.step).arrays(), state.expected)
        oracle_inputs.assert_equal(baseline, state.expected)
    ratio(numpy_fills, lambda: [inputs.fill(state.step) for state in states])
