"""LoRA adapters: a head without a place for its adapter lets the next one have its chance."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm_harness import request
from vllm_setup import Engine, add, both_classes, every_engine, lora, with_lora


@every_engine
def test_adapters_in_use_are_those_of_the_hidden_decodes_too(cls, ahead):
    """One adapter at a time: b waits until a has ended, c needs none."""
    s = with_lora(cls, max_loras=1, async_scheduling=bool(ahead))
    engine = Engine(s, ahead)
    s.add_request(lora(request("a", 10, 4), 1))
    engine.step()
    s.add_request(lora(request("b", 10, 2), 2))
    add(s, c=(10, 2))
    s.add_request(lora(request("d", 10, 2), 1))
    engine.run()
    assert engine.steps[:3] == [{"a": 10}, {"c": 10}, {"d": 10}]
    assert engine.outputs == {"a": 4, "b": 2, "c": 2, "d": 2}
    assert [step for step in engine.steps if "b" in step and len(step) > 1] == []


@both_classes
def test_adapters_within_a_packed_prefill(cls):
    s = with_lora(cls, max_loras=1, neuron_config={"max_prefills_per_batch": 2})
    engine = Engine(s)
    for name, number in {"a": 1, "b": 2, "c": 1}.items():
        s.add_request(lora(request(name, 10, 2), number))
    assert engine.step().num_scheduled_tokens == {"a": 10, "c": 10}
    engine.run()
    assert engine.steps[1:] == [{"a": 1, "c": 1}, {"b": 10}, {"b": 1}]


@both_classes
def test_adapters_of_a_packed_prefill_and_of_hidden_decodes_together(cls):
    """Two adapters at a time: a's and one more; the third would be one too many in the next decode step."""
    s = with_lora(cls, max_loras=2, neuron_config={"max_prefills_per_batch": 3}, max_num_seqs=6)
    engine = Engine(s)
    s.add_request(lora(request("a", 10, 6), 1))
    engine.step()
    for name, number in {"b": 2, "c": 3, "d": 2, "e": 1}.items():
        s.add_request(lora(request(name, 10, 2), number))
    assert engine.step().num_scheduled_tokens == {"b": 10, "d": 10, "e": 10}
    engine.run()
    assert engine.outputs == {"a": 6, "b": 2, "c": 2, "d": 2, "e": 2}


@both_classes
def test_one_without_an_adapter_does_not_saturate_a_rank(cls):
    s = with_lora(cls)
    engine = Engine(s)
    s.add_request(lora(request("a", 10, 30), 1))
    engine.step()
    s.add_request(lora(request("b", 10, 3), 2))
    engine.step()
    add(s, c=(10, 2))
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1}
    assert engine.step().num_scheduled_tokens == {"c": 10}
