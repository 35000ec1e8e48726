"""vLLM's CPU engine in this process: each request gets the tokens of the stock scheduler, and no step mixes phases.

The comparison requires that the sampled tokens of a request do not depend on the rest of the batch. Batching changes
the last bits of a logit. Greedy sampling is not affected if the gap between the two highest logits is much wider, which
`test_logit_gaps_exceed_batching_noise` measures.

vLLM's dummy weights are so small that the logits depend on little more than the last token, so a broken KV cache would
go unnoticed. The tests therefore also run with weights whose logits depend on the whole prompt.
"""

import json
import random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import torch
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler

import neuron_sched
from neuron_sched.vllm.buckets import get_bucket_for_count
from tests.vllm.support.llm import (
    SEQS_BUCKETS,
    TOKEN_BUCKETS,
    WITH_LOGITS,
    engine,
    one_process,
    recording,
    serve,
    workload,
)
from tests.vllm.support.model import write_model, write_weights

current_platform.import_kernels()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # numba, xgrammar and other libraries raise warnings.
    pytest.mark.skipif(
        not (current_platform.is_cpu() and hasattr(torch.ops._C, "init_cpu_memory_env")),
        reason="the CPU kernels of this vLLM cannot be loaded on this machine",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def run_in_one_process():
    with one_process():
        yield


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return write_weights(write_model(tmp_path_factory.mktemp("random")))


@pytest.fixture(scope="module", params=["dummy weights", "random weights"])
def model(request, random_model, tmp_path_factory):
    return random_model if request.param == "random weights" else write_model(tmp_path_factory.mktemp("dummy"))


@pytest.fixture(scope="module")
def stock(model):
    """Serve the workload with the stock scheduler, without aborts."""
    with engine(model, recording(Scheduler), **WITH_LOGITS) as (llm, core):
        results, _, logits = serve(llm, core, workload(), logprobs=2)
        return SimpleNamespace(results=results, logits=logits, steps=core.scheduler.steps)


ENGINES = pytest.mark.parametrize(
    ("name", "async_engine"),
    [("NeuronScheduler", False), ("NeuronAsyncScheduler", False), ("NeuronAsyncScheduler", True)],
    ids=["sync", "async class, one-step engine", "async"],
)


def test_logit_gaps_exceed_batching_noise(model, stock):
    """The smallest gap between the two highest logits is over 10 times the largest change caused by batching."""
    requests = workload()[:24]
    with engine(model, max_num_seqs=3, max_num_batched_tokens=100, **WITH_LOGITS) as (llm, core):
        logits = serve(llm, core, requests, logprobs=2)[2]
    noise = max(abs(logits[at][0] - stock.logits[at][0]) / abs(logits[at][0]) for at in logits)
    gap = min((first - second) / abs(first) for first, second in stock.logits.values())
    assert len(logits) > 150 and len(stock.logits) > 400
    assert gap > 10 * noise


def test_the_random_weights_depend_on_the_whole_prompt(random_model):
    prompt = random.Random(2).choices(range(3, 512), k=600)
    prompts = {"unchanged": prompt}
    for position in (0, 100, 300, 500):
        prompts[f"changed at {position}"] = [*prompt[:position], 7, *prompt[position + 1 :]]
    with engine(random_model, **WITH_LOGITS) as (llm, core):
        requests = [(0, name, tokens, 1, {}) for name, tokens in prompts.items()]
        best = {name: values[0] for (name, _), values in serve(llm, core, requests, logprobs=2)[2].items()}
    expected = best.pop("unchanged")
    assert {name for name, logit in best.items() if abs(logit - expected) > 1e-3 * expected} == best.keys(), best


def test_the_workload_covers_mixed_steps_preemption_hits_and_both_finish_reasons(stock):
    results, steps = stock.results, stock.steps
    assert len(results) == 64
    assert any(step.prefills and step.unpadded.keys() - step.prefills for step in steps), (
        "the stock scheduler mixes no phases"
    )
    assert any(step.preempted for step in steps), "the stock scheduler preempts no request"
    assert sum(step.hits for step in steps) >= 5
    assert {reason for _, reason in results.values()} == {"stop", "length"}


@ENGINES
def test_tokens_equal_those_of_the_stock_scheduler(model, stock, name, async_engine):
    cls = recording(getattr(neuron_sched, name))
    aborts = [(step, state) for step in (3, 30, 60) for state in ("waiting", "prefill", "decode")]
    with engine(model, cls, async_engine=async_engine) as (llm, core):
        results, aborted, _ = serve(llm, core, workload(), aborts)
        scheduler = core.scheduler
        assert scheduler.most_in_flight == (2 if async_engine else 1)
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1
    for request, (tokens, reason) in stock.results.items():
        if request in aborted:
            partial = results.get(request, ([], None))[0]
            assert partial == tokens[: len(partial)], f"{request}, aborted in state {aborted[request]}"
        else:
            assert results[request] == (tokens, reason), request
    assert sum(step.hits for step in scheduler.steps) >= 5
    assert not any(step.preempted for step in scheduler.steps)
    check_phases_and_padding(scheduler.steps)


def check_phases_and_padding(steps):
    kinds = set()
    for step in steps:
        if step.prefills:
            kinds.add("prefill")
            assert step.prefills == step.unpadded.keys(), "prefill and decode in one step"
            tokens = sum(step.unpadded.values())
            assert sum(step.padded.values()) == get_bucket_for_count(tokens, TOKEN_BUCKETS)
            assert step.padded.keys() == step.unpadded.keys()
            assert step.seqs_padded == 0
        else:
            kinds.add("decode")
            assert step.padded == step.unpadded
            assert step.seqs_padded == get_bucket_for_count(len(step.unpadded), SEQS_BUCKETS)
    assert kinds == {"prefill", "decode"}


# Structured output


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green", "blue"]}},
    "required": ["ok", "colour"],
    "additionalProperties": False,
}


def served_with_grammars(model, cls, async_engine=False):
    """Serve 12 requests, every second one with a grammar. Return the results, the grammar texts and the scheduler."""
    grammars = [StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(choice=["yes", "no", "perhaps"])]
    requests = [
        (*request[:3], 60, {"structured_outputs": grammars[i // 2 % 2], "ignore_eos": False}) if i % 2 else request
        for i, request in enumerate(workload()[:12])
    ]
    # JSON allows any number of blanks, so the model could otherwise emit nothing else.
    changes = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    with engine(model, recording(cls), async_engine=async_engine, skip_tokenizer_init=False, **changes) as (llm, core):
        results = serve(llm, core, requests)[0]
        constrained = [results[name][0] for _, name, *_, more in requests if "structured_outputs" in more]
        return results, llm.get_tokenizer().batch_decode(constrained, skip_special_tokens=True), core.scheduler


@pytest.fixture(scope="module")
def stock_with_grammars(random_model):
    return served_with_grammars(random_model, Scheduler)


@ENGINES
def test_structured_output_equals_that_of_the_stock_scheduler(random_model, stock_with_grammars, name, async_engine):
    results, texts, scheduler = served_with_grammars(random_model, getattr(neuron_sched, name), async_engine)
    assert results == stock_with_grammars[0]
    assert len(texts) == 6
    for text in texts[::2]:
        assert json.loads(text).keys() == {"ok", "colour"}
    assert set(texts[1::2]) <= {"yes", "no", "perhaps"}
    check_phases_and_padding(scheduler.steps)


# Speculative decoding near `max_model_len`. The stock scheduler cuts the drafts there, to decode rows of 4, 3, 2 and 1
# tokens, and each of these widths would need a compiled graph.


SHORT_MODEL_LEN = 128
# Computed tokens above which the async class schedules a request without drafts, for 3 drafts.
NO_DRAFTS_ABOVE = SHORT_MODEL_LEN - 3 - 2 * 3


def served_near_max_model_len(model, cls, async_engine=False, draft=None):
    """Serve requests that fill the context. Return the results and the scheduler."""
    rng = random.Random(8)
    requests = [
        (n, f"r{n}", [rng.randrange(3, 512) for _ in range(n)], SHORT_MODEL_LEN, {})
        for n in (1, 20, 50, 90, 99, 125, 127)
    ]
    requests = [(i, *request[1:]) for i, request in enumerate(requests)]
    shape = {"max_model_len": SHORT_MODEL_LEN, "max_num_batched_tokens": SHORT_MODEL_LEN, "speculative_config": draft}
    with engine(model, recording(cls), async_engine=async_engine, **shape) as (llm, core):
        return serve(llm, core, requests)[0], core.scheduler


@pytest.fixture(scope="module")
def stock_near_max_model_len(random_model):
    return served_near_max_model_len(random_model, Scheduler)[0]


@pytest.mark.parametrize("async_engine", [False, True], ids=["one-step engine", "async"])
def test_decodes_with_a_draft_model_have_two_widths(random_model, stock_near_max_model_len, tmp_path, async_engine):
    """Each decode row has 1 or 1 + k tokens, and a request without drafts never gets drafts again."""
    draft = write_weights(write_model(tmp_path), noise=0.05)
    draft = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    results, scheduler = served_near_max_model_len(random_model, neuron_sched.NeuronAsyncScheduler, async_engine, draft)
    assert results == stock_near_max_model_len
    widths = decode_widths(scheduler)
    assert {width for row_widths in widths.values() for width, _ in row_widths} == {1, 4}
    for row_widths in widths.values():
        assert row_widths == sorted(row_widths, key=lambda step: -step[0])


@pytest.mark.llvm
def test_ngram_drafts_stop_near_max_model_len(random_model, stock_near_max_model_len):
    """N-grams may propose fewer than k tokens in any step, but near `max_model_len` no step has drafts."""
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    results, scheduler = served_near_max_model_len(random_model, neuron_sched.NeuronAsyncScheduler, False, draft)
    assert results == stock_near_max_model_len
    steps = [step for row_widths in decode_widths(scheduler).values() for step in row_widths]
    assert {width for width, computed in steps if computed <= NO_DRAFTS_ABOVE} >= {1, 4}
    assert {width for width, computed in steps if computed > NO_DRAFTS_ABOVE} == {1}


def decode_widths(scheduler):
    """Return, by request, (number of tokens, tokens computed before) of each of its decode rows."""
    widths = {}
    for step in scheduler.steps:
        if not step.prefills:
            assert step.padded == step.unpadded
            for request, width in step.unpadded.items():
                widths.setdefault(request, []).append((width, step.before[request]))
    return widths
