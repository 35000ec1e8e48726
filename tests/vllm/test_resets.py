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
