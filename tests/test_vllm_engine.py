"""Against stock: on a real engine every request gets the tokens that vLLM's own scheduler gives it, phases never mix.

Tokens are compared, so the model must answer the same whatever else is in the batch. Batching changes the last bits of
a logit; a gap between the two best logits that is far wider than that, at every token, makes greedy sampling exact
(`test_greedy_choice_has_room` measures it). vLLM's dummy weights are so small that hardly more than the last token
matters to them, and a broken KV cache would go unseen; therefore everything runs once more with weights for which the
whole prompt matters.

The engine is vLLM's for the CPU, in this process.
"""

import contextlib
import json
import os
import random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler

import neuron_sched
from neuron_sched.vllm.buckets import get_bucket_for_count
from vllm_harness import starts
from vllm_model import write_model, write_weights
from vllm_plugin import neuron_sched_test_plugin

current_platform.import_kernels()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # numba, xgrammar and others warn
    pytest.mark.skipif(
        not (current_platform.is_cpu() and hasattr(torch.ops._C, "init_cpu_memory_env")),
        reason="the CPU kernels of this vLLM do not load here: its engine cannot run",
    ),
]

MAX_MODEL_LEN, MAX_NUM_SEQS, BUDGET, BLOCK_SIZE = 1024, 8, 256, 32
TOKEN_BUCKETS, SEQS_BUCKETS = [128, 256], [1, 2, 4, 8]


def workload():
    """64 requests: (step of arrival, id, prompt, max_tokens, more sampling parameters)."""
    rng = random.Random(2)
    lengths = [1, 2, 31, 32, 33, 64, 100, 255, 256, 257, 300, 500, 700]
    prefixes = [[rng.randrange(3, 512) for _ in range(BLOCK_SIZE * blocks)] for blocks in (3, 3, 5, 9)]
    requests = []
    for i in range(64):
        tokens = [rng.randrange(3, 512) for _ in range(rng.choice(lengths))]
        if i % 3 == 0:
            tokens = rng.choice(prefixes) + tokens
        more = {"stop_token_ids": rng.sample(range(3, 512), 25)} if i % 4 == 1 else {}
        requests.append((i // 4, f"r{i:02}", tokens, 1 if i % 8 == 5 else rng.randrange(2, 20), more))
    return requests


def recording(base):
    """A subclass of the scheduler under test that keeps what every step was, and how many were in flight."""

    class Recording(base):
        def __init__(self, *args, **kwargs):
            self.steps, self.in_flight, self.most_in_flight = [], 0, 0
            super().__init__(*args, **kwargs)

        def schedule(self, *args, **kwargs):
            out = super().schedule(*args, **kwargs)
            if out.num_scheduled_tokens:
                before = starts(out)
                self.steps.append(
                    SimpleNamespace(
                        real=dict(out.num_scheduled_tokens),
                        before=before,
                        prefills={i for i in before if before[i] < self.requests[i].num_prompt_tokens},
                        preempted=len(getattr(out, "preempted_req_ids", None) or ()),
                        hits=sum(new.num_computed_tokens > 0 for new in out.scheduled_new_reqs),
                        padded=dict(getattr(out, "num_scheduled_tokens_padded", {})),
                        seqs_padded=getattr(out, "num_seqs_padded", 0),
                    )
                )
            self.in_flight += 1
            self.most_in_flight = max(self.in_flight, self.most_in_flight)
            return out

        def update_from_output(self, *args, **kwargs):
            self.in_flight -= 1
            return super().update_from_output(*args, **kwargs)

    return Recording


@contextlib.contextmanager
def engine(model, scheduler_cls=None, *, async_engine=False, **changes):
    """A vLLM engine of one process, and its core."""
    arguments = {
        "load_format": "auto" if (model / "model.safetensors").exists() else "dummy",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 49,
        "kv_cache_memory_bytes": 64 << 20,
        "async_scheduling": async_engine,
        "scheduler_cls": scheduler_cls,
    }
    llm = LLM(str(model), **{**arguments, **changes})
    core = llm.llm_engine.engine_core.engine_core
    try:
        assert (2 if async_engine else 1) == core.batch_queue_size, "what the CPU platform says has come through"
        yield llm, core
    finally:
        llm.llm_engine.engine_core.shutdown()


WITH_LOGITS = {"max_logprobs": 2, "logprobs_mode": "raw_logits"}


def serve(llm, core, requests, aborts=(), logprobs=None):
    """({request: (its tokens, finish reason)}, {request: the state that it was aborted in},
    {(request, position): its two highest logits}).

    `aborts` are (step, state): then the newest request in that state goes, as soon as there is one.
    """
    requests, aborts, told, aborted, logits = list(requests), list(aborts), {}, {}, {}
    for step in range(5000):
        while requests and requests[0][0] <= step:
            _, name, tokens, max_tokens, more = requests.pop(0)
            params = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": logprobs, **more}
            llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, SamplingParams(**params))
        if not requests and not llm.llm_engine.has_unfinished_requests():
            assert not aborts, f"nobody was ever found to be aborted: {aborts}"
            return told, aborted, logits
        for output in llm.llm_engine.step():
            told[output.request_id] = (list(output.outputs[0].token_ids), output.outputs[0].finish_reason)
            for position, best in enumerate(output.outputs[0].logprobs or ()):
                values = sorted((token.logprob for token in best.values()), reverse=True)
                logits[output.request_id, position] = values[:2]
        if aborts and aborts[0][0] <= step and (victim := in_state(core.scheduler, aborts[0][1])):
            aborted[victim] = aborts.pop(0)[1]
            llm.llm_engine.abort_request([victim])
        if hasattr(core.scheduler, "check"):
            core.scheduler.check()
    raise AssertionError(f"not finished after {step} steps: {list(core.scheduler.requests)}")


def in_state(scheduler, state):
    """The id of the newest request that waits, that is amid its prompt, or that has told two tokens."""
    waiting = {r.request_id for r in scheduler.waiting}
    found = None
    for r in scheduler.requests.values():
        if r.request_id in waiting:
            now = "waiting"
        elif r.num_computed_tokens < r.num_prompt_tokens:
            now = "prefill"
        else:
            now = "decode" if r.num_output_tokens >= 2 else "first token"
        if now == state:
            found = r.request_id.split("-")[0]  # vLLM adds a random end to the ids that it is given
    return found


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """vLLM's engine in this process. What it leaves behind in it is taken back."""
    environment, set_num_threads, state = dict(os.environ), torch.set_num_threads, random.getstate()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    hook = vars(CpuPlatform)["check_and_update_config"]
    neuron_sched_test_plugin.keep_async()
    yield
    CpuPlatform.check_and_update_config = hook
    torch.set_num_threads = set_num_threads
    random.setstate(state)
    cleanup_dist_env_and_memory()
    os.environ.clear()
    os.environ.update(environment)


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


def test_ngram_at_the_end_of_the_context(drawn_model, stock_near_the_end):
    """The last test here that makes an engine: n-grams load llvmlite, and a CPU engine cannot start after that.

    N-grams may propose fewer tokens than k, or none, at any time; but no step may be cut where the context ends.
    """
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
