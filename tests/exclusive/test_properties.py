"""`BucketScheduler` and the oracle return the same values for the same random histories."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.exclusive.support.scheduler import NATIVE, ORACLE

# Prompts are prefixes of these lists, so that content is often shared.
PROMPT_SOURCES = ([1] * 40, [1, 2] * 20, [2, 2, 1] * 14)


@st.composite
def configs(draw):
    seqs = draw(st.integers(1, 5))
    tokens = draw(st.integers(max(4, seqs), 40))
    length = draw(st.integers(5, 40))
    block_size = draw(st.integers(1, 8))
    longest = -(-length // block_size)
    by_model_len = draw(st.sampled_from([False, False, False, True]))

    def sizes(last):
        return st.none() | st.sets(st.integers(1, last), max_size=3).map(lambda some: sorted({*some, last}))

    buckets = draw(sizes(min(tokens, length)))
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "max_model_len": length,
        "block_size": block_size,
        "num_blocks": draw(st.integers(longest if by_model_len else 1, 3 * longest + 1)),
        "num_batched_tokens_buckets": buckets,
        "num_seqs_buckets": draw(sizes(seqs)),
        "max_prefills_per_batch": draw(st.integers(1, 3)),
        "kv_admission": "max_model_len" if by_model_len else "reserve",
        "max_consecutive_prefill_steps": draw(st.none() | st.integers(1, 3)),
        "min_decode_steps": draw(st.integers(1, 3)),
        "chunking": draw(st.sampled_from(["fixed", "bucket"])),
        "prefill_cost": draw(st.none() | st.fixed_dictionaries({size: st.integers(0, 9) for size in buckets or []}))
        if buckets
        else None,
        "long_prefill_token_threshold": draw(st.just(0) | st.integers(1, 8)),
        "prefix_caching": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "lookahead": draw(st.integers(0, 3)),
    }


@st.composite
def prompts(draw):
    length = draw(st.integers(1, 12) | st.integers(1, 41))
    if draw(st.integers(0, 3)) == 0:
        return length
    tail = draw(st.lists(st.integers(1, 2), max_size=2))
    return [*draw(st.sampled_from(PROMPT_SOURCES))[:length], *tail][: max(1, length)]


def result_of(call):
    """Return the result of the call, or the type of its exception."""
    try:
        return call()
    except (ValueError, KeyError) as error:
        return type(error)


class Agreement(RuleBasedStateMachine):
    @initialize(config=configs())
    def start(self, config):
        self.pair = NATIVE.new(**config), ORACLE.new(**config)
        self.native, self.oracle = self.pair
        self.steps = []
        self.added = 0

    def assert_agreement(self, call):
        native, oracle = (result_of(lambda s=s: call(s)) for s in self.pair)
        assert native == oracle
        return oracle

    @rule(
        name=st.sampled_from("abcdef"),
        prompt=prompts(),
        max_tokens=st.integers(1, 4) | st.integers(1, 50),
        priority=st.integers(-1, 1),
        stop=st.lists(st.integers(3, 5), max_size=1),
    )
    def add(self, name, prompt, max_tokens, priority, stop):
        options = {"priority": priority, "stop_token_ids": stop}
        requests = [impl.request(name, prompt, max_tokens, **options) for impl in (NATIVE, ORACLE)]
        results = [result_of(lambda s=s, r=r: s.add(r)) for s, r in zip(self.pair, requests, strict=True)]
        assert results[0] == results[1]
        self.compare_all()

    @rule(throttle=st.sampled_from([False, False, False, True]), ahead=st.booleans())
    def schedule(self, throttle, ahead):
        steps = [result_of(lambda s=s: s.schedule(throttle_prefills=throttle, ahead=ahead)) for s in self.pair]
        if ValueError in steps:
            assert steps == [ValueError, ValueError]
            assert ahead
            assert len(self.steps) == 2
            return
        if not ahead:
            self.steps.clear()
        self.steps.append(steps)
        if len(self.steps) == 1:
            live = self.native.num_waiting + self.native.num_running
            assert (steps[0].kind == "idle") == (live == 0), "an idle step although a request could run"
        self.compare_all()

    @precondition(lambda self: self.steps)
    @rule(ids=st.lists(st.sampled_from([1, 1, 1, 2, 2, 2, 3, 4]), min_size=1), variant=st.integers(0, 9))
    def complete(self, ids, variant):
        native, oracle = self.steps[0]
        tokens = []
        for at, (r, count, computed, _, _) in enumerate(oracle.rows):
            tokens.append(ids[at % len(ids)] if computed + count >= r.prompt_len else None)
        if variant == 0:
            tokens = None
        elif variant == 1:
            tokens = tokens[1:]
        elif variant == 2 and tokens:
            tokens[-1] = 7 if tokens[-1] is None else None
        outcomes = [
            result_of(lambda s=s, step=step: s.complete(step, tokens))
            for s, step in zip(self.pair, self.steps[0], strict=True)
        ]
        if ValueError in outcomes:
            assert outcomes == [ValueError, ValueError]
        else:
            emitted_by_side = [[(o.id, o.token, o.finish_reason) for o in emitted] for emitted in outcomes]
            assert emitted_by_side[0] == emitted_by_side[1]
            self.steps.pop(0)
            assert result_of(lambda: self.native.complete(native, tokens)) is ValueError, "completed twice"
        self.compare_all()

    @precondition(lambda self: len(self.steps) == 2)
    @rule()
    def complete_the_step_ahead_first(self):
        assert result_of(lambda: self.native.complete(self.steps[1][0])) is ValueError
        self.compare_all()

    @rule(name=st.sampled_from("abcdef"))
    def cancel(self, name):
        self.assert_agreement(lambda s: s.cancel(name))
        self.compare_all()

    def compare_all(self):
        for s in self.pair:
            s.check()
        self.assert_agreement(lambda s: (s.state, s.num_waiting, s.num_running, s.free_blocks, s.reserved_blocks))
        for name in "abcdef":
            self.assert_agreement(lambda s, name=name: self.state_of(s, name))
        self.assert_agreement(self.explanation)
        for native, oracle in self.steps:
            assert self.values_of(native) == self.values_of(oracle)

    @staticmethod
    def state_of(s, name):
        state = s.request(name)
        return state.status, state.num_computed_tokens, list(state.output_token_ids), list(state.block_ids)

    @staticmethod
    def explanation(s):
        e = s.explain()
        return e and (e.id, e.reason, e.needed, e.reserved, e.usable)

    @staticmethod
    def values_of(step):
        rows = list(step.num_scheduled_tokens.items()), list(step.num_scheduled_tokens_padded.items())
        computed = list(step.num_computed_tokens.items())
        blocks = [list(step.block_ids(name)) for name, _ in computed]
        return step.kind, *rows, computed, step.num_seqs_padded, list(step.finished_ids), blocks

    def teardown(self):
        """Assert that every accepted request ends and all blocks are freed."""
        if not hasattr(self, "pair"):
            return
        for _ in range(2000):
            if not self.native.num_running + self.native.num_waiting:
                break
            self.schedule(throttle=False, ahead=False)
            self.complete(ids=[1], variant=9)
        assert (self.oracle.num_running, self.oracle.num_waiting) == (0, 0)
        assert self.native.free_blocks == self.oracle.num_blocks


TestAgreement = pytest.mark.timeout(0)(Agreement.TestCase)
# Each comparison covers all values, so one history takes long. The profile sets the number of histories.
TestAgreement.settings = settings(deadline=None)
