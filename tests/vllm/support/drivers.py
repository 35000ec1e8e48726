"""The same interface for running a workload on vLLM's schedulers and on `BucketScheduler`."""

from collections.abc import Callable

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import neuron_sched
from tests.vllm.support.harness import build, computed_before
from tests.vllm.support.workload import Arrival, Workload, steps_to_completion


class VllmDriver:
    """Runs a workload on `NeuronScheduler` or `NeuronAsyncScheduler`."""

    def __init__(self, cls: type, workload: Workload, *, asynchronous: bool = False):
        self.workload, self.arrivals, self.added = workload, workload.arrivals(), 0
        self.sched = build(
            cls,
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            max_model_len=workload.max_model_len,
            num_blocks=workload.num_blocks + 1,
            block_size=workload.block_size,
            prefix_caching=workload.prefix_caching,
            policy=workload.policy,
            async_scheduling=asynchronous,
            neuron_config=workload.options,
            long_prefill_token_threshold=workload.long_prefill_token_threshold,
        )

    def add(self, name: str) -> None:
        arrival = self.arrivals[name]
        self.added += 1
        params = SamplingParams(
            ignore_eos=True,
            max_tokens=arrival.max_tokens,
            stop_token_ids=arrival.stop_token_ids,
            **self.sampling_options(arrival),
        )
        self.sched.add_request(
            Request(
                request_id=name,
                prompt_token_ids=arrival.prompt_ids,
                sampling_params=params,
                pooling_params=None,
                priority=arrival.priority,
                arrival_time=float(self.added),
                block_hasher=get_request_block_hasher(self.workload.block_size, sha256),
            )
        )

    def sampling_options(self, arrival: Arrival) -> dict[str, float]:
        """Return the sampling parameters of a request."""
        return {"temperature": 0.0}

    def abort(self, name: str) -> None:
        self.sched.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self, throttle: bool):
        return self.sched.schedule(throttle_prefills=throttle)

    def deliver(self, out) -> list[tuple[str, list[int], str | None]]:
        """Process the output of a step. Return (request id, new tokens, finish reason) of each request, in order."""
        names, before = list(out.num_scheduled_tokens), computed_before(out)
        sampled = []
        for name in names:
            end = before[name] + out.num_scheduled_tokens[name]
            arrival = self.arrivals[name]
            sampled.append([arrival.token(end)] if end >= arrival.prompt else [])
        outputs = self.sched.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        emitted = outputs[0].outputs if 0 in outputs else []
        ends = [None if o.finish_reason is None else str(o.finish_reason) for o in emitted]
        return [(o.request_id, list(o.new_token_ids), end) for o, end in zip(emitted, ends, strict=True)]

    def unfinished(self) -> bool:
        return bool(self.sched.requests)

    def blocks(self, name: str) -> list[int]:
        return list(self.sched.kv_cache_manager.get_block_ids(name)[0])

    @property
    def free_blocks(self) -> int:
        return self.sched.kv_cache_manager.block_pool.get_num_free_blocks()

    def explanation(self) -> tuple[str, str, int, int, int] | None:
        e = self.sched.explain()
        return e and (e.id, e.reason, e.needed, e.reserved, e.usable)


class BucketDriver:
    """Runs a workload on `BucketScheduler`."""

    def __init__(self, workload: Workload):
        self.workload, self.arrivals = workload, workload.arrivals()
        self.sched = neuron_sched.BucketScheduler(
            neuron_sched.NeuronConfig(
                max_num_seqs=workload.max_num_seqs,
                max_num_batched_tokens=workload.max_num_batched_tokens,
                max_model_len=workload.max_model_len,
                block_size=workload.block_size,
                num_blocks=workload.num_blocks,
                prefix_caching=workload.prefix_caching,
                policy=workload.policy,
                long_prefill_token_threshold=workload.long_prefill_token_threshold,
                **workload.options,
            )
        )

    def add(self, name: str) -> None:
        """Add a request. Raises `ValueError` if it can never run or its id belongs to an unfinished request."""
        arrival = self.arrivals[name]
        self.sched.add(
            neuron_sched.Request(
                name,
                arrival.prompt_ids,
                arrival.max_tokens,
                priority=arrival.priority,
                stop_token_ids=arrival.stop_token_ids,
            )
        )

    def abort(self, name: str) -> None:
        self.sched.cancel(name)

    def schedule(self, throttle: bool, ahead: bool):
        return self.sched.schedule(throttle_prefills=throttle, ahead=ahead)

    def deliver(self, step) -> list[tuple[str, list[int], str | None]]:
        tokens = []
        before = step.num_computed_tokens
        for name, count in step.num_scheduled_tokens.items():
            end, arrival = before[name] + count, self.arrivals[name]
            tokens.append(arrival.token(end) if end >= arrival.prompt else None)
        return [(o.id, [o.token], o.finish_reason) for o in self.sched.complete(step, tokens)]

    def explanation(self) -> tuple[str, str, int, int, int] | None:
        e = self.sched.explain()
        return e and (e.id, e.reason, e.needed, e.reserved, e.usable)


def run_workload(driver: VllmDriver, *, ahead: bool = False, check: Callable[..., None] = lambda _: None):
    """Run a workload on vLLM's scheduler. Return {request id: [output tokens, finish reason]}.

    `check` is called with the output of each `schedule()`.
    """
    results = {}
    in_flight = []

    def deliver():
        for name, tokens, reason in driver.deliver(in_flight.pop(0)):
            result = results.setdefault(name, [[], None])
            assert result[1] is None, f"{name} has output after it finished"
            result[0] += tokens
            result[1] = reason

    for events, names in steps_to_completion(driver.workload, driver.unfinished):
        for name in names:
            driver.add(name)
        for i in events.abort:
            driver.abort(f"r{i}")
        out = driver.schedule(events.throttle)
        in_flight.append(out)
        check(out)
        for i in events.abort_in_flight:
            driver.abort(f"r{i}")
        if len(in_flight) > ahead:
            deliver()
    while in_flight:
        deliver()
    return results
