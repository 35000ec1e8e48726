"""Arrays on both sides of a fill: callers' own, however they lie in memory, and ours in callers' hands."""

import gc
import threading

import numpy as np
import pytest

import oracle_inputs
from inputs_setup import WatchedInputs, arrays, roomy
from neuron_sched import BucketScheduler, DecodeRow, NeuronConfig, PaddedInputs, PrefillRow, Request

NUMBERS = [7, 1, 5, 3]


def unaligned(dtype):
    memory = np.zeros(4 * np.dtype(dtype).itemsize + 1, np.uint8)
    array = memory[1:].view(dtype)
    array[:] = NUMBERS
    assert array.itemsize == 1 or not array.flags.aligned
    return array


def field_of_records(dtype):
    """Its stride is no multiple of its item."""
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
def test_ids_in_an_array(array, dtype):
    watched = WatchedInputs(roomy(block_size=1, max_model_len=16))
    row = PrefillRow(array(dtype), 0, array(dtype))
    watched.prefill([row], [oracle_inputs.Prefill(NUMBERS, 0, NUMBERS)])
    assert Request("a", array(dtype), 1).prompt == NUMBERS


def test_an_array_that_a_broadcast_repeats():
    watched = WatchedInputs(roomy())
    watched.prefill([PrefillRow(np.broadcast_to(np.int64(5), 3), 0, [1])], [oracle_inputs.Prefill([5] * 3, 0, [1])])


@pytest.mark.parametrize(
    "wrong",
    [np.array(5), np.array([[5]]), np.array([5.0]), np.array([True]), np.array([-1]), np.array([2**31])],
    ids=repr,
)
def test_arrays_that_hold_no_ids(wrong):
    watched = WatchedInputs(roomy())
    watched.dummy(("prefill", 512))
    watched.refused(lambda: watched.inputs.prefill([PrefillRow(wrong, 0, [1])]), r"^rows\[0\]\.token_ids")


@pytest.mark.parametrize("top_k", [0, -1, 7, np.int64(7)])
def test_numbers_of_numpy_for_the_sampler(top_k):
    """0 means all, as to vLLM."""
    top_p, temperature = np.float32(0.1), np.float32(0.3)
    batch = PaddedInputs(roomy()).decode(
        [DecodeRow(1, 0, [1], top_k=top_k, top_p=top_p, temperature=temperature), DecodeRow(1, 0, [2])]
    )
    assert batch.sampling_params.tolist() == [[top_k or -1, float(top_p), float(temperature)], [-1, 1, 0]]


# Ours


def test_no_array_can_be_taken_away():
    """Neither an array nor what it is a view of can be resized under the next fill."""
    inputs = PaddedInputs(roomy())
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


def test_arrays_outlive_what_filled_them():
    batch = PaddedInputs(roomy()).prefill([PrefillRow([1, 2, 3], 0, [1])])
    array = batch.input_ids
    del batch
    gc.collect()
    others = [PaddedInputs(roomy()).prefill([PrefillRow([9] * 500, 0, list(range(1, 33)))]) for _ in range(20)]
    assert array[:4].tolist() == [1, 2, 3, 0]
    assert {batch.input_ids[499] for batch in others} == {9}


SMALL = NeuronConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32, block_size=4, num_blocks=20)


def test_a_callable_that_fills_itself_takes_buffers_of_its_own():
    scheduler, inputs = BucketScheduler(SMALL), PaddedInputs(SMALL, buffers=2)
    scheduler.add(Request("a", 3, 9))
    scheduler.complete(scheduler.schedule())
    step, inner = scheduler.schedule(), []

    def ask(ids):
        inner.append(inputs.fill(step, [10]))
        return [11]

    outer = inputs.fill(step, ask)
    assert (outer.input_ids.tolist(), inner[0].input_ids.tolist()) == ([11], [10])
    assert not np.shares_memory(outer.input_ids, inner[0].input_ids)


def test_threads_never_see_half_a_copy():
    """Fills and copies of several threads at once: each copy is one step's, whole."""
    inputs, rows = PaddedInputs(roomy(num_seqs_buckets=[8])), 8
    inputs.dummy(("decode", rows, 1024))
    stop, wrong = threading.Event(), []

    def fill(token):
        while not stop.is_set():
            inputs.decode([DecodeRow(token, token, [token])] * rows)

    def copy():
        while not stop.is_set():
            copied = inputs.dummy(("decode", rows, 1024)).copy()
            if len(set(copied.input_ids.tolist())) != 1 or len(set(copied.positions.tolist())) != 1:
                wrong.append(copied)

    threads = [threading.Thread(target=fill, args=(token,)) for token in (3, 4)] + [threading.Thread(target=copy)]
    for thread in threads:
        thread.start()
    stop.wait(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
