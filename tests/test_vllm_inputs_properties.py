"""Random workloads on vLLM's schedulers: every tensor of every step is that of the oracle, as the scheduler's own
requests tell it, whatever arrives, ends, starts over or is in flight."""

import dataclasses

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from hypothesis import given
from hypothesis import strategies as st

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_inputs_setup import WAYS, Watch
from vllm_workload import VllmSide, turns_to_the_end, workloads

ENGINES = [(NeuronScheduler, 0), (NeuronAsyncScheduler, 0), (NeuronAsyncScheduler, 1)]


class Side(VllmSide):
    """Requests that ask different things of the sampler."""

    def wishes(self, arrival):
        if not arrival.odd:
            return {"temperature": 0.0}
        return {
            "temperature": 0.25 * (arrival.theme + 1),
            "top_p": 1 / (1 + arrival.prompt % 3),
            "top_k": arrival.theme,
        }


@st.composite
def cases(draw):
    """A workload, with context buckets; the turns before which everybody starts over; and how steps are filled."""
    workload = draw(workloads(prefix_caching=None, again=True))
    contexts = draw(st.none() | st.sets(st.integers(1, workload.max_model_len), min_size=1, max_size=3).map(sorted))
    if contexts is not None:
        options = {**workload.options, "decode_context_length_buckets": contexts}
        workload = dataclasses.replace(workload, options=options)
    resets = draw(st.sets(st.integers(0, 20), max_size=3))
    ways = draw(st.lists(st.sampled_from(WAYS), min_size=1, max_size=4))
    larger = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    return workload, resets, ways, larger, draw(st.integers(1, 3))


def play(cls, ahead, workload, resets, ways, larger, buffers):
    side = Side(cls, workload, asynchronous=bool(ahead))
    sched = side.sched

    def sample(name, position, number):
        """Stop tokens now and then; else one that tells which step it is of."""
        return side.arrivals[name].token(position) if number % 3 == 0 else 100 + (7 * number + position) % 800

    watch = Watch(sched, buffers=buffers, sample=sample)
    for number, (turn, names) in enumerate(turns_to_the_end(workload, side.unfinished)):
        for name in names:
            side.add(name)
        for i in turn.abort:
            side.abort(f"r{i}")
        if number in resets:
            sched.reset_prefix_cache(reset_running_requests=True)
        out = side.schedule(turn.throttle)
        watch.fill(out, ways[number % len(ways)], context_of(sched, out, larger[number % len(larger)]))
        for i in turn.late_abort:
            side.abort(f"r{i}")
        while len(watch.in_flight) > ahead:
            watch.deliver()
    watch.run()
    watch.watched.distinct()


def context_of(sched, out, larger):
    """The last context bucket for a decode, where a larger one is asked for."""
    return sched.neuron_config.decode_context_length_buckets[-1] if larger and out.num_seqs_padded else None


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("cls", "ahead"), ENGINES, ids=["sync", "async-one-step", "async-ahead"])
@given(cases())
def test_every_tensor_of_every_step(cls, ahead, case):
    play(cls, ahead, *case)
