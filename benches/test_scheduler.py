"""`Scheduler` against the pure-Python oracle, and how its cost scales."""

import pytest

from neuron_sched import Req, Scheduler
from tests.support.oracles.mixed import MixedOracle, MixedReq

SIDES = {"oracle": (MixedOracle, MixedReq), "ours": (Scheduler, Req)}
ENDLESS = 10**9


def decoding(side, count, *, token_budget=2048, waiting=0):
    """Return a scheduler with `count` requests that decode endlessly and `waiting` requests without a batch slot."""
    make_scheduler, make_req = SIDES[side]
    scheduler = make_scheduler(token_budget, count, 10**6 * ENDLESS)
    for rid in range(count + waiting):
        scheduler.add(make_req(rid, 1, ENDLESS))
    scheduler.complete(scheduler.schedule())
    assert (len(scheduler.running), len(scheduler.waiting)) == (count, waiting)
    return scheduler


def step(scheduler):
    plan = scheduler.schedule()
    return [(req.rid, tokens) for req, tokens in plan], scheduler.complete(plan)


def stepper(scheduler):
    def call():
        scheduler.complete(scheduler.schedule())

    return call


def test_steady_decode_of_1024(ratio):
    oracle, ours = decoding("oracle", 1024), decoding("ours", 1024)
    for _ in range(3):
        assert step(ours) == step(oracle)
    ratio(stepper(oracle), stepper(ours), at_least=20)


def test_1023_decodes_beside_an_endless_prompt(ratio):
    """Prompt progress changes with every step, so no plan can be reused."""
    pair = []
    for side, (_, make_req) in SIDES.items():
        scheduler = decoding(side, 1024)
        scheduler.cancel(0)
        scheduler.add(make_req("prompt", 10**12, 1))
        pair.append(scheduler)
    oracle, ours = pair
    for _ in range(3):
        assert step(ours) == step(oracle)
    ratio(stepper(oracle), stepper(ours))


def turnover(side):
    """Return a function that serves 1,024 requests of two outputs in 256 batch slots.

    Half of the running requests end in each step and are replaced by waiting requests.
    """
    make_scheduler, make_req = SIDES[side]
    scheduler = make_scheduler(2048, 256, 10**9)

    def call():
        for rid in range(1024):
            scheduler.add(make_req(rid, 4, 2))
        plan = scheduler.schedule()
        steps = []
        while plan:
            steps.append(scheduler.complete(plan))
            plan = scheduler.schedule()
        scheduler.complete(plan)
        return steps

    return call


def test_request_turnover(ratio):
    oracle, ours = turnover("oracle"), turnover("ours")
    assert ours() == oracle()
    ratio(oracle, ours)


@pytest.mark.parametrize("running", [256, 1024])
def test_x03_cost_does_not_depend_on_the_number_waiting(ratio, running):
    many, few = (decoding("ours", running, waiting=waiting) for waiting in (100_000, 10_000))
    assert step(many) == step(few)
    ratio(stepper(many), stepper(few), below=1.2)


def fill_and_drain(count):
    scheduler = Scheduler(4096, 4096, 10**9)
    for rid in range(count):
        scheduler.add(Req(rid, 1, 1))
    ended = 0
    while scheduler.waiting:
        ended += len(scheduler.complete(scheduler.schedule()))
    return ended


def test_cost_of_adding_and_draining_is_linear(ratio):
    assert fill_and_drain(1000) == 1000
    ratio(lambda: fill_and_drain(1_000_000), lambda: [fill_and_drain(100_000) for _ in range(10)], below=2, rounds=3)
