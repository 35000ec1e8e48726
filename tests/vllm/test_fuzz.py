"""Random moves: arrivals, aborts, grammars, remote KV, sessions, pauses, resets, and errors of the base class.

The invariants hold after each move. After the last one, each request that was not aborted finishes with its outputs, or
with an error if it can never run.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import random
from collections import Counter

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.errors import raise_on_call
from tests.vllm.support.grammar import set_compiled_grammar
from tests.vllm.support.harness import request
from tests.vllm.support.requests import request_ids, waiting_ids
from tests.vllm.support.schedulers import every_engine, num_free_blocks, with_connector

MODEL_LEN = 160
RAISING_METHODS = [
    "kv_cache_manager.new_step_starts",
    "kv_cache_manager.get_computed_blocks",
    "kv_cache_manager.allocate_slots",
    "connector.get_num_new_matched_tokens",
    "_make_cached_request_data",
    "_update_after_schedule",
]


class InjectedError(Exception):
    """The error that the test injects into the base class."""


class RandomMoves:
    """A scheduler, its engine and the expected results. `move()` makes one random move."""

    def __init__(self, seed, cls, ahead):
        self.rng = rng = random.Random(seed)
        self.blocks = rng.choice([12, 14, 20, 40, 400])
        self.sched = with_connector(
            cls,
            async_scheduling=bool(ahead),
            max_num_seqs=rng.choice([1, 2, 3, 5]),
            max_num_batched_tokens=rng.choice([48, 64, 160]),
            max_model_len=MODEL_LEN,
            num_blocks=self.blocks,
            prefix_caching=rng.random() < 0.4,
            policy=rng.choice(["fcfs", "fcfs", "priority"]),
            long_prefill_token_threshold=rng.choice([0, 0, 32]),
            watermark=rng.choice([0.0, 0.0, 0.1]),
            neuron_config={
                "max_prefills_per_batch": rng.choice([1, 1, 2, 3]),
                "max_consecutive_prefill_steps": rng.choice([None, 1, 2]),
                "min_decode_steps": rng.choice([1, 2]),
                "chunking": rng.choice(["fixed", "bucket"]),
            },
        )
        self.engine = Engine(self.sched, ahead)
        self.engine.allow_preemption = True
        self.count = 0
        self.expected_outputs = {}  # number of outputs by id
        self.unchecked = set()  # aborted requests and sessions, whose number of outputs is not determined
        self.unservable = set()
        self.finishes = Counter()  # calls of `_free_request` by id
        self.reported = Counter()  # reports in `finished_req_ids` by id
        self.session_inputs = {}  # number of inputs by id of an unfinished session
        free = self.sched._free_request

        def counting(r, *args, **kwargs):
            self.finishes[r.request_id] += 1
            return free(r, *args, **kwargs)

        self.sched._free_request = counting

    # Moves

    def new_id(self):
        self.count += 1
        return f"r{self.count}"

    def lengths(self):
        """Return a range of prompt lengths and a range of output counts."""
        return self.rng.choice([(1, 30), (20, 70), (100, MODEL_LEN)]), (1, self.rng.choice([1, 4, 12]))

    def new_request(self, **options):
        (shortest, longest), outputs = self.lengths()
        name, prompt, max_tokens = self.new_id(), self.rng.randint(shortest, longest), self.rng.randint(*outputs)
        ids = [3 + i for i in range(prompt)] if self.rng.random() < 0.5 else None
        r = request(name, prompt, max_tokens, token_ids=ids, priority=self.rng.randint(0, 2), **options)
        num_outputs = min(max_tokens, max(1, MODEL_LEN - prompt))
        if -(-min(prompt + num_outputs - 1, MODEL_LEN) // 16) > self.blocks - 1:
            self.unservable.add(name)
        self.expected_outputs[name] = num_outputs
        return r

    def add(self):
        self.sched.add_request(self.new_request())

    def add_with_grammar(self):
        self.sched.add_request(self.new_request(grammar=True))

    def add_remote(self):
        r = self.new_request()
        remote = self.rng.randint(0, r.num_prompt_tokens // 16) * 16
        answer = self.rng.choice([(None, False), (remote, False), (remote, remote > 0)])
        if answer[0] == r.num_prompt_tokens and not answer[1]:
            answer = (remote - 16, False)  # A synchronous load leaves at least one token to compute.
        self.sched.connector.answers[r.request_id] = answer
        self.sched.add_request(r)

    def add_empty(self):
        name = self.new_id()
        self.unservable.add(name)
        self.expected_outputs[name] = 0
        self.sched.add_request(request(name, 0, 3))

    def add_duplicate_id(self):
        unfinished = [rid for rid in self.sched.requests if rid not in self.session_inputs]
        if unfinished:
            self.sched.add_request(request(self.rng.choice(unfinished), 10, 3))

    def add_session(self):
        if self.blocks - 1 < -(-MODEL_LEN // 16):
            return
        name = self.new_id()
        self.session_inputs[name] = 1
        self.unchecked.add(name)
        r = request(name, self.rng.randint(1, 30), 3)
        r.resumable = True
        self.sched.add_request(r)

    def continue_session(self):
        sessions = [name for name in self.session_inputs if name in self.sched.requests]
        if sessions:
            name = self.rng.choice(sessions)
            last = self.session_inputs[name] >= 3
            self.session_inputs[name] += 1
            r = request(name, self.rng.randint(1, 10), 3)
            r.resumable = not last
            self.sched.add_request(r)
            if last:
                del self.session_inputs[name]

    def abort(self):
        aborted = self.rng.sample(sorted(self.sched.requests), min(len(self.sched.requests), self.rng.randint(1, 2)))
        self.unchecked.update(aborted)
        for name in aborted:
            self.session_inputs.pop(name, None)
        self.sched.finish_requests([*aborted, "unknown"], RequestStatus.FINISHED_ABORTED)

    def compile_grammars(self):
        for r in list(self.sched.requests.values()):
            if r.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR and self.rng.random() < 0.5:
                set_compiled_grammar(r)

    def answer_connector_queries(self):
        answers = self.sched.connector.answers
        for name, (remote, _) in list(answers.items()):
            if remote is None and self.rng.random() < 0.5:
                answers[name] = (0, False)

    def pause(self):
        self.sched.set_pause_state(self.rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))

    def unpause(self):
        self.sched.set_pause_state(PauseState.UNPAUSED)

    def reset(self):
        """Reset the prefix cache, unless a request that is not running has KV blocks."""
        sched = self.sched
        self.process_outputs(keep=0)
        not_running = [r for r in sched.requests.values() if r not in sched.running]
        if not any(r.num_computed_tokens or r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in not_running):
            assert sched.reset_prefix_cache(reset_running_requests=True)

    def process_outputs(self, keep=None):
        loading = [
            rid
            for rid, r in self.sched.requests.items()
            if (r.status == RequestStatus.WAITING_FOR_REMOTE_KVS or r.is_finished())
            and rid not in self.sched.finished_recving_kv_req_ids
        ]
        loaded = [rid for rid in loading if self.rng.random() < 0.4]
        self.engine.process_outputs(
            keep, **({"finished_recving": set(loaded)} if loaded and self.engine.in_flight else {})
        )

    def step(self, raises=False):
        sched, built = self.sched, self.sched.connector.built
        built.clear()
        throttle = self.rng.random() < 0.2
        if raises:
            # If the stock scheduler defers the release of blocks, it counts a step as in flight from
            # `_update_after_schedule` on, and would wait forever for the output of the step that failed.
            excluded = ["_update_after_schedule"] if sched.defer_block_free else []
            *owners, name = self.rng.choice([path for path in RAISING_METHODS if path not in excluded]).split(".")
            owner = sched
            for attribute in owners:
                owner = getattr(owner, attribute)
            is_instance_attribute = name in vars(owner)
            original = getattr(owner, name)
            setattr(owner, name, raise_on_call(original, InjectedError(), self.rng.randint(1, 3)))
            try:
                self.schedule(throttle)
            except InjectedError:
                sched.check()
            finally:
                if is_instance_attribute:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)
        else:
            out = self.schedule(throttle)
            assert len(built) == 1 and out.kv_connector_metadata is built[0]
            paused = sched.pause_state == PauseState.PAUSED_ALL
            if not self.engine.ahead:
                assert out.num_scheduled_tokens or paused or not sched.running, "an empty step while a request runs"
        sched.check()
        self.process_outputs()

    def schedule(self, throttle):
        out = self.engine.schedule(throttle_prefills=throttle)
        self.reported.update(out.finished_req_ids)
        slots_used = len(self.sched.running) + self.sched.num_waiting_for_streaming_input
        assert slots_used <= self.sched.max_num_running_reqs
        return out

    def step_that_raises(self):
        self.step(raises=True)

    MOVES = {  # noqa: RUF012
        add: 12,
        add_with_grammar: 4,
        add_remote: 5,
        add_empty: 1,
        add_duplicate_id: 1,
        add_session: 2,
        continue_session: 4,
        abort: 3,
        compile_grammars: 4,
        answer_connector_queries: 4,
        pause: 1,
        unpause: 3,
        reset: 1,
        step: 40,
        step_that_raises: 4,
    }

    def move(self):
        (chosen,) = self.rng.choices(list(self.MOVES), list(self.MOVES.values()))
        chosen(self)
        self.sched.check()
        self.check_queues()

    def check_queues(self):
        """Check that each unfinished request that can run is in exactly one list."""
        listed = request_ids(self.sched.running) + waiting_ids(self.sched)
        unservable = [rid for rid, r in self.sched.requests.items() if rid in self.unservable]
        unfinished = [rid for rid, r in self.sched.requests.items() if not r.is_finished() and rid not in unservable]
        assert sorted(rid for rid in listed if rid not in unservable) == sorted(unfinished)

    # Completion

    def drain(self):
        """Run all requests to completion and check the results."""
        sched = self.sched
        sched.set_pause_state(PauseState.UNPAUSED)
        for name in list(self.session_inputs):
            sched.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        for _ in range(3_000):
            for r in sched.requests.values():
                if r.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                    set_compiled_grammar(r)
                if r.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                    self.session_inputs[r.request_id] = 0
            for name in list(self.session_inputs):
                sched.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.session_inputs.clear()
            sched.connector.answers = {
                name: (0, False) if remote is None else (remote, asynchronous)
                for name, (remote, asynchronous) in sched.connector.answers.items()
            }
            if not sched.requests and not sched.has_requests():
                break
            self.step()
        else:
            raise AssertionError(f"not finished: {list(sched.requests)}: {sched.explain()}")
        self.engine.process_outputs(keep=0)
        assert num_free_blocks(sched) == self.blocks - 1
        assert (request_ids(sched.running), waiting_ids(sched)) == ([], [])
        for name, outputs in self.expected_outputs.items():
            if name in self.unchecked:
                continue
            if name in self.unservable:
                assert name in self.engine.errors and self.engine.outputs[name] == 0
            else:
                assert self.engine.outputs[name] == outputs, name
                assert name not in self.engine.errors
        assert self.reported == self.finishes, "a finished id was not reported exactly once"


def run_moves(seed, cls, ahead, num_moves=120):
    moves = RandomMoves(seed, cls, ahead)
    for _ in range(num_moves):
        moves.move()
    moves.drain()


@pytest.mark.parametrize("seed", range(24))
@every_engine
def test_random_moves_keep_the_invariants(cls, ahead, seed):
    run_moves(seed, cls, ahead)
