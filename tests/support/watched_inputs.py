"""`PaddedInputs` under test: all arrays hold garbage before a fill and are compared with the oracle after it."""

from itertools import pairwise

import numpy as np
import pytest

from neuron_sched import PaddedInputs
from tests.support.oracles import inputs as oracle_inputs

# Names of the tensors by kind of batch, in the order of `Batch.arrays()`.
BOTH_FIRST = ("input_ids", "positions", "slot_mapping", "block_table")
BOTH_LAST = ("logits_index", "sampling_params")
NAMES = {
    "prefill": (*BOTH_FIRST, "cached_seq_len", "cu_seqlens", *BOTH_LAST),
    "decode": (*BOTH_FIRST, "context_lens", *BOTH_LAST),
}
# Names of the tensors that a batch of this kind does not have.
ABSENT = {"prefill": ("context_lens",), "decode": ("cached_seq_len", "cu_seqlens")}


def arrays(batch) -> dict[str, np.ndarray]:
    """Return the tensors of a batch by name, read from its attributes.

    Assert that the attributes of the other kind are `None` and that `batch.arrays()` returns the same objects.
    """
    assert [name for name in ABSENT[batch.kind] if getattr(batch, name) is not None] == []
    found = {name: getattr(batch, name) for name in NAMES[batch.kind]}
    listed = batch.arrays()
    assert list(listed) == list(found)
    assert [name for name in found if listed[name] is not found[name]] == []
    return found


def assert_batch(batch, expected, *, ids, unpadded):
    """Assert the shape and the tensors of a batch, its request ids in order, and its number of unpadded tokens."""
    shape, tensors = expected
    assert (batch.kind, batch.shape) == (shape[0], shape)
    assert (batch.request_ids, batch.num_real_tokens, batch.num_padded_tokens) == (tuple(ids), unpadded, shape[1])
    oracle_inputs.assert_equal(arrays(batch), tensors)


class WatchedInputs:
    """`PaddedInputs` whose batches are compared with the oracle.

    Before each fill, the arrays of all earlier batches are overwritten with garbage. After the fill, the arrays of its
    batch must be correct and all others unchanged. The fills of a shape must use its `buffers` sets of arrays in turn.
    """

    def __init__(self, config, *, buffers=1, vocab_size=None):
        self.config = config
        self.buffers = buffers
        self.inputs = PaddedInputs(config, buffers=buffers, vocab_size=vocab_size)
        self.num_fills = {}  # by shape
        self.sets = {}  # arrays by name, by (shape, index of the buffer set)
        self.garbage = 0

    def prefill(self, rows, expected_rows):
        ids, unpadded = [row.request_id for row in expected_rows], sum(len(row.token_ids) for row in expected_rows)
        return self.fill(
            lambda: self.inputs.prefill(rows),
            oracle_inputs.prefill(self.config, expected_rows),
            ids=ids,
            unpadded=unpadded,
        )

    def decode(self, rows, expected_rows, bucket=None):
        ids, unpadded = [row.request_id for row in expected_rows], len(expected_rows)
        expected = oracle_inputs.decode(self.config, expected_rows, bucket)
        return self.fill(lambda: self.inputs.decode(rows, bucket), expected, ids=ids, unpadded=unpadded)

    def dummy(self, shape):
        expected = oracle_inputs.dummy(self.config, shape)
        return self.fill(lambda: self.inputs.dummy(shape), expected, ids=[], unpadded=0)

    def fill(self, call, expected, *, ids, unpadded):
        """Assert that the call returns the expected batch and writes to no other array. Return the batch."""
        before = self.overwrite_all()
        try:
            batch = call()
        except BaseException:
            self.assert_unchanged(before)
            raise
        assert_batch(batch, expected, ids=ids, unpadded=unpadded)
        count = self.num_fills.get(batch.shape, 0)
        self.num_fills[batch.shape] = count + 1
        key = (batch.shape, count % self.buffers)
        found = arrays(batch)
        for name, array in self.sets.setdefault(key, found).items():
            assert found[name] is array, f"{name}: another array than that of {self.buffers} fills ago"
            assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous and array.flags.writeable, name
        before.pop(key, None)
        self.assert_unchanged(before)
        return batch

    def refused(self, call, match, error=(TypeError, ValueError)):
        """Assert that the call raises and writes nothing. Return the message."""
        before = self.overwrite_all()
        with pytest.raises(error, match=match) as raised:
            call()
        self.assert_unchanged(before)
        return str(raised.value)

    def overwrite_all(self):
        """Overwrite all arrays with a byte that differs from the previous one, and return their content."""
        self.garbage = self.garbage % 250 + 1
        for found in self.sets.values():
            for array in found.values():
                array.reshape(-1).view(np.uint8).fill(self.garbage)
        return {key: {name: array.tobytes() for name, array in found.items()} for key, found in self.sets.items()}

    def assert_unchanged(self, before):
        for key, contents in before.items():
            for name, content in contents.items():
                assert self.sets[key][name].tobytes() == content, f"{name} of {key}: was written"

    def assert_no_shared_memory(self):
        """Assert that no two arrays overlap."""
        spans = sorted(
            (array.ctypes.data, array.ctypes.data + array.nbytes)
            for found in self.sets.values()
            for array in found.values()
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
