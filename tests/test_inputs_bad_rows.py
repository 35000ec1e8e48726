"""X01: whatever a caller gives for a row, a shape or a bucket, an error names it and nothing is written."""

import contextlib

import pytest

import oracle_inputs
from inputs_setup import WatchedInputs
from neuron_sched import DecodeRow, NeuronConfig, PrefillRow


class Hostile:
    """Raises whenever it is asked anything."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __index__(self):
        raise RuntimeError("no index")

    def __float__(self):
        raise RuntimeError("no float")

    def __iter__(self):
        raise RuntimeError("no iter")


def repr_of(value):
    """A readable name of a test."""
    with contextlib.suppress(RuntimeError):
        return repr(value)
    return type(value).__name__


SMALL = NeuronConfig(
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=32,
    block_size=4,
    num_blocks=20,
    num_batched_tokens_buckets=[4, 8],
)
NO_COUNT = [-1, 2**31, 2**63, 2**64, -(2**200), 1.5, "7", b"7", None, True, [1], {}, float("nan"), Hostile()]
NO_IDS = ["12", b"12", 12, 1.5, {1: 2}, {1, 2}, object(), Hostile()]
BAD_OPTIONS = {
    "top_k": [-2, 2**31, 2**200, 1.5, "1", True],
    "top_p": [0, 0.0, -0.5, 1.1, float("nan"), float("inf"), "1", [1.0]],
    "temperature": [-1, -0.5, float("nan"), float("inf"), "1", [1.0]],
}
BAD_PREFILLS = {
    "token_ids": [[], *[[1, value] for value in NO_COUNT], *NO_IDS],
    "start": NO_COUNT,
    "block_ids": [[], *[[1, value] for value in NO_COUNT], *NO_IDS],
    **BAD_OPTIONS,
}
BAD_DECODES = {
    "token_id": NO_COUNT,
    "position": NO_COUNT,
    "block_ids": [[], *[[1, value] for value in NO_COUNT], *NO_IDS],
    "draft_tokens": NO_COUNT,
    **BAD_OPTIONS,
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_PREFILLS.items() for value in values], ids=repr_of
)
def test_x01_bad_values_of_a_prefill_row(field, value):
    watched = WatchedInputs(SMALL, vocab_size=1000)
    good = {"token_ids": [5, 6], "start": 3, "block_ids": [2, 1]}
    watched.prefill([PrefillRow(**good)], [oracle_inputs.Prefill(**good)])
    watched.refused(lambda: watched.inputs.prefill([PrefillRow(**{**good, field: value})]), field.rstrip("s"))


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_DECODES.items() for value in values], ids=repr_of
)
def test_x01_bad_values_of_a_decode_row(field, value):
    watched = WatchedInputs(SMALL, vocab_size=1000)
    good = {"token_id": 5, "position": 3, "block_ids": [2, 1]}
    watched.decode([DecodeRow(**good)], [oracle_inputs.Decode(**good)])
    watched.refused(lambda: watched.inputs.decode([DecodeRow(**{**good, field: value})]), field)


ROWS = {"prefill": PrefillRow([5], 0, [1]), "decode": DecodeRow(5, 0, [1])}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("rows", [None, 5, "rows", {1: 2}, [None], [5], [[5]], [{}], object(), Hostile()], ids=repr_of)
def test_x01_what_are_no_rows(kind, rows):
    watched = WatchedInputs(SMALL)
    fill = getattr(watched.inputs, kind)
    fill([ROWS[kind]])
    watched.refused(lambda: fill(rows), "rows", TypeError)
    other = ROWS["decode" if kind == "prefill" else "prefill"]
    watched.refused(lambda: fill([ROWS[kind], other]), r"rows\[1\]", TypeError)


@pytest.mark.parametrize(
    "shape",
    [
        *[None, 5, "prefill", (), ("prefill",), ("prefill", 3), ("prefill", 8, 32), ("prefill", "8"), ("prefill", 8.0)],
        *[("decode", 2), ("decode", 3, 32), ("decode", 2, 31), ("decode", 2, 33), ("decode", 2, 32, 1), ("mixed", 8)],
        *[("prefill", -8), ("prefill", 2**70), ("decode", True, 32), ("prefill", True), (b"prefill", 8), Hostile()],
    ],
    ids=repr_of,
)
def test_x01_shapes_that_are_not_compiled(shape):
    watched = WatchedInputs(SMALL)
    for known in watched.inputs.shapes:
        watched.dummy(known)
    watched.refused(lambda: watched.inputs.dummy(shape), "shape")
