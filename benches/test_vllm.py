"""Time that `NeuronScheduler` and `NeuronAsyncScheduler` add to `schedule()` of their base class.

Both parts are measured inside the same call, so no second scheduler is needed for comparison.
"""

import gc
import statistics
from time import thread_time_ns

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from neuron_sched import NeuronAsyncScheduler, NeuronScheduler
from tests.vllm.support.harness import build

STEPS = 300
LONG = "a prompt too long to finish"
# No request ends while a benchmark runs.
PARAMS = SamplingParams(ignore_eos=True, max_tokens=4000, temperature=0.0)


def timed(cls):
    """Return a subclass of `cls` that measures the time its last step spent in the base class."""

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
    """A scheduler with `running` requests that decode endlessly and `waiting` requests without a batch slot."""

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
            pass  # prefill steps
        for _ in range(waiting):
            self.add()
        # Warm-up, which also fills the pipeline of the async class.
        for _ in range(20):
            self.step()

    def add(self, params=PARAMS):
        # Prompts of all lengths up to a block, so that every step allocates blocks for the same number of requests.
        self.send(f"request-{self.added}", 1 + self.added % 16, params)
        self.added += 1

    def send(self, name, length, params=PARAMS):
        self.sched.add_request(
            Request(request_id=name, prompt_token_ids=[7] * length, sampling_params=params, pooling_params=None)
        )

    def step(self):
        """Run one step; return the time of our part and of the base class, in nanoseconds."""
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
    """Return a function that turns the garbage collector off until the test ends."""

    def freeze():
        gc.collect()
        gc.freeze()
        gc.disable()

    yield freeze
    gc.enable()
    gc.unfreeze()


def assert_share_at_most(limit, note, steps):
    ours, base = (statistics.median(side) for side in zip(*steps, strict=True))
    share = statistics.median(ours / base for ours, base in steps)
    text = f"ours {ours / 1e3:.1f} us, base class {base / 1e3:.1f} us: {share:.1%} (at most {limit:.0%})"
    note(text)
    assert share <= limit, text


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_overhead_of_a_decode_step_of_1024(cls, frozen, note):
    engine = Engine(cls, 1024)
    frozen()
    steps = [engine.step() for _ in range(STEPS)]
    assert engine.out.num_scheduled_tokens_padded == {f"request-{i}": 1 for i in range(1024)}
    assert_share_at_most(0.05, note, steps)


# A prompt of 8,000 tokens is computed in chunks of 16, with a decode step after every second chunk.
INTERLEAVED = {
    "max_consecutive_prefill_steps": 2,
    "chunking": "bucket",
    "num_batched_tokens_buckets": [16, 8192],
    "prefill_cost": {16: 0, 8192: 1000},
}


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_overhead_of_a_decode_step_between_two_chunks(cls, frozen, note):
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
    assert_share_at_most(0.05, note, steps)


def ours_of(engines, steps, before=lambda _: None):
    """Return the median time of our part in each engine, in nanoseconds; the steps of the engines alternate."""
    times = [[] for _ in engines]
    for _ in range(steps):
        for engine, taken in zip(engines, times, strict=True):
            before(engine)
            taken.append(engine.step()[0])
    return [statistics.median(taken) for taken in times]


def assert_growth_below(limit, note, many, few):
    text = f"ours {many / 1e3:.2f} us with many waiting, {few / 1e3:.2f} us with few: {many / few:.2f} (below {limit})"
    note(text)
    assert many / few < limit, text


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
def test_cost_of_a_decode_step_does_not_depend_on_the_number_waiting(cls, frozen, note):
    engines = [Engine(cls, 1024, waiting) for waiting in (100_000, 10)]
    assert [engine.sched.get_request_counts() for engine in engines] == [(1024, 100_000), (1024, 10)]
    frozen()
    assert_growth_below(1.2, note, *ours_of(engines, STEPS))


def test_cost_of_a_prefill_step_does_not_depend_on_the_number_waiting(frozen, note):
    """Every step admits the head of the queue and hides 256 decoding requests from the base class."""
    once = SamplingParams(ignore_eos=True, max_tokens=1, temperature=0.0)
    engines = [Engine(NeuronScheduler, 256, slots=257) for _ in range(2)]
    for engine, waiting in zip(engines, (100_000, 10), strict=True):
        for _ in range(waiting):
            engine.add(once)
    frozen()
    assert_growth_below(1.2, note, *ours_of(engines, STEPS, before=lambda engine: engine.add(once)))
    assert [engine.sched.get_request_counts() for engine in engines] == [(256, 100_000), (256, 10)]


def test_cost_between_chunks_does_not_depend_on_the_number_waiting(frozen, note):
    engines = [Engine(NeuronScheduler, 1024, slots=1025, **INTERLEAVED) for _ in range(2)]
    for engine, waiting in zip(engines, (100_000, 10), strict=True):
        engine.send(LONG, 8000)
        for _ in range(waiting):
            engine.add()
    frozen()
    assert_growth_below(1.2, note, *ours_of(engines, STEPS))
    assert [engine.sched.get_request_counts() for engine in engines] == [(1025, 100_000), (1025, 10)]
    assert all(engine.sched.has_prefill_in_running for engine in engines)


def test_x03_a_thousand_decode_steps_of_256_with_100000_waiting(frozen, note):
    engines = [Engine(NeuronScheduler, 256, waiting) for waiting in (100_000, 10_000)]
    frozen()
    assert_growth_below(2, note, *ours_of(engines, 1000))
