"""Random workloads take the same steps on the vLLM classes and on `BucketScheduler`.

Both make their decisions in the same core. These tests check the vLLM classes' translation between the core and the
base class. `tests/exclusive` compares `BucketScheduler` with an oracle in Python.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from hypothesis import given

from neuron_sched import NeuronAsyncScheduler, NeuronScheduler
from tests.vllm.support.drivers import BucketDriver, VllmDriver
from tests.vllm.support.harness import computed_before
from tests.vllm.support.invariants import run_and_check
from tests.vllm.support.strategies import workloads
from tests.vllm.support.workload import steps_to_completion

pytestmark = [pytest.mark.timeout(0), pytest.mark.usefixtures("quiet")]


class Pair:
    """A workload on both schedulers, which are compared after every event."""

    def __init__(self, workload, cls, *, ahead=False):
        self.workload, self.ahead = workload, ahead
        self.vllm, self.bucket = VllmDriver(cls, workload, asynchronous=ahead), BucketDriver(workload)
        self.in_flight = []
        self.refused = {}  # by id of a request that can never run, whether its error was delivered
        self.unpadded = self.padded = 0
        self.state = "IDLE"

    def run(self):
        for events, names in steps_to_completion(self.workload, self.unfinished):
            for name in names:
                self.add(name)
            for i in events.abort:
                self.abort(f"r{i}")
            self.compare()
            self.schedule(events.throttle)
            self.compare()
            for i in events.abort_in_flight:
                self.abort(f"r{i}")
                self.compare()
            if len(self.in_flight) > self.ahead:
                self.deliver()
                self.compare()
        while self.in_flight:
            self.deliver()
        assert all(self.refused.values())
        assert self.vllm.free_blocks == self.workload.num_blocks
        sched = self.vllm.sched
        assert (sched.total_scheduled_tokens, sched.total_padding_tokens) == (
            self.unpadded,
            self.padded - self.unpadded,
        )

    def unfinished(self):
        sched = self.bucket.sched
        return sched.num_waiting or sched.num_running or self.vllm.unfinished()

    def add(self, name):
        duplicate = name in self.vllm.sched.requests
        fits = self.workload.fits(self.vllm.arrivals[name])
        self.vllm.add(name)
        try:
            self.bucket.add(name)
        except ValueError:
            assert duplicate or not fits
            if not duplicate:
                self.refused[name] = False
        else:
            assert fits and not duplicate

    def abort(self, name):
        self.vllm.abort(name)
        self.bucket.abort(name)
        if name in self.refused:
            self.refused[name] = True

    def schedule(self, throttle):
        capacity_bound = self.vllm.sched.prefill_capacity_bound
        out = self.vllm.schedule(throttle)
        # Unlike vLLM, `BucketScheduler` throttles a capacity-bound rank too.
        step = self.bucket.schedule(throttle and not capacity_bound, self.ahead)
        assert self.contents(out) == {
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
            self.unpadded += out.total_num_scheduled_tokens
            self.padded += step.padded_tokens
        if not (throttle and not capacity_bound and step.kind == "decode"):
            capacity_bound = self.bucket.sched.num_waiting > 0
        assert self.vllm.sched.prefill_capacity_bound == capacity_bound
        if not self.bucket.sched.num_running and not self.bucket.sched.num_waiting:
            self.state = "IDLE"
        elif step.kind != "idle":
            self.state = f"ACTIVE_{step.kind.upper()}"
        assert self.vllm.sched.state.name == self.state
        self.in_flight.append((out, step))
        self.vllm.sched.check()

    def contents(self, out):
        """Return the fields of vLLM's output, without requests that can never run."""
        return {
            "tokens": list(out.num_scheduled_tokens.items()),
            "padded": list(out.num_scheduled_tokens_padded.items()),
            "seqs": out.num_seqs_padded,
            "computed": computed_before(out),
            "blocks": {name: self.vllm.blocks(name) for name in out.num_scheduled_tokens},
            "finished": out.finished_req_ids - self.refused.keys(),
        }

    def deliver(self):
        out, step = self.in_flight.pop(0)
        emitted = self.vllm.deliver(out)
        for name in (name for name, _, reason in emitted if reason == "error"):
            assert self.refused[name] is False, f"{name}: expected one error, of a request that can never run"
            self.refused[name] = True
        assert [output for output in emitted if output[2] != "error"] == self.bucket.deliver(step)
        assert all(self.refused.values()), "an error was not delivered with the next output"
        assert self.vllm.free_blocks == self.bucket.sched.free_blocks

    def compare(self):
        """Assert that both schedulers have the same counts of requests and give the same explanation."""
        self.vllm.sched.check()
        if not all(self.refused.values()):
            return  # vLLM counts a request as unfinished until its error is delivered
        sched = self.bucket.sched
        assert self.vllm.sched.get_request_counts() == (sched.num_running, sched.num_waiting)
        vllm, bucket = self.vllm.explanation(), self.bucket.explanation()
        planned = self.in_flight[-1][0].num_scheduled_tokens if self.in_flight else {}
        if vllm and bucket and self.in_flight and not planned.keys() & self.vllm.sched.requests.keys():
            # All requests of the last step are aborted. Only `BucketScheduler` then updates the reason at once.
            vllm, bucket = ((e[0], *e[2:]) for e in (vllm, bucket))
        assert vllm == bucket


@given(workloads(resubmit=True))
def test_the_sync_class_takes_the_same_steps(workload):
    Pair(workload, NeuronScheduler).run()


@given(workloads(prefix_caching=True, packed=False, aborts_in_flight=False, resubmit=True))
def test_the_sync_class_takes_the_same_steps_with_prefix_cache_hits(workload):
    """vLLM caches a block when it is scheduled, `BucketScheduler` when it is computed.

    There is no difference with one prompt a step, one step in flight and no abort in flight.
    """
    Pair(workload, NeuronScheduler).run()


@given(workloads())
def test_the_async_class_takes_the_same_steps_one_step_ahead(workload):
    Pair(workload, NeuronAsyncScheduler, ahead=True).run()


@given(workloads(prefix_caching=True, packed=False, aborts_in_flight=False))
def test_the_async_class_takes_the_same_steps_in_a_synchronous_engine(workload):
    Pair(workload, NeuronAsyncScheduler).run()


@given(workloads(prefix_caching=None))
def test_the_sync_and_the_async_class_have_the_same_results(workload):
    """Output tokens and finish reasons are equal. Batches may differ, because a slot is freed one step later."""
    sync = run_and_check(workload, NeuronScheduler, ahead=False)
    one_ahead = run_and_check(workload, NeuronAsyncScheduler, ahead=True)
    for name in workload.arrivals().keys() - workload.aborted():
        assert sync[name] == one_ahead[name], name
