"""Helpers of the tests of `Scheduler`."""

from neuron_sched import Req, Scheduler


def by_rid(plan):
    """Return the plan with rids in place of requests."""
    return [(req.rid, tokens) for req, tokens in plan]


def step(scheduler):
    """Run one step. Return its plan by rid, and the rids that emitted a token."""
    plan = scheduler.schedule()
    return by_rid(plan), scheduler.complete(plan)


def scheduler_with(token_budget, max_seqs, kv_tokens, *requests):
    """Return a scheduler with these waiting requests, given as (rid, prompt_len, max_new)."""
    scheduler = Scheduler(token_budget, max_seqs, kv_tokens)
    for rid, prompt_len, max_new in requests:
        scheduler.add(Req(rid, prompt_len, max_new))
    return scheduler


def decoding(budget, count=64):
    """Return a scheduler with `count` decoding requests, whose prompts had one token each."""
    scheduler = scheduler_with(budget, 1024, 10**7, *((i, 1, 10_000) for i in range(count)))
    assert scheduler.complete(scheduler.schedule()) == list(range(count))
    return scheduler
