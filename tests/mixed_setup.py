"""What the tests of `Scheduler` share."""

from neuron_sched import Req, Scheduler


def named(plan):
    return [(req.rid, tokens) for req, tokens in plan]


def step(scheduler):
    """One step: what was planned, and who emitted."""
    plan = scheduler.schedule()
    return named(plan), scheduler.complete(plan)


def scheduler_with(token_budget, max_seqs, kv_tokens, *requests):
    scheduler = Scheduler(token_budget, max_seqs, kv_tokens)
    for rid, prompt_len, max_new in requests:
        scheduler.add(Req(rid, prompt_len, max_new))
    return scheduler


def decoding(budget, count=64):
    """A scheduler in which that many requests decode: their one-token prompts are done."""
    scheduler = scheduler_with(budget, 1024, 10**7, *((i, 1, 10_000) for i in range(count)))
    assert scheduler.complete(scheduler.schedule()) == list(range(count))
    return scheduler
