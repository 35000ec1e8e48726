"""Random workloads through our classes on the installed vLLM and through `BucketScheduler`: the same steps.

Both sides take their decisions from one core, so what is tested here is the translation: what the core is told, what
the base class is shown, and that what comes out is what was decided. The standalone scheduler itself is held against
an oracle in pure Python elsewhere.
"""

import logging
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from hypothesis import given, settings

from neuron_sched import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import starts
from vllm_workload import BucketSide, VllmSide, play, turns_to_the_end, workloads

pytestmark = pytest.mark.timeout(0)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Thousands of schedulers are made: a failure's report would end with what each of them logged."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


class Pair:
    """One workload on both sides, compared at every turn."""

    def __init__(self, workload, cls, *, ahead=False):
        self.workload, self.ahead = workload, ahead
        self.vllm, self.bucket = VllmSide(cls, workload, asynchronous=ahead), BucketSide(workload)
        self.in_flight = []
        self.refused = {}  # requests that can never run: whether the error was delivered
        self.real = self.padded = 0
        self.state = "IDLE"

    def run(self):
        for turn, names in turns_to_the_end(self.workload, self.unfinished):
            for name in names:
                self.add(name)
            for i in turn.abort:
                self.abort(f"r{i}")
            self.agree()
            self.schedule(turn.throttle)
            self.agree()
            for i in turn.late_abort:
                self.abort(f"r{i}")
                self.agree()
            if len(self.in_flight) > self.ahead:
                self.deliver()
                self.agree()
        while self.in_flight:
            self.deliver()
        assert all(self.refused.values())
        assert self.vllm.free_blocks == self.workload.num_blocks
        sched = self.vllm.sched
        assert (sched.total_scheduled_tokens, sched.total_padding_tokens) == (self.real, self.padded - self.real)

    def unfinished(self):
        sched = self.bucket.sched
        return sched.num_waiting or sched.num_running or self.vllm.unfinished()

    def add(self, name):
        lives = name in self.vllm.sched.requests
        fits = self.workload.fits(self.vllm.arrivals[name])
        self.vllm.add(name)
        try:
            self.bucket.add(name)
        except ValueError:
            assert lives or not fits
            if not lives:
                self.refused[name] = False
        else:
            assert fits and not lives

    def abort(self, name):
        self.vllm.abort(name)
        self.bucket.abort(name)
        if name in self.refused:
            self.refused[name] = True

    def schedule(self, throttle):
        saturated = self.vllm.sched.prefill_capacity_bound
        out = self.vllm.schedule(throttle)
        # Of the standalone scheduler no exception is known for a rank that is saturated.
        step = self.bucket.schedule(throttle and not saturated, self.ahead)
        assert self.told(out) == {
            "tokens": list(step.num_scheduled_tokens.items()),
            "padded": list(step.num_scheduled_tokens_padded.items()),
            "seqs": step.num_seqs_padded,
            "computed": step.num_computed_tokens,
            "blocks": {name: step.block_ids(name) for name in step.num_scheduled_tokens},
            "finished": set(step.finished_ids),
        }
        assert out.total_num_scheduled_tokens == sum(out.num_scheduled_tokens.values())
        assert not out.preempted_req_ids
        assert self.vllm.free_blocks == self.bucket.sched.free_blocks
        if step.kind == "prefill":
            self.real += out.total_num_scheduled_tokens
            self.padded += step.padded_tokens
        if not (throttle and not saturated and step.kind == "decode"):
            saturated = self.bucket.sched.num_waiting > 0
        assert self.vllm.sched.prefill_capacity_bound == saturated
        if not self.bucket.sched.num_running and not self.bucket.sched.num_waiting:
            self.state = "IDLE"
        elif step.kind != "idle":
            self.state = f"ACTIVE_{step.kind.upper()}"
        assert self.vllm.sched.state.name == self.state
        self.in_flight.append((out, step))
        self.vllm.sched.check()

    def told(self, out):
        """What the output of vLLM's side says, of requests that can run."""
        return {
            "tokens": list(out.num_scheduled_tokens.items()),
            "padded": list(out.num_scheduled_tokens_padded.items()),
            "seqs": out.num_seqs_padded,
            "computed": starts(out),
            "blocks": {name: self.vllm.blocks(name) for name in out.num_scheduled_tokens},
            "finished": out.finished_req_ids - self.refused.keys(),
        }

    def deliver(self):
        out, step = self.in_flight.pop(0)
        emitted = self.vllm.deliver(out)
        for name in (name for name, _, reason in emitted if reason == "error"):
            assert self.refused[name] is False, f"{name} is told of its end once, and it cannot run"
            self.refused[name] = True
        assert [entry for entry in emitted if entry[2] != "error"] == self.bucket.deliver(step)
        assert all(self.refused.values()), "told at the next chance"
        assert self.vllm.free_blocks == self.bucket.sched.free_blocks

    def agree(self):
        """At any time."""
        self.vllm.sched.check()
        if not all(self.refused.values()):
            return  # they count as unfinished on the side of vLLM until they are told
        sched = self.bucket.sched
        assert self.vllm.sched.get_request_counts() == (sched.num_running, sched.num_waiting)
        ours, theirs = self.vllm.explained(), self.bucket.explained()
        planned = self.in_flight[-1][0].num_scheduled_tokens if self.in_flight else {}
        if ours and theirs and self.in_flight and not planned.keys() & self.vllm.sched.requests.keys():
            # Whoever the step left no room for need not wait for it any more: only the standalone scheduler says so.
            ours, theirs = ((e[0], *e[2:]) for e in (ours, theirs))
        assert ours == theirs


@given(workloads(again=True))
def test_sync_class_step_for_step(workload):
    Pair(workload, NeuronScheduler).run()


@given(workloads(prefix_caching=True, packed=False, late=False, again=True))
def test_sync_class_step_for_step_with_prefix_hits(workload):
    """vLLM shares content as soon as it is scheduled, the standalone scheduler once it is computed.

    That is the same with one prompt a step, no step ahead, and no abort while a step runs.
    """
    Pair(workload, NeuronScheduler).run()


@given(workloads())
def test_async_class_step_for_step_one_ahead(workload):
    Pair(workload, NeuronAsyncScheduler, ahead=True).run()


@given(workloads(prefix_caching=True, packed=False, late=False))
def test_async_class_step_for_step_under_the_one_step_engine(workload):
    Pair(workload, NeuronAsyncScheduler).run()


def lawful(workload, sched):
    """A check of every output: one phase, nothing above a limit, nobody preempted, padding by the book."""

    def look(out):
        before, real, padded = starts(out), out.num_scheduled_tokens, out.num_scheduled_tokens_padded
        assert padded.keys() == real.keys() == before.keys()
        assert all(0 < count <= padded[name] for name, count in real.items())
        assert not out.preempted_req_ids
        assert len(sched.running) <= workload.max_num_seqs
        arrivals = workload.arrivals()
        prefills = {name for name in real if before[name] < arrivals[name].prompt}
        assert prefills in (set(), real.keys()), "a mixed step"
        assert all(before[name] + count <= workload.max_model_len for name, count in real.items())
        if prefills:
            assert len(prefills) <= sched.max_prefills_per_batch
            assert sum(real.values()) <= sum(padded.values())
            assert sum(padded.values()) in sched.num_batched_tokens_buckets
            assert out.num_seqs_padded == 0
        elif real:
            assert padded == real
            assert set(real.values()) == {1}
            assert out.num_seqs_padded == min(size for size in sched.num_seqs_buckets if size >= len(real))
        sched.check()

    return look


def expected(workload, arrival):
    """What a request that is left alone emits, and why it ends."""
    if not workload.fits(arrival):
        return [[], "error"]
    tokens = []
    for position in range(arrival.prompt, arrival.prompt + arrival.max_tokens):
        tokens.append(arrival.token(position))
        if tokens[-1] in arrival.stop_token_ids:
            return [tokens, "stop"]
        if position + 1 >= workload.max_model_len:
            break
    return [tokens, "length"]


def served(workload, cls, *, ahead):
    """Everybody who is not aborted gets all that he asked for, by lawful steps; returns all outputs."""
    side = VllmSide(cls, workload, asynchronous=ahead)
    results = play(side, ahead=ahead, look=lawful(workload, side.sched))
    assert side.free_blocks == workload.num_blocks
    for name, arrival in workload.arrivals().items():
        if name not in workload.aborted():
            assert results[name] == expected(workload, arrival), name
    return results


@given(workloads(prefix_caching=None))
def test_sync_against_async(workload):
    """The same outputs and ends; the batches may differ, since a slot is freed one step later."""
    sync = served(workload, NeuronScheduler, ahead=False)
    one_ahead = served(workload, NeuronAsyncScheduler, ahead=True)
    for name in workload.arrivals().keys() - workload.aborted():
        assert sync[name] == one_ahead[name], name


@pytest.mark.parametrize("cls", [NeuronScheduler, NeuronAsyncScheduler])
@given(workload=workloads(prefix_caching=None))
@settings(max_examples=max(1, settings().max_examples // 20))
def test_nobody_is_preempted_at_any_block_count(cls, workload):
    """From the one at which the largest request fits up to where all of them do at once."""
    needs = [workload.need(arrival) for arrival in workload.arrivals().values()]
    for num_blocks in range(max(needs, default=1), sum(needs) + 1):
        served(replace(workload, num_blocks=num_blocks), cls, ahead=cls is NeuronAsyncScheduler)
