"""KV blocks of `BucketScheduler`: which blocks are allocated, in which order, and which are shared by content."""

from tests.exclusive.support.scheduler import add, advance, both, make

pytestmark = both


def test_block_zero_is_never_allocated(impl):
    s = make(impl, num_blocks=4)
    add(impl, s, a=(64, 1))
    assert s.schedule().block_ids("a") == [1, 2, 3, 4]
    assert s.free_blocks == 0


def test_a_block_is_allocated_when_its_first_token_is_scheduled(impl):
    s = make(impl)
    add(impl, s, a=(16, 3))
    advance(s)
    assert list(s.request("a").block_ids) == [1]
    step = s.schedule()
    assert step.block_ids("a") == [1, 2]


def test_lookahead_allocates_slots_beyond_the_next_token(impl):
    s = make(impl, lookahead=3)
    add(impl, s, a=(13, 3), b=(14, 3))
    steps = s.schedule(), advance(s)[0], s.schedule()
    assert steps[1].block_ids("a") == [1]
    assert steps[2].block_ids("b") == [2, 3]
    assert s.reserved_blocks == 2 + 2


def test_blocks_of_a_finished_request_are_reused_in_reverse_order(impl):
    s = make(impl, num_blocks=8)
    add(impl, s, a=(48, 1), b=(64, 1))
    advance(s)
    assert s.schedule().block_ids("b") == [3, 2, 1, 4]


def test_cached_blocks_are_allocated_last(impl):
    s = make(impl, num_blocks=6, prefix_caching=True, max_num_batched_tokens=128)
    add(impl, s, a=(list(range(40)), 1), b=(96, 1))
    advance(s, [0])
    assert s.free_blocks == 6
    assert s.schedule().block_ids("b") == [3, 4, 5, 6, 2, 1], "first the partly filled block, last the cached ones"


def test_shared_blocks_stay_allocated_while_a_request_references_them(impl):
    s = make(impl, prefix_caching=True, num_blocks=20)
    prompt = list(range(40))
    add(impl, s, a=(prompt, 5), b=(prompt, 5))
    advance(s, [0])
    advance(s, [0])
    a, b = s.request("a").block_ids, s.request("b").block_ids
    assert (a[:2], a[2] != b[2]) == (b[:2], True)
    assert s.free_blocks == 20 - 4
    s.cancel("a")
    assert (s.free_blocks, s.request("b").block_ids) == (20 - 3, b)
    s.check()


def test_content_is_shared_only_after_it_was_computed(impl):
    s = make(impl, prefix_caching=True, max_prefills_per_batch=2, max_num_batched_tokens=128)
    prompt = list(range(40))
    add(impl, s, a=(prompt, 1), b=(prompt, 1))
    assert s.schedule().num_scheduled_tokens == {"a": 40, "b": 40}
    s.schedule()
    s.cancel("a")
    add(impl, s, c=(prompt, 1))
    step = s.schedule()
    assert step.num_computed_tokens == {"b": 0}
    ahead = s.schedule(ahead=True)
    assert ahead.num_computed_tokens == {"c": 0}, "the step that computes the blocks was not completed before"


def test_equal_blocks_after_different_prefixes_are_not_shared(impl):
    s = make(impl, prefix_caching=True)
    same = list(range(100, 116))
    add(impl, s, a=([1] * 16 + same + [0], 1), b=([2] * 16 + same + [0], 1), c=([*same, 0], 1), d=([1] * 16 + same, 1))
    computed = [advance(s, [0])[0].num_computed_tokens for _ in range(4)]
    assert computed == [{"a": 0}, {"b": 0}, {"c": 0}, {"d": 16}]


def test_blocks_with_output_tokens_are_shared(impl):
    s = make(impl, prefix_caching=True, block_size=4)
    add(impl, s, a=([1, 2, 3], 7))
    for token in (4, 5, 6, 7, 8, 9, 10):
        advance(s, [token])
    add(impl, s, b=([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1))
    assert s.schedule().num_computed_tokens == {"b": 8}


def test_prompts_given_as_lengths_share_no_blocks(impl):
    s = make(impl, prefix_caching=True)
    add(impl, s, a=(40, 1), b=(40, 1))
    advance(s)
    assert s.schedule().num_computed_tokens == {"b": 0}


def test_prefix_caching_is_off_by_default(impl):
    s = make(impl)
    add(impl, s, a=([1] * 40, 1), b=([1] * 40, 1))
    advance(s, [0])
    assert s.schedule().num_computed_tokens == {"b": 0}


def test_a_block_allocated_again_loses_its_content(impl):
    s = make(impl, prefix_caching=True, num_blocks=3)
    prompt = list(range(33))
    add(impl, s, a=(prompt, 1), b=(40, 1), c=(prompt, 1))
    advance(s, [0])
    advance(s)
    assert s.schedule().num_computed_tokens == {"c": 0}
