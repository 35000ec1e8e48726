"""Tokens and context buckets that `VllmInputs.fill` refuses, and sampled tokens that `accept` refuses."""

import re

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from neuron_sched.vllm.inputs import VllmInputs
from tests.vllm.support.checked_worker import CheckedWorker
from tests.vllm.support.requests import add
from tests.vllm.support.schedulers import build
from tests.vllm.support.unfilled_steps import UnfilledAsyncStep, UnfilledStep, assert_refused

# --- fill ---


def raise_key_error(_):
    raise KeyError("unknown token")


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (None, "request 'a': tokens: none at position 17: expected a token passed to fill(), or accept() called for"),
        ([5, None], "request 'b': tokens: none at position 11: expected a token passed to fill()"),
        ([5], "tokens: 1 entries: expected one for each of 2 rows"),
        ([5, 6, 7], "tokens: 3 entries: expected one for each of 2 rows"),
        ([5, 1000], "request 'b': tokens: 1000: expected an id below vocab_size = 1000"),
        ([5, -1], "tokens[1]: -1: expected a token id from 0"),
        ([5, "6"], "tokens[1]: '6': expected a token id from 0"),
        ("56", "tokens: '56': expected a sequence"),
        (7, "tokens: 7: expected a sequence"),
        (lambda ids: [5], "tokens: 1 entries: expected one for each of 2 rows"),
        (lambda ids: [5, None], "request 'b': tokens: none at position 11"),
        (lambda ids: None, "tokens: the callable returned None: expected a sequence"),
    ],
)
def test_invalid_tokens_are_refused(tokens, match):
    UnfilledAsyncStep().assert_refused(tokens, match)


def test_an_error_of_the_callable_propagates():
    UnfilledAsyncStep().assert_refused(raise_key_error, "unknown token", KeyError)


@pytest.mark.parametrize(
    ("bucket", "match"),
    [
        (65, "context_bucket: 65: expected one of [64, 256] that holds 18 tokens"),
        (0, "context_bucket: 0: expected one of"),
        ("64", "context_bucket: '64': expected a whole number"),
    ],
)
def test_an_invalid_context_bucket_is_refused(bucket, match):
    UnfilledAsyncStep().assert_refused([5, 6], match, context_bucket=bucket)


def test_a_prefill_step_takes_neither_tokens_nor_a_context_bucket():
    unfilled = UnfilledStep("prefill")
    fill, out = unfilled.worker.inputs.fill, unfilled.out
    assert_refused(
        unfilled.worker,
        lambda: fill(out, [1, 2]),
        r"tokens: \[1, 2\]: expected None: the tokens of a prefill step are known",
    )
    assert_refused(
        unfilled.worker, lambda: fill(out, context_bucket=64), "context_bucket: 64: expected None for a prefill step"
    )
    unfilled.worker.fill(out)


# --- accept ---


def test_accept_without_a_step_in_flight_is_refused():
    inputs = VllmInputs(build().neuron_config)
    with pytest.raises(ValueError, match="accept: no step is in flight"):
        inputs.accept([])


@pytest.mark.parametrize(
    ("sampled", "match"),
    [
        ([], "sampled: 0 entries: expected one for each of 2 rows"),
        ([[1]], "sampled: 1 entries: expected one for each of 2 rows"),
        ([[1], [2], [3]], "sampled: 3 entries: expected one for each of 2 rows"),
        ([[1]] * 9, "sampled: 9 entries: expected one for each of 2 rows"),
        ([[1], []], "request 'b': sampled: []: expected one token"),
        ([[1], [2, 3]], "request 'b': sampled: [2, 3]: expected one token, or none"),
        ([[1], [1000]], "request 'b': sampled: 1000: expected an id below vocab_size = 1000"),
        ([[1], [-1]], "request 'b': sampled: -1: expected a whole number from 0"),
        ([[1], ["2"]], "request 'b': sampled: '2': expected a whole number from 0"),
        ([[1], 2], "request 'b': sampled: 2: expected a list of one token, or an empty list"),
        ([[1], None], "request 'b': sampled: None: expected a list"),
        ({"a": [1], "b": [2]}, "sampled: {'a': [1], 'b': [2]}: expected a sequence with one list per row"),
        (None, "sampled: None: expected a sequence with one list per row"),
    ],
)
def test_invalid_sampled_tokens_are_refused(sampled, match):
    unfilled = UnfilledStep("decode")
    worker = unfilled.worker
    worker.fill(unfilled.out)
    assert_refused(worker, lambda: worker.inputs.accept(sampled), re.escape(match))
    worker.deliver()
    worker.run()


def test_a_token_of_a_middle_chunk_is_refused():
    s = build()
    worker = CheckedWorker(s)
    add(s, a=(100, 2))
    worker.fill(s.schedule())
    assert_refused(
        worker, lambda: worker.inputs.accept([[7]]), r"request 'a': sampled: 7: expected \[\] for a chunk in the mid"
    )
    worker.deliver()
    worker.run()


@pytest.mark.parametrize("sampled", [[[], [5]], [[7], [5]]])
def test_a_row_of_a_finished_request_can_have_a_token_or_none(sampled):
    unfilled = UnfilledAsyncStep()
    worker = unfilled.worker
    unfilled.out.finished_req_ids = {"a"}
    for counts in (unfilled.out.num_scheduled_tokens, unfilled.out.num_scheduled_tokens_padded):
        del counts["a"]
    unfilled.out.num_seqs_padded = 1
    cached = unfilled.out.scheduled_cached_reqs
    for column in (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, cached.num_output_tokens):
        del column[0]
    assert worker.inputs.fill(unfilled.out, [5]).input_ids.tolist() == [5]
    worker.inputs.accept(sampled)
    assert worker.inputs.num_in_flight == 1
