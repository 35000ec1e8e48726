"""Scheduler and runner agree: vLLM's engine with `examples/vllm_worker.py` gives every request the tokens of the dense
reference, and runs no shape that was not compiled before the first request came.

The KV cache begins as NaN and is compared bit by bit around every step: nothing but the slots of the step's tokens
changes, and those lie in blocks that the scheduler has given to the step's requests.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import torch
from safetensors.torch import load_file

import neuron_sched
from neuron_sched import NeuronConfig
from tiny_llama import TinyLlama, generate_reference
from vllm_engine import BLOCK_SIZE, SEQS_BUCKETS, TOKEN_BUCKETS, engine, one_process, recording, serve, workload
from vllm_model import CONFIG, write_model, write_weights
from vllm_worker import short

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),  # numba, torch and others warn
]

ENGINES = pytest.mark.parametrize(
    ("name", "async_engine"),
    [("NeuronScheduler", False), ("NeuronAsyncScheduler", False), ("NeuronAsyncScheduler", True)],
    ids=["sync", "async class, one-step engine", "async"],
)
OPTIONS = {
    "default": {},
    "packed": {"max_prefills_per_batch": 3},
    "contexts and turns": {
        "decode_context_length_buckets": [256, 600],
        "max_consecutive_prefill_steps": 1,
        "chunking": "bucket",
    },
}


@pytest.fixture(scope="module", autouse=True)
def in_this_process():
    threads = torch.get_num_threads()
    with one_process():
        torch.set_num_threads(1)  # threads only wait for each other where matrices are this small
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_weights(write_model(tmp_path_factory.mktemp("drawn")))


@pytest.fixture(scope="module")
def reference(model):
    """Of each request in the workload, its tokens and why it ends."""
    no_matter = NeuronConfig(
        max_num_seqs=1, max_num_batched_tokens=1024, max_model_len=1024, block_size=BLOCK_SIZE, num_blocks=32
    )
    llama = TinyLlama(
        no_matter,
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
    """Checks the KV cache around each call of a worker's model, and counts what happened."""

    def __init__(self, core):
        self.core, self.worker = core, core.model_executor.driver_worker.worker
        self.model, self.worker.model = self.worker.model, self
        self.worker.llama.kv_cache.fill_(torch.nan)
        self.shapes, self.calls, self.unknown, self.last = set(self.model.report().graphs), 0, 0, self.bits()
        self.middles = self.emitted = 0
        self.last_tokens, self.worker.last_tokens = self.worker.last_tokens, self.told_last_tokens
        self.accept = self.worker.inputs.accept

    def bits(self):
        return self.worker.llama.kv_cache.movedim(2, 0).flatten(1).contiguous().view(torch.int32)

    def told_last_tokens(self, request_ids):
        self.unknown += len(request_ids)
        return self.last_tokens(request_ids)

    def __call__(self, batch):
        self.calls += 1
        self.middles += batch.emits.count(False)
        before = self.bits()
        assert before.equal(self.last), "the cache changed between two steps"
        logits = self.model(batch)
        self.last = self.bits()
        changed = set((self.last != before).any(dim=1).nonzero()[:, 0].tolist())
        assert changed <= set(batch.slot_mapping.tolist()) - {-1}
        blocks = self.core.scheduler.kv_cache_manager.get_block_ids
        own = {block for request_id in batch.request_ids for block in blocks(request_id)[0]}
        assert {slot // BLOCK_SIZE for slot in changed} <= own
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
        told, aborted, _ = serve(llm, core, workload(), aborts)
        scheduler, report = core.scheduler, watch.model.report()

        assert scheduler.neuron_config == watch.worker.inputs.config
        assert set(report.graphs) == watch.shapes == set(watch.worker.inputs.shapes)
        assert watch.calls == len(scheduler.steps)
        assert scheduler.most_in_flight == (2 if async_engine else 1)
        assert (watch.unknown > 100) == async_engine
        assert not watch.worker.in_flight

    for request, (tokens, reason) in reference.items():
        if request in aborted:
            so_far = told.get(request, ([], None))[0]
            assert so_far == tokens[: len(so_far)], f"{request}, aborted when it was in state {aborted[request]}"
        else:
            assert told[request] == (tokens, reason), request
    assert {reason for request, (_, reason) in told.items() if request not in aborted} == {"stop", "length"}
    assert any(len(tokens) == 1 for tokens, _ in told.values())
    assert sum(step.hits for step in scheduler.steps) >= 5 and watch.middles >= 20
    kinds = {
        (bool(step.prefills), sum(step.padded.values()) if step.prefills else step.seqs_padded)
        for step in scheduler.steps
    }
    assert kinds == {(True, size) for size in TOKEN_BUCKETS} | {(False, size) for size in SEQS_BUCKETS}
