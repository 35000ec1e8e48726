"""Outputs that `VllmInputs.fill` refuses: the error names the field, nothing changes, and the next valid fill works."""

import copy
import dataclasses

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import torch
from vllm.pooling_params import PoolingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler

from neuron_sched.vllm.inputs import VllmInputs
from tests.vllm.support import harness
from tests.vllm.support.corruptions import (
    add_third_prompt,
    all_of,
    delete_attribute,
    list_new_request_twice,
    mark_running_request_finished,
    omit_scheduled_request,
    rename_running_request,
    set_attribute,
    set_cached_field,
    set_new_field,
    set_padded_counts,
    set_scheduled_count,
)
from tests.vllm.support.requests import add
from tests.vllm.support.schedulers import build
from tests.vllm.support.unfilled_steps import UnfilledStep, assert_refused

NOT_INTEGERS = [None, "1", 1.5, True, [1]]

COMPUTED, BLOCKS, OUTPUTS = "num_computed_tokens", "new_block_ids", "num_output_tokens"
INVALID_DECODES = {
    "a prefill row in a decode step": (
        set_cached_field(COMPUTED, 3, 1),
        "decode step: 1 tokens of prefilling request b: expected decoding requests",
    ),
    "a decode step without a batch bucket": (
        all_of(set_attribute("num_seqs_padded", 0), set_padded_counts(b=63)),
        "prefill step: 1 tokens of decoding request a: expected prefilling requests",
    ),
    "an unknown request id": (
        rename_running_request,
        "request 'z': num_scheduled_tokens: unknown: expected a request of an earlier step",
    ),
    "a finished request": (
        mark_running_request_finished,
        "request 'b': request: unknown: expected a request of an earlier step that has not finished",
    ),
    "a padded decode count": (
        set_padded_counts(a=2),
        "request 'a': num_scheduled_tokens_padded: 2: expected the unpadded count, 1",
    ),
    "a missing padded count": (
        set_attribute("num_scheduled_tokens_padded", {"a": 1, "z": 1}),
        "request 'b': num_scheduled_tokens_padded: none: expected a count",
    ),
    "an extra padded count": (
        set_padded_counts(z=1),
        "num_scheduled_tokens_padded: 3 counts: expected those of the 2 scheduled requests",
    ),
    "a count of rows that is no batch bucket": (
        set_attribute("num_seqs_padded", 3),
        "num_seqs_padded: 3: expected one of [1, 2, 4]",
    ),
    "a batch bucket below the number of rows": (
        set_attribute("num_seqs_padded", 1),
        "decode step that starts with request a: 2 rows: expected at most 1",
    ),
    "two tokens of a decode row": (
        all_of(set_scheduled_count("a", 2), set_padded_counts(a=2)),
        "request 'a': num_scheduled_tokens: 2: expected at most the 1 remaining tokens",
    ),
    "no tokens": (
        all_of(set_scheduled_count("a", 0), set_padded_counts(a=0)),
        "decode step: 0 tokens of decoding request a: expected",
    ),
    "a negative token count": (
        all_of(set_scheduled_count("a", -5), set_padded_counts(a=-5)),
        "decode step: -5 tokens of decoding request a: expected",
    ),
    "a token count of 2**62": (
        all_of(set_scheduled_count("a", 2**62), set_padded_counts(a=2**62)),
        f"request 'a': num_scheduled_tokens: {2**62}: expected at most",
    ),
    "a negative position": (set_cached_field(COMPUTED, -1), "request 'a': num_computed_tokens: -1: expected 0 to 16"),
    "a position above the known tokens": (
        set_cached_field(COMPUTED, 17),
        "request 'a': num_computed_tokens: 17: expected 0 to 16",
    ),
    "a negative output count": (set_cached_field(OUTPUTS, -1), "request 'a': num_output_tokens: -1: expected a count"),
    "an output count of 2**63 - 1": (
        set_cached_field(OUTPUTS, 2**63 - 1),
        "request 'a': num_output_tokens: 9223372036854775807",
    ),
    "a missing block for the position": (
        set_cached_field(BLOCKS, None),
        "request 'a': block_ids: 1 blocks: expected 2 to 16 for positions up to 16",
    ),
    "the null block": (
        set_cached_field(BLOCKS, ([0],)),
        "request 'a': block_ids: 0: expected ids from 1 to num_blocks = 399",
    ),
    "a block id above num_blocks": (
        set_cached_field(BLOCKS, ([400],)),
        "request 'a': block_ids: 400: expected ids from 1 to",
    ),
    "a block that the request already has": (
        set_cached_field(BLOCKS, ([1],)),
        "request 'a': block_ids: 1 twice: expected each block once",
    ),
    "a new block twice": (
        set_cached_field(BLOCKS, ([9, 9],)),
        "request 'a': block_ids: 9 twice: expected each block once",
    ),
    "a block id that is a string": (
        set_cached_field(BLOCKS, (["9"],)),
        "request 'a': new_block_ids[0]: '9': expected a whole number",
    ),
    "two KV cache groups": (
        set_cached_field(BLOCKS, ([9], [10])),
        "request 'a': new_block_ids: block ids of 2 KV cache groups: expected one KV cache group, with full attention",
    ),
    "block ids without a KV cache group": (
        set_cached_field(BLOCKS, [9]),
        "request 'a': new_block_ids: [9]: expected a tuple",
    ),
    "draft tokens": (
        set_attribute("scheduled_spec_decode_tokens", {"a": [3, 4]}),
        "request 'a': scheduled_spec_decode_tokens: [3, 4]: expected none: drafts are not supported",
    ),
    "a replaced block table": (
        set_attribute("block_table_updates", {"a": ([4, 5],)}),
        "request 'a': block_table_updates: ([4, 5],): expected none",
    ),
    "a scheduled request without an entry": (
        all_of(set_scheduled_count("z", 1), set_padded_counts(z=1)),
        "request 'z': num_scheduled_tokens: no entry: expected an entry in scheduled_new_reqs or scheduled_cached_reqs",
    ),
    "lists of different lengths": (
        lambda out: out.scheduled_cached_reqs.num_output_tokens.pop(),
        "scheduled_cached_reqs: [2, 2, 2, 1] ids, counts, blocks and outputs: expected lists of equal length",
    ),
    "a missing num_seqs_padded": (
        delete_attribute("num_seqs_padded"),
        "scheduler_output: num_seqs_padded: missing: expected the",
    ),
    "a missing num_scheduled_tokens_padded": (
        delete_attribute("num_scheduled_tokens_padded"),
        "scheduler_output: num_scheduled_tokens_padded: missing: expected the output of NeuronScheduler or",
    ),
}
INVALID_PREFILLS = {
    "a position after the prompt": (
        set_new_field(COMPUTED, 20),
        "request 'c': num_computed_tokens: 20: expected 0 to 19",
    ),
    "a padded total that is no token bucket": (
        set_padded_counts(d=45),
        "num_scheduled_tokens_padded: 65 in total: expected a sum that is one of [64]",
    ),
    "a padded count below the unpadded one": (
        set_padded_counts(c=15, d=49),
        "request 'c': num_scheduled_tokens_padded: 15: expected at least 20",
    ),
    "a prefill step with a batch bucket": (
        all_of(set_attribute("num_seqs_padded", 2), set_padded_counts(d=30)),
        "decode step: 20 tokens of prefilling request c: expected",
    ),
    "more tokens than remain": (
        all_of(set_scheduled_count("c", 21), set_padded_counts(c=21, d=43)),
        "request 'c': num_scheduled_tokens: 21: expected at most the 20 remaining tokens",
    ),
    "no tokens": (set_scheduled_count("c", 0), "prefill step: 0 tokens of prefilling request c: expected"),
    "two entries of one request": (
        list_new_request_twice,
        "request 'c': scheduled_new_reqs, scheduled_cached_reqs: two entries",
    ),
    "an entry of a request that is not scheduled": (
        omit_scheduled_request,
        "request 'd': num_scheduled_tokens: none: expected a count for each entry",
    ),
    "more prompts than max_prefills_per_batch": (
        add_third_prompt,
        "rows: 3 prompts: expected at most max_prefills_per_batch = 2",
    ),
    "an empty prompt": (
        set_new_field("prompt_token_ids", []),
        "request 'c': prompt_token_ids: none: expected at least one",
    ),
    "a token outside the vocabulary": (
        set_new_field("prompt_token_ids", [5] * 19 + [1000]),
        "request 'c': prompt_token_ids: 1000: expected an id below vocab_size = 1000",
    ),
    "a negative token id": (
        set_new_field("prompt_token_ids", [5, -1]),
        "request 'c': prompt_token_ids[1]: -1: expected a whole number",
    ),
    "a prompt of embeddings only": (
        set_new_field("prompt_token_ids", None),
        "request 'c': prompt_embeds: given: expected a prompt",
    ),
    "a prompt with embeddings": (
        set_new_field("prompt_embeds", torch.zeros(1)),
        "request 'c': prompt_embeds: given: expected",
    ),
    "pooling parameters": (
        set_new_field("pooling_params", PoolingParams(task="embed")),
        "request 'c': pooling_params: PoolingParams(",
    ),
    "fewer tokens than the prompt": (
        set_new_field("prefill_token_ids", [5] * 19),
        "request 'c': prefill_token_ids: 19 ids: expected at least the 20 prompt tokens",
    ),
    "no blocks": (
        set_new_field("block_ids", ([],)),
        "request 'c': block_ids: 0 blocks: expected 2 to 16 for positions up to 19",
    ),
    "two KV cache groups": (
        set_new_field("block_ids", ([8, 9], [8, 9])),
        "request 'c': block_ids: block ids of 2 KV cache groups",
    ),
    "block ids of zero KV cache groups": (
        set_new_field("block_ids", ()),
        "request 'c': block_ids: block ids of 0 KV cache groups",
    ),
    "a block that does not exist": (
        set_new_field("block_ids", ([8, 2**31 - 1],)),
        "request 'c': block_ids: 2147483647: expected",
    ),
}
INVALID_RESUMED = {
    "a resumed id without an entry": (
        lambda out: out.scheduled_cached_reqs.resumed_req_ids.add("z"),
        "request 'z': resumed_req_ids: no entry: expected an entry in scheduled_cached_reqs",
    ),
    "no token ids": (
        lambda out: out.scheduled_cached_reqs.all_token_ids.clear(),
        "request 'a': all_token_ids: None: expected a sequence of token ids",
    ),
    "too few token ids": (
        lambda out: out.scheduled_cached_reqs.all_token_ids.update(a=[5] * 16),
        "request 'a': token_ids: none at position 16: expected a known token at every position",
    ),
    "no blocks": (set_cached_field(BLOCKS, ([],)), "request 'a': block_ids: 0 blocks: expected 2 to 16"),
    "a token outside the vocabulary": (
        lambda out: out.scheduled_cached_reqs.all_token_ids.update(a=[1001] * 17),
        "request 'a': all_token_ids: 1001: expected an id below vocab_size = 1000",
    ),
}


@pytest.mark.parametrize(("change", "match"), INVALID_DECODES.values(), ids=INVALID_DECODES)
def test_an_invalid_decode_step_is_refused(change, match):
    UnfilledStep("decode").assert_refused(change, match)


@pytest.mark.parametrize(("change", "match"), INVALID_PREFILLS.values(), ids=INVALID_PREFILLS)
def test_an_invalid_prefill_step_is_refused(change, match):
    UnfilledStep("prefill").assert_refused(change, match)


@pytest.mark.parametrize(("change", "match"), INVALID_RESUMED.values(), ids=INVALID_RESUMED)
def test_an_invalid_resumed_request_is_refused(change, match):
    UnfilledStep("resumed").assert_refused(change, match)


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda value: set_scheduled_count("b", value), "request 'b': num_scheduled_tokens: "),
        (lambda value: set_padded_counts(b=value), "request 'b': num_scheduled_tokens_padded: "),
        (lambda value: set_attribute("num_seqs_padded", value), "num_seqs_padded: "),
        (lambda value: set_cached_field(COMPUTED, value, 1), "request 'b': num_computed_tokens: "),
        (lambda value: set_cached_field(OUTPUTS, value, 1), "request 'b': num_output_tokens: "),
    ],
    ids=[
        "num_scheduled_tokens",
        "num_scheduled_tokens_padded",
        "num_seqs_padded",
        "num_computed_tokens",
        "num_output_tokens",
    ],
)
def test_a_count_that_is_not_an_integer_is_refused(change, match, value):
    assert repr(value) in UnfilledStep("decode").assert_refused(change(value), match)


def test_a_count_whose_index_method_clears_the_output_is_refused():
    unfilled = UnfilledStep("decode")

    class Hostile:
        def __index__(self):
            for counts in (wrong.num_scheduled_tokens, wrong.num_scheduled_tokens_padded):
                counts.clear()
            wrong.scheduled_cached_reqs.req_ids.clear()
            raise RuntimeError("not an integer")

    wrong = copy.deepcopy(unfilled.out)
    wrong.num_scheduled_tokens["a"] = Hostile()
    assert_refused(unfilled.worker, lambda: unfilled.worker.inputs.fill(wrong), "request 'a': num_scheduled_tokens: ")
    unfilled.worker.fill(unfilled.out)


def test_an_output_of_the_stock_scheduler_is_refused():
    s = harness.build(Scheduler)
    add(s, a=(10, 2))
    inputs = VllmInputs(build().neuron_config)
    out = s.schedule()
    with pytest.raises(ValueError, match=r"num_scheduled_tokens_padded: missing: expected the output of NeuronSched"):
        inputs.fill(out)
    assert inputs.num_requests == 0


@pytest.mark.parametrize(
    "change",
    [
        set_attribute("num_scheduled_tokens", [("a", 1)]),
        set_attribute("finished_req_ids", {1}),
        set_attribute("finished_req_ids", None),
        set_attribute("scheduled_new_reqs", None),
        lambda out: setattr(out.scheduled_cached_reqs, "req_ids", ("a", "b")),
    ],
)
def test_a_field_of_another_type_is_refused(change):
    message = UnfilledStep("decode").assert_refused(change, "scheduler_output: ")
    assert message.endswith("expected a SchedulerOutput of vLLM")


@pytest.mark.parametrize("value", [None, 5, {}, [], object()], ids=repr)
def test_a_value_that_is_no_scheduler_output_is_refused(value):
    inputs = VllmInputs(build().neuron_config)
    with pytest.raises(
        TypeError, match=r"^scheduler_output: .*num_scheduled_tokens.*expected a SchedulerOutput of vLLM"
    ):
        inputs.fill(value)


# The fields of vLLM's request data in all supported releases. Another field could change tokens or block tables, which
# `VllmInputs` would miss.
FIELDS = {
    NewRequestData: {
        "req_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "block_ids",
        "num_computed_tokens",
        "lora_request",
        "prompt_embeds",
        "prompt_is_token_ids",
        "prefill_token_ids",
        "replay_start",
    },
    CachedRequestData: {
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    },
}


@pytest.mark.parametrize("data_class", FIELDS, ids=lambda data_class: data_class.__name__)
def test_no_release_has_other_fields_of_request_data(data_class):
    found = {field.name for field in dataclasses.fields(data_class)}
    assert found <= FIELDS[data_class]
    assert FIELDS[data_class] - found <= {"replay_start"}
