"""`BucketScheduler` against the pure-Python baseline, and how its cost scales."""

import subprocess
import sys
from pathlib import Path

import pytest
from python_baseline import BaselineScheduler

from neuron_sched import BucketScheduler, NeuronConfig, Request

ENDLESS = 10**6


def config(running):
    return NeuronConfig(
        max_num_seqs=running,
        max_num_batched_tokens=max(2048, running),
        max_model_len=2 * ENDLESS,
        block_size=32,
        num_blocks=running * (ENDLESS // 16),
    )


def decoding(make, running, waiting=0):
    """Return a scheduler with `running` requests that decode endlessly and `waiting` requests without a batch slot."""
    scheduler = make(config(running))
    for i in range(running + waiting):
        if make is BaselineScheduler:
            scheduler.add(f"request-{i}", 1 + i % 50, ENDLESS)
        else:
            scheduler.add(Request(f"request-{i}", 1 + i % 50, ENDLESS))
    while (step := scheduler.schedule()).kind == "prefill":
        scheduler.complete(step)
    return scheduler


def read_kind_and_tokens(scheduler):
    step = scheduler.schedule()
    seen = step.kind, step.num_scheduled_tokens
    scheduler.complete(step)
    return seen


def read_everything(scheduler):
    step = scheduler.schedule()
    seen = (
        step.kind,
        step.num_scheduled_tokens,
        step.num_scheduled_tokens_padded,
        step.num_computed_tokens,
        step.num_seqs_padded,
        step.finished_ids,
    )
    return seen, [(outcome.id, outcome.token, outcome.finish_reason) for outcome in scheduler.complete(step)]


def test_steady_decode_of_1024(ratio):
    baseline, ours = decoding(BaselineScheduler, 1024), decoding(BucketScheduler, 1024)
    for _ in range(100):
        assert read_kind_and_tokens(ours) == read_kind_and_tokens(baseline)
    ratio(lambda: read_kind_and_tokens(baseline), lambda: read_kind_and_tokens(ours), at_least=20)


def test_steady_decode_of_1024_with_every_output_read(ratio):
    baseline, ours = decoding(BaselineScheduler, 1024), decoding(BucketScheduler, 1024)
    for _ in range(100):
        assert read_everything(ours) == read_everything(baseline)
    ratio(lambda: read_everything(baseline), lambda: read_everything(ours), at_least=5)


def test_steady_decode_of_1024_with_token_ids(ratio):
    """As in an engine: each step commits 1,024 sampled token ids and reads the outcomes."""
    baseline, ours = decoding(BaselineScheduler, 1024), decoding(BucketScheduler, 1024)
    tokens = list(range(1024))

    def run(scheduler):
        step = scheduler.schedule()
        seen = step.kind, step.num_scheduled_tokens
        return seen, [(outcome.id, outcome.token) for outcome in scheduler.complete(step, tokens)]

    for _ in range(100):
        assert run(ours) == run(baseline)
    ratio(lambda: run(baseline), lambda: run(ours), rounds=21)


@pytest.mark.parametrize("running", [256, 1024])
def test_x03_cost_does_not_depend_on_the_number_waiting(ratio, running):
    many, few = (decoding(BucketScheduler, running, waiting) for waiting in (100_000, 10_000))
    assert read_kind_and_tokens(many) == read_kind_and_tokens(few)
    ratio(lambda: read_kind_and_tokens(many), lambda: read_kind_and_tokens(few), below=1.2)


def fill_and_drain(count):
    scheduler = BucketScheduler(
        NeuronConfig(
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            block_size=32,
            num_blocks=1 << 20,
            max_prefills_per_batch=1024,
        )
    )
    for i in range(count):
        scheduler.add(Request(str(i), 8, 1))
    ended = 0
    while scheduler.num_waiting:
        ended += len(scheduler.complete(scheduler.schedule()))
    return ended


def test_cost_of_adding_and_draining_is_linear(ratio):
    assert fill_and_drain(5000) == 5000
    # Cache misses alone make the larger run up to twice as slow per request.
    ratio(lambda: fill_and_drain(1_000_000), lambda: [fill_and_drain(100_000) for _ in range(10)], below=3, rounds=3)


WAITING = """
import resource
from pathlib import Path
from neuron_sched import BucketScheduler, NeuronConfig, Request

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

config = NeuronConfig(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=2048, block_size=32, num_blocks=512)
scheduler, count, before = BucketScheduler(config), 1_000_000, resident()
for i in range(count):
    scheduler.add(Request(str(i), 8, 1))
assert scheduler.num_waiting == count
print(round((resident() - before) / count))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the resident memory is read from /proc")
def test_memory_of_a_waiting_request(note):
    """Report the resident memory: the core's entry (below 200 bytes), the id, and the binding's tables."""
    run = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=True)
    note(f"{run.stdout.strip()} bytes per waiting request, with its id and the binding's tables")
