"""Oracle of the padded tensors, slow and obvious: loops over tokens and lists, and numpy only at the end.

`prefill`, `decode` and `dummy` return the compiled shape and the tensors by name. They take any rows with the
attributes of `PrefillRow` and `DecodeRow`; `Prefill` and `Decode` are such rows for tests that run without the core.
`step_rows` makes them from a step of `BucketScheduler` and from the tokens that the test recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

Shape = tuple[str, int] | tuple[str, int, int]
Tensors = dict[str, np.ndarray]

# Default sampling parameters, used for padding rows too: top_k, top_p, temperature.
DEFAULT_SAMPLING = (-1, 1.0, 0.0)
NO_SLOT = -1
NO_BLOCK = -1


@dataclass(frozen=True)
class Prefill:
    """Tokens of one prompt that a step computes, the first of them at position `start`."""

    token_ids: Sequence[int]
    start: int = 0
    block_ids: Sequence[int] = ()
    top_k: int = -1
    top_p: float = 1.0
    temperature: float = 0.0
    request_id: str | None = None


@dataclass(frozen=True)
class Decode:
    """One token of one request, at `position`."""

    token_id: int
    position: int
    block_ids: Sequence[int] = ()
    top_k: int = -1
    top_p: float = 1.0
    temperature: float = 0.0
    draft_tokens: int = 0
    request_id: str | None = None


def ceil_div(tokens, size):
    return -(-tokens // size)


def fit(sizes, count):
    """Return the smallest of the ascending sizes that holds `count`."""
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count}: expected at most the last bucket, {sizes[-1]}")


def slot(block_ids, position, block_size):
    """Return the slot in the KV cache of the token at that position."""
    return block_ids[position // block_size] * block_size + position % block_size


def padded(values, length, padding):
    """Return the values, filled up to the length with the padding value."""
    assert len(values) <= length
    return [*values, *[padding] * (length - len(values))]


def sampling_of(row):
    return (row.top_k or DEFAULT_SAMPLING[0], row.top_p, row.temperature)


def prefill(config, rows) -> tuple[Shape, Tensors]:
    """Return the tensors of a prefill step: the prompts in sequence, in the token bucket of their sum."""
    input_ids, positions, slots = [], [], []
    cu_seqlens, cached_lens, logits_index, block_tables, sampling = [0], [], [], [], []
    columns = ceil_div(config.max_model_len, config.block_size)
    for row in rows:
        position = row.start
        for token in row.token_ids:
            input_ids.append(token)
            positions.append(position)
            slots.append(slot(row.block_ids, position, config.block_size))
            position += 1
        cu_seqlens.append(len(input_ids))
        logits_index.append(len(input_ids) - 1)
        cached_lens.append(row.start)
        block_tables.append(padded(row.block_ids, columns, NO_BLOCK))
        sampling.append(sampling_of(row))
    size = fit(config.num_batched_tokens_buckets, len(input_ids))
    return ("prefill", size), prefill_tensors(
        config,
        input_ids=padded(input_ids, size, 0),
        positions=padded(positions, size, positions[-1]),
        slots=padded(slots, size, NO_SLOT),
        block_tables=block_tables,
        cached_lens=cached_lens,
        cu_seqlens=cu_seqlens,
        logits_index=logits_index,
        sampling=sampling,
    )


def prefill_tensors(
    config, *, input_ids, positions, slots, block_tables, cached_lens, cu_seqlens, logits_index, sampling
) -> Tensors:
    """Return the tensors from columns per token, already padded, and columns per prompt, which are padded here."""
    prompts = config.max_prefills_per_batch
    columns = ceil_div(config.max_model_len, config.block_size)
    return {
        "input_ids": np.array(input_ids, np.int32),
        "positions": np.array(positions, np.int64),
        "slot_mapping": np.array(slots, np.int64),
        "block_table": np.array(padded(block_tables, prompts, [NO_BLOCK] * columns), np.int32),
        "cached_seq_len": np.array([[count] for count in padded(cached_lens, prompts, 0)], np.int32),
        "cu_seqlens": np.array(padded(cu_seqlens, prompts + 1, cu_seqlens[-1]), np.int32),
        "logits_index": np.array(padded(logits_index, prompts, logits_index[-1] if logits_index else 0), np.int64),
        "sampling_params": np.array(padded(sampling, prompts, DEFAULT_SAMPLING), np.float32),
    }


def decode(config, rows, context_bucket=None) -> tuple[Shape, Tensors]:
    """Return the tensors of a decode step: one token per row. Padding rows fill the batch bucket."""
    context = fit(
        config.decode_context_length_buckets if context_bucket is None else [context_bucket],
        max(row.position + 1 + row.draft_tokens for row in rows),
    )
    size = fit(config.num_seqs_buckets, len(rows))
    columns = ceil_div(context, config.block_size)
    input_ids, positions, slots, block_tables, context_lens, sampling = [], [], [], [], [], []
    for row in rows:
        input_ids.append(row.token_id)
        positions.append(row.position)
        slots.append(slot(row.block_ids, row.position, config.block_size))
        # Blocks allocated for later tokens may lie beyond the context bucket.
        block_tables.append(padded(row.block_ids[:columns], columns, NO_BLOCK))
        context_lens.append(row.position + 1)
        sampling.append(sampling_of(row))
    return ("decode", size, context), decode_tensors(
        size,
        columns,
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        block_tables=block_tables,
        context_lens=context_lens,
        sampling=sampling,
    )


def decode_tensors(size, columns, *, input_ids, positions, slots, block_tables, context_lens, sampling) -> Tensors:
    rows = range(len(input_ids))
    return {
        "input_ids": np.array(padded(input_ids, size, 0), np.int32),
        "positions": np.array(padded(positions, size, 0), np.int64),
        "slot_mapping": np.array(padded(slots, size, NO_SLOT), np.int64),
        "block_table": np.array(padded(block_tables, size, [NO_BLOCK] * columns), np.int32),
        "context_lens": np.array(padded(context_lens, size, 0), np.int32),
        "logits_index": np.array(padded(rows, size, rows[-1] if rows else 0), np.int64),
        "sampling_params": np.array(padded(sampling, size, DEFAULT_SAMPLING), np.float32),
    }


def dummy(config, shape) -> tuple[Shape, Tensors]:
    """Return the tensors of a batch that contains only padding."""
    kind, size, *context = shape
    if kind == "decode":
        columns = ceil_div(context[0], config.block_size)
        return shape, decode_tensors(
            size, columns, input_ids=[], positions=[], slots=[], block_tables=[], context_lens=[], sampling=[]
        )
    return shape, prefill_tensors(
        config,
        input_ids=[0] * size,
        positions=[0] * size,
        slots=[NO_SLOT] * size,
        block_tables=[],
        cached_lens=[],
        cu_seqlens=[0],
        logits_index=[],
        sampling=[],
    )


def shapes(config) -> list[Shape]:
    """Return every compiled shape: prefills in ascending order, then decodes."""
    prefills = [("prefill", size) for size in config.num_batched_tokens_buckets]
    return prefills + [
        ("decode", size, context)
        for size in config.num_seqs_buckets
        for context in config.decode_context_length_buckets
    ]


def step_rows(step, sequences: Mapping[str, Sequence[int]], sampling: Mapping[str, tuple] | None = None):
    """Return the rows of a prefill or decode step of `BucketScheduler`.

    `sequences` holds the tokens of each request by id: prompt tokens followed by output tokens, at least up to the last
    one that the step computes. `sampling` holds its (top_k, top_p, temperature).
    """
    rows = []
    for name, tokens in step.num_scheduled_tokens.items():
        start, blocks = step.num_computed_tokens[name], step.block_ids(name)
        top_k, top_p, temperature = (sampling or {}).get(name, DEFAULT_SAMPLING)
        options = {"top_k": top_k, "top_p": top_p, "temperature": temperature, "request_id": name}
        if step.kind == "prefill":
            now = [sequences[name][start + i] for i in range(tokens)]
            rows.append(Prefill(now, start, blocks, **options))
        else:
            rows.append(Decode(sequences[name][start], start, blocks, **options))
    return rows


def drafts(config, position) -> int:
    """Return the number of draft tokens after a decode row: `lookahead`, limited by `max_model_len`."""
    return min(config.lookahead, config.max_model_len - 1 - position)


def of_step(config, step, sequences, sampling=None, context_bucket=None) -> tuple[Shape, Tensors]:
    """Return the compiled shape and the tensors of a step that is not idle."""
    rows = step_rows(step, sequences, sampling)
    if step.kind == "prefill":
        return prefill(config, rows)
    rows = [replace(row, draft_tokens=drafts(config, row.position)) for row in rows]
    return decode(config, rows, context_bucket)


def assert_equal(tensors: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]):
    """Assert equal names in equal order, dtypes, shapes and elements. The message names the tensor that differs."""
    assert list(tensors) == list(expected)
    for name, right in expected.items():
        got = tensors[name]
        assert (got.dtype, got.shape) == (right.dtype, right.shape), name
        np.testing.assert_array_equal(got, right, err_msg=name, strict=True)
