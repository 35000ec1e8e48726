"""vLLM's engine with the worker of `examples/vllm_worker.py`.

Each request gets the tokens of the dense reference, and no shape runs that was not compiled before the first request.
The KV cache is filled with NaN and is compared bit by bit around each step: only the slots of the step's tokens change,
and these are in blocks that the scheduler has allocated to the step's requests.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import torch
from safetensors.torch import load_file

import neuron_sched
from neuron_sched import NeuronConfig
from tests.vllm.support.llm import (
    BLOCK_SIZE,
    SEQS_BUCKETS,
    TOKEN_BUCKETS,
    engine,
    one_process,
    recording,
    serve,
    workload,
)
from tests.vllm.support.model import CONFIG, write_model, write_weights
from tiny_llama import TinyLlama, generate_reference
from vllm_worker import short

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # numba, torch and other libraries raise warnings.
]

ENGINES = pytest.mark.parametrize(
    ("name", "async_engine"),
    [("NeuronScheduler", False), ("NeuronAsyncScheduler", False), ("NeuronAsyncScheduler", True)],
    ids=["sync", "async class, one-step engine", "async"],
)
OPTIONS = {
    "default": {},
    "packed": {"max_prefills_per_batch": 3},
    "context buckets, interleaved phases and planned chunks": {
        "decode_context_length_buckets": [256, 600],
        "max_consecutive_prefill_steps": 1,
        "chunking": "bucket",
    },
}


@pytest.fixture(scope="module", autouse=True)
def run_in_one_process():
    threads = torch.get_num_threads()
    with one_process():
        torch.set_num_threads(1)  # With matrices this small, several threads are slower.
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_weights(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reference(model):
    """Return, by request of the workload, its tokens and its finish reason."""
    # The dense reference computes without a KV cache and without buckets.
    config = NeuronConfig(
        max_num_seqs=1, max_num_batched_tokens=1024, max_model_len=1024, block_size=BLOCK_SIZE, num_blocks=32
    )
    llama = TinyLlama(
        config,
        vocab_size=CONFIG["vocab_size"],
        width=CONFIG["hidden_size"],
        inner=CONFIG["intermediate_size"],
        heads=CONFIG["num_attention_heads"],
        kv_heads=CONFIG["num_key_value_heads"],
    )
    weights = load_file(model / "model.safetensors")
    llama.load_state_dict({short(name): weight for name, weight in weights.items()})
    found = {}
    for _, name, prompt, max_tokens, more in workload():
        stops = more.get("stop_token_ids", [])
        tokens = generate_reference(llama, prompt, max_tokens, stops)
        found[name] = (tokens, "stop" if tokens[-1] in stops else "length")
    return found


class Watch:
    """The model of a worker under test: checks the KV cache around each call and counts calls, chunks and tokens."""

    def __init__(self, core):
        self.core, self.worker = core, core.model_executor.driver_worker.worker
        self.model, self.worker.model = self.worker.model, self
        self.worker.llama.kv_cache.fill_(torch.nan)
        self.shapes = set(self.model.report().graphs)  # compiled before the first request
        self.num_calls = 0
        self.num_unknown_tokens = 0  # input tokens of steps in flight
        self.num_middle_chunks = 0  # rows that sample no token
        self.cache_after_last_call = self.bits()
        self.last_tokens, self.worker.last_tokens = self.worker.last_tokens, self.counted_last_tokens

    def bits(self):
        """Return a copy of the KV cache as int32, one row for each slot."""
        return self.worker.llama.kv_cache.movedim(2, 0).flatten(1).contiguous().view(torch.int32)

    def counted_last_tokens(self, request_ids):
        self.num_unknown_tokens += len(request_ids)
        return self.last_tokens(request_ids)

    def __call__(self, batch):
        self.num_calls += 1
        self.num_middle_chunks += batch.emits.count(False)
        before = self.bits()
        assert before.equal(self.cache_after_last_call), "the KV cache changed between two steps"
        logits = self.model(batch)
        self.cache_after_last_call = self.bits()
        changed = set((self.cache_after_last_call != before).any(dim=1).nonzero()[:, 0].tolist())
        assert changed <= set(batch.slot_mapping.tolist()) - {-1}
        blocks = self.core.scheduler.kv_cache_manager.get_block_ids
        allocated = {block for request_id in batch.request_ids for block in blocks(request_id)[0]}
        assert {slot // BLOCK_SIZE for slot in changed} <= allocated
        return logits


@pytest.mark.parametrize("options", OPTIONS)
@ENGINES
def test_tokens_equal_those_of_the_reference(model, reference, name, async_engine, options):
    cls = recording(getattr(neuron_sched, name))
    aborts = [(step, state) for step in (3, 30, 60) for state in ("waiting", "prefill", "decode")]
    changes = {"additional_config": {"neuron_config": OPTIONS[options]}}
    with engine(model, cls, async_engine=async_engine, worker_cls="vllm_worker.TinyLlamaWorker", **changes) as (
        llm,
        core,
    ):
        watch = Watch(core)
        results, aborted, _ = serve(llm, core, workload(), aborts)
        scheduler, report = core.scheduler, watch.model.report()

        assert scheduler.neuron_config == watch.worker.inputs.config
        assert set(report.graphs) == watch.shapes == set(watch.worker.inputs.shapes)
        assert watch.num_calls == len(scheduler.steps)
        assert scheduler.most_in_flight == (2 if async_engine else 1)
        assert (watch.num_unknown_tokens > 100) == async_engine
        assert not watch.worker.in_flight

    for request, (tokens, reason) in reference.items():
        if request in aborted:
            partial = results.get(request, ([], None))[0]
            assert partial == tokens[: len(partial)], f"{request}, aborted in state {aborted[request]}"
        else:
            assert results[request] == (tokens, reason), request
    assert {reason for request, (_, reason) in results.items() if request not in aborted} == {"stop", "length"}
    assert any(len(tokens) == 1 for tokens, _ in results.values())
    assert sum(step.hits for step in scheduler.steps) >= 5 and watch.num_middle_chunks >= 20
    kinds = {
        (bool(step.prefills), sum(step.padded.values()) if step.prefills else step.seqs_padded)
        for step in scheduler.steps
    }
    assert kinds == {(True, size) for size in TOKEN_BUCKETS} | {(False, size) for size in SEQS_BUCKETS}
