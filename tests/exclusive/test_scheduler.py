"""Worked cases of `BucketScheduler` through its public interface. Every case also runs on the oracle."""

import pytest

from tests.exclusive.support.scheduler import add, advance, both, make, steps_until_done
from tests.support.outcomes import as_tuples

pytestmark = both


# Cases


def test_v02_a_request_that_can_never_fit_is_refused_without_delaying_others(impl):
    s = make(impl, max_num_batched_tokens=128, max_model_len=128, num_blocks=4)

    def refused():
        with pytest.raises(ValueError, match="'L'"):
            add(impl, s, L=(70, 4))

    arrivals = {0: lambda: add(impl, s, a=(10, 6)), 1: refused, 2: lambda: add(impl, s, c=(10, 2))}
    steps = steps_until_done(s, arrivals)
    both = {"a": 1, "c": 1}
    assert steps == [{"a": 10}, {"a": 1}, {"c": 10}, both, {"a": 1}, {"a": 1}, {"a": 1}]
    with pytest.raises(KeyError):
        s.request("L")


def test_v03_a_request_that_does_not_fit_yet_waits_for_the_decodes(impl):
    s = make(impl, max_model_len=64, num_blocks=7)
    steps = steps_until_done(s, {0: lambda: add(impl, s, a=(60, 4)), 1: lambda: add(impl, s, b=(64, 1))})
    assert steps == [{"a": 60}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 64}]


def test_v08_decode_rows_are_in_order_of_admission(impl):
    s = make(impl, max_num_seqs=2)
    add(impl, s, a=(100, 3), b=(100, 3), c=(100, 3))
    steps = steps_until_done(s)
    assert steps[:4] == [{"a": 64}, {"a": 36}, {"b": 64}, {"b": 36}]
    assert [list(step.items()) for step in steps[4:6]] == [[("a", 1), ("b", 1)]] * 2
    assert steps[6:] == [{"c": 64}, {"c": 36}, {"c": 1}, {"c": 1}]


def test_v09_the_long_prompt_threshold_applies_while_others_decode(impl):
    s = make(impl, max_num_batched_tokens=512, max_model_len=1024, long_prefill_token_threshold=128)
    add(impl, s, a=(8, 20))
    advance(s)
    add(impl, s, L=(400, 2))
    chunks = [
        (dict(step.num_scheduled_tokens), step.num_scheduled_tokens_padded)
        for step, _ in (advance(s), advance(s), advance(s), advance(s))
    ]
    assert chunks == [({"L": 128}, {"L": 128})] * 3 + [({"L": 16}, {"L": 128})]


def test_v09_the_long_prompt_threshold_does_not_apply_to_a_lone_request(impl):
    s = make(impl, max_num_batched_tokens=512, max_model_len=1024, long_prefill_token_threshold=128)
    add(impl, s, L=(400, 2))
    assert steps_until_done(s) == [{"L": 400}, {"L": 1}]


def test_v10_a_decode_step_follows_two_prefill_steps(impl):
    s = make(
        impl,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=1024,
        num_blocks=1999,
        max_consecutive_prefill_steps=2,
    )
    add(impl, s, a=(8, 4))
    times = []
    for t in range(12):
        add(impl, s, **{f"x{t}": (8, 1)})
        step, _ = advance(s)
        if "a" in step.num_scheduled_tokens:
            times.append(t)
    assert times == [0, 3, 6, 9]


def test_v10_without_the_interleave_bound_prefills_come_first(impl):
    s = make(impl, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024, num_blocks=1999)
    add(impl, s, a=(8, 4))
    for t in range(12):
        add(impl, s, **{f"x{t}": (8, 1)})
        step, _ = advance(s)
        assert ("a" in step.num_scheduled_tokens) == (t == 0)


def test_v11_earlier_decode_steps_do_not_delay_a_new_prompt(impl):
    s = make(impl, max_num_batched_tokens=128, max_model_len=512, max_consecutive_prefill_steps=2, min_decode_steps=2)
    add(impl, s, a=(8, 100))
    for _ in range(51):
        advance(s)
    add(impl, s, p=(300, 1))
    steps = [advance(s)[0].num_scheduled_tokens for _ in range(5)]
    assert steps == [{"p": 128}, {"p": 128}, {"a": 1}, {"a": 1}, {"p": 44}]


def test_v15_one_token_requests_need_no_decode_step(impl):
    s = make(impl, max_num_seqs=2)
    add(impl, s, a=(10, 1), b=(10, 1), c=(10, 1))
    steps = [advance(s) for _ in range(3)]
    assert [step.num_scheduled_tokens for step, _ in steps] == [{"a": 10}, {"b": 10}, {"c": 10}]
    assert [list(step.finished_ids) for step, _ in steps] == [[], ["a"], ["b"]]
    assert [as_tuples(outcomes) for _, outcomes in steps] == [[(name, None, "length")] for name in "abc"]
    assert (s.num_waiting, s.num_running, s.state) == (0, 0, "idle")


def test_v19_prefix_hits(impl):
    s = make(impl, max_num_batched_tokens=512, max_model_len=1024, prefix_caching=True)
    a = list(range(1, 131))
    add(impl, s, a=(a, 1), b=(a, 1), c=([*a[:128], 999], 1), d=(a[:128], 1))
    steps = [advance(s, [7])[0] for _ in range(4)]
    assert [step.kind for step in steps] == ["prefill"] * 4
    assert [step.num_scheduled_tokens for step in steps] == [{"a": 130}, {"b": 2}, {"c": 1}, {"d": 16}]
    assert [step.num_computed_tokens for step in steps] == [{"a": 0}, {"b": 128}, {"c": 128}, {"d": 112}]
    assert [step.num_scheduled_tokens_padded for step in steps] == [{"a": 256}, {"b": 128}, {"c": 128}, {"d": 128}]


def test_v19_prefix_hits_within_a_prompt_of_equal_tokens(impl):
    s = make(impl, max_num_batched_tokens=512, max_model_len=1024, prefix_caching=True)
    add(impl, s, a=([5] * 64, 1), b=([5] * 64, 1))
    first, second = advance(s, [7])[0], advance(s, [7])[0]
    assert (first.num_scheduled_tokens, first.num_computed_tokens) == ({"a": 64}, {"a": 0})
    assert (second.num_scheduled_tokens, second.num_computed_tokens) == ({"b": 16}, {"b": 48})


def test_v22_chunks_and_slots_that_do_not_divide_evenly(impl):
    s = make(impl)
    add(impl, s, **{f"r{i}": (100, 3) for i in range(1, 6)})
    steps = steps_until_done(s)
    prefills = [{f"r{i}": n} for i in range(1, 5) for n in (64, 36)]
    all_four = {f"r{i}": 1 for i in range(1, 5)}
    assert steps == [*prefills, all_four, all_four, {"r5": 64}, {"r5": 36}, {"r5": 1}, {"r5": 1}]
    assert sum(sum(step.values()) for step in steps) == 510


def test_v24_empty_prompts_and_duplicate_ids_are_refused(impl):
    s = make(impl)
    with pytest.raises(ValueError, match="'e'"):
        add(impl, s, e=(0, 3))
    with pytest.raises(ValueError, match="'e'"):
        add(impl, s, e=([], 3))
    add(impl, s, b=(5, 2))
    assert steps_until_done(s) == [{"b": 5}, {"b": 1}]
    add(impl, s, a=(10, 3))
    with pytest.raises(ValueError, match="'a'"):
        add(impl, s, a=(10, 3))
    assert steps_until_done(s) == [{"a": 10}, {"a": 1}, {"a": 1}]
    add(impl, s, a=(10, 3))
    assert steps_until_done(s) == [{"a": 10}, {"a": 1}, {"a": 1}]
    for max_tokens in (0, -1):
        with pytest.raises(ValueError, match="'z'"):
            add(impl, s, z=(10, max_tokens))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "steps"), [(60, 4, 4), (61, 4, 4), (62, 4, 0), (64, 1, 1), (64, 2, 0)]
)
def test_v25_the_last_output_token_needs_no_block(impl, prompt, max_tokens, steps):
    s = make(impl, max_num_seqs=1, max_num_batched_tokens=128, max_model_len=128, num_blocks=4)
    if steps:
        add(impl, s, a=(prompt, max_tokens))
        assert len(steps_until_done(s)) == steps
    else:
        with pytest.raises(ValueError, match="'a'"):
            add(impl, s, a=(prompt, max_tokens))
        assert s.num_waiting == 0


@pytest.mark.parametrize(("prompt", "outputs"), [(51, 49), (99, 1), (100, 1), (101, None)])
def test_v25_outputs_end_at_max_model_len(impl, prompt, outputs):
    s = make(impl, max_num_batched_tokens=128, max_model_len=100)
    if outputs is None:
        with pytest.raises(ValueError, match="'a'"):
            add(impl, s, a=(prompt, 100))
        return
    add(impl, s, a=(prompt, 100))
    last = [as_tuples(advance(s)[1]) for _ in range(outputs)][-1]
    assert (last, s.num_running) == ([("a", None, "length")], 0)


def test_b03_padding_ends_at_max_model_len(impl):
    s = make(impl, max_num_batched_tokens=512, max_model_len=317)
    add(impl, s, a=(300, 2))
    assert s.schedule().num_scheduled_tokens_padded == {"a": 317}


@pytest.mark.parametrize(
    ("config", "decodes", "rows"),
    [({"max_num_seqs": 6}, 5, 6), ({"max_num_seqs": 8}, 1, 1), ({"max_num_seqs": 8, "num_seqs_buckets": [4, 8]}, 1, 4)],
    ids=["b06", "b07_default", "b07_given"],
)
def test_decode_batches_are_padded_to_a_batch_bucket(impl, config, decodes, rows):
    s = make(impl, **config)
    add(impl, s, **{f"r{i}": (8, 3) for i in range(decodes)})
    for _ in range(decodes):
        assert advance(s)[0].num_seqs_padded == 0
    step = s.schedule()
    assert (step.kind, step.num_seqs_padded, len(step.num_scheduled_tokens)) == ("decode", rows, decodes)
    assert step.num_scheduled_tokens_padded == step.num_scheduled_tokens


@pytest.mark.parametrize(("prompt", "padded"), [(50, 128), (127, 128), (128, 128), (129, 256), (1500, 2048)])
def test_prefills_are_padded_to_a_token_bucket(impl, prompt, padded):
    s = make(impl, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=1000)
    add(impl, s, a=(prompt, 2))
    step, _ = advance(s)
    assert (step.num_scheduled_tokens, step.num_scheduled_tokens_padded) == ({"a": prompt}, {"a": padded})
    assert s.request("a").num_computed_tokens == prompt


def test_padding_is_not_counted_as_computed_tokens(impl):
    s = make(impl, max_num_batched_tokens=8192, max_model_len=8192, block_size=100, num_blocks=100, prefix_caching=True)
    add(impl, s, w=(list(range(1001)), 1))
    advance(s, [0])
    add(impl, s, a=(list(range(1000)) + [7] * 4000, 2))
    step, _ = advance(s, [0])
    counted = step.num_scheduled_tokens, step.num_scheduled_tokens_padded, s.request("a").num_computed_tokens
    assert counted == ({"a": 4000}, {"a": 4096}, 5000)


# Chunks and packing


def test_fixed_chunks_fill_the_step(impl):
    s = make(impl, max_num_batched_tokens=2048, max_model_len=16384, num_blocks=1024)
    add(impl, s, a=(10_000, 1))
    assert steps_until_done(s) == [{"a": 2048}] * 4 + [{"a": 1808}]


def test_bucket_chunks_end_on_bucket_edges_if_that_is_cheaper(impl):
    s = make(impl, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=1024, chunking="bucket")
    add(impl, s, a=(5000, 1))
    steps = [advance(s)[0] for _ in range(2)]
    assert [step.num_scheduled_tokens for step in steps] == [{"a": 4096}, {"a": 904}]
    assert [step.num_scheduled_tokens_padded for step in steps] == [{"a": 4096}, {"a": 1024}]


def test_bucket_chunks_follow_the_cost_table(impl):
    expensive_calls = {128: 5000, 256: 5000, 512: 5000, 1024: 5000, 2048: 5000, 4096: 5000, 8192: 8000}
    config = {"max_num_batched_tokens": 8192, "max_model_len": 8192, "num_blocks": 1024, "chunking": "bucket"}
    s = make(impl, **config, prefill_cost=expensive_calls)
    add(impl, s, a=(5000, 1))
    assert steps_until_done(s) == [{"a": 5000}]


def test_packed_prefills_share_one_bucket(impl):
    s = make(impl, max_num_batched_tokens=256, max_prefills_per_batch=3)
    add(impl, s, a=(40, 2), b=(50, 2), c=(60, 2), d=(10, 2))
    step, outcomes = advance(s)
    assert list(step.num_scheduled_tokens.items()) == [("a", 40), ("b", 50), ("c", 60)]
    assert list(step.num_scheduled_tokens_padded.items()) == [("a", 40), ("b", 50), ("c", 166)]
    assert [o.id for o in outcomes] == ["a", "b", "c"]


def test_packing_stops_at_the_first_prompt_that_does_not_fit(impl):
    s = make(impl, max_num_batched_tokens=128, max_prefills_per_batch=3)
    add(impl, s, a=(100, 1), b=(29, 1), c=(28, 1), L=(200, 1), e=(1, 1))
    assert steps_until_done(s) == [{"a": 100}, {"b": 29, "c": 28}, {"L": 128}, {"L": 72}, {"e": 1}]


def test_each_packed_head_reserves_before_the_next_is_tested(impl):
    s = make(impl, max_num_seqs=2, max_prefills_per_batch=3, max_num_batched_tokens=128)
    add(impl, s, a=(10, 1), b=(10, 1), c=(10, 1))
    assert steps_until_done(s) == [{"a": 10, "b": 10}, {"c": 10}]
    s = make(impl, num_blocks=3, max_prefills_per_batch=3, max_num_batched_tokens=128)
    add(impl, s, a=(16, 1), b=(32, 1), c=(16, 1))
    assert steps_until_done(s) == [{"a": 16, "b": 32}, {"c": 16}]


def test_the_long_prompt_threshold_disables_packing(impl):
    s = make(impl, max_num_batched_tokens=128, max_prefills_per_batch=3, long_prefill_token_threshold=30)
    add(impl, s, a=(40, 1), b=(20, 1))
    assert steps_until_done(s) == [{"a": 30}, {"a": 10}, {"b": 20}]


def test_packing_counts_whole_prompts_regardless_of_prefix_hits(impl):
    s = make(impl, max_num_batched_tokens=128, max_prefills_per_batch=2, prefix_caching=True)
    prompt = list(range(100))
    add(impl, s, w=(prompt, 1))
    advance(s, [0])
    add(impl, s, a=(prompt, 1), b=(prompt[:28], 1), c=(prompt[:29], 1))
    step, _ = advance(s, [0, 0])
    assert step.num_scheduled_tokens == {"a": 4, "b": 12}
    assert step.num_scheduled_tokens_padded == {"a": 4, "b": 124}


def test_the_first_chunk_is_sized_for_the_whole_prompt_despite_a_prefix_hit(impl):
    s = make(impl, max_num_batched_tokens=64, max_model_len=512, prefix_caching=True)
    prompt = list(range(200))
    add(impl, s, w=(prompt[:48], 1))
    advance(s, [0])
    add(impl, s, a=(prompt, 1))
    steps = [advance(s, [None])[0] for _ in range(2)] + [advance(s, [0])[0]]
    assert [step.num_computed_tokens["a"] for step in steps] == [48, 112, 176]
    assert [step.num_scheduled_tokens["a"] for step in steps] == [64, 64, 24]


def test_the_chunk_plan_is_made_for_the_whole_prompt_despite_a_prefix_hit(impl):
    costs = {"num_batched_tokens_buckets": [16, 32, 64], "prefill_cost": {16: 1, 32: 10, 64: 3}}
    s = make(impl, chunking="bucket", prefix_caching=True, **costs)
    prompt = list(range(60))
    add(impl, s, w=(prompt[:33], 1))
    advance(s, [0])
    add(impl, s, a=(prompt, 1))
    step = s.schedule()
    assert (step.num_computed_tokens, step.num_scheduled_tokens) == ({"a": 32}, {"a": 28}), (
        "28 prompt tokens without a hit would be cut into 16 + 12"
    )
    assert s.schedule().num_scheduled_tokens == {"a": 28}, "it is still the first chunk when scheduled again"
