"""Padded inputs under watch: before a fill all buffers hold garbage, after it they are compared with the oracle."""

from itertools import pairwise

import numpy as np
import pytest

import oracle_inputs
from neuron_sched import NeuronConfig, PaddedInputs

# The tensors by kind, in order.
BOTH_FIRST = ("input_ids", "positions", "slot_mapping", "block_table")
BOTH_LAST = ("logits_index", "sampling_params")
NAMES = {
    "prefill": (*BOTH_FIRST, "cached_seq_len", "cu_seqlens", *BOTH_LAST),
    "decode": (*BOTH_FIRST, "context_lens", *BOTH_LAST),
}
OTHERS = {"prefill": ("context_lens",), "decode": ("cached_seq_len", "cu_seqlens")}


def roomy(**changes) -> NeuronConfig:
    """A configuration as the cases have it, with what they change."""
    plain = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024, "block_size": 16}
    return NeuronConfig(**{**plain, "num_blocks": 399, **changes})


def arrays(batch) -> dict[str, np.ndarray]:
    """The tensors of a batch by its attributes; those of the other kind are None."""
    assert [name for name in OTHERS[batch.kind] if getattr(batch, name) is not None] == []
    found = {name: getattr(batch, name) for name in NAMES[batch.kind]}
    listed = batch.arrays()
    assert list(listed) == list(found)
    assert [name for name in found if listed[name] is not found[name]] == []
    return found


def assert_batch(batch, expected, *, ids, real):
    """The batch has the expected key and tensors, the ids in order, and that many real tokens."""
    shape, tensors = expected
    assert (batch.kind, batch.shape) == (shape[0], shape)
    assert (batch.request_ids, batch.num_real_tokens, batch.num_padded_tokens) == (tuple(ids), real, shape[1])
    oracle_inputs.assert_equal(arrays(batch), tensors)


class WatchedInputs:
    """`PaddedInputs` that is compared with the oracle.

    Before each fill all arrays of all earlier batches are overwritten with garbage; after it, those of its batch are
    right and no other was touched. A shape uses its `buffers` sets of arrays in turn.
    """

    def __init__(self, config, *, buffers=1, vocab_size=None):
        self.config = config
        self.buffers = buffers
        self.inputs = PaddedInputs(config, buffers=buffers, vocab_size=vocab_size)
        self.filled = {}  # shape -> how many fills
        self.sets = {}  # (shape, number of the set) -> its arrays
        self.garbage = 0

    def prefill(self, rows, expected_rows):
        ids, real = [row.request_id for row in expected_rows], sum(len(row.token_ids) for row in expected_rows)
        return self.fill(
            lambda: self.inputs.prefill(rows), oracle_inputs.prefill(self.config, expected_rows), ids=ids, real=real
        )

    def decode(self, rows, expected_rows, bucket=None):
        ids, real = [row.request_id for row in expected_rows], len(expected_rows)
        expected = oracle_inputs.decode(self.config, expected_rows, bucket)
        return self.fill(lambda: self.inputs.decode(rows, bucket), expected, ids=ids, real=real)

    def dummy(self, shape):
        expected = oracle_inputs.dummy(self.config, shape)
        return self.fill(lambda: self.inputs.dummy(shape), expected, ids=[], real=0)

    def fill(self, call, expected, *, ids, real):
        """A call that must give the expected batch."""
        before = self.poison()
        try:
            batch = call()
        except BaseException:
            self.untouched(before)
            raise
        assert_batch(batch, expected, ids=ids, real=real)
        count = self.filled.get(batch.shape, 0)
        self.filled[batch.shape] = count + 1
        key = (batch.shape, count % self.buffers)
        found = arrays(batch)
        for name, array in self.sets.setdefault(key, found).items():
            assert found[name] is array, f"{name}: another array than that of {self.buffers} fills ago"
            assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous and array.flags.writeable, name
        before.pop(key, None)
        self.untouched(before)
        return batch

    def refused(self, call, match, error=(TypeError, ValueError)):
        """A call that must raise, and write nothing."""
        before = self.poison()
        with pytest.raises(error, match=match) as raised:
            call()
        self.untouched(before)
        return str(raised.value)

    def poison(self):
        """Overwrites everything with garbage, other than last time; returns what is there now."""
        self.garbage = self.garbage % 250 + 1
        for found in self.sets.values():
            for array in found.values():
                array.reshape(-1).view(np.uint8).fill(self.garbage)
        return {key: {name: array.tobytes() for name, array in found.items()} for key, found in self.sets.items()}

    def untouched(self, before):
        for key, kept in before.items():
            for name, content in kept.items():
                assert self.sets[key][name].tobytes() == content, f"{name} of {key}: was written"

    def distinct(self):
        """No two arrays share memory."""
        spans = sorted(
            (array.ctypes.data, array.ctypes.data + array.nbytes)
            for found in self.sets.values()
            for array in found.values()
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
