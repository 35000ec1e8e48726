"""Resets of the prefix cache, which preempt every running request."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add, waiting_ids
from tests.vllm.support.schedulers import both_classes, build, build_ahead, every_engine, num_free_blocks


@both_classes
def test_a_reset_recomputes_prompts_and_outputs_as_prefills(cls):
    s = build(cls)
    engine = Engine(s)
    engine.allow_preemption = True
    add(s, a=(10, 5), b=(10, 5))
    for _ in range(3):
        engine.step()
    add(s, c=(10, 1))
    assert s.reset_prefix_cache(reset_running_requests=True)
    s.check()
    assert waiting_ids(s) == ["a", "b", "c"]
    assert num_free_blocks(s) == 399
    engine.run()
    assert engine.steps[3:] == [{"a": 12}, {"b": 12}, {"c": 10}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert engine.kinds[3:] == ["P12", "P12", "P10", "D", "D"]
    assert engine.outputs == {"a": 5, "b": 5, "c": 1}


@every_engine
def test_a_reset_before_any_step_loses_no_request(cls, ahead):
    for when in range(1, 8):
        s = build_ahead(cls, ahead, max_num_seqs=3)
        engine = Engine(s, ahead)
        engine.allow_preemption = True

        def reset(t, s=s, when=when):
            if t == when:
                assert s.reset_prefix_cache(reset_running_requests=True)
                s.check()

        engine.run({0: [request("a", 100, 5), request("b", 10, 3), request("c", 20, 4)]}, before=reset)
        if ahead:
            assert all(engine.outputs[name] <= n for name, n in {"a": 5, "b": 3, "c": 4}.items())
            assert engine.finished == dict.fromkeys("abc", "length")
        else:
            assert engine.outputs == {"a": 5, "b": 3, "c": 4}
        assert num_free_blocks(s) == 399


def build_cached(cls, ahead, **config):
    """Return an engine with prefix caching, KV blocks of one token, and two prompts per prefill step."""
    defaults = {"block_size": 1, "prefix_caching": True, "neuron_config": {"max_prefills_per_batch": 2}}
    engine = Engine(build_ahead(cls, ahead, **{**defaults, **config}), ahead)
    engine.allow_preemption = True
    return engine


def same_prompt(name, prompt_len, max_tokens):
    return request(name, max_tokens=max_tokens, token_ids=[5] * prompt_len, block_size=1)


@both_classes
def test_a_resumed_request_with_one_uncached_token_gets_a_step_of_its_own(cls):
    """The first resumed request caches the prompt again. Of the second one, only the last token is then uncached: it is
    a decode row, which a prefill step must not hold."""
    engine = build_cached(cls, 0)
    for name in ("a", "b"):
        engine.sched.add_request(same_prompt(name, 1, 3))
    engine.step()
    assert engine.steps == [{"a": 1, "b": 1}]
    assert engine.sched.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.steps[1:3] == [{"a": 2}, {"b": 1}]
    assert engine.kinds[1:3] == ["P2", "D"]
    assert engine.outputs == {"a": 3, "b": 3}


@every_engine
def test_a_resumed_request_never_shares_a_prefill_step_as_a_decode_row(cls, ahead):
    """A full pool, equal prompts and a reset at each step of the run."""
    for when in range(12):
        limits = {"max_num_seqs": 3, "max_num_batched_tokens": 4, "max_model_len": 7, "num_blocks": 8}
        engine = build_cached(cls, ahead, **limits)
        first = [same_prompt("r0", 1, 2), same_prompt("r1", 5, 1)]
        later = [same_prompt(f"r{i}", 1, n) for i, n in enumerate((1, 1, 1, 2), start=2)]

        def reset(t, engine=engine, when=when):
            if t == when:
                engine.sched.reset_prefix_cache(reset_running_requests=True)

        engine.run({0: first, 3: later}, before=reset)
        assert engine.finished == {f"r{i}": "length" for i in range(6)}
        assert num_free_blocks(engine.sched) == 7
