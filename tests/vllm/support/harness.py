"""Drive a vLLM scheduler of any release from 0.24 to 0.33 without a model or a worker. Sampled tokens are constants.

    sched = build(NeuronScheduler, max_num_batched_tokens=64)
    sched.add_request(request("a", prompt_len=100, max_tokens=4))
    out = step(sched)  # schedule() and update_from_output()
    out.num_scheduled_tokens  # {"a": 64}

`run` steps until all requests have finished. `Pipeline` is an engine that runs one step ahead.
"""

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.support.model import TINY_LLAMA, tiny_model_dir

init_none_hash(sha256)


def full_attention(block_size: int = 16, **more: Any) -> FullAttentionSpec:
    """Return the KV cache spec of a layer with full attention, with the smallest head that the block pool accepts."""
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, **more)


def build(
    cls: type = Scheduler,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 512,
    max_model_len: int = 1024,
    num_blocks: int = 100,
    block_size: int = 16,
    prefix_caching: bool = False,
    chunked_prefill: bool = True,
    policy: str = "fcfs",
    async_scheduling: bool = False,
    neuron_config: Any = None,
    log_stats: bool = True,
    kv_groups: Sequence[KVCacheSpec] | None = None,
    vllm_config: Mapping[str, Any] | None = None,
    scheduler_args: Mapping[str, Any] | None = None,
    **scheduler_config: Any,
) -> Any:
    """Return a scheduler of class `cls` with `num_blocks` KV blocks, one of which is vLLM's null block.

    `kv_groups` has the KV cache spec of each group of layers; the default is one group with full attention. Further
    arguments are passed to `SchedulerConfig`, `vllm_config` to `VllmConfig` (`speculative_config`,
    `kv_transfer_config`, ...), and `scheduler_args` to the class.
    """
    scheduling = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked_prefill,
        policy=policy,
        async_scheduling=async_scheduling,
        is_encoder_decoder=False,
        **scheduler_config,
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model=tiny_model_dir(), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=max_model_len
        ),
        scheduler_config=scheduling,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
        device_config=DeviceConfig("cpu"),
        additional_config={} if neuron_config is None else {"neuron_config": neuron_config},
        **(vllm_config or {}),
    )
    config.scheduler_config.async_scheduling = async_scheduling  # vLLM's CPU platform disables it
    config.cache_config.num_gpu_blocks = num_blocks
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(kv_groups or [full_attention(block_size)])]
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=log_stats,
        **(scheduler_args or {}),
    )


def request(
    request_id: object,
    prompt_len: int | None = None,
    max_tokens: int = 16,
    *,
    token_ids: Iterable[int] | None = None,
    block_size: int = 16,
    grammar: bool = False,
    params: Mapping[str, Any] | None = None,
    **more: Any,
) -> Request:
    """Return a request that ignores EOS, with the prompt `token_ids` or `prompt_len` tokens derived from the id.

    With `grammar`, the request is blocked until `structured_output_request.grammar` is set. `params` is passed to
    `SamplingParams`, further arguments (`priority`, `arrival_time`, `resumable`, `lora_request`, ...) to `Request`.
    """
    if token_ids is None:
        numbers = random.Random(str(request_id))
        token_ids = [numbers.randrange(3, TINY_LLAMA["vocab_size"]) for _ in range(prompt_len)]
    sampling = {"ignore_eos": True, "max_tokens": max_tokens, **(params or {})}
    if grammar:
        sampling["structured_outputs"] = StructuredOutputsParams(json='{"type": "object"}')
    sampling = SamplingParams(**sampling)
    if grammar:
        sampling.structured_outputs._backend = "xgrammar"
    return Request(
        request_id=str(request_id),
        prompt_token_ids=list(token_ids),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_size, sha256),
        **more,
    )


def computed_before(out: SchedulerOutput) -> dict[str, int]:
    """Return the number of tokens computed before the step, by id of each scheduled request."""
    cached = out.scheduled_cached_reqs
    return {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs} | dict(
        zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )


def finish(sched: Any, out: SchedulerOutput, token: int = 7) -> Any:
    """Call `update_from_output()` with one sampled token for each request whose known tokens are then all computed."""
    before = computed_before(out)
    sampled = []
    for name, count in out.num_scheduled_tokens.items():
        unfinished = sched.requests.get(name)
        sampled.append([token] if unfinished and before[name] + count >= unfinished.num_tokens else [])
    result = ModelRunnerOutput(
        req_ids=list(out.num_scheduled_tokens),
        req_id_to_index={name: i for i, name in enumerate(out.num_scheduled_tokens)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    return sched.update_from_output(out, result)


def step(sched: Any, *args: Any, **kwargs: Any) -> SchedulerOutput:
    """Schedule a step, process its output and return it. Arguments are passed to `schedule()`."""
    out = sched.schedule(*args, **kwargs)
    finish(sched, out)
    return out


def run(
    sched: Any, arrivals: Mapping[int, Iterable[Request]] | None = None, max_steps: int = 10_000
) -> list[dict[str, int]]:
    """Run steps until all requests have finished. Return the scheduled tokens of each step that is not empty.

    `arrivals` maps a step number to the requests added before that step.
    """
    arrivals, steps = dict(arrivals or {}), []
    for number in range(max_steps):
        for new in arrivals.pop(number, ()):
            sched.add_request(new)
        if not arrivals and not sched.requests:
            return steps
        out = step(sched)
        if out.num_scheduled_tokens:
            steps.append(dict(out.num_scheduled_tokens))
    raise AssertionError(f"not finished after {max_steps} steps: {list(sched.requests)}")


class Pipeline:
    """An asynchronous engine loop whose batch queue holds up to `depth` steps in flight."""

    def __init__(self, sched: Any, depth: int = 2) -> None:
        self.sched = sched
        self.depth = depth
        self.in_flight: deque[SchedulerOutput] = deque()

    def step(self) -> SchedulerOutput | None:
        """Schedule a step, and process the oldest output if the queue is full. Return the new output or `None`."""
        out = None
        if self.sched.has_requests():
            out = self.sched.schedule()
            self.in_flight.append(out)
            if len(self.in_flight) < self.depth and (out.num_scheduled_tokens or self.sched.has_requests()):
                return out
        if self.in_flight:
            finish(self.sched, self.in_flight.popleft())
        return out

    def run(self, max_steps: int = 10_000) -> list[dict[str, int]]:
        """Run steps until all requests have finished. Return the scheduled tokens of each step that is not empty."""
        steps = []
        for _ in range(max_steps):
            if not self.in_flight and not self.sched.has_requests():
                return steps
            out = self.step()
            if out and out.num_scheduled_tokens:
                steps.append(dict(out.num_scheduled_tokens))
        raise AssertionError(f"not finished after {max_steps} steps: {list(self.sched.requests)}")
