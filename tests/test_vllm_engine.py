"""Against stock: on a real engine every request gets the tokens that vLLM's own scheduler gives it, phases never mix.

Tokens are compared, so the model must answer the same whatever else is in the batch. Batching changes the last bits of
a logit; a gap between the two best logits that is far wider than that, at every token, makes greedy sampling exact
(`test_greedy_choice_has_room` measures it). vLLM's dummy weights are so small that hardly more than the last token
matters to them, and a broken KV cache would go unseen; therefore everything runs once more with weights for which the
whole prompt matters.

The engine is vLLM's for the CPU, in this process.
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
from vllm_engine import SEQS_BUCKETS, TOKEN_BUCKETS, WITH_LOGITS, engine, one_process, recording, serve, workload
from vllm_model import write_model, write_weights

current_platform.import_kernels()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # numba, xgrammar and others warn
    pytest.mark.skipif(
        not (current_platform.is_cpu() and hasattr(torch.ops._C, "init_cpu_memory_env")),
        reason="the CPU kernels of this vLLM do not load here: its engine cannot run",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def in_this_process():
    with one_process():
        yield


@pytest.fixture(scope="module")
def drawn_model(tmp_path_factory):
    return write_weights(write_model(tmp_path_factory.mktemp("drawn")))


@pytest.fixture(scope="module", params=["dummy weights", "drawn weights"])
def model(request, drawn_model, tmp_path_factory):
    return drawn_model if request.param == "drawn weights" else write_model(tmp_path_factory.mktemp("dummy"))


@pytest.fixture(scope="module")
def stock(model):
    """What vLLM's own scheduler gives, all requests in full."""
    with engine(model, recording(Scheduler), **WITH_LOGITS) as (llm, core):
        told, _, logits = serve(llm, core, workload(), logprobs=2)
        return SimpleNamespace(told=told, logits=logits, steps=core.scheduler.steps)


ENGINES = pytest.mark.parametrize(
    ("name", "async_engine"),
    [("NeuronScheduler", False), ("NeuronAsyncScheduler", False), ("NeuronAsyncScheduler", True)],
    ids=["sync", "async class, one-step engine", "async"],
)


def test_greedy_choice_has_room(model, stock):
    """Another batching changes the best logit far less than the second best is away, at every token."""
    requests = workload()[:24]
    with engine(model, max_num_seqs=3, max_num_batched_tokens=100, **WITH_LOGITS) as (llm, core):
        logits = serve(llm, core, requests, logprobs=2)[2]
    noise = max(abs(logits[at][0] - stock.logits[at][0]) / abs(logits[at][0]) for at in logits)
    room = min((first - second) / abs(first) for first, second in stock.logits.values())
    assert len(logits) > 150 and len(stock.logits) > 400
    assert room > 10 * noise


def test_the_whole_prompt_matters_to_the_drawn_weights(drawn_model):
    prompt = random.Random(2).choices(range(3, 512), k=600)
    prompts = {"same": prompt}
    for position in (0, 100, 300, 500):
        prompts[f"other token at {position}"] = [*prompt[:position], 7, *prompt[position + 1 :]]
    with engine(drawn_model, **WITH_LOGITS) as (llm, core):
        requests = [(0, name, tokens, 1, {}) for name, tokens in prompts.items()]
        best = {name: values[0] for (name, _), values in serve(llm, core, requests, logprobs=2)[2].items()}
    expected = best.pop("same")
    assert {name for name, logit in best.items() if abs(logit - expected) > 1e-3 * expected} == best.keys(), best


def test_the_workload_has_what_it_is_meant_to_have(stock):
    told, steps = stock.told, stock.steps
    assert len(told) == 64
    assert any(step.prefills and step.real.keys() - step.prefills for step in steps), "stock mixes phases"
    assert any(step.preempted for step in steps), "stock runs out of blocks"
    assert sum(step.hits for step in steps) >= 5
    assert {reason for _, reason in told.values()} == {"stop", "length"}


@ENGINES
def test_tokens_equal_those_of_stock(model, stock, name, async_engine):
    cls = recording(getattr(neuron_sched, name))
    aborts = [(step, state) for step in (3, 30, 60) for state in ("waiting", "prefill", "decode")]
    with engine(model, cls, async_engine=async_engine) as (llm, core):
        told, aborted, _ = serve(llm, core, workload(), aborts)
        scheduler = core.scheduler
        assert scheduler.most_in_flight == (2 if async_engine else 1)
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1
    for request, (tokens, reason) in stock.told.items():
        if request in aborted:
            so_far = told.get(request, ([], None))[0]
            assert so_far == tokens[: len(so_far)], f"{request}, aborted when it was in state {aborted[request]}"
        else:
            assert told[request] == (tokens, reason), request
    assert sum(step.hits for step in scheduler.steps) >= 5
    assert not any(step.preempted for step in scheduler.steps)
    check_phases_and_padding(scheduler.steps)


def check_phases_and_padding(steps):
    kinds = set()
    for step in steps:
        if step.prefills:
            kinds.add("prefill")
            assert step.prefills == step.real.keys(), "prefill and decode in one step"
            tokens = sum(step.real.values())
            assert sum(step.padded.values()) == get_bucket_for_count(tokens, TOKEN_BUCKETS)
            assert step.padded.keys() == step.real.keys()
            assert step.seqs_padded == 0
        else:
            kinds.add("decode")
            assert step.padded == step.real
            assert step.seqs_padded == get_bucket_for_count(len(step.real), SEQS_BUCKETS)
    assert kinds == {"prefill", "decode"}


# Structured output


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green", "blue"]}},
    "required": ["ok", "colour"],
    "additionalProperties": False,
}


def served_with_grammars(model, cls, async_engine=False):
    """Every second request is held to a grammar."""
    grammars = [StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(choice=["yes", "no", "perhaps"])]
    requests = [
        (*request[:3], 60, {"structured_outputs": grammars[i // 2 % 2], "ignore_eos": False}) if i % 2 else request
        for i, request in enumerate(workload()[:12])
    ]
    # Else the model may write blanks for ever, which JSON allows.
    changes = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    with engine(model, recording(cls), async_engine=async_engine, skip_tokenizer_init=False, **changes) as (llm, core):
        told = serve(llm, core, requests)[0]
        held = [told[name][0] for _, name, *_, more in requests if "structured_outputs" in more]
        return told, llm.get_tokenizer().batch_decode(held, skip_special_tokens=True), core.scheduler


@pytest.fixture(scope="module")
def stock_with_grammars(drawn_model):
    return served_with_grammars(drawn_model, Scheduler)


@ENGINES
def test_structured_output_equals_that_of_stock(drawn_model, stock_with_grammars, name, async_engine):
    told, texts, scheduler = served_with_grammars(drawn_model, getattr(neuron_sched, name), async_engine)
    assert told == stock_with_grammars[0]
    assert len(texts) == 6
    for text in texts[::2]:
        assert json.loads(text).keys() == {"ok", "colour"}
    assert set(texts[1::2]) <= {"yes", "no", "perhaps"}
    check_phases_and_padding(scheduler.steps)


# Speculative decoding. Near the end of the context stock trims the last steps (4, 3, 2, 1 wide); each of these widths
# would be one more compiled graph.


SHORT = 128
NO_DRAFTS_ABOVE = SHORT - 3 - 2 * 3


def served_near_the_end(model, cls, async_engine=False, draft=None):
    """Requests that use up the whole context."""
    rng = random.Random(8)
    requests = [
        (n, f"r{n}", [rng.randrange(3, 512) for _ in range(n)], SHORT, {}) for n in (1, 20, 50, 90, 99, 125, 127)
    ]
    requests = [(i, *request[1:]) for i, request in enumerate(requests)]
    shape = {"max_model_len": SHORT, "max_num_batched_tokens": SHORT, "speculative_config": draft}
    with engine(model, recording(cls), async_engine=async_engine, **shape) as (llm, core):
        return serve(llm, core, requests)[0], core.scheduler


@pytest.fixture(scope="module")
def stock_near_the_end(drawn_model):
    return served_near_the_end(drawn_model, Scheduler)[0]


@pytest.mark.parametrize("async_engine", [False, True], ids=["one-step engine", "async"])
def test_draft_model_at_the_end_of_the_context(drawn_model, stock_near_the_end, tmp_path, async_engine):
    """Every step is 1 or 1 + k wide, and a request that has stopped drafting never drafts again."""
    draft = write_weights(write_model(tmp_path), noise=0.05)
    draft = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    told, scheduler = served_near_the_end(drawn_model, neuron_sched.NeuronAsyncScheduler, async_engine, draft)
    assert told == stock_near_the_end
    widths = decode_widths(scheduler)
    assert {width for of_one in widths.values() for width, _ in of_one} == {1, 4}
    for of_one in widths.values():
        assert of_one == sorted(of_one, key=lambda step: -step[0])


@pytest.mark.llvm
def test_ngram_at_the_end_of_the_context(drawn_model, stock_near_the_end):
    """N-grams may propose fewer tokens than k, or none, at any time; but no step may be cut where the context ends."""
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    told, scheduler = served_near_the_end(drawn_model, neuron_sched.NeuronAsyncScheduler, False, draft)
    assert told == stock_near_the_end
    steps = [step for of_one in decode_widths(scheduler).values() for step in of_one]
    assert {width for width, computed in steps if computed <= NO_DRAFTS_ABOVE} >= {1, 4}
    assert {width for width, computed in steps if computed > NO_DRAFTS_ABOVE} == {1}


def decode_widths(scheduler):
    """{request: [(tokens of a step, tokens computed before it)]} of all decode steps."""
    widths = {}
    for step in scheduler.steps:
        if not step.prefills:
            assert step.padded == step.real
            for request, width in step.real.items():
                widths.setdefault(request, []).append((width, step.before[request]))
    return widths
