"""What `VllmInputs` refuses: each fault is named, changes nothing, and the right call that follows is filled."""

import copy
import dataclasses
import re

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import torch
from vllm.pooling_params import PoolingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler

import vllm_harness
from neuron_sched.vllm.inputs import VllmInputs
from neuron_sched.vllm.scheduler import NeuronAsyncScheduler
from vllm_inputs_setup import Watch
from vllm_setup import add, build, build_ahead

NO_NUMBERS = [None, "1", 1.5, True, [1]]


def refused(watch, call, match, error=(TypeError, ValueError)):
    """The call raises, and nothing has changed: no array, nobody who is known, no step in flight."""
    before = (watch.inputs.num_requests, watch.inputs.num_in_flight)
    message = watch.watched.refused(call, match, error)
    assert (watch.inputs.num_requests, watch.inputs.num_in_flight) == before
    return message


class Steps:
    """The output of a step that was scheduled and not filled yet, and its worker."""

    def __init__(self, kind):
        self.sched = build(neuron_config={"max_prefills_per_batch": 2, "decode_context_length_buckets": [64]})
        self.sched.use_v2_model_runner = False  # those who start over are told as such, not as new ones
        self.watch = Watch(self.sched, vocab_size=1000)
        add(self.sched, a=(16, 9), b=(10, 9))
        self.watch.step()
        if kind == "prefill":
            self.watch.step()
            add(self.sched, c=(20, 3), d=(30, 3))
        elif kind == "resumed":
            self.sched.reset_prefix_cache(reset_running_requests=True)
        self.out = self.sched.schedule()

    def refused(self, change, match):
        """A changed output is refused; the unchanged one is filled, and all goes on to the end."""
        wrong = copy.deepcopy(self.out)
        change(wrong)
        message = refused(self.watch, lambda: self.watch.inputs.fill(wrong), re.escape(match))
        self.watch.fill(self.out)
        self.watch.deliver()
        self.watch.run()
        return message


def cached(field, value, at=0):
    def change(out):
        getattr(out.scheduled_cached_reqs, field)[at] = value

    return change


def new(field, value, at=0):
    def change(out):
        setattr(out.scheduled_new_reqs[at], field, value)

    return change


def count(name, value):
    def change(out):
        out.num_scheduled_tokens[name] = value

    return change


def padded(**counts):
    def change(out):
        out.num_scheduled_tokens_padded.update(counts)

    return change


def both(*changes):
    def change(out):
        for one in changes:
            one(out)

    return change


def attribute(name, value):
    def change(out):
        setattr(out, name, value)

    return change


def without(name):
    def change(out):
        delattr(out, name)

    return change


def renamed(out):
    """b goes on under a name that nobody told."""
    out.scheduled_cached_reqs.req_ids[1] = "z"
    for counts in (out.num_scheduled_tokens, out.num_scheduled_tokens_padded):
        counts["z"] = counts.pop("b")


def told_twice(out):
    out.scheduled_new_reqs[1] = out.scheduled_new_reqs[0]
    out.scheduled_new_reqs.append(out.scheduled_new_reqs[0])


def left_out(out):
    """Somebody is told who is not scheduled."""
    del out.num_scheduled_tokens["d"], out.num_scheduled_tokens_padded["d"]


def ended(out):
    out.finished_req_ids = {"b"}


def a_third(out):
    third = copy.copy(out.scheduled_new_reqs[0])
    third.req_id = "e"
    out.scheduled_new_reqs.append(third)
    out.num_scheduled_tokens["e"] = 1
    out.num_scheduled_tokens_padded.update(d=43, e=1)


COMPUTED, BLOCKS, OUTPUTS = "num_computed_tokens", "new_block_ids", "num_output_tokens"
WRONG_DECODES = {
    "a prompt among decodes": (cached(COMPUTED, 3, 1), "a decode step holds prefill b with 1 tokens"),
    "decodes as a prefill": (
        both(attribute("num_seqs_padded", 0), padded(b=63)),
        "a prefill step holds decode a with 1 tokens",
    ),
    "an unknown id": (renamed, "request 'z': num_scheduled_tokens: unknown: expected a request that was told before"),
    "one who ended": (ended, "request 'b': request: unknown: expected one that was told before, and not told"),
    "another padded count": (padded(a=2), "request 'a': num_scheduled_tokens_padded: 2: expected the real count, 1"),
    "no padded count": (
        attribute("num_scheduled_tokens_padded", {"a": 1, "z": 1}),
        "request 'b': num_scheduled_tokens_padded: none: expected a count",
    ),
    "one padded count too many": (
        padded(z=1),
        "num_scheduled_tokens_padded: 3 counts: expected those of the 2 scheduled requests",
    ),
    "no batch bucket": (attribute("num_seqs_padded", 3), "num_seqs_padded: 3: expected one of [1, 2, 4]"),
    "a smaller batch bucket": (attribute("num_seqs_padded", 1), "a decode step of 2 rows, a first, is padded to 1"),
    "several tokens": (
        both(count("a", 2), padded(a=2)),
        "request 'a': num_scheduled_tokens: 2: expected at most the 1 that are left",
    ),
    "no tokens": (both(count("a", 0), padded(a=0)), "a decode step holds decode a with 0 tokens"),
    "fewer than none": (both(count("a", -5), padded(a=-5)), "a decode step holds decode a with -5 tokens"),
    "far too many": (
        both(count("a", 2**62), padded(a=2**62)),
        f"request 'a': num_scheduled_tokens: {2**62}: expected at most",
    ),
    "no position": (cached(COMPUTED, -1), "request 'a': num_computed_tokens: -1: expected 0 to 16"),
    "a position beyond": (cached(COMPUTED, 17), "request 'a': num_computed_tokens: 17: expected 0 to 16"),
    "fewer outputs than none": (cached(OUTPUTS, -1), "request 'a': num_output_tokens: -1: expected a count"),
    "outputs beyond all bounds": (cached(OUTPUTS, 2**63 - 1), "request 'a': num_output_tokens: 9223372036854775807"),
    "no block for the position": (
        cached(BLOCKS, None),
        "request 'a': block_ids: 1 blocks: expected 2 to 16 for positions up to 16",
    ),
    "the null block": (cached(BLOCKS, ([0],)), "request 'a': block_ids: 0: expected ids from 1 to num_blocks = 399"),
    "a block too many": (cached(BLOCKS, ([400],)), "request 'a': block_ids: 400: expected ids from 1 to"),
    "a block that it has": (cached(BLOCKS, ([1],)), "request 'a': block_ids: 1 twice: expected each block once"),
    "a block twice": (cached(BLOCKS, ([9, 9],)), "request 'a': block_ids: 9 twice: expected each block once"),
    "no block id": (cached(BLOCKS, (["9"],)), "request 'a': new_block_ids[0]: '9': expected a whole number"),
    "two KV cache groups": (
        cached(BLOCKS, ([9], [10])),
        "request 'a': new_block_ids: those of 2 KV cache groups: expected one group, with full attention",
    ),
    "blocks of no group": (cached(BLOCKS, [9]), "request 'a': new_block_ids: [9]: expected a tuple"),
    "drafts": (
        attribute("scheduled_spec_decode_tokens", {"a": [3, 4]}),
        "request 'a': scheduled_spec_decode_tokens: [3, 4]: expected none: drafts are not supported",
    ),
    "a table that is replaced": (
        attribute("block_table_updates", {"a": ([4, 5],)}),
        "request 'a': block_table_updates: ([4, 5],): expected none",
    ),
    "told nowhere": (
        both(count("z", 1), padded(z=1)),
        "request 'z': num_scheduled_tokens: told nowhere: expected one of scheduled_new_reqs or scheduled_cached_reqs",
    ),
    "lists of different lengths": (
        lambda out: out.scheduled_cached_reqs.num_output_tokens.pop(),
        "scheduled_cached_reqs: [2, 2, 2, 1] ids, counts, blocks and outputs: expected as many of each",
    ),
    "no padding attached": (without("num_seqs_padded"), "scheduler_output: num_seqs_padded: missing: expected the"),
    "no padded counts attached": (
        without("num_scheduled_tokens_padded"),
        "scheduler_output: num_scheduled_tokens_padded: missing: expected the output of NeuronScheduler or",
    ),
}
WRONG_PREFILLS = {
    "a position beyond": (new(COMPUTED, 20), "request 'c': num_computed_tokens: 20: expected 0 to 19"),
    "no token bucket": (padded(d=45), "num_scheduled_tokens_padded: 65 in all: expected a sum of one of [64]"),
    "padded to less": (padded(c=15, d=49), "request 'c': num_scheduled_tokens_padded: 15: expected at least 20"),
    "as a decode": (
        both(attribute("num_seqs_padded", 2), padded(d=30)),
        "a decode step holds prefill c with 20 tokens",
    ),
    "more than is left": (
        both(count("c", 21), padded(c=21, d=43)),
        "request 'c': num_scheduled_tokens: 21: expected at most the 20 that are left",
    ),
    "no tokens": (count("c", 0), "a prefill step holds prefill c with 0 tokens"),
    "told twice": (told_twice, "request 'c': scheduled_new_reqs, scheduled_cached_reqs: told twice"),
    "told and not scheduled": (left_out, "request 'd': num_scheduled_tokens: none: expected a count of each request"),
    "three prompts where two may be": (a_third, "rows: 3 prompts: expected at most max_prefills_per_batch = 2"),
    "no prompt": (new("prompt_token_ids", []), "request 'c': prompt_token_ids: none: expected at least one"),
    "a token outside the vocabulary": (
        new("prompt_token_ids", [5] * 19 + [1000]),
        "request 'c': prompt_token_ids: 1000: expected an id below vocab_size = 1000",
    ),
    "no token id": (new("prompt_token_ids", [5, -1]), "request 'c': prompt_token_ids[1]: -1: expected a whole number"),
    "a prompt of embeddings": (new("prompt_token_ids", None), "request 'c': prompt_embeds: given: expected a prompt"),
    "a prompt with embeddings": (new("prompt_embeds", torch.zeros(1)), "request 'c': prompt_embeds: given: expected"),
    "pooling": (new("pooling_params", PoolingParams(task="embed")), "request 'c': pooling_params: PoolingParams("),
    "fewer tokens than the prompt": (
        new("prefill_token_ids", [5] * 19),
        "request 'c': prefill_token_ids: 19 ids: expected at least the 20 of the prompt",
    ),
    "no blocks": (new("block_ids", ([],)), "request 'c': block_ids: 0 blocks: expected 2 to 16 for positions up to 19"),
    "two KV cache groups": (new("block_ids", ([8, 9], [8, 9])), "request 'c': block_ids: those of 2 KV cache groups"),
    "no KV cache group": (new("block_ids", ()), "request 'c': block_ids: those of 0 KV cache groups"),
    "a block that does not exist": (
        new("block_ids", ([8, 2**31 - 1],)),
        "request 'c': block_ids: 2147483647: expected",
    ),
}
WRONG_RESUMPTIONS = {
    "of nobody": (
        lambda out: out.scheduled_cached_reqs.resumed_req_ids.add("z"),
        "request 'z': resumed_req_ids: told nowhere: expected one of scheduled_cached_reqs",
    ),
    "without tokens": (
        lambda out: out.scheduled_cached_reqs.all_token_ids.clear(),
        "request 'a': all_token_ids: None: expected a sequence of token ids",
    ),
    "too few tokens": (
        lambda out: out.scheduled_cached_reqs.all_token_ids.update(a=[5] * 16),
        "request 'a': token_ids: none at position 16: expected those of a prefill known",
    ),
    "without blocks": (cached(BLOCKS, ([],)), "request 'a': block_ids: 0 blocks: expected 2 to 16"),
    "a token outside the vocabulary": (
        lambda out: out.scheduled_cached_reqs.all_token_ids.update(a=[1001] * 17),
        "request 'a': all_token_ids: 1001: expected an id below vocab_size = 1000",
    ),
}


@pytest.mark.parametrize(("change", "match"), WRONG_DECODES.values(), ids=WRONG_DECODES)
def test_a_wrong_decode(change, match):
    Steps("decode").refused(change, match)


@pytest.mark.parametrize(("change", "match"), WRONG_PREFILLS.values(), ids=WRONG_PREFILLS)
def test_a_wrong_prefill(change, match):
    Steps("prefill").refused(change, match)


@pytest.mark.parametrize(("change", "match"), WRONG_RESUMPTIONS.values(), ids=WRONG_RESUMPTIONS)
def test_a_wrong_resumption(change, match):
    Steps("resumed").refused(change, match)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda value: count("b", value), "request 'b': num_scheduled_tokens: "),
        (lambda value: padded(b=value), "request 'b': num_scheduled_tokens_padded: "),
        (lambda value: attribute("num_seqs_padded", value), "num_seqs_padded: "),
        (lambda value: cached(COMPUTED, value, 1), "request 'b': num_computed_tokens: "),
        (lambda value: cached(OUTPUTS, value, 1), "request 'b': num_output_tokens: "),
    ],
    ids=["count", "padded", "rows", "computed", "outputs"],
)
def test_what_is_no_number(change, match, value):
    assert repr(value) in Steps("decode").refused(change(value), match)


def test_a_number_that_changes_what_is_being_read():
    steps = Steps("decode")

    class Hostile:
        def __index__(self):
            for counts in (wrong.num_scheduled_tokens, wrong.num_scheduled_tokens_padded):
                counts.clear()
            wrong.scheduled_cached_reqs.req_ids.clear()
            raise RuntimeError("no index")

    wrong = copy.deepcopy(steps.out)
    wrong.num_scheduled_tokens["a"] = Hostile()
    refused(steps.watch, lambda: steps.watch.inputs.fill(wrong), "request 'a': num_scheduled_tokens: ")
    steps.watch.fill(steps.out)


def test_the_stock_schedulers_output():
    s = vllm_harness.build(Scheduler)
    add(s, a=(10, 2))
    inputs = VllmInputs(build().neuron_config)
    out = s.schedule()
    with pytest.raises(ValueError, match=r"num_scheduled_tokens_padded: missing: expected the output of NeuronSched"):
        inputs.fill(out)
    assert inputs.num_requests == 0


@pytest.mark.parametrize(
    "change",
    [
        attribute("num_scheduled_tokens", [("a", 1)]),
        attribute("finished_req_ids", {1}),
        attribute("finished_req_ids", None),
        attribute("scheduled_new_reqs", None),
        lambda out: setattr(out.scheduled_cached_reqs, "req_ids", ("a", "b")),
    ],
)
def test_fields_of_another_type(change):
    message = Steps("decode").refused(change, "scheduler_output: ")
    assert message.endswith("expected a SchedulerOutput of vLLM")


@pytest.mark.parametrize("value", [None, 5, {}, [], object()], ids=repr)
def test_what_is_no_output_of_a_scheduler(value):
    inputs = VllmInputs(build().neuron_config)
    with pytest.raises(
        TypeError, match=r"^scheduler_output: .*num_scheduled_tokens.*expected a SchedulerOutput of vLLM"
    ):
        inputs.fill(value)


# What a worker is told of requests, in all releases: a field more may be one that changes their tokens or tables.
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


@pytest.mark.parametrize("told", FIELDS, ids=lambda told: told.__name__)
def test_no_release_tells_more_of_a_request(told):
    found = {field.name for field in dataclasses.fields(told)}
    assert found <= FIELDS[told]
    assert FIELDS[told] - found <= {"replay_start"}


# --- what the caller adds ---


class Ahead:
    """A decode of a and b whose tokens are being sampled, scheduled and not filled."""

    def __init__(self):
        self.sched = build_ahead(NeuronAsyncScheduler, 1, neuron_config={"decode_context_length_buckets": [64]})
        self.watch = Watch(self.sched, buffers=2, vocab_size=1000)
        add(self.sched, a=(16, 9), b=(10, 9))
        for _ in range(3):
            self.watch.step(1)
        self.out = self.sched.schedule()

    def refused(self, tokens, match, error=(TypeError, ValueError), **options):
        refused(self.watch, lambda: self.watch.inputs.fill(self.out, tokens, **options), re.escape(match), error)
        self.watch.fill(self.out)
        self.watch.run(1)


def raising(_):
    raise KeyError("nobody knows")


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (None, "request 'a': tokens: none at position 17: expected that of fill(), or that of the step that samples"),
        ([5, None], "request 'b': tokens: none at position 11: expected that of fill()"),
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
def test_wrong_tokens(tokens, match):
    Ahead().refused(tokens, match)


def test_a_callable_that_raises():
    Ahead().refused(raising, "nobody knows", KeyError)


@pytest.mark.parametrize(
    ("bucket", "match"),
    [
        (65, "context_bucket: 65: expected one of [64, 256] that holds 18 tokens"),
        (0, "context_bucket: 0: expected one of"),
        ("64", "context_bucket: '64': expected a whole number"),
    ],
)
def test_a_wrong_context_bucket(bucket, match):
    Ahead().refused([5, 6], match, context_bucket=bucket)


def test_a_prefill_knows_its_tokens_and_looks_back_on_all():
    steps = Steps("prefill")
    fill, out = steps.watch.inputs.fill, steps.out
    refused(steps.watch, lambda: fill(out, [1, 2]), r"tokens: \[1, 2\]: expected None: a prefill step knows its tokens")
    refused(steps.watch, lambda: fill(out, context_bucket=64), "context_bucket: 64: expected None for a prefill step")
    steps.watch.fill(out)


# --- accept ---


def test_nothing_is_due():
    inputs = VllmInputs(build().neuron_config)
    with pytest.raises(ValueError, match="accept: no step was filled that was not accepted"):
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
        ([[1], 2], "request 'b': sampled: 2: expected a list of one token, or an empty one"),
        ([[1], None], "request 'b': sampled: None: expected a list"),
        ({"a": [1], "b": [2]}, "sampled: {'a': [1], 'b': [2]}: expected a sequence with one list a row"),
        (None, "sampled: None: expected a sequence with one list a row"),
    ],
)
def test_wrong_samples(sampled, match):
    steps = Steps("decode")
    watch = steps.watch
    watch.fill(steps.out)
    refused(watch, lambda: watch.inputs.accept(sampled), re.escape(match))
    watch.deliver()
    watch.run()


def test_a_chunk_in_the_middle_has_no_token():
    s = build()
    watch = Watch(s)
    add(s, a=(100, 2))
    watch.fill(s.schedule())
    refused(watch, lambda: watch.inputs.accept([[7]]), r"request 'a': sampled: 7: expected \[\] for a chunk in the mid")
    watch.deliver()
    watch.run()


@pytest.mark.parametrize("sampled", [[[], [5]], [[7], [5]]])
def test_either_will_do_for_one_who_ended(sampled):
    steps = Ahead()
    watch = steps.watch
    steps.out.finished_req_ids = {"a"}
    for counts in (steps.out.num_scheduled_tokens, steps.out.num_scheduled_tokens_padded):
        del counts["a"]
    steps.out.num_seqs_padded = 1
    told = steps.out.scheduled_cached_reqs
    for column in (told.req_ids, told.num_computed_tokens, told.new_block_ids, told.num_output_tokens):
        del column[0]
    assert watch.inputs.fill(steps.out, [5]).input_ids.tolist() == [5]
    watch.inputs.accept(sampled)
    assert watch.inputs.num_in_flight == 1
