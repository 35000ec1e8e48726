"""Arrays on both sides of a fill: arguments in any memory layout, and the arrays of a batch in use by the caller."""

import gc
import threading

import numpy as np
import pytest

from neuron_sched import BucketScheduler, DecodeRow, NeuronConfig, PaddedInputs, PrefillRow, Request
from tests.runner.inputs.support.configuration import config_with
from tests.support.oracles import inputs as oracle_inputs
from tests.support.watched_inputs import WatchedInputs, arrays

NUMBERS = [7, 1, 5, 3]


def unaligned(dtype):
    memory = np.zeros(4 * np.dtype(dtype).itemsize + 1, np.uint8)
    array = memory[1:].view(dtype)
    array[:] = NUMBERS
    assert array.itemsize == 1 or not array.flags.aligned
    return array


def field_of_records(dtype):
    """Return an array whose stride is no multiple of its item size."""
    records = np.zeros(4, np.dtype([("first", "u1"), ("number", dtype)]))
    records["number"] = NUMBERS
    return records["number"]


def read_only(dtype):
    array = np.array(NUMBERS, dtype)
    array.flags.writeable = False
    return array


LAYOUTS = {
    "plain": lambda dtype: np.array(NUMBERS, dtype),
    "every other item": lambda dtype: np.array([[number, 99] for number in NUMBERS], dtype)[:, 0],
    "backwards": lambda dtype: np.array(NUMBERS[::-1], dtype)[::-1],
    "unaligned": unaligned,
    "a field of records": field_of_records,
    "read-only": read_only,
    "of the other byte order": lambda dtype: np.array(NUMBERS, np.dtype(dtype).newbyteorder()),
}


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS)
def test_ids_are_read_from_arrays_of_any_layout(array, dtype):
    watched = WatchedInputs(config_with(block_size=1, max_model_len=16))
    row = PrefillRow(array(dtype), 0, array(dtype))
    watched.prefill([row], [oracle_inputs.Prefill(NUMBERS, 0, NUMBERS)])
    assert Request("a", array(dtype), 1).prompt == NUMBERS


def test_ids_are_read_from_a_broadcast_array():
    watched = WatchedInputs(config_with())
    watched.prefill([PrefillRow(np.broadcast_to(np.int64(5), 3), 0, [1])], [oracle_inputs.Prefill([5] * 3, 0, [1])])


@pytest.mark.parametrize(
    "wrong",
    [np.array(5), np.array([[5]]), np.array([5.0]), np.array([True]), np.array([-1]), np.array([2**31])],
    ids=repr,
)
def test_arrays_without_valid_ids_are_refused(wrong):
    watched = WatchedInputs(config_with())
    watched.dummy(("prefill", 512))
    watched.refused(lambda: watched.inputs.prefill([PrefillRow(wrong, 0, [1])]), r"^rows\[0\]\.token_ids")


@pytest.mark.parametrize("top_k", [0, -1, 7, np.int64(7)])
def test_sampling_parameters_may_be_numpy_numbers(top_k):
    """`top_k` 0 means all, as in vLLM."""
    top_p, temperature = np.float32(0.1), np.float32(0.3)
    batch = PaddedInputs(config_with()).decode(
        [DecodeRow(1, 0, [1], top_k=top_k, top_p=top_p, temperature=temperature), DecodeRow(1, 0, [2])]
    )
    assert batch.sampling_params.tolist() == [[top_k or -1, float(top_p), float(temperature)], [-1, 1, 0]]


# Arrays of a batch


def test_arrays_of_a_batch_cannot_be_resized():
    """Neither an array nor the objects that it is a view of can be resized."""
    inputs = PaddedInputs(config_with())
    row = PrefillRow([1, 2, 3], 0, [1])
    batch = inputs.prefill([row])
    for name, array in arrays(batch).items():
        base = array
        while base is not None:
            if hasattr(base, "resize"):
                with pytest.raises(ValueError, match="resize"):
                    base.resize(1 << 20, refcheck=False)
            base = getattr(base, "base", None)
        assert array.base is not None, f"{name}: owns its memory"
    assert inputs.prefill([row]).input_ids[:4].tolist() == [1, 2, 3, 0]


def test_arrays_outlive_their_batch_and_inputs():
    batch = PaddedInputs(config_with()).prefill([PrefillRow([1, 2, 3], 0, [1])])
    array = batch.input_ids
    del batch
    gc.collect()
    others = [PaddedInputs(config_with()).prefill([PrefillRow([9] * 500, 0, list(range(1, 33)))]) for _ in range(20)]
    assert array[:4].tolist() == [1, 2, 3, 0]
    assert {batch.input_ids[499] for batch in others} == {9}


SMALL = NeuronConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32, block_size=4, num_blocks=20)


def test_a_fill_inside_the_tokens_callable_uses_another_buffer_set():
    scheduler, inputs = BucketScheduler(SMALL), PaddedInputs(SMALL, buffers=2)
    scheduler.add(Request("a", 3, 9))
    scheduler.complete(scheduler.schedule())
    step, inner = scheduler.schedule(), []

    def tokens(ids):
        inner.append(inputs.fill(step, [10]))
        return [11]

    outer = inputs.fill(step, tokens)
    assert (outer.input_ids.tolist(), inner[0].input_ids.tolist()) == ([11], [10])
    assert not np.shares_memory(outer.input_ids, inner[0].input_ids)


def test_a_copy_never_mixes_two_fills_of_other_threads():
    """With fills and copies in several threads, each copy holds the values of exactly one fill."""
    inputs, rows = PaddedInputs(config_with(num_seqs_buckets=[8])), 8
    inputs.dummy(("decode", rows, 1024))
    stop, torn = threading.Event(), []

    def fill(token):
        while not stop.is_set():
            inputs.decode([DecodeRow(token, token, [token])] * rows)

    def copy():
        while not stop.is_set():
            copied = inputs.dummy(("decode", rows, 1024)).copy()
            if len(set(copied.input_ids.tolist())) != 1 or len(set(copied.positions.tolist())) != 1:
                torn.append(copied)

    threads = [threading.Thread(target=fill, args=(token,)) for token in (3, 4)] + [threading.Thread(target=copy)]
    for thread in threads:
        thread.start()
    stop.wait(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert torn == []
