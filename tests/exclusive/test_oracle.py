"""The parts of the exclusive oracle, checked against results worked out by hand."""

from itertools import combinations_with_replacement

import pytest

from tests.support.oracles.block_pool import Pool
from tests.support.oracles.chunks import chunk_plan
from tests.support.oracles.exclusive import BucketOracle
from tests.support.oracles.sizes import doubling, fit
from tests.support.oracles.values import OracleRequest

DEFAULT_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192)


def cost_table(buckets):
    return {size: size + 256 for size in buckets}


@pytest.mark.parametrize(
    ("last", "sizes"),
    [(64, [64]), (100, [100]), (128, [128]), (129, [128, 129]), (3000, [128, 256, 512, 1024, 2048, 3000])],
)
def test_doubling(last, sizes):
    assert doubling(128, last) == sizes


def test_fit():
    assert [fit(DEFAULT_BUCKETS, n) for n in (0, 50, 127, 128, 129, 1500)] == [0, 128, 128, 128, 256, 2048]


def test_chunk_plan_example_of_the_specification():
    assert chunk_plan(5000, DEFAULT_BUCKETS, cost_table(DEFAULT_BUCKETS)) == [4096, 904]


def test_chunk_plan_prefers_fewer_calls_then_larger_chunks():
    assert chunk_plan(8, (4, 8), {4: 5, 8: 10}) == [8]
    assert chunk_plan(9, (3, 6), {3: 1, 6: 2}) == [6, 3]


@pytest.mark.parametrize("buckets", [(4,), (2, 3), (1, 4, 6), (3, 5, 8)])
def test_chunk_plan_equals_exhaustive_search(buckets):
    cost = {size: 2 * size + 3 for size in buckets}
    for rest in range(1, 25):
        plans = []
        for calls in range(rest // buckets[0] + 2):
            for full in combinations_with_replacement(sorted(buckets, reverse=True), calls):
                last = rest - sum(full)
                if 0 < last <= buckets[-1]:
                    price = sum(cost[size] for size in full) + cost[fit(buckets, last)]
                    plans.append((price, calls + 1, [-chunk for chunk in (*full, last)]))
        assert [-chunk for chunk in chunk_plan(rest, buckets, cost)] == min(plans)[2], rest


def test_free_queue_order():
    pool = Pool(6)
    blocks = [pool.allocate() for _ in range(4)]
    assert (blocks, pool.free) == ([1, 2, 3, 4], [5, 6])
    pool.content[1], pool.content[2] = ("x",), ("x", "y")
    pool.release(blocks)
    assert pool.free == [4, 3, 5, 6, 2, 1]
    assert pool.share(("x",)) == 1
    assert pool.free == [4, 3, 5, 6, 2]
    assert [pool.allocate() for _ in range(5)] == [4, 3, 5, 6, 2]
    assert pool.share(("x", "y")) is None, "a block that was allocated again has lost its content"


def test_the_block_registered_first_of_two_equal_ones_is_shared():
    pool = Pool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.content[second] = pool.content[first] = ("x",)
    assert pool.share(("x",)) == second


def test_interleave_example_of_the_specification():
    oracle = BucketOracle(
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_model_len=1024,
        block_size=16,
        num_blocks=200,
        max_consecutive_prefill_steps=2,
        min_decode_steps=2,
    )
    oracle.add(OracleRequest("a", 8, 100))
    kinds = []
    for number in range(56):
        if number == 51:
            oracle.add(OracleRequest("p", 300, 1))
        step = oracle.schedule()
        oracle.complete(step)
        oracle.check()
        kinds.append((step.kind[0], *step.num_scheduled_tokens.values()))
    assert kinds == [("p", 8)] + [("d", 1)] * 50 + [("p", 128), ("p", 128), ("d", 1), ("d", 1), ("p", 44)]
