"""Scheduled steps that the worker has not filled yet, for calls that `VllmInputs` must refuse."""

import copy
import re

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler
from tests.vllm.support.checked_worker import CheckedWorker
from tests.vllm.support.requests import add
from tests.vllm.support.schedulers import build, build_ahead


def assert_refused(worker, call, match, error=(TypeError, ValueError)):
    """Assert that the call raises and changes no array, tracked request or step in flight. Return the message."""
    before = (worker.inputs.num_requests, worker.inputs.num_in_flight)
    message = worker.watched.refused(call, match, error)
    assert (worker.inputs.num_requests, worker.inputs.num_in_flight) == before
    return message


class UnfilledStep:
    """An unfilled decode or prefill step, or a prefill step of resumed requests, and its worker."""

    def __init__(self, kind):
        self.sched = build(neuron_config={"max_prefills_per_batch": 2, "decode_context_length_buckets": [64]})
        self.sched.use_v2_model_runner = False  # the output lists resumed requests as resumed, not as new
        self.worker = CheckedWorker(self.sched, vocab_size=1000)
        add(self.sched, a=(16, 9), b=(10, 9))
        self.worker.step()
        if kind == "prefill":
            self.worker.step()
            add(self.sched, c=(20, 3), d=(30, 3))
        elif kind == "resumed":
            self.sched.reset_prefix_cache(reset_running_requests=True)
        self.out = self.sched.schedule()

    def assert_refused(self, corrupt, match):
        """Assert that the corrupted output is refused, and that the original one then runs to the end."""
        wrong = copy.deepcopy(self.out)
        corrupt(wrong)
        message = assert_refused(self.worker, lambda: self.worker.inputs.fill(wrong), re.escape(match))
        self.worker.fill(self.out)
        self.worker.deliver()
        self.worker.run()
        return message


class UnfilledAsyncStep:
    """An unfilled decode step of a and b, while the step that samples its input tokens is in flight."""

    def __init__(self):
        self.sched = build_ahead(NeuronAsyncScheduler, 1, neuron_config={"decode_context_length_buckets": [64]})
        self.worker = CheckedWorker(self.sched, buffers=2, vocab_size=1000)
        add(self.sched, a=(16, 9), b=(10, 9))
        for _ in range(3):
            self.worker.step(1)
        self.out = self.sched.schedule()

    def assert_refused(self, tokens, match, error=(TypeError, ValueError), **options):
        """Assert that the tokens are refused, and that the step then runs to the end with correct ones."""
        assert_refused(
            self.worker, lambda: self.worker.inputs.fill(self.out, tokens, **options), re.escape(match), error
        )
        self.worker.fill(self.out)
        self.worker.run(1)
