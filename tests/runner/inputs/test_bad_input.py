"""X01: invalid arguments of `PaddedInputs` raise an error that names them, and nothing is written."""

import contextlib
import re

import numpy as np
import pytest

from neuron_sched import BucketScheduler, DecodeRow, NeuronConfig, PaddedInputs, PrefillRow, Request
from tests.support.bad_values import Hostile
from tests.support.oracles import inputs as oracle_inputs
from tests.support.watched_inputs import WatchedInputs


def repr_of(value):
    """Return a readable parameter id of a test."""
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
NOT_A_COUNT = [-1, 2**31, 2**63, 2**64, -(2**200), 1.5, "7", b"7", None, True, [1], {}, float("nan"), Hostile()]
NOT_IDS = ["12", b"12", 12, 1.5, {1: 2}, {1, 2}, object(), Hostile()]
BAD_OPTIONS = {
    "top_k": [-2, 2**31, 2**200, 1.5, "1", True],
    "top_p": [0, 0.0, -0.5, 1.1, float("nan"), float("inf"), "1", [1.0]],
    "temperature": [-1, -0.5, float("nan"), float("inf"), "1", [1.0]],
}
BAD_PREFILLS = {
    "token_ids": [[], *[[1, value] for value in NOT_A_COUNT], *NOT_IDS],
    "start": NOT_A_COUNT,
    "block_ids": [[], *[[1, value] for value in NOT_A_COUNT], *NOT_IDS],
    "emits": [None, 0, 1, 1.0, "True", [True], Hostile()],
    **BAD_OPTIONS,
}
BAD_DECODES = {
    "token_id": NOT_A_COUNT,
    "position": NOT_A_COUNT,
    "block_ids": [[], *[[1, value] for value in NOT_A_COUNT], *NOT_IDS],
    "draft_tokens": NOT_A_COUNT,
    **BAD_OPTIONS,
}


def message_start(row, field, value):
    """Return a pattern for row, field and value. For a list the value is its last item; it may not be printable."""
    if isinstance(value, list) and value:
        value = value[-1]
    text = repr_of(value) if value != [] else ""
    return rf"^rows\[{row}\]\.{field}(\[1\])?: .*{re.escape(text)}"


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_PREFILLS.items() for value in values], ids=repr_of
)
def test_x01_invalid_fields_of_a_prefill_row_are_named(field, value):
    watched = WatchedInputs(SMALL, vocab_size=1000)
    good = {"token_ids": [5, 6], "start": 3, "block_ids": [2, 1]}
    watched.prefill([PrefillRow(**good)], [oracle_inputs.Prefill(**good)])
    bad = PrefillRow(**{**good, field: value})
    watched.refused(lambda: watched.inputs.prefill([bad]), message_start(0, field, value))


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_DECODES.items() for value in values], ids=repr_of
)
def test_x01_invalid_fields_of_a_decode_row_are_named(field, value):
    watched = WatchedInputs(SMALL, vocab_size=1000)
    good = {"token_id": 5, "position": 3, "block_ids": [2, 1]}
    watched.decode([DecodeRow(**good)] * 2, [oracle_inputs.Decode(**good)] * 2)
    bad = [DecodeRow(**good), DecodeRow(**{**good, field: value})]
    watched.refused(lambda: watched.inputs.decode(bad), message_start(1, field, value))


PROMPT, DECODE = {"token_ids": [5], "start": 0, "block_ids": [1]}, {"token_id": 5, "position": 0, "block_ids": [1]}


@pytest.mark.parametrize("rows", [None, 5, "rows", {1: 2}, [None], [5], [[5]], [{}], object(), Hostile()], ids=repr_of)
def test_x01_arguments_that_are_not_rows_are_refused(rows):
    watched = WatchedInputs(SMALL)
    watched.prefill([PrefillRow(**PROMPT)], [oracle_inputs.Prefill(**PROMPT)])
    watched.decode([DecodeRow(**DECODE)] * 2, [oracle_inputs.Decode(**DECODE)] * 2)
    for fill in (watched.inputs.prefill, watched.inputs.decode):
        watched.refused(lambda fill=fill: fill(rows), "^rows", TypeError)


def test_x01_rows_of_the_other_kind_are_refused():
    watched = WatchedInputs(SMALL)
    prompt, decode = PrefillRow(**PROMPT), DecodeRow(**DECODE)
    watched.prefill([prompt], [oracle_inputs.Prefill(**PROMPT)])
    watched.decode([decode] * 2, [oracle_inputs.Decode(**DECODE)] * 2)
    watched.refused(lambda: watched.inputs.prefill([decode]), r"^rows\[0\]: .*PrefillRow", TypeError)
    watched.refused(lambda: watched.inputs.decode([decode, prompt]), r"^rows\[1\]: .*DecodeRow", TypeError)


@pytest.mark.parametrize(
    "shape",
    [
        *[None, 5, "prefill", (), ("prefill",), ("prefill", 3), ("prefill", 8, 32), ("prefill", "8"), ("prefill", 8.0)],
        *[("decode", 2), ("decode", 3, 32), ("decode", 2, 31), ("decode", 2, 33), ("decode", 2, 32, 1), ("mixed", 8)],
        *[("prefill", -8), ("prefill", 2**70), ("decode", True, 32), ("prefill", True), (b"prefill", 8), Hostile()],
    ],
    ids=repr_of,
)
def test_x01_shapes_that_are_not_compiled_are_refused(shape):
    watched = WatchedInputs(SMALL)
    for known in watched.inputs.shapes:
        watched.dummy(known)
    watched.refused(lambda: watched.inputs.dummy(shape), "shape")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("buffers", value) for value in (0, -1, 2**31, 2**70, "1", 1.0, True, Hostile())),
        *(("vocab_size", value) for value in (0, -1, 2**31, 2**70, "1", 1.0, True, Hostile())),
    ],
    ids=repr_of,
)
def test_x01_invalid_arguments_of_the_constructor_are_named(field, value):
    with pytest.raises((TypeError, ValueError), match=f"^{field}: "):
        PaddedInputs(SMALL, **{field: value})


def test_x01_unsupported_configurations_are_refused():
    for not_a_config in (None, 5, {"block_size": 4}):
        with pytest.raises(TypeError):
            PaddedInputs(not_a_config)
    with pytest.raises(ValueError, match=r"^dcp: 2: "):
        PaddedInputs(NeuronConfig(**{**SMALL.as_dict(), "dcp": 2}))


class Decoding:
    """Two decoding requests: "a" has known tokens, "b" has none, because its prompt was given as a length."""

    def __init__(self, vocab_size=None):
        self.watched = WatchedInputs(SMALL, vocab_size=vocab_size)
        self.scheduler = BucketScheduler(SMALL)
        self.scheduler.add(Request("a", [5, 6, 7], 20))
        self.watched.fill(
            lambda: self.watched.inputs.fill(self.scheduler.schedule()),
            oracle_inputs.prefill(SMALL, [oracle_inputs.Prefill([5, 6, 7], 0, [1])]),
            ids=["a"],
            unpadded=3,
        )
        self.scheduler.complete(self.scheduler.schedule(), [8])
        self.scheduler.add(Request("b", 4, 20))
        self.scheduler.complete(self.scheduler.schedule())
        self.step = self.scheduler.schedule()
        assert (self.step.kind, list(self.step.num_computed_tokens.items())) == ("decode", [("a", 3), ("b", 4)])

    def accepted(self, tokens, second):
        """Assert that the fill accepts these tokens and that `second` is the token of "b"."""
        rows = [oracle_inputs.Decode(8, 3, [1]), oracle_inputs.Decode(second, 4, [2, 3])]
        expected = oracle_inputs.decode(SMALL, rows)
        self.watched.fill(lambda: self.watched.inputs.fill(self.step, tokens), expected, ids=["a", "b"], unpadded=2)

    def refused(self, tokens, match, error=(TypeError, ValueError)):
        self.watched.refused(lambda: self.watched.inputs.fill(self.step, tokens), match, error)


def test_x01_unknown_tokens_must_be_passed_to_fill():
    decoding = Decoding()
    decoding.accepted([None, 9], 9)
    decoding.refused(None, "'b'", ValueError)
    decoding.refused([None, None], "'b'", ValueError)
    decoding.refused([8, None], "'b'", ValueError)
    decoding.refused([9, 10], "'a': tokens: a different token: expected None or 8, which", ValueError)
    decoding.accepted([8, 10], 10)
    decoding.accepted((None, 11), 11)
    decoding.accepted(np.array([8, 12]), 12)
    decoding.accepted(lambda ids: [13], 13)
    decoding.accepted(lambda ids: np.array([14], np.int32), 14)


@pytest.mark.parametrize(
    "tokens",
    [
        *[5, "59", b"59", {0: 1, 1: 2}, {8, 9}, object(), Hostile(), [], [9], [8, 9, 10]],
        *[[8, invalid] for invalid in (-1, 2**31, 2**70, 1.0, "9", True, [9])],
    ],
    ids=repr_of,
)
def test_x01_invalid_tokens_are_refused(tokens):
    decoding = Decoding()
    decoding.accepted([None, 9], 9)
    decoding.refused(tokens, "tokens")
    if not isinstance(tokens, list) or len(tokens) != 1:
        decoding.refused(lambda ids: tokens[1:] if isinstance(tokens, list) and tokens else tokens, "tokens")
    decoding.accepted([None, 9], 9)


def test_x01_tokens_outside_the_vocabulary_are_refused():
    decoding = Decoding(vocab_size=9)
    decoding.accepted([None, 8], 8)
    decoding.refused([None, 9], "'b'.*token_id: 9: ", ValueError)
    decoding.refused([9, 8], "'a'.*tokens: a different token: expected None or 8,", ValueError)
    decoding.refused(lambda ids: [9], "'b'.*token_id: 9: ", ValueError)
    scheduler, inputs = BucketScheduler(SMALL), decoding.watched.inputs
    scheduler.add(Request("c", [1, 8, 9, 10], 1))
    step = scheduler.schedule()
    decoding.watched.refused(lambda: inputs.fill(step), "'c'.*token_ids: 9: ", ValueError)


def test_x01_token_callables_that_raise_or_call_the_scheduler():
    decoding = Decoding()
    decoding.accepted([None, 9], 9)
    decoding.refused(lambda ids: 1 // 0, "division", ZeroDivisionError)
    decoding.refused(lambda: [9], "argument", TypeError)
    decoding.refused(lambda ids: None, "tokens: the callable returned None: expected a sequence", TypeError)

    def fill_again(ids):
        decoding.watched.inputs.fill(decoding.step, [None, 10])
        return [11]

    decoding.accepted(fill_again, 11)

    def end_both_and_schedule(ids):
        decoding.scheduler.cancel("a")
        decoding.scheduler.cancel("b")
        decoding.scheduler.add(Request("a", [1, 1, 1, 1], 1))
        decoding.scheduler.complete(decoding.scheduler.schedule(), [1])
        decoding.scheduler.schedule()
        return [9]

    decoding.refused(end_both_and_schedule, "step: too old", ValueError)
    decoding.scheduler.check()


def test_x01_steps_that_cannot_be_filled_are_refused():
    watched, scheduler = WatchedInputs(SMALL), BucketScheduler(SMALL)
    for shape in watched.inputs.shapes:
        watched.dummy(shape)
    fill = watched.inputs.fill
    for not_a_step in (None, 5, "step", [], Hostile()):
        watched.refused(lambda not_a_step=not_a_step: fill(not_a_step), "step", TypeError)
    idle = scheduler.schedule()
    watched.refused(lambda: fill(idle), "step: idle", ValueError)
    scheduler.add(Request("a", [1, 2, 3], 2))
    step = scheduler.schedule()
    watched.refused(lambda: fill(step, [None]), "tokens: ", ValueError)
    watched.refused(lambda: fill(step, context_bucket=32), "context_bucket: 32: ", ValueError)
    other = WatchedInputs(NeuronConfig(**{**SMALL.as_dict(), "block_size": 8}))
    other.refused(lambda: other.inputs.fill(step), "step: .*configuration", ValueError)
    equal = WatchedInputs(NeuronConfig(**SMALL.as_dict()))
    expected = oracle_inputs.prefill(SMALL, [oracle_inputs.Prefill([1, 2, 3], 0, [1])])
    for inputs in (watched, equal):
        inputs.fill(lambda inputs=inputs: inputs.inputs.fill(step), expected, ids=["a"], unpadded=3)
    scheduler.add(Request("b", 3, 2))
    scheduler.complete(step, [4])
    step = scheduler.schedule()
    watched.refused(lambda: fill(step), "'b': token_ids: unknown", ValueError)
