"""What our vLLM classes add to a step of the base scheduler, measured inside one call of `schedule()`."""

import gc
import statistics
from time import thread_time_ns

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from neuron_sched import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import build

STEPS = 300
LONG = "a prompt that never comes to its end"
# Nobody ends while a benchmark runs.
PARAMS = SamplingParams(ignore_eos=True, max_tokens=4000, temperature=0.0)


def timed(cls):
    """The class, with the time that its last step spent in the base."""

    class Timed(cls):
        base_ns = 0

        def _call_base_schedule(self, *args, **kwargs):
            start = thread_time_ns()
            try:
                return super()._call_base_schedule(*args, **kwargs)
            finally:
                self.base_ns += thread_time_ns() - start

    return Timed


class Engine:
    """A scheduler in which `running` requests decode without end, while others wait for a slot."""

    def __init__(self, cls, running, waiting=0, *, slots=None, **config):
        self.ahead = issubclass(cls, NeuronAsyncScheduler)
        self.sched = build(
            timed(cls),
            max_num_seqs=slots or running,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            num_blocks=(running + 8) * 256,
            async_scheduling=self.ahead,
            neuron_config={"max_prefills_per_batch": 1024, **config},
        )
        self.in_flight, self.added = [], 0
        for _ in range(running):
            self.add()
        while self.step() and self.out.num_seqs_padded == 0:
            pass  # prompts first
        for _ in range(waiting):
            self.add()
        # Whatever a first time costs, and in the async class the pipeline filled.
        for _ in range(20):
            self.step()

    def add(self, params=PARAMS):
        # Of all lengths up to a block, so that every step needs new blocks for as many requests.
        self.send(f"request-{self.added}", 1 + self.added % 16, params)
        self.added += 1

    def send(self, name, length, params=PARAMS):
        self.sched.add_request(
            Request(request_id=name, prompt_token_ids=[7] * length, sampling_params=params, pooling_params=None)
        )

    def step(self):
        """One step; returns the nanoseconds that were ours and those of the base."""
        self.sched.base_ns = 0
        start = thread_time_ns()
        self.out = self.sched.schedule()
        taken = thread_time_ns() - start
        self.in_flight.append(self.out)
        if len(self.in_flight) > self.ahead:
            self.deliver()
        return taken - self.sched.base_ns, self.sched.base_ns

    def deliver(self):
        out = self.in_flight.pop(0)
        names = list(out.num_scheduled_tokens)
        self.sched.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[] if name == LONG else [7] for name in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )


@pytest.fixture
def frozen():
    """The garbage collector at rest, and what exists out of its sight."""

    def freeze():
        gc.collect()
        gc.freeze()
        gc.disable()

    yield freeze
    gc.enable()
    gc.unfreeze()


def shares_at_most(limit, note, steps):
    ours, base = (statistics.median(side) for side in zip(*steps, strict=True))
    share = statistics.median(mine / theirs for mine, theirs in steps)
    told = f"ours {ours / 1e3:.1f} us besides {base / 1e3:.1f} us of the base: {share:.1%} (at most {limit:.0%})"
    note(told)
    assert share <= limit, told


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_a_decode_step_of_1024_costs_at_most_a_twentieth_more(cls, frozen, note):
    engine = Engine(cls, 1024)
    frozen()
    steps = [engine.step() for _ in range(STEPS)]
    assert engine.out.num_scheduled_tokens_padded == {f"request-{i}": 1 for i in range(1024)}
    shares_at_most(0.05, note, steps)


# A prompt of 8,000 tokens is cut to pieces of 16, and between two of them there is a decode step.
INTERLEAVED = {
    "max_consecutive_prefill_steps": 2,
    "chunking": "bucket",
    "num_batched_tokens_buckets": [16, 8192],
    "prefill_cost": {16: 0, 8192: 1000},
}


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_a_decode_step_between_two_chunks_costs_at_most_a_twentieth_more(cls, frozen, note):
    engine = Engine(cls, 1024, slots=1025, **INTERLEAVED)
    engine.send(LONG, 8000)
    frozen()
    steps = []
    while len(steps) < 200:
        taken = engine.step()
        if engine.out.num_seqs_padded:
            steps.append(taken)
    assert len(engine.out.num_scheduled_tokens) == 1024
    assert engine.sched.has_prefill_in_running
    shares_at_most(0.05, note, steps)


def ours_of(engines, steps, before=lambda _: None):
    """Median nanoseconds of our part in each of the engines, whose steps alternate."""
    times = [[] for _ in engines]
    for _ in range(steps):
        for engine, taken in zip(engines, times, strict=True):
            before(engine)
            taken.append(engine.step()[0])
    return [statistics.median(taken) for taken in times]


def held_below(limit, note, many, few):
    told = f"ours {many / 1e3:.2f} us with many waiting, {few / 1e3:.2f} us with few: {many / few:.2f} (below {limit})"
    note(told)
    assert many / few < limit, told


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_a_decode_step_costs_the_same_however_many_wait(cls, frozen, note):
    engines = [Engine(cls, 1024, waiting) for waiting in (100_000, 10)]
    assert [engine.sched.get_request_counts() for engine in engines] == [(1024, 100_000), (1024, 10)]
    frozen()
    held_below(1.2, note, *ours_of(engines, STEPS))


def test_a_prefill_step_costs_the_same_however_many_wait(frozen, note):
    """A head is taken out of the queue and the 256 that decode are hidden, in every step."""
    once = SamplingParams(ignore_eos=True, max_tokens=1, temperature=0.0)
    engines = [Engine(NeuronScheduler, 256, slots=257) for _ in range(2)]
    for engine, waiting in zip(engines, (100_000, 10), strict=True):
        for _ in range(waiting):
            engine.add(once)
    frozen()
    held_below(1.2, note, *ours_of(engines, STEPS, before=lambda engine: engine.add(once)))
    assert [engine.sched.get_request_counts() for engine in engines] == [(256, 100_000), (256, 10)]


def test_steps_between_chunks_cost_the_same_however_many_wait(frozen, note):
    engines = [Engine(NeuronScheduler, 1024, slots=1025, **INTERLEAVED) for _ in range(2)]
    for engine, waiting in zip(engines, (100_000, 10), strict=True):
        engine.send(LONG, 8000)
        for _ in range(waiting):
            engine.add()
    frozen()
    held_below(1.2, note, *ours_of(engines, STEPS))
    assert [engine.sched.get_request_counts() for engine in engines] == [(1025, 100_000), (1025, 10)]
    assert all(engine.sched.has_prefill_in_running for engine in engines)


def test_x03_a_thousand_decode_steps_of_256_with_100000_waiting(frozen, note):
    engines = [Engine(NeuronScheduler, 256, waiting) for waiting in (100_000, 10_000)]
    frozen()
    held_below(2, note, *ours_of(engines, 1000))
