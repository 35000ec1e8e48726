"""The oracle of the padded tensors, checked against the worked examples of the specification."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.oracles.inputs import (
    Decode,
    Prefill,
    assert_equal,
    ceil_div,
    decode,
    dummy,
    fit,
    of_step,
    padded,
    prefill,
    shapes,
)


def config(**changes):
    """Return an object with the fields that the oracle reads from a configuration."""
    defaults = {
        "max_model_len": 1024,
        "block_size": 16,
        "num_batched_tokens_buckets": [128, 256, 512],
        "num_seqs_buckets": [8],
        "decode_context_length_buckets": [1024],
        "max_prefills_per_batch": 1,
        "lookahead": 0,
    }
    return SimpleNamespace(**{**defaults, **changes})


def lists(tensors):
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def test_sizes():
    assert [ceil_div(tokens, 16) for tokens in (1, 16, 17)] == [1, 1, 2]
    assert [fit([128, 256], count) for count in (1, 128, 129, 256)] == [128, 128, 256, 256]
    with pytest.raises(ValueError, match="257: expected at most the last bucket, 256"):
        fit([128, 256], 257)
    assert padded([1, 2], 4, -1) == [1, 2, -1, -1]


def test_dtypes_and_shapes_of_a_prefill():
    key, tensors = prefill(config(max_prefills_per_batch=3), [Prefill([5], 0, [1])])
    assert key == ("prefill", 128)
    assert {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()} == {
        "input_ids": ("int32", (128,)),
        "positions": ("int64", (128,)),
        "slot_mapping": ("int64", (128,)),
        "block_table": ("int32", (3, 64)),
        "cached_seq_len": ("int32", (3, 1)),
        "cu_seqlens": ("int32", (4,)),
        "logits_index": ("int64", (3,)),
        "sampling_params": ("float32", (3, 3)),
    }


def test_dtypes_and_shapes_of_a_decode():
    key, tensors = decode(config(decode_context_length_buckets=[100, 1024]), [Decode(5, 0, [1])])
    assert key == ("decode", 8, 100)
    assert {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()} == {
        "input_ids": ("int32", (8,)),
        "positions": ("int64", (8,)),
        "slot_mapping": ("int64", (8,)),
        "block_table": ("int32", (8, 7)),
        "context_lens": ("int32", (8,)),
        "logits_index": ("int64", (8,)),
        "sampling_params": ("float32", (8, 3)),
    }


def test_200_tokens_in_a_bucket_of_256():
    ids = list(range(1000, 1200))
    key, tensors = prefill(config(), [Prefill(ids, 0, list(range(1, 14)))])
    assert key == ("prefill", 256)
    assert lists(tensors) == {
        "input_ids": ids + [0] * 56,
        "positions": [*range(200)] + [199] * 56,
        "slot_mapping": [*range(16, 216)] + [-1] * 56,
        "block_table": [[*range(1, 14)] + [-1] * 51],
        "cached_seq_len": [[0]],
        "cu_seqlens": [0, 200],
        "logits_index": [199],
        "sampling_params": [[-1, 1, 0]],
    }


def test_100_tokens_in_blocks_of_64():
    key, tensors = prefill(config(block_size=64), [Prefill([7] * 100, 0, [10, 15])])
    assert key == ("prefill", 128)
    assert tensors["slot_mapping"].tolist() == [*range(640, 704), *range(960, 996)] + [-1] * 28
    assert tensors["positions"].tolist() == [*range(100)] + [99] * 28
    assert tensors["block_table"].tolist() == [[10, 15] + [-1] * 14]
    assert tensors["logits_index"].tolist() == [99]


def test_465_tokens_of_which_256_are_cached():
    key, tensors = prefill(config(), [Prefill([7] * 209, 256, list(range(1, 31)))])
    assert key == ("prefill", 256)
    assert tensors["positions"].tolist() == [*range(256, 465)] + [464] * 47
    assert tensors["logits_index"].tolist() == [208]
    assert tensors["cached_seq_len"].tolist() == [[256]]
    assert tensors["cu_seqlens"].tolist() == [0, 209]


def test_the_last_chunk_of_10000_tokens():
    long = config(max_model_len=16384, num_batched_tokens_buckets=[128, 256, 512, 1024, 2048])
    blocks = list(range(1, 626))
    for start in (0, 2048, 4096, 6144):
        assert prefill(long, [Prefill([7] * 2048, start, blocks)])[0] == ("prefill", 2048)
    key, tensors = prefill(long, [Prefill([7] * 1808, 8192, blocks)])
    assert key == ("prefill", 2048)
    assert tensors["slot_mapping"].tolist() == [*range(8208, 10016)] + [-1] * 240
    assert tensors["logits_index"].tolist() == [1807]


def test_two_decodes_in_a_bucket_of_8():
    rows = [Decode(41, 17, [2, 3]), Decode(42, 30, [9, 4], top_k=5, top_p=0.5, temperature=2.0)]
    key, tensors = decode(config(), rows)
    padding = [-1] * 64
    assert key == ("decode", 8, 1024)
    assert lists(tensors) == {
        "input_ids": [41, 42, 0, 0, 0, 0, 0, 0],
        "positions": [17, 30, 0, 0, 0, 0, 0, 0],
        "slot_mapping": [49, 78, -1, -1, -1, -1, -1, -1],
        "block_table": [[2, 3] + [-1] * 62, [9, 4] + [-1] * 62, *[padding] * 6],
        "context_lens": [18, 31, 0, 0, 0, 0, 0, 0],
        "logits_index": [0, 1, 1, 1, 1, 1, 1, 1],
        "sampling_params": [[-1, 1, 0], [5, 0.5, 2], *[[-1, 1, 0]] * 6],
    }


def test_slots_across_a_block_boundary():
    tensors = prefill(config(block_size=64), [Prefill([1, 2, 3, 4], 62, [10, 15])])[1]
    assert tensors["slot_mapping"][:5].tolist() == [702, 703, 960, 961, -1]
    tensors = decode(config(block_size=64), [Decode(1, 100, [10, 15, 22])])[1]
    assert tensors["slot_mapping"][:2].tolist() == [996, -1]


def test_packed_prompts_are_concatenated():
    rows = [Prefill([5] * 100, 0, list(range(1, 8))), Prefill([6] * 40, 16, [9, 8, 10, 11], 3, 0.25, 1.5)]
    key, tensors = prefill(config(max_prefills_per_batch=3), rows)
    assert key == ("prefill", 256)
    assert lists(tensors) == {
        "input_ids": [5] * 100 + [6] * 40 + [0] * 116,
        "positions": [*range(100), *range(16, 56)] + [55] * 116,
        "slot_mapping": [*range(16, 116), *range(128, 144), *range(160, 176), *range(176, 184)] + [-1] * 116,
        "block_table": [[*range(1, 8)] + [-1] * 57, [9, 8, 10, 11] + [-1] * 60, [-1] * 64],
        "cached_seq_len": [[0], [16], [0]],
        "cu_seqlens": [0, 100, 140, 140],
        "logits_index": [99, 139, 139],
        "sampling_params": [[-1, 1, 0], [3, 0.25, 1.5], [-1, 1, 0]],
    }


def test_a_context_bucket_holds_drafts_and_omits_blocks_beyond_it():
    small = config(num_seqs_buckets=[1], decode_context_length_buckets=[32, 64, 1024])
    for position, drafts, context in [(31, 0, 32), (31, 1, 64), (28, 3, 32), (32, 0, 64), (64, 0, 1024)]:
        assert decode(small, [Decode(5, position, [*range(1, 6)], draft_tokens=drafts)])[0] == ("decode", 1, context)
    key, tensors = decode(small, [Decode(5, 20, [3, 2, 1])])
    assert (key, tensors["block_table"].tolist()) == (("decode", 1, 32), [[3, 2]])
    key, tensors = decode(small, [Decode(5, 20, [3, 2, 1])], context_bucket=64)
    assert (key, tensors["block_table"].tolist()) == (("decode", 1, 64), [[3, 2, 1, -1]])
    with pytest.raises(ValueError, match="33"):
        decode(small, [Decode(5, 32, [1, 2, 3])], context_bucket=32)


def test_a_dummy_contains_only_padding():
    some = config(max_prefills_per_batch=2, num_seqs_buckets=[4], decode_context_length_buckets=[32, 1024])
    assert shapes(some) == [
        ("prefill", 128),
        ("prefill", 256),
        ("prefill", 512),
        ("decode", 4, 32),
        ("decode", 4, 1024),
    ]
    key, tensors = dummy(some, ("prefill", 128))
    assert key == ("prefill", 128)
    assert lists(tensors) == {
        "input_ids": [0] * 128,
        "positions": [0] * 128,
        "slot_mapping": [-1] * 128,
        "block_table": [[-1] * 64] * 2,
        "cached_seq_len": [[0], [0]],
        "cu_seqlens": [0, 0, 0],
        "logits_index": [0, 0],
        "sampling_params": [[-1, 1, 0]] * 2,
    }
    key, tensors = dummy(some, ("decode", 4, 32))
    assert key == ("decode", 4, 32)
    assert lists(tensors) == {
        "input_ids": [0] * 4,
        "positions": [0] * 4,
        "slot_mapping": [-1] * 4,
        "block_table": [[-1, -1]] * 4,
        "context_lens": [0] * 4,
        "logits_index": [0] * 4,
        "sampling_params": [[-1, 1, 0]] * 4,
    }


def test_rows_of_a_step():
    step = SimpleNamespace(
        kind="prefill",
        num_scheduled_tokens={"a": 2, "b": 1},
        num_computed_tokens={"a": 1, "b": 0},
        block_ids={"a": [4], "b": [5]}.get,
    )
    packed = config(max_prefills_per_batch=2)
    right = prefill(packed, [Prefill([11, 12], 1, [4]), Prefill([20], 0, [5], 7, 1.0, 0.5)])
    found = of_step(packed, step, {"a": [10, 11, 12, 13], "b": [20]}, {"b": (7, 1.0, 0.5)})
    assert found[0] == right[0]
    assert_equal(found[1], right[1])
    step = SimpleNamespace(
        kind="decode",
        num_scheduled_tokens={"a": 1},
        num_computed_tokens={"a": 3},
        block_ids={"a": [4]}.get,
    )
    assert_equal(of_step(packed, step, {"a": [10, 11, 12, 13]})[1], decode(packed, [Decode(13, 3, [4])])[1])


def test_assert_equal_finds_every_difference():
    right = decode(config(), [Decode(13, 3, [4])])[1]
    assert_equal(right, {name: tensor.copy() for name, tensor in right.items()})
    for name, tensor in right.items():
        wrong = tensor.copy()
        wrong.flat[-1] += 1
        for other in (wrong, tensor.astype(np.float64), tensor[:-1]):
            with pytest.raises(AssertionError, match=name):
                assert_equal({**right, name: other}, right)
    with pytest.raises(AssertionError):
        assert_equal({name: tensor for name, tensor in right.items() if name != "positions"}, right)
    with pytest.raises(AssertionError):
        assert_equal(dict(reversed(right.items())), right)
