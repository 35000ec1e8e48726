"""`Scheduler` and its oracle return the same values for the same random histories."""

from hypothesis import given
from hypothesis import strategies as st

from neuron_sched import Req, Scheduler
from tests.support.oracles.mixed import MixedOracle, MixedReq


def sizes(draw, kv_tokens):
    """Draw prompt_len, max_new, prefilled and generated of a request.

    Some requests never fit. Others fill the KV cache exactly, or a half or a quarter of it.
    """
    prompt_len = draw(st.integers(1, max(1, kv_tokens * 2 // 3)))
    max_new = draw(st.integers(1, max(1, kv_tokens * 2 // 3)))
    for share in draw(st.sampled_from([(), (), (1, 2, 4)])):
        if prompt_len < kv_tokens // share:
            max_new = kv_tokens // share - prompt_len
    started = draw(st.sampled_from([False, False, True]))
    prefilled = draw(st.integers(0, prompt_len)) if started else 0
    generated = draw(st.integers(0, max_new - 1)) if started else 0
    return prompt_len, max_new, prefilled, generated


@st.composite
def histories(draw):
    """Draw a configuration and a list of operations with up to 40 requests."""
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


def result_of(call, arguments):
    """Return the result of the call, or `ValueError` if it raises that."""
    try:
        return call(*arguments)
    except ValueError:
        return ValueError


class Pair:
    """`Scheduler` and its oracle. Every operation runs on both and the results are compared."""

    def __init__(self, config):
        self.config = config
        self.native, self.oracle = Scheduler(*config), MixedOracle(*config)
        self.requests = {}
        self.plans = ([], [])

    def both(self, call, native, oracle):
        """Return the results of a call on both sides. Either both raise `ValueError` or neither does."""
        results = result_of(getattr(self.native, call), native), result_of(getattr(self.oracle, call), oracle)
        assert (results[0] is ValueError) == (results[1] is ValueError)
        return results

    def add(self, fields):
        pair = self.requests[fields[0]] = (Req(*fields), MixedReq(*fields))
        self.both("add", pair[:1], pair[1:])

    def again(self, rid):
        if rid in self.requests and self.requests[rid][1].generated < self.requests[rid][1].max_new:
            self.both("add", self.requests[rid][:1], self.requests[rid][1:])

    def cancel(self, rid):
        results = self.both("cancel", (rid,), (rid,))
        assert results[0] == results[1]

    def schedule(self, _):
        self.plans = self.both("schedule", (), ())
        native, oracle = ([(req.rid, tokens) for req, tokens in plan] for plan in self.plans)
        assert native == oracle
        token_budget, max_seqs, kv_tokens = self.config
        assert sum(tokens for _, tokens in native) <= token_budget
        assert all(tokens >= 1 for _, tokens in native)
        assert len(self.native.running) <= max_seqs
        assert self.native.reserved <= kv_tokens

    def complete(self, _):
        results = self.both("complete", (self.plans[0],), (self.plans[1],))
        assert results[0] == results[1]

    def cancel_planned(self, position):
        """Run a step, and cancel one of its requests before it is completed."""
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
        assert self.native.reserved == self.oracle.reserved
        for queue in ("waiting", "running"):
            native, oracle = getattr(self.native, queue), getattr(self.oracle, queue)
            assert [req.rid for req in native] == [req.rid for req in oracle]
        for native, oracle in self.requests.values():
            assert (native.prefilled, native.generated) == (oracle.prefilled, oracle.generated)
        self.native.check()


@given(histories())
def test_x02_results_equal_the_oracle_and_every_request_ends(history):
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
    assert (len(pair.native.waiting), len(pair.native.running), pair.native.reserved) == (0, 0, 0)
