"""LoRA adapters: if the head's adapter cannot be loaded, the next waiting request is tried."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add, with_adapter
from tests.vllm.support.schedulers import both_classes, every_engine, with_lora


@every_engine
def test_adapters_of_hidden_decodes_count_as_loaded(cls, ahead):
    """With `max_loras` 1, b waits until a has finished, and c needs no adapter."""
    s = with_lora(cls, max_loras=1, async_scheduling=bool(ahead))
    engine = Engine(s, ahead)
    s.add_request(with_adapter(request("a", 10, 4), 1))
    engine.step()
    s.add_request(with_adapter(request("b", 10, 2), 2))
    add(s, c=(10, 2))
    s.add_request(with_adapter(request("d", 10, 2), 1))
    engine.run()
    assert engine.steps[:3] == [{"a": 10}, {"c": 10}, {"d": 10}]
    assert engine.outputs == {"a": 4, "b": 2, "c": 2, "d": 2}
    assert [step for step in engine.steps if "b" in step and len(step) > 1] == []


@both_classes
def test_a_packed_prefill_respects_max_loras(cls):
    s = with_lora(cls, max_loras=1, neuron_config={"max_prefills_per_batch": 2})
    engine = Engine(s)
    for name, number in {"a": 1, "b": 2, "c": 1}.items():
        s.add_request(with_adapter(request(name, 10, 2), number))
    assert engine.step().num_scheduled_tokens == {"a": 10, "c": 10}
    engine.run()
    assert engine.steps[1:] == [{"a": 1, "c": 1}, {"b": 10}, {"b": 1}]


@both_classes
def test_a_packed_prefill_respects_max_loras_with_hidden_decodes(cls):
    """With `max_loras` 2, the adapters of a and b are loaded, and c waits: the next decode step would need a third."""
    s = with_lora(cls, max_loras=2, neuron_config={"max_prefills_per_batch": 3}, max_num_seqs=6)
    engine = Engine(s)
    s.add_request(with_adapter(request("a", 10, 6), 1))
    engine.step()
    for name, number in {"b": 2, "c": 3, "d": 2, "e": 1}.items():
        s.add_request(with_adapter(request(name, 10, 2), number))
    assert engine.step().num_scheduled_tokens == {"b": 10, "d": 10, "e": 10}
    engine.run()
    assert engine.outputs == {"a": 6, "b": 2, "c": 2, "d": 2, "e": 2}


@both_classes
def test_a_request_without_an_adapter_slot_does_not_make_the_rank_capacity_bound(cls):
    """vLLM does not throttle a rank whose `prefill_capacity_bound` is set."""
    s = with_lora(cls)
    engine = Engine(s)
    s.add_request(with_adapter(request("a", 10, 30), 1))
    engine.step()
    s.add_request(with_adapter(request("b", 10, 3), 2))
    engine.step()
    add(s, c=(10, 2))
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1}
    assert engine.step().num_scheduled_tokens == {"c": 10}
