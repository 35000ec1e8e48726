"""`Scheduler` against the pure-Python oracle, over random histories."""

from hypothesis import given
from hypothesis import strategies as st

from neuron_sched import Req, Scheduler
from oracle import MixedOracle, MixedReq


def sizes(draw, kv_tokens):
    """A prompt and its outputs; some never fit, others fill the cache exactly, alone or in halves and quarters."""
    prompt_len = draw(st.integers(1, max(1, kv_tokens * 2 // 3)))
    max_new = draw(st.integers(1, max(1, kv_tokens * 2 // 3)))
    for share in draw(st.sampled_from([(), (), (1, 2, 4)])):
        if prompt_len < kv_tokens // share:
            max_new = kv_tokens // share - prompt_len
    begun = draw(st.sampled_from([False, False, True]))
    prefilled = draw(st.integers(0, prompt_len)) if begun else 0
    generated = draw(st.integers(0, max_new - 1)) if begun else 0
    return prompt_len, max_new, prefilled, generated


@st.composite
def histories(draw):
    """A configuration and what a caller does, with up to 40 requests."""
    config = draw(st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(4, 200)))
    kinds = ["add", "add", "step", "steps", "schedule", "complete", "cancel", "again", "cancel_planned"]
    operations = []
    added = 0
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=100)):
        if kind == "add" and added < 40:
            operations.append((kind, (added, *sizes(draw, config[2]))))
            added += 1
        elif kind in ("cancel", "again"):
            operations.append((kind, draw(st.integers(0, max(0, added - 1)))))
        elif kind == "cancel_planned":
            operations.append((kind, draw(st.integers(0, 7))))
        elif kind == "steps":
            operations.append((kind, draw(st.integers(2, 20))))
        else:
            operations.append((kind, None))
    return config, operations


def answer(call, arguments):
    """What the call returns, or ValueError where it raises that."""
    try:
        return call(*arguments)
    except ValueError:
        return ValueError


class Pair:
    """Both schedulers under one set of calls; every answer is compared."""

    def __init__(self, config):
        self.config = config
        self.ours, self.oracle = Scheduler(*config), MixedOracle(*config)
        self.requests = {}
        self.plans = ([], [])

    def both(self, call, ours, oracle):
        """The answers to a call of either side, or the ValueErrors of both."""
        answers = answer(getattr(self.ours, call), ours), answer(getattr(self.oracle, call), oracle)
        assert (answers[0] is ValueError) == (answers[1] is ValueError)
        return answers

    def add(self, fields):
        pair = self.requests[fields[0]] = (Req(*fields), MixedReq(*fields))
        self.both("add", pair[:1], pair[1:])

    def again(self, rid):
        if rid in self.requests and self.requests[rid][1].generated < self.requests[rid][1].max_new:
            self.both("add", self.requests[rid][:1], self.requests[rid][1:])

    def cancel(self, rid):
        answers = self.both("cancel", (rid,), (rid,))
        assert answers[0] == answers[1]

    def schedule(self, _):
        self.plans = self.both("schedule", (), ())
        ours, oracle = ([(req.rid, tokens) for req, tokens in plan] for plan in self.plans)
        assert ours == oracle
        token_budget, max_seqs, kv_tokens = self.config
        assert sum(tokens for _, tokens in ours) <= token_budget
        assert all(tokens >= 1 for _, tokens in ours)
        assert len(self.ours.running) <= max_seqs
        assert self.ours.reserved <= kv_tokens

    def complete(self, _):
        answers = self.both("complete", (self.plans[0],), (self.plans[1],))
        assert answers[0] == answers[1]

    def cancel_planned(self, position):
        """A step, one of whose requests is cancelled before it completes."""
        self.schedule(None)
        if self.plans[1]:
            self.cancel(self.plans[1][position % len(self.plans[1])][0].rid)
        self.complete(None)

    def step(self, _):
        self.schedule(None)
        self.complete(None)

    def steps(self, times):
        for _ in range(times):
            self.step(None)

    def compare(self):
        assert self.ours.reserved == self.oracle.reserved
        for queue in ("waiting", "running"):
            ours, oracle = getattr(self.ours, queue), getattr(self.oracle, queue)
            assert [req.rid for req in ours] == [req.rid for req in oracle]
        for ours, oracle in self.requests.values():
            assert (ours.prefilled, ours.generated) == (oracle.prefilled, oracle.generated)
        self.ours.check()


@given(histories())
def test_x02_equal_to_the_oracle_and_everybody_ends(history):
    config, operations = history
    pair = Pair(config)
    for name, argument in operations:
        getattr(pair, name)(argument)
        pair.compare()
    work = sum(req.prompt_len + req.max_new for req, _ in pair.requests.values())
    for _ in range(work + 1):
        if not (pair.oracle.waiting or pair.oracle.running):
            break
        pair.step(None)
        pair.compare()
    assert (len(pair.ours.waiting), len(pair.ours.running), pair.ours.reserved) == (0, 0, 0)
