"""Chunked prefill: the cap on long prompts, the chunk sizes, and packed prefills."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import request
from tests.vllm.support.release import since
from tests.vllm.support.requests import add
from tests.vllm.support.schedulers import both_classes, build

# --- long_prefill_token_threshold ---

CAPPED = {"max_num_batched_tokens": 512, "max_model_len": 1024, "long_prefill_token_threshold": 128}


@both_classes
def test_the_only_prompt_is_not_capped(cls):
    s = build(cls, **CAPPED)
    engine = Engine(s)
    add(s, a=(400, 1))
    engine.run()
    assert engine.steps == [{"a": 400}]


@both_classes
@pytest.mark.parametrize("other", ["decoding", "waiting", "blocked"])
def test_a_prompt_is_capped_beside_another_request(cls, other):
    s = build(cls, **CAPPED)
    engine = Engine(s)
    if other == "decoding":
        add(s, b=(10, 20))
        engine.step()
    add(s, a=(400, 1))
    if other == "waiting":
        add(s, b=(10, 20))
    if other == "blocked":
        s.add_request(request("g", 10, 1, grammar=True))
    for _ in range(4):
        engine.step()
    assert [step for step in engine.steps if "a" in step] == [{"a": 128}, {"a": 128}, {"a": 128}, {"a": 16}]
    assert s.scheduler_config.long_prefill_token_threshold == 128


@both_classes
def test_the_cap_ends_when_the_other_request_finishes(cls):
    s = build(cls, **CAPPED)
    engine = Engine(s)
    add(s, a=(700, 1), b=(10, 1))
    engine.step()
    s.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.steps == [{"a": 128}, {"a": 512}, {"a": 60}]


@both_classes
def test_capped_prompts_are_not_packed(cls):
    s = build(cls, **CAPPED, neuron_config={"max_prefills_per_batch": 3})
    engine = Engine(s)
    add(s, a=(200, 1), b=(10, 1), c=(20, 1))
    assert engine.step().num_scheduled_tokens == {"a": 128}


@both_classes
@since(0, 32, "adaptive cap")
@pytest.mark.parametrize(("others", "chunk"), [(1, 256), (3, 128), (7, 64)])
@pytest.mark.parametrize("state", ["decoding", "waiting"])
def test_the_adaptive_cap_is_an_equal_share_of_the_budget(cls, others, chunk, state):
    s = build(
        cls,
        **{**CAPPED, "long_prefill_token_threshold": 64},
        max_num_seqs=8,
        long_prefill_token_threshold_adaptive=True,
    )
    engine = Engine(s)
    if state == "decoding":
        add(s, **{f"d{i}": (10, 50) for i in range(others)})
        for _ in range(others):
            engine.step()
        add(s, a=(400, 1))
    else:
        add(s, a=(400, 1), **{f"d{i}": (10, 50) for i in range(others)})
    assert engine.step().num_scheduled_tokens == {"a": chunk}


# --- chunk sizes and packed prefills ---


@both_classes
def test_fixed_chunking_uses_the_whole_budget(cls):
    s = build(cls, max_num_batched_tokens=2048, max_model_len=16_384, num_blocks=2000)
    engine = Engine(s).run({0: [request("a", 10_000, 1)]})
    assert engine.kinds == ["P2048"] * 4 + ["P1808"]
    assert engine.padded == [{"a": 2048}] * 5


@both_classes
def test_bucket_chunking_ends_chunks_at_buckets(cls):
    s = build(
        cls,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        num_blocks=2000,
        neuron_config={"chunking": "bucket"},
    )
    engine = Engine(s).run({0: [request("a", 5000, 2)]})
    assert engine.steps == [{"a": 4096}, {"a": 904}, {"a": 1}]
    assert engine.padded == [{"a": 4096}, {"a": 1024}, {"a": 1}]
    assert s.max_num_scheduled_tokens == 8192


@both_classes
def test_a_prompt_within_the_budget_is_one_padded_chunk(cls):
    s = build(cls, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=2000)
    engine = Engine(s)
    add(s, a=(5000, 2))
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"a": 5000}, {"a": 8192})
    assert s.requests["a"].num_computed_tokens == 5000
    assert s._calculate_padded_count(5000) == 8192


@both_classes
def test_cached_tokens_do_not_count_for_the_token_bucket(cls):
    s = build(cls, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=2000, prefix_caching=True, block_size=8)
    engine = Engine(s)
    tokens = [3 + i % 900 for i in range(5000)]
    for name, ids in {"a": tokens[:1000], "b": tokens}.items():
        s.add_request(request(name, token_ids=ids, max_tokens=1, block_size=8))
    engine.step()
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"b": 4000}, {"b": 4096})


@both_classes
def test_packed_prefills_share_a_token_bucket(cls):
    s = build(cls, max_num_batched_tokens=512, neuron_config={"max_prefills_per_batch": 3})
    engine = Engine(s)
    add(s, a=(10, 2), b=(150, 2), c=(40, 2), d=(10, 2))
    out = engine.step()
    assert out.num_scheduled_tokens == {"a": 10, "b": 150, "c": 40}
    assert out.num_scheduled_tokens_padded == {"a": 10, "b": 150, "c": 96}
    assert s.max_prefills_per_batch == 3


@both_classes
def test_a_prompt_that_does_not_fit_in_the_rest_of_a_packed_step_waits(cls):
    s = build(cls, max_num_batched_tokens=128, max_model_len=512, neuron_config={"max_prefills_per_batch": 3})
    engine = Engine(s)
    add(s, a=(100, 1), b=(29, 1), c=(5, 1), d=(300, 1))
    engine.run()
    assert engine.steps == [{"a": 100}, {"b": 29, "c": 5}, {"d": 128}, {"d": 128}, {"d": 44}]
