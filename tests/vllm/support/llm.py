"""Helpers of the tests with vLLM's engine: a workload, the engine in this process, and a loop that steps it."""

import contextlib
import os
import random
from types import SimpleNamespace

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform

from tests.vllm.support.harness import computed_before
from tests.vllm.support.plugin import neuron_sched_test_plugin

MAX_MODEL_LEN, MAX_NUM_SEQS, BUDGET, BLOCK_SIZE = 1024, 8, 256, 32
TOKEN_BUCKETS, SEQS_BUCKETS = [128, 256], [1, 2, 4, 8]


def workload():
    """Return 64 requests, as (step of arrival, id, prompt, max_tokens, further sampling parameters)."""
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
    """Return a subclass of the scheduler that records each step that is not empty, and the most steps in flight."""

    class Recording(base):
        def __init__(self, *args, **kwargs):
            self.steps, self.in_flight, self.most_in_flight = [], 0, 0
            super().__init__(*args, **kwargs)

        def schedule(self, *args, **kwargs):
            out = super().schedule(*args, **kwargs)
            if out.num_scheduled_tokens:
                before = computed_before(out)
                self.steps.append(
                    SimpleNamespace(
                        unpadded=dict(out.num_scheduled_tokens),
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
    """Run a vLLM engine in this process. Yield the `LLM` and its engine core."""
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
        assert (2 if async_engine else 1) == core.batch_queue_size, "the CPU platform changed async_scheduling"
        yield llm, core
    finally:
        llm.llm_engine.engine_core.shutdown()


WITH_LOGITS = {"max_logprobs": 2, "logprobs_mode": "raw_logits"}


def serve(llm, core, requests, aborts=(), logprobs=None):
    """Run the engine until all requests have finished. Return three dicts.

    The first maps request ids to (output tokens, finish reason), the second the ids of aborted requests to their state
    when they were aborted, the third (request id, output position) to the two highest logits.

    `aborts` are (step, state) pairs in order of steps. From that step on, the newest request found in that state is
    aborted.
    """
    requests, aborts, results, aborted, logits = list(requests), list(aborts), {}, {}, {}
    for step in range(5000):
        while requests and requests[0][0] <= step:
            _, name, tokens, max_tokens, more = requests.pop(0)
            params = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": logprobs, **more}
            llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, SamplingParams(**params))
        if not requests and not llm.llm_engine.has_unfinished_requests():
            assert not aborts, f"no request reached the state to be aborted in: {aborts}"
            return results, aborted, logits
        for output in llm.llm_engine.step():
            results[output.request_id] = (list(output.outputs[0].token_ids), output.outputs[0].finish_reason)
            for position, candidates in enumerate(output.outputs[0].logprobs or ()):
                values = sorted((token.logprob for token in candidates.values()), reverse=True)
                logits[output.request_id, position] = values[:2]
        if aborts and aborts[0][0] <= step and (newest := newest_in_state(core.scheduler, aborts[0][1])):
            aborted[newest] = aborts.pop(0)[1]
            llm.llm_engine.abort_request([newest])
        if hasattr(core.scheduler, "check"):
            core.scheduler.check()
    raise AssertionError(f"not finished after {step} steps: {list(core.scheduler.requests)}")


def newest_in_state(scheduler, state):
    """Return the id of the newest request in a state, or `None`.

    The states are "waiting", "prefill", "first token" and, from two output tokens on, "decode".
    """
    waiting = {r.request_id for r in scheduler.waiting}
    found = None
    for r in scheduler.requests.values():
        if r.request_id in waiting:
            current = "waiting"
        elif r.num_computed_tokens < r.num_prompt_tokens:
            current = "prefill"
        else:
            current = "decode" if r.num_output_tokens >= 2 else "first token"
        if current == state:
            found = r.request_id.split("-")[0]  # vLLM appends a random suffix to request ids
    return found


@contextlib.contextmanager
def one_process():
    """Make vLLM run its engine in this process, and restore the process state that the engine changes."""
    environment, set_num_threads, state = dict(os.environ), torch.set_num_threads, random.getstate()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    hook = vars(CpuPlatform)["check_and_update_config"]
    neuron_sched_test_plugin.keep_async()
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = hook
        torch.set_num_threads = set_num_threads
        random.setstate(state)
        cleanup_dist_env_and_memory()
        os.environ.clear()
        os.environ.update(environment)
