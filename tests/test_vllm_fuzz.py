"""Everything at once and in any order: arrivals, aborts, grammars, remote KV, sessions, pauses, resets, and errors.

After each move the laws hold, and when the moves end everybody who was not aborted ends as he should.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import random
from collections import Counter

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import request
from vllm_setup import Engine, compiled, names, queued, raising_once, usable_free, with_connector

ENGINES = [(NeuronScheduler, 0), (NeuronAsyncScheduler, 0), (NeuronAsyncScheduler, 1)]
MODEL_LEN = 160
RAISES = [
    "kv_cache_manager.new_step_starts",
    "kv_cache_manager.get_computed_blocks",
    "kv_cache_manager.allocate_slots",
    "connector.get_num_new_matched_tokens",
    "_make_cached_request_data",
    "_update_after_schedule",
]


class TestError(Exception):
    """Raised by the base because the test wants it."""

    __test__ = False


class World:
    """A scheduler with all that may happen to it; `move()` does one thing."""

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
        self.engine.may_preempt = True
        self.count = 0
        self.wanted = {}  # id: outputs
        self.gone = set()  # aborted, or of uncertain length
        self.impossible = set()
        self.finishes = Counter()
        self.told = Counter()
        self.turns = {}  # session: turns that were asked for
        free = self.sched._free_request

        def counting(r, *args, **kwargs):
            self.finishes[r.request_id] += 1
            return free(r, *args, **kwargs)

        self.sched._free_request = counting

    # moves

    def new_id(self):
        self.count += 1
        return f"r{self.count}"

    def lengths(self):
        return self.rng.choice([(1, 30), (20, 70), (100, MODEL_LEN)]), (1, self.rng.choice([1, 4, 12]))

    def fresh(self, **more):
        (shortest, longest), outputs = self.lengths()
        name, prompt, outs = self.new_id(), self.rng.randint(shortest, longest), self.rng.randint(*outputs)
        ids = [3 + i for i in range(prompt)] if self.rng.random() < 0.5 else None
        r = request(name, prompt, outs, token_ids=ids, priority=self.rng.randint(0, 2), **more)
        capped = min(outs, max(1, MODEL_LEN - prompt))
        if -(-min(prompt + capped - 1, MODEL_LEN) // 16) > self.blocks - 1:
            self.impossible.add(name)
        self.wanted[name] = capped
        return r

    def add(self):
        self.sched.add_request(self.fresh())

    def add_with_grammar(self):
        self.sched.add_request(self.fresh(grammar=True))

    def add_remote(self):
        r = self.fresh()
        held = self.rng.randint(0, r.num_prompt_tokens // 16) * 16
        answer = self.rng.choice([(None, False), (held, False), (held, held > 0)])
        if answer[0] == r.num_prompt_tokens and not answer[1]:
            answer = (held - 16, False)  # a load in the step itself leaves something to compute
        self.sched.connector.answers[r.request_id] = answer
        self.sched.add_request(r)

    def add_empty(self):
        name = self.new_id()
        self.impossible.add(name)
        self.wanted[name] = 0
        self.sched.add_request(request(name, 0, 3))

    def add_twice(self):
        living = [rid for rid in self.sched.requests if rid not in self.turns]
        if living:
            self.sched.add_request(request(self.rng.choice(living), 10, 3))

    def add_session(self):
        if self.blocks - 1 < -(-MODEL_LEN // 16):
            return
        name = self.new_id()
        self.turns[name] = 1
        self.gone.add(name)
        r = request(name, self.rng.randint(1, 30), 3)
        r.resumable = True
        self.sched.add_request(r)

    def continue_session(self):
        alive = [name for name in self.turns if name in self.sched.requests]
        if alive:
            name = self.rng.choice(alive)
            last = self.turns[name] >= 3
            self.turns[name] += 1
            r = request(name, self.rng.randint(1, 10), 3)
            r.resumable = not last
            self.sched.add_request(r)
            if last:
                del self.turns[name]

    def abort(self):
        some = self.rng.sample(sorted(self.sched.requests), min(len(self.sched.requests), self.rng.randint(1, 2)))
        self.gone.update(some)
        for name in some:
            self.turns.pop(name, None)
        self.sched.finish_requests([*some, "nobody"], RequestStatus.FINISHED_ABORTED)

    def compile(self):
        for r in list(self.sched.requests.values()):
            if r.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR and self.rng.random() < 0.5:
                compiled(r)

    def answer(self):
        answers = self.sched.connector.answers
        for name, (held, _) in list(answers.items()):
            if held is None and self.rng.random() < 0.5:
                answers[name] = (0, False)

    def pause(self):
        self.sched.set_pause_state(self.rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))

    def unpause(self):
        self.sched.set_pause_state(PauseState.UNPAUSED)

    def reset(self):
        """Possible while nobody holds blocks who does not run."""
        sched = self.sched
        self.settle(keep=0)
        others = [r for r in sched.requests.values() if r not in sched.running]
        if not any(r.num_computed_tokens or r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in others):
            assert sched.reset_prefix_cache(reset_running_requests=True)

    def settle(self, keep=None):
        loading = [
            rid
            for rid, r in self.sched.requests.items()
            if (r.status == RequestStatus.WAITING_FOR_REMOTE_KVS or r.is_finished())
            and rid not in self.sched.finished_recving_kv_req_ids
        ]
        ended = [rid for rid in loading if self.rng.random() < 0.4]
        self.engine.settle(keep, **({"finished_recving": set(ended)} if ended and self.engine.in_flight else {}))

    def step(self, raises=False):
        sched, built = self.sched, self.sched.connector.built
        built.clear()
        throttle = self.rng.random() < 0.2
        if raises:
            # Where blocks are freed one step late, stock counts a step as running from here on, and waits for its end.
            late = ["_update_after_schedule"] if sched.defer_block_free else []
            *owners, name = self.rng.choice([place for place in RAISES if place not in late]).split(".")
            owner = sched
            for one in owners:
                owner = getattr(owner, one)
            own = name in vars(owner)
            original = getattr(owner, name)
            setattr(owner, name, raising_once(original, TestError(), self.rng.randint(1, 3)))
            try:
                self.schedule(throttle)
            except TestError:
                sched.check()
            finally:
                if own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)
        else:
            out = self.schedule(throttle)
            assert len(built) == 1 and out.kv_connector_metadata is built[0]
            paused = sched.pause_state == PauseState.PAUSED_ALL
            if not self.engine.ahead:
                assert out.num_scheduled_tokens or paused or not sched.running, "an empty step while somebody runs"
        sched.check()
        self.settle()

    def schedule(self, throttle):
        out = self.engine.schedule(throttle_prefills=throttle)
        self.told.update(out.finished_req_ids)
        seats = len(self.sched.running) + self.sched.num_waiting_for_streaming_input
        assert seats <= self.sched.max_num_running_reqs
        return out

    def step_that_raises(self):
        self.step(raises=True)

    MOVES = {  # noqa: RUF012
        add: 12,
        add_with_grammar: 4,
        add_remote: 5,
        add_empty: 1,
        add_twice: 1,
        add_session: 2,
        continue_session: 4,
        abort: 3,
        compile: 4,
        answer: 4,
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
        self.check_order()

    def check_order(self):
        everywhere = names(self.sched.running) + queued(self.sched)
        unservable = [rid for rid, r in self.sched.requests.items() if rid in self.impossible]
        alive = [rid for rid, r in self.sched.requests.items() if not r.is_finished() and rid not in unservable]
        assert sorted(rid for rid in everywhere if rid not in unservable) == sorted(alive)

    # the end

    def drain(self):
        sched = self.sched
        sched.set_pause_state(PauseState.UNPAUSED)
        for name in list(self.turns):
            sched.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        for _ in range(3_000):
            for r in sched.requests.values():
                if r.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                    compiled(r)
                if r.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                    self.turns[r.request_id] = 0
            for name in list(self.turns):
                sched.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.turns.clear()
            sched.connector.answers = {
                name: (0, False) if held is None else (held, beside)
                for name, (held, beside) in sched.connector.answers.items()
            }
            if not sched.requests and not sched.has_requests():
                break
            self.step()
        else:
            raise AssertionError(f"stuck with {list(sched.requests)}: {sched.explain()}")
        self.engine.settle(keep=0)
        assert usable_free(sched) == self.blocks - 1
        assert (names(sched.running), queued(sched)) == ([], [])
        for name, outputs in self.wanted.items():
            if name in self.gone:
                continue
            if name in self.impossible:
                assert name in self.engine.errors and self.engine.outputs[name] == 0
            else:
                assert self.engine.outputs[name] == outputs, name
                assert name not in self.engine.errors
        assert self.told == self.finishes, "every end is told once"


def play(seed, cls, ahead, moves=120):
    world = World(seed, cls, ahead)
    for _ in range(moves):
        world.move()
    world.drain()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("cls", "ahead"), ENGINES, ids=["sync", "async-one-step", "async-ahead"])
def test_anything_may_happen(cls, ahead, seed):
    play(seed, cls, ahead)
