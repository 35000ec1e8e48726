"""The tensors of the padded-input runner, slow and obvious: loops over tokens, lists, and numpy only at the end.

`prefill`, `decode` and `dummy` give the key of the compiled shape and the tensors by name. They take any rows with the
attributes of `PrefillRow` and `DecodeRow`; `Prefill` and `Decode` are such rows for tests that run without the core.
`step_rows` makes them from a step of `BucketScheduler` and the tokens that the test itself recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

Shape = tuple[str, int] | tuple[str, int, int]
Tensors = dict[str, np.ndarray]

# What a row without a request, or a request without wishes, samples with: top_k, top_p, temperature.
NO_SAMPLING = (-1, 1.0, 0.0)
NO_SLOT = -1
NO_BLOCK = -1


@dataclass(frozen=True)
class Prefill:
    """Tokens of one prompt that are computed now, the first of them at position `start`."""

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
    """The smallest of the ascending sizes that holds `count`."""
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count}: expected at most the last bucket, {sizes[-1]}")


def slot(block_ids, position, block_size):
    """Where in the KV array the token at that position is written."""
    return block_ids[position // block_size] * block_size + position % block_size


def filled(values, length, padding):
    """The values, then the padding, up to the length."""
    assert len(values) <= length
    return [*values, *[padding] * (length - len(values))]


def sampling(row):
    return (row.top_k or NO_SAMPLING[0], row.top_p, row.temperature)


def prefill(config, rows) -> tuple[Shape, Tensors]:
    """Prompts one behind the other in the bucket of their sum."""
    input_ids, positions, slots = [], [], []
    borders, cached, last, tables, wishes = [0], [], [], [], []
    columns = ceil_div(config.max_model_len, config.block_size)
    for row in rows:
        position = row.start
        for token in row.token_ids:
            input_ids.append(token)
            positions.append(position)
            slots.append(slot(row.block_ids, position, config.block_size))
            position += 1
        borders.append(len(input_ids))
        last.append(len(input_ids) - 1)
        cached.append(row.start)
        tables.append(filled(row.block_ids, columns, NO_BLOCK))
        wishes.append(sampling(row))
    size = fit(config.num_batched_tokens_buckets, len(input_ids))
    return ("prefill", size), prefill_tensors(
        config,
        input_ids=filled(input_ids, size, 0),
        positions=filled(positions, size, positions[-1]),
        slots=filled(slots, size, NO_SLOT),
        tables=tables,
        cached=cached,
        borders=borders,
        last=last,
        wishes=wishes,
    )


def prefill_tensors(config, *, input_ids, positions, slots, tables, cached, borders, last, wishes) -> Tensors:
    """Columns of tokens, which are padded already, and columns of prompts, which are padded here."""
    prompts = config.max_prefills_per_batch
    columns = ceil_div(config.max_model_len, config.block_size)
    return {
        "input_ids": np.array(input_ids, np.int32),
        "positions": np.array(positions, np.int64),
        "slot_mapping": np.array(slots, np.int64),
        "block_table": np.array(filled(tables, prompts, [NO_BLOCK] * columns), np.int32),
        "cached_seq_len": np.array([[count] for count in filled(cached, prompts, 0)], np.int32),
        "cu_seqlens": np.array(filled(borders, prompts + 1, borders[-1]), np.int32),
        "logits_index": np.array(filled(last, prompts, last[-1] if last else 0), np.int64),
        "sampling_params": np.array(filled(wishes, prompts, NO_SAMPLING), np.float32),
    }


def decode(config, rows, context_bucket=None) -> tuple[Shape, Tensors]:
    """One token a row; the rest of the batch bucket is rows of nobody."""
    context = fit(
        config.decode_context_length_buckets if context_bucket is None else [context_bucket],
        max(row.position + 1 + row.draft_tokens for row in rows),
    )
    size = fit(config.num_seqs_buckets, len(rows))
    columns = ceil_div(context, config.block_size)
    input_ids, positions, slots, tables, contexts, wishes = [], [], [], [], [], []
    for row in rows:
        input_ids.append(row.token_id)
        positions.append(row.position)
        slots.append(slot(row.block_ids, row.position, config.block_size))
        # Blocks for tokens to come may lie beyond the context that this graph reads.
        tables.append(filled(row.block_ids[:columns], columns, NO_BLOCK))
        contexts.append(row.position + 1)
        wishes.append(sampling(row))
    return ("decode", size, context), decode_tensors(
        size,
        columns,
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        tables=tables,
        contexts=contexts,
        wishes=wishes,
    )


def decode_tensors(size, columns, *, input_ids, positions, slots, tables, contexts, wishes) -> Tensors:
    rows = range(len(input_ids))
    return {
        "input_ids": np.array(filled(input_ids, size, 0), np.int32),
        "positions": np.array(filled(positions, size, 0), np.int64),
        "slot_mapping": np.array(filled(slots, size, NO_SLOT), np.int64),
        "block_table": np.array(filled(tables, size, [NO_BLOCK] * columns), np.int32),
        "context_lens": np.array(filled(contexts, size, 0), np.int32),
        "logits_index": np.array(filled(rows, size, rows[-1] if rows else 0), np.int64),
        "sampling_params": np.array(filled(wishes, size, NO_SAMPLING), np.float32),
    }


def dummy(config, shape) -> tuple[Shape, Tensors]:
    """A batch of nobody: every token is padding."""
    kind, size, *context = shape
    if kind == "decode":
        columns = ceil_div(context[0], config.block_size)
        return shape, decode_tensors(
            size, columns, input_ids=[], positions=[], slots=[], tables=[], contexts=[], wishes=[]
        )
    return shape, prefill_tensors(
        config,
        input_ids=[0] * size,
        positions=[0] * size,
        slots=[NO_SLOT] * size,
        tables=[],
        cached=[],
        borders=[0],
        last=[],
        wishes=[],
    )


def shapes(config) -> list[Shape]:
    """Every compiled shape: prefills ascending, then decodes."""
    prefills = [("prefill", size) for size in config.num_batched_tokens_buckets]
    return prefills + [
        ("decode", size, context)
        for size in config.num_seqs_buckets
        for context in config.decode_context_length_buckets
    ]


def step_rows(step, sequences: Mapping[str, Sequence[int]], wishes: Mapping[str, tuple] | None = None):
    """The rows of a prefill or decode step of `BucketScheduler`.

    `sequences`: all tokens of each request by id, prompt and outputs, as far as the step computes them; `wishes`: its
    top_k, top_p and temperature.
    """
    rows = []
    for name, tokens in step.num_scheduled_tokens.items():
        start, blocks = step.num_computed_tokens[name], step.block_ids(name)
        top_k, top_p, temperature = (wishes or {}).get(name, NO_SAMPLING)
        options = {"top_k": top_k, "top_p": top_p, "temperature": temperature, "request_id": name}
        if step.kind == "prefill":
            now = [sequences[name][start + i] for i in range(tokens)]
            rows.append(Prefill(now, start, blocks, **options))
        else:
            rows.append(Decode(sequences[name][start], start, blocks, **options))
    return rows


def drafts(config, position) -> int:
    """The draft tokens behind a row of a step: `lookahead`, as far as the model's length allows."""
    return min(config.lookahead, config.max_model_len - 1 - position)


def of_step(config, step, sequences, wishes=None, context_bucket=None) -> tuple[Shape, Tensors]:
    """The key and the tensors of a step that is not idle."""
    rows = step_rows(step, sequences, wishes)
    if step.kind == "prefill":
        return prefill(config, rows)
    rows = [replace(row, draft_tokens=drafts(config, row.position)) for row in rows]
    return decode(config, rows, context_bucket)


def assert_equal(tensors: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]):
    """Same names in the same order, same dtypes and shapes, same elements; a difference names the tensor."""
    assert list(tensors) == list(expected)
    for name, right in expected.items():
        got = tensors[name]
        assert (got.dtype, got.shape) == (right.dtype, right.shape), name
        np.testing.assert_array_equal(got, right, err_msg=name, strict=True)
