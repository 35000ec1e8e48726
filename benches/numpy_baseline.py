"""The numpy baselines of the benchmarks: `PaddedInputs.fill` as efficient numpy code.

The baselines have no loop over rows and no checks. Their inputs are numpy arrays already, in the layout that suits each
baseline best.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

NO_SAMPLING = np.array([-1.0, 1.0, 0.0], np.float32)


def fit(sizes, count):
    return sizes[bisect_left(sizes, count)]


def table_width(config, tokens):
    return -(-tokens // config.block_size)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a prefill step: the tokens to compute and all KV blocks of the request."""

    ids: np.ndarray  # int32 [n]
    start: int
    blocks: np.ndarray  # int32
    sampling: np.ndarray  # float32 [3]


@dataclass(frozen=True)
class DecodeColumns:
    """The rows of a decode step, one array per column."""

    ids: np.ndarray  # int32 [n]
    positions: np.ndarray  # int64 [n]
    sampling: np.ndarray  # float32 [n, 3]


def prefill_allocating(config, prompt):
    """Return newly allocated arrays of a prefill step with one prompt."""
    count, end = len(prompt.ids), prompt.start + len(prompt.ids)
    size = fit(config.num_batched_tokens_buckets, count)
    real = np.arange(prompt.start, end)
    input_ids = np.zeros(size, np.int32)
    input_ids[:count] = prompt.ids
    positions = np.full(size, end - 1)
    positions[:count] = real
    slot_mapping = np.full(size, -1)
    slot_mapping[:count] = prompt.blocks[real // config.block_size].astype(np.int64) * config.block_size
    slot_mapping[:count] += real % config.block_size
    block_table = np.full((1, table_width(config, config.max_model_len)), -1, np.int32)
    block_table[0, : len(prompt.blocks)] = prompt.blocks
    return {
        "input_ids": input_ids,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "block_table": block_table,
        "cached_seq_len": np.array([[prompt.start]], np.int32),
        "cu_seqlens": np.array([0, count], np.int32),
        "logits_index": np.array([count - 1]),
        "sampling_params": prompt.sampling[np.newaxis].copy(),
    }


class TunedPrefill:
    """Fill preallocated arrays, one set per token bucket.

    Positions are copied from a precomputed range, and KV slots are computed a whole block at a time.
    """

    def __init__(self, config):
        self.config = config
        width = table_width(config, config.max_model_len)
        self.range = np.arange(config.max_model_len)
        self.offsets = np.arange(config.block_size)
        self.firsts = np.empty(width, np.int64)
        self.slots = np.empty((width, config.block_size), np.int64)
        self.arrays = {
            size: {
                "input_ids": np.zeros(size, np.int32),
                "positions": np.zeros(size, np.int64),
                "slot_mapping": np.full(size, -1),
                "block_table": np.full((1, width), -1, np.int32),
                "cached_seq_len": np.zeros((1, 1), np.int32),
                "cu_seqlens": np.zeros(2, np.int32),
                "logits_index": np.zeros(1, np.int64),
                "sampling_params": np.empty((1, 3), np.float32),
            }
            for size in config.num_batched_tokens_buckets
        }

    def fill(self, prompt):
        block_size, start, count = self.config.block_size, prompt.start, len(prompt.ids)
        end = start + count
        arrays = self.arrays[fit(self.config.num_batched_tokens_buckets, count)]
        input_ids, positions, slot_mapping = arrays["input_ids"], arrays["positions"], arrays["slot_mapping"]
        input_ids[:count] = prompt.ids
        input_ids[count:] = 0
        positions[:count] = self.range[start:end]
        positions[count:] = end - 1
        first, whole = start // block_size, 0
        blocks = prompt.blocks[first : -(-end // block_size)]
        firsts = np.multiply(blocks, block_size, out=self.firsts[: len(blocks)])[:, np.newaxis]
        if start % block_size == 0:
            # The first token starts a block, so the slots of whole blocks are written in place.
            whole = count // block_size
            np.add(firsts[:whole], self.offsets, out=slot_mapping[: whole * block_size].reshape(whole, block_size))
        if whole * block_size < count:
            rest = np.add(firsts[whole:], self.offsets, out=self.slots[whole : len(blocks)]).reshape(-1)
            skipped = start % block_size
            slot_mapping[whole * block_size : count] = rest[skipped : skipped + count - whole * block_size]
        slot_mapping[count:] = -1
        table = arrays["block_table"][0]
        table[: len(prompt.blocks)] = prompt.blocks
        table[len(prompt.blocks) :] = -1
        arrays["cached_seq_len"][0, 0] = start
        arrays["cu_seqlens"][1] = count
        arrays["logits_index"][0] = count - 1
        arrays["sampling_params"][0] = prompt.sampling
        return arrays


def decode_from_flat(config, rows, flat, lengths):
    """Return newly allocated arrays of a decode step.

    `flat` has the block ids of all rows, concatenated; `lengths` has the number of blocks of each row.
    """
    count = len(rows.ids)
    size = fit(config.num_seqs_buckets, count)
    context = fit(config.decode_context_length_buckets, int(rows.positions.max()) + 1)
    width = table_width(config, context)
    block_table = np.full((size, width), -1, np.int32)
    block_table[:count][np.arange(width) < lengths[:, np.newaxis]] = flat
    at = np.cumsum(lengths) - lengths + rows.positions // config.block_size
    return decode_arrays(config, rows, size, flat[at], block_table)


def decode_arrays(config, rows, size, blocks, block_table):
    """Return all arrays of a decode step; `blocks` has the block that each row writes to."""
    count = len(rows.ids)
    input_ids = np.zeros(size, np.int32)
    input_ids[:count] = rows.ids
    positions = np.zeros(size, np.int64)
    positions[:count] = rows.positions
    slot_mapping = np.full(size, -1)
    slot_mapping[:count] = blocks.astype(np.int64) * config.block_size + rows.positions % config.block_size
    context_lens = np.zeros(size, np.int32)
    context_lens[:count] = rows.positions + 1
    sampling_params = np.empty((size, 3), np.float32)
    sampling_params[:count] = rows.sampling
    sampling_params[count:] = NO_SAMPLING
    return {
        "input_ids": input_ids,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "block_table": block_table,
        "context_lens": context_lens,
        "logits_index": np.minimum(np.arange(size), count - 1),
        "sampling_params": sampling_params,
    }


class PersistentDecode:
    """Fill preallocated arrays from a persistent padded block table with one row per request.

    The table is updated when a block is allocated, which is not part of a fill. The rows of a step are either the first
    rows of the table, as in an engine that compacts its batch when a request ends, or are gathered by row number.
    """

    def __init__(self, config):
        self.config = config
        self.range = np.arange(config.max_num_seqs)
        self.table = np.full((config.max_num_seqs, table_width(config, config.max_model_len)), -1, np.int32)
        self.firsts = np.empty(config.max_num_seqs, np.int64)
        self.offsets = np.empty(config.max_num_seqs, np.int64)
        self.arrays = {
            (size, context): {
                "input_ids": np.zeros(size, np.int32),
                "positions": np.zeros(size, np.int64),
                "slot_mapping": np.full(size, -1),
                "block_table": np.full((size, table_width(config, context)), -1, np.int32),
                "context_lens": np.zeros(size, np.int32),
                "logits_index": np.zeros(size, np.int64),
                "sampling_params": np.empty((size, 3), np.float32),
            }
            for size in config.num_seqs_buckets
            for context in config.decode_context_length_buckets
        }

    def fill(self, rows, numbers=None):
        count, block_size = len(rows.ids), self.config.block_size
        size = fit(self.config.num_seqs_buckets, count)
        context = fit(self.config.decode_context_length_buckets, int(rows.positions.max()) + 1)
        arrays = self.arrays[size, context]
        table, slot_mapping, width = arrays["block_table"], arrays["slot_mapping"], table_width(self.config, context)
        if numbers is None:
            np.copyto(table[:count], self.table[:count, :width])
        elif width == self.table.shape[1]:
            # With any other mode, numpy gathers into a temporary buffer first.
            np.take(self.table, numbers, axis=0, out=table[:count], mode="clip")
        else:
            table[:count] = self.table[numbers, :width]
        table[count:] = -1
        columns, offsets = np.divmod(rows.positions, block_size, out=(self.firsts[:count], self.offsets[:count]))
        np.multiply(table[self.range[:count], columns], block_size, out=slot_mapping[:count])
        slot_mapping[:count] += offsets
        slot_mapping[count:] = -1
        arrays["input_ids"][:count] = rows.ids
        arrays["input_ids"][count:] = 0
        arrays["positions"][:count] = rows.positions
        arrays["positions"][count:] = 0
        np.add(rows.positions, 1, out=arrays["context_lens"][:count], casting="same_kind")
        arrays["context_lens"][count:] = 0
        arrays["logits_index"][:count] = self.range[:count]
        arrays["logits_index"][count:] = count - 1
        arrays["sampling_params"][:count] = rows.sampling
        arrays["sampling_params"][count:] = NO_SAMPLING
        return arrays


class PlainCopy:
    """Copy as many bytes as a fill writes, array by array."""

    def __init__(self, arrays):
        self.pairs = [(np.empty_like(array), array.copy()) for array in arrays.values()]

    def fill(self):
        for target, source in self.pairs:
            np.copyto(target, source)
