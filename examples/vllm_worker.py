"""A worker for vLLM 0.32 that runs the tiny Llama through compiled shapes only.

    LLM(model, worker_cls="vllm_worker.TinyLlamaWorker", scheduler_cls="neuron_sched.NeuronAsyncScheduler", ...)

`VllmInputs` turns the output of the scheduler into padded inputs, and `CompiledModel` holds the compiled graphs. The
worker adds the rest: the calls of the engine, the weights, and greedy sampling. The model may be any Llama without
biases, tied weights or quantised weights.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from neuron_sched import Batch, CompiledModel
from neuron_sched.vllm import config
from neuron_sched.vllm.inputs import VllmInputs
from tiny_llama import TinyLlama


class TinyLlamaWorker(WorkerBase):
    """A worker for one device, the CPU. The engine calls the methods in the order of their definition."""

    model: CompiledModel

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self.in_flight: deque[Sampled] = deque()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Read the weights. The model is created once the size of the KV cache is known."""
        files = sorted(Path(self.model_config.model).glob("*.safetensors"))
        self.weights = {short(name): weight for file in files for name, weight in load_file(file).items()}

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        hf = self.model_config.hf_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=hf.num_key_value_heads,
            head_size=hf.hidden_size // hf.num_attention_heads,
            dtype=torch.float32,
        )
        return {f"layers.{i}": spec for i in range(hf.num_hidden_layers)}

    def determine_available_memory(self) -> int:
        return self.cache_config.kv_cache_memory_bytes or 64 << 20

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Create the model, the KV cache and the inputs from the configuration of the scheduler."""
        runs_ahead = self.scheduler_config.async_scheduling
        neuron_config = config.read(self.vllm_config, kv_cache_config.num_blocks, runs_ahead=runs_ahead)
        hf = self.model_config.hf_config
        self.llama = TinyLlama(
            neuron_config,
            vocab_size=hf.vocab_size,
            width=hf.hidden_size,
            inner=hf.intermediate_size,
            layers=hf.num_hidden_layers,
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
        )
        self.llama.load_state_dict(self.weights)
        # Two buffers: a step is filled while the arrays of the previous step may still be read.
        self.inputs = VllmInputs(neuron_config, buffers=2, vocab_size=hf.vocab_size)
        self.model = CompiledModel(lambda: self.llama, neuron_config, backend="jit")

    def compile_or_warm_up_model(self) -> CompilationTimes:
        start = time.perf_counter()
        self.model.warmup(progress=False)
        return CompilationTimes(language_model=time.perf_counter() - start, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_model(self) -> torch.nn.Module:
        return self.llama

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Start a step; unless the step is empty, the engine calls `sample_tokens` next."""
        batch = self.inputs.fill(scheduler_output, tokens=self.last_tokens)
        if batch is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        tokens = self.model(batch).argmax(dim=-1)
        self.in_flight.append(Sampled(self, batch, tokens))
        return None

    def sample_tokens(self, grammar_output: Any) -> AsyncModelRunnerOutput:
        if grammar_output is not None:
            raise NotImplementedError("grammar_output: expected None: structured output is not supported")
        return self.in_flight[-1]

    def last_tokens(self, request_ids: list[str]) -> list[int | None]:
        """Return the last token of each request from the steps in flight."""
        known: dict[str, int] = {}
        for sampled in list(self.in_flight):
            known.update(zip(sampled.request_ids, sampled.tokens.tolist(), strict=False))
        # None for a token that the engine's output thread has accepted in the meantime.
        return [known.get(request_id) for request_id in request_ids]

    def execute_dummy_batch(self) -> None:
        """Run a batch of padding while other ranks run a step."""
        self.model(self.inputs.dummy(self.inputs.shapes[-1]))


class Sampled(AsyncModelRunnerOutput):
    """The tokens of one step on the device; an asynchronous engine reads them after the next step has started."""

    def __init__(self, worker: TinyLlamaWorker, batch: Batch, tokens: torch.Tensor) -> None:
        self.worker, self.tokens = worker, tokens
        self.request_ids, self.emits = batch.request_ids, batch.emits

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the device and return one token per unpadded row, or none for a chunk in the middle of a prompt."""
        rows = zip(self.tokens.tolist(), self.emits, strict=False)
        sampled = [[token] if emits else [] for token, emits in rows]
        self.worker.inputs.accept(sampled)
        # Removed after `accept`, so that a concurrent `execute_model` finds the token in one place at least.
        assert self.worker.in_flight.popleft() is self, "steps complete in the order in which they start"
        index = {request_id: row for row, request_id in enumerate(self.request_ids)}
        return ModelRunnerOutput(req_ids=list(index), req_id_to_index=index, sampled_token_ids=sampled)


def short(name: str) -> str:
    """Return the name in `TinyLlama` of a weight of a Llama checkpoint."""
    return name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")
