"""Worked cases of `PaddedInputs`. The expected values are worked out by hand."""

import numpy as np
import pytest

from neuron_sched import BucketScheduler, DecodeRow, PaddedInputs, PrefillRow, Request
from tests.runner.inputs.support.configuration import config_with
from tests.support.oracles.inputs import assert_equal
from tests.support.outcomes import as_tuples
from tests.support.watched_inputs import arrays

DEFAULT_SAMPLING = [-1.0, 1.0, 0.0]
NAMED = [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


def write(kv, batch, values):
    """Write values to the slots of a batch, as a model does. Tokens with slot -1 are masked out."""
    has_slot = batch.slot_mapping >= 0
    kv[batch.slot_mapping[has_slot]] = values[has_slot]


def advance(s, inputs, tokens):
    """Schedule, fill and complete one step. Return the batch and the outcomes."""
    step = s.schedule()
    batch = inputs.fill(step)
    return batch, as_tuples(s.complete(step, tokens))


# Cases


def test_r01_tensors_of_a_padded_prefill():
    inputs = PaddedInputs(config_with(block_size=64))
    ids = list(range(700, 800))
    batch = inputs.prefill([PrefillRow(ids, 0, [10, 15])])
    assert (batch.kind, batch.shape) == ("prefill", ("prefill", 128))
    assert (batch.num_real_tokens, batch.num_padded_tokens) == (100, 128)
    assert batch.input_ids.tolist() == ids + [0] * 28
    assert batch.positions.tolist() == [*range(100)] + [99] * 28
    assert batch.slot_mapping.tolist() == [*range(640, 704), *range(960, 996)] + [-1] * 28
    assert batch.block_table.tolist() == [[10, 15] + [-1] * 14], "padding is assigned no block"
    assert batch.logits_index.tolist() == [99]
    assert (batch.cached_seq_len.tolist(), batch.cu_seqlens.tolist()) == ([[0]], [0, 100])
    assert batch.sampling_params.tolist() == [DEFAULT_SAMPLING]


def test_r03_slot_minus_one_is_not_the_last_slot():
    config = config_with(max_num_batched_tokens=8, max_model_len=48, num_blocks=3, num_batched_tokens_buckets=[4, 8])
    batch = PaddedInputs(config).prefill([PrefillRow([5, 6, 7], 0, [1])])
    assert batch.slot_mapping.tolist() == [16, 17, 18, -1]
    kv = np.full((config.num_blocks + 1) * config.block_size, 7.0)
    write(kv, batch, np.ones(4))
    assert len(kv) == 64
    assert kv[16:19].tolist() == [1.0, 1.0, 1.0]
    assert np.delete(kv, [16, 17, 18]).tolist() == [7.0] * 61


def test_r05_a_prefill_after_a_prefix_hit_computes_the_rest():
    config = config_with(prefix_caching=True)
    assert config.num_batched_tokens_buckets == [128, 256, 512]
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    prompt = list(range(1000, 1465))
    s.add(Request("w", prompt[:256], 1))
    s.add(Request("a", prompt, 2))
    advance(s, inputs, [7])
    batch, outcomes = advance(s, inputs, [8])
    assert (batch.shape, batch.num_real_tokens, batch.request_ids) == (("prefill", 256), 209, ("a",))
    assert batch.input_ids.tolist() == [*range(1256, 1465)] + [0] * 47
    assert batch.positions.tolist() == [*range(256, 465)] + [464] * 47
    # Blocks 1 to 16 are shared with "w"; the next ones hold the tokens of this step.
    assert batch.slot_mapping.tolist() == [*range(17 * 16, 17 * 16 + 209)] + [-1] * 47
    assert batch.block_table.tolist() == [[*range(1, 31)] + [-1] * 34]
    assert (batch.logits_index.tolist(), batch.cached_seq_len.tolist()) == ([208], [[256]])
    assert batch.cu_seqlens.tolist() == [0, 209]
    assert outcomes == [("a", 8, None)]
    assert s.request("a").num_computed_tokens == 465
    batch, _ = advance(s, inputs, [9])
    assert (batch.input_ids.tolist(), batch.positions.tolist()) == ([8], [465])


def test_r06_padding_is_not_counted_as_computed_tokens():
    config = config_with(max_num_batched_tokens=8192, max_model_len=16384, num_blocks=1024)
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    prompt = list(range(5000))
    s.add(Request("a", prompt, 2))
    batch, outcomes = advance(s, inputs, [17])
    assert (batch.shape, batch.num_real_tokens, batch.num_padded_tokens) == (("prefill", 8192), 5000, 8192)
    assert batch.input_ids.tolist() == prompt + [0] * 3192
    assert batch.slot_mapping.tolist() == [*range(16, 5016)] + [-1] * 3192
    assert (outcomes, s.request("a").num_computed_tokens) == ([("a", 17, None)], 5000)
    batch, _ = advance(s, inputs, [18])
    assert (batch.kind, batch.num_real_tokens, batch.num_padded_tokens) == ("decode", 1, 1)
    assert (batch.input_ids.tolist(), batch.positions.tolist(), batch.context_lens.tolist()) == ([17], [5000], [5001])
    assert batch.slot_mapping.tolist() == [5016]


def test_r06_cached_tokens_are_not_computed_again():
    config = config_with(
        max_num_batched_tokens=8192, max_model_len=8192, block_size=100, num_blocks=100, prefix_caching=True
    )
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    s.add(Request("w", list(range(1000)), 1))
    s.add(Request("a", [*range(1000), *[7] * 4000], 2))
    advance(s, inputs, [0])
    batch, _ = advance(s, inputs, [17])
    assert (batch.shape, batch.num_real_tokens) == (("prefill", 4096), 4000)
    assert batch.positions.tolist() == [*range(1000, 5000)] + [4999] * 96
    assert (batch.cached_seq_len.tolist(), batch.logits_index.tolist()) == ([[1000]], [3999])
    assert s.request("a").num_computed_tokens == 5000
    batch, _ = advance(s, inputs, [18])
    assert batch.positions.tolist() == [5000]


def test_r07_dummy_batches_change_neither_kv_cache_nor_block_pool():
    config = config_with(
        max_model_len=256,
        num_blocks=20,
        num_seqs_buckets=[1, 4, 8],
        decode_context_length_buckets=[64, 256],
        max_prefills_per_batch=2,
    )
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    s.add(Request("a", list(range(40)), 9))
    advance(s, inputs, [5])
    free, blocks = s.free_blocks, s.request("a").block_ids
    pattern = np.arange((config.num_blocks + 1) * config.block_size, dtype=np.float64)
    kv = pattern.copy()
    assert inputs.shapes == (
        *[("prefill", size) for size in (128, 256)],
        *[("decode", rows, context) for rows in (1, 4, 8) for context in (64, 256)],
    )
    for shape in inputs.shapes:
        batch = inputs.dummy(shape)
        assert (batch.shape, batch.request_ids, batch.num_real_tokens) == (shape, (), 0)
        assert batch.slot_mapping.tolist() == [-1] * shape[1]
        assert (batch.block_table == -1).all()
        write(kv, batch, np.zeros(shape[1]))
    batch = inputs.dummy(("decode", 4, 64))
    assert {name: array.tolist() for name, array in arrays(batch).items()} == {
        "input_ids": [0] * 4,
        "positions": [0] * 4,
        "slot_mapping": [-1] * 4,
        "block_table": [[-1] * 4] * 4,
        "context_lens": [0] * 4,
        "logits_index": [0] * 4,
        "sampling_params": [DEFAULT_SAMPLING] * 4,
    }
    assert kv.tobytes() == pattern.tobytes()
    assert (s.free_blocks, s.request("a").block_ids) == (free, blocks)
    s.check()
    batch, outcomes = advance(s, inputs, [6])
    assert (batch.input_ids.tolist(), batch.positions.tolist(), outcomes) == ([5], [40], [("a", 6, None)])


def sampled(batch, logits):
    """Return one greedy token for each row with a request, in row order. Logits of padding rows are ignored."""
    return [int(row.argmax()) for row in logits[: len(batch.request_ids)]]


def test_r08_padding_rows_are_not_sampled():
    config = config_with(num_seqs_buckets=[4, 8])
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    for name in "abc":
        s.add(Request(name, [5], 3))
        advance(s, inputs, [6])
    step = s.schedule()
    batch = inputs.fill(step)
    assert (batch.shape[:2], batch.request_ids) == (("decode", 4), ("a", "b", "c"))
    assert batch.logits_index.tolist() == [0, 1, 2, 2]
    logits = np.full((4, 10), np.nan)
    logits[:3] = np.eye(10)[[9, 7, 8]]
    assert as_tuples(s.complete(step, sampled(batch, logits))) == [("a", 9, None), ("b", 7, None), ("c", 8, None)]
    batch = inputs.fill(s.schedule())
    assert batch.input_ids.tolist() == [9, 7, 8, 0]


def test_r08_a_chunk_that_does_not_end_the_prompt_emits_no_token():
    config = config_with(max_num_batched_tokens=128)
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    s.add(Request("a", list(range(200)), 3))
    batch, outcomes = advance(s, inputs, [None])
    assert (batch.num_real_tokens, batch.logits_index.tolist(), outcomes) == (128, [127], [])
    assert batch.emits == batch.copy().emits == [False]
    batch, outcomes = advance(s, inputs, [4])
    assert (batch.num_real_tokens, batch.logits_index.tolist(), outcomes) == (72, [71], [("a", 4, None)])
    assert batch.emits == [True]


def test_r08_emits_has_an_entry_per_row():
    config = config_with(max_num_batched_tokens=128, max_prefills_per_batch=2)
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    s.add(Request("a", list(range(60)), 3))
    s.add(Request("b", list(range(50)), 3))
    for shape in [("prefill", 128), ("decode", 2, 1024)]:
        step = s.schedule()
        batch = inputs.fill(step)
        assert (batch.shape, batch.emits) == (shape, [True, True])
        s.complete(step, [4, 5])
    rows = [PrefillRow([1], 0, [1], emits=False), PrefillRow([2], 0, [2])]
    assert inputs.prefill(rows).emits == [False, True]
    assert inputs.decode([DecodeRow(1, 5, [1])]).emits == [True]
    assert inputs.dummy(("prefill", 128)).emits == []


def test_b03_tensors_have_only_compiled_lengths():
    config = config_with(max_model_len=317)
    assert config.num_batched_tokens_buckets == [128, 256, 317]
    inputs = PaddedInputs(config)
    assert inputs.shapes == (
        *[("prefill", size) for size in (128, 256, 317)],
        *[("decode", rows, 317) for rows in (1, 2, 4, 8)],
    )
    s = BucketScheduler(config)
    s.add(Request("a", list(range(1, 301)), 17))
    batch, _ = advance(s, inputs, [5])
    assert (batch.shape, batch.num_real_tokens, batch.num_padded_tokens) == (("prefill", 317), 300, 317)
    assert {name: array.shape for name, array in arrays(batch).items()} == {
        "input_ids": (317,),
        "positions": (317,),
        "slot_mapping": (317,),
        "block_table": (1, 20),
        "cached_seq_len": (1, 1),
        "cu_seqlens": (2,),
        "logits_index": (1,),
        "sampling_params": (1, 3),
    }
    assert batch.input_ids.tolist() == [*range(1, 301)] + [0] * 17
    assert batch.slot_mapping.tolist() == [*range(16, 316)] + [-1] * 17
    for _ in range(16):
        batch, outcomes = advance(s, inputs, [5])
        assert (batch.shape, batch.block_table.shape) == (("decode", 1, 317), (1, 20))
    assert (outcomes, batch.positions.tolist()) == ([("a", 5, "length")], [315])
    for shape in inputs.shapes:
        assert inputs.dummy(shape).input_ids.shape == (shape[1],)


def test_v21_a_block_allocated_for_a_decode_is_in_its_block_table():
    config = config_with(max_num_batched_tokens=128)
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    s.add(Request("a", list(range(32)), 4))
    batch, _ = advance(s, inputs, [5])
    assert batch.block_table[0, :3].tolist() == [1, 2, -1]
    s.add(Request("b", list(range(10)), 2))
    batch, _ = advance(s, inputs, [6])
    assert batch.block_table[0, :2].tolist() == [3, -1]
    batch, _ = advance(s, inputs, [7, 8])
    assert batch.request_ids == ("a", "b")
    assert batch.block_table[:, :4].tolist() == [[1, 2, 4, -1], [3, -1, -1, -1]]
    assert batch.slot_mapping.tolist() == [64, 58]


# Worked examples of the specification


@pytest.mark.parametrize("by_scheduler", [False, True], ids=["rows", "step"])
def test_example_200_tokens_in_a_bucket_of_256(by_scheduler):
    config, ids = config_with(), list(range(3000, 3200))
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    if by_scheduler:
        s.add(Request("a", ids, 1, top_k=40, top_p=0.5, temperature=0.25))
        batch, _ = advance(s, inputs, [5])
    else:
        batch = inputs.prefill([PrefillRow(ids, 0, list(range(1, 14)), top_k=40, top_p=0.5, temperature=0.25)])
    assert batch.shape == ("prefill", 256)
    assert {name: array.tolist() for name, array in arrays(batch).items()} == {
        "input_ids": ids + [0] * 56,
        "positions": [*range(200)] + [199] * 56,
        "slot_mapping": [*range(16, 216)] + [-1] * 56,
        "block_table": [[*range(1, 14)] + [-1] * 51],
        "cached_seq_len": [[0]],
        "cu_seqlens": [0, 200],
        "logits_index": [199],
        "sampling_params": [[40.0, 0.5, 0.25]],
    }


def test_example_10000_tokens_in_chunks_of_2048():
    config = config_with(max_num_batched_tokens=2048, max_model_len=16384, num_blocks=1024)
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    prompt = list(range(10_000))
    s.add(Request("a", prompt, 2))
    for start in (0, 2048, 4096, 6144):
        batch, outcomes = advance(s, inputs, [None])
        assert (batch.shape, batch.num_real_tokens, outcomes) == (("prefill", 2048), 2048, [])
        assert batch.cached_seq_len.tolist() == [[start]]
        assert batch.input_ids.tolist() == prompt[start : start + 2048]
        assert batch.positions.tolist() == [*range(start, start + 2048)]
        assert batch.slot_mapping.tolist() == [*range(16 + start, 16 + start + 2048)]
    batch, outcomes = advance(s, inputs, [9])
    assert (batch.shape, batch.num_real_tokens, outcomes) == (("prefill", 2048), 1808, [("a", 9, None)])
    assert batch.input_ids.tolist() == prompt[8192:] + [0] * 240
    assert batch.positions.tolist() == [*range(8192, 10_000)] + [9999] * 240
    assert batch.slot_mapping.tolist() == [*range(8208, 10_016)] + [-1] * 240
    assert (batch.cached_seq_len.tolist(), batch.logits_index.tolist()) == ([[8192]], [1807])


@pytest.mark.parametrize("by_scheduler", [False, True], ids=["rows", "step"])
def test_example_two_decodes_in_a_bucket_of_8(by_scheduler):
    config = config_with(num_seqs_buckets=[8])
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    if by_scheduler:
        for name, length, token in [("a", 17, 41), ("b", 30, 42)]:
            s.add(Request(name, list(range(length)), 3))
            advance(s, inputs, [token])
        batch, _ = advance(s, inputs, [1, 2])
    else:
        batch = inputs.decode([DecodeRow(41, 17, [1, 2]), DecodeRow(42, 30, [3, 4])])
    assert (batch.shape, batch.num_real_tokens, batch.num_padded_tokens) == (("decode", 8, 1024), 2, 8)
    assert {name: array.tolist() for name, array in arrays(batch).items()} == {
        "input_ids": [41, 42, 0, 0, 0, 0, 0, 0],
        "positions": [17, 30, 0, 0, 0, 0, 0, 0],
        "slot_mapping": [33, 78, -1, -1, -1, -1, -1, -1],
        "block_table": [[1, 2] + [-1] * 62, [3, 4] + [-1] * 62, *[[-1] * 64] * 6],
        "context_lens": [18, 31, 0, 0, 0, 0, 0, 0],
        "logits_index": [0, 1, 1, 1, 1, 1, 1, 1],
        "sampling_params": [DEFAULT_SAMPLING] * 8,
    }


def test_example_slots_across_a_block_boundary():
    inputs = PaddedInputs(config_with(block_size=64))
    assert inputs.prefill([PrefillRow([1, 2, 3, 4], 62, [10, 15])]).slot_mapping[:5].tolist() == [
        702,
        703,
        960,
        961,
        -1,
    ]
    for position, right in [(62, 702), (63, 703), (64, 960), (65, 961)]:
        assert inputs.decode([DecodeRow(1, position, [10, 15])]).slot_mapping.tolist() == [right]
    assert inputs.decode([DecodeRow(1, 100, [10, 15, 22])]).slot_mapping.tolist() == [996]


def test_example_packed_prompts():
    config = config_with(max_prefills_per_batch=3)
    s, inputs = BucketScheduler(config), PaddedInputs(config)
    s.add(Request("a", list(range(100, 200)), 2))
    s.add(Request("b", list(range(200, 240)), 2, top_k=3))
    batch, outcomes = advance(s, inputs, [8, 9])
    assert (batch.shape, batch.request_ids, batch.num_real_tokens) == (("prefill", 256), ("a", "b"), 140)
    assert {name: array.tolist() for name, array in arrays(batch).items()} == {
        "input_ids": [*range(100, 240)] + [0] * 116,
        "positions": [*range(100), *range(40)] + [39] * 116,
        "slot_mapping": [*range(16, 116), *range(128, 168)] + [-1] * 116,
        "block_table": [[*range(1, 8)] + [-1] * 57, [8, 9, 10] + [-1] * 61, [-1] * 64],
        "cached_seq_len": [[0], [0], [0]],
        "cu_seqlens": [0, 100, 140, 140],
        "logits_index": [99, 139, 139],
        "sampling_params": [DEFAULT_SAMPLING, [3.0, 1.0, 0.0], DEFAULT_SAMPLING],
    }
    assert outcomes == [("a", 8, None), ("b", 9, None)]


def test_example_the_context_bucket_is_the_smallest_that_holds_the_unpadded_rows():
    config = config_with(num_seqs_buckets=[2, 8], decode_context_length_buckets=[32, 64])
    inputs = PaddedInputs(config)
    assert config.decode_context_length_buckets == [32, 64, 1024]

    def shape(*positions, drafts=0):
        return inputs.decode([DecodeRow(5, at, list(range(1, 20)), draft_tokens=drafts) for at in positions]).shape

    assert shape(300) == ("decode", 2, 1024)
    assert shape(30, 31) == ("decode", 2, 32), "rows of the earlier step are not counted"
    assert shape(31, drafts=1) == ("decode", 2, 64)
    assert shape(3, 32, 5) == ("decode", 8, 64)
    batch = inputs.decode([DecodeRow(5, 20, [3, 2, 1])])
    assert batch.block_table.tolist() == [[3, 2], [-1, -1]]


# Buffers


def test_a_later_fill_overwrites_a_batch_but_not_its_copy():
    inputs = PaddedInputs(config_with())
    first = inputs.prefill([PrefillRow([1, 2, 3], 0, [4], request_id="a")])
    copy, arrays_before = first.copy(), arrays(first)
    original = {name: array.copy() for name, array in arrays_before.items()}
    second = inputs.prefill([PrefillRow([9], 5, [6], request_id="b")])
    assert [name for name, array in arrays(second).items() if array is not arrays_before[name]] == []
    assert first.input_ids[:3].tolist() == [9, 0, 0], "the tokens of the first batch are overwritten"
    assert (first.request_ids, first.num_real_tokens) == (("a",), 3)
    assert (copy.kind, copy.shape, copy.request_ids, copy.num_real_tokens) == ("prefill", first.shape, ("a",), 3)
    assert_equal(arrays(copy), original)
    for name, array in arrays(copy).items():
        assert not np.shares_memory(array, arrays_before[name]), name
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous, name


def test_two_buffer_sets_hold_two_batches_in_flight():
    inputs = PaddedInputs(config_with(), buffers=2)
    batches = [inputs.decode([DecodeRow(token, 5, [token])]) for token in (1, 2)]
    assert [batch.input_ids.tolist() for batch in batches] == [[1], [2]]
    third = inputs.decode([DecodeRow(3, 5, [3])])
    assert third.input_ids is batches[0].input_ids
    assert [batch.input_ids.tolist() for batch in batches] == [[3], [2]]
    with pytest.raises(ValueError, match="block_ids: 0"):
        inputs.decode([DecodeRow(4, 5, [0])])
    fourth = inputs.decode([DecodeRow(5, 5, [5])])
    assert fourth.input_ids is batches[1].input_ids, "a refused call uses no buffer set"
    assert inputs.decode([DecodeRow(6, 5, [6])] * 2).input_ids.tolist() == [6, 6], "another shape has its own buffers"
    assert [batch.input_ids.tolist() for batch in batches] == [[3], [5]]


def test_a_batch_keeps_nothing_of_earlier_larger_or_reordered_ones():
    config = config_with(max_model_len=64, num_seqs_buckets=[8])
    inputs = PaddedInputs(config)
    rows = {name: DecodeRow(at, 10 * at, list(range(10 * at, 10 * at + at)), request_id=name) for at, name in NAMED}
    for order in ("abcd", "d", "cab", "", "dcba", "b", "abcd"):
        batch = inputs.dummy(("decode", 8, 64)) if not order else inputs.decode([rows[name] for name in order])
        chosen, rest = [rows[name] for name in order], 8 - len(order)
        tables = [[*row.block_ids, *[-1] * (4 - len(row.block_ids))] for row in chosen]
        assert batch.request_ids == tuple(order)
        assert batch.input_ids.tolist() == [row.token_id for row in chosen] + [0] * rest
        assert batch.block_table.tolist() == tables + [[-1] * 4] * rest
        assert batch.context_lens.tolist() == [row.position + 1 for row in chosen] + [0] * rest
        slots = [16 * row.block_ids[row.position // 16] + row.position % 16 for row in chosen]
        assert batch.slot_mapping.tolist() == slots + [-1] * rest
