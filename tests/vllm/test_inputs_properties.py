"""Random workloads on vLLM's schedulers: each tensor of each step is that of the oracle for the scheduler's requests.

Requests arrive, finish, are aborted and resumed, and steps are in flight.
"""

import dataclasses

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from hypothesis import given
from hypothesis import strategies as st

from tests.vllm.support.checked_worker import TOKEN_SOURCES, CheckedWorker
from tests.vllm.support.drivers import VllmDriver
from tests.vllm.support.schedulers import every_engine
from tests.vllm.support.strategies import workloads
from tests.vllm.support.workload import steps_to_completion


class SamplingDriver(VllmDriver):
    """A driver whose requests have different sampling parameters."""

    def sampling_options(self, arrival):
        if not arrival.unique_end:
            return {"temperature": 0.0}
        return {
            "temperature": 0.25 * (arrival.prefix_group + 1),
            "top_p": 1 / (1 + arrival.prompt % 3),
            "top_k": arrival.prefix_group,
        }


@st.composite
def cases(draw):
    """Draw a workload with context buckets, the steps before which the prefix cache is reset, and options of `fill`."""
    workload = draw(workloads(prefix_caching=None, resubmit=True))
    contexts = draw(st.none() | st.sets(st.integers(1, workload.max_model_len), min_size=1, max_size=3).map(sorted))
    if contexts is not None:
        options = {**workload.options, "decode_context_length_buckets": contexts}
        workload = dataclasses.replace(workload, options=options)
    resets = draw(st.sets(st.integers(0, 20), max_size=3))
    token_sources = draw(st.lists(st.sampled_from(TOKEN_SOURCES), min_size=1, max_size=4))
    use_largest = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    return workload, resets, token_sources, use_largest, draw(st.integers(1, 3))


def run_and_check(cls, ahead, workload, resets, token_sources, use_largest, buffers):
    driver = SamplingDriver(cls, workload, asynchronous=bool(ahead))
    sched = driver.sched

    def sample(name, position, number):
        """Return a token of the prompt pattern, which may stop the request, or one that depends on the step."""
        return driver.arrivals[name].token(position) if number % 3 == 0 else 100 + (7 * number + position) % 800

    worker = CheckedWorker(sched, buffers=buffers, sample=sample)
    for number, (events, names) in enumerate(steps_to_completion(workload, driver.unfinished)):
        for name in names:
            driver.add(name)
        for i in events.abort:
            driver.abort(f"r{i}")
        if number in resets:
            sched.reset_prefix_cache(reset_running_requests=True)
        out = driver.schedule(events.throttle)
        worker.fill(
            out,
            token_sources[number % len(token_sources)],
            context_bucket(sched, out, use_largest[number % len(use_largest)]),
        )
        for i in events.abort_in_flight:
            driver.abort(f"r{i}")
        while len(worker.in_flight) > ahead:
            worker.deliver()
    worker.run()
    worker.watched.assert_no_shared_memory()


def context_bucket(sched, out, largest):
    """Return the largest context bucket for a decode if `largest`, otherwise `None` for the smallest that fits."""
    return sched.neuron_config.decode_context_length_buckets[-1] if largest and out.num_seqs_padded else None


@pytest.mark.timeout(0)
@every_engine
@given(cases())
def test_every_tensor_of_every_step_equals_the_oracle(cls, ahead, case):
    run_and_check(cls, ahead, *case)
