"""Heads that cannot be admitted yet because of stale output or missing images: the next head is admitted."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from tests.vllm.support.encoder_connector import EncoderConnector
from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add
from tests.vllm.support.schedulers import both_classes, build


@both_classes
def test_a_head_with_stale_output_in_flight_is_skipped(cls):
    s = build(cls)
    engine = Engine(s)
    b = request("b", 10, 1)
    if not hasattr(b, "num_stale_output_tokens"):
        pytest.skip("this vLLM does not count stale output tokens")
    b.num_stale_output_tokens = 1
    s.add_request(b)
    add(s, c=(10, 1), d=(10, 1))
    assert engine.step().num_scheduled_tokens == {"c": 10}
    b.num_stale_output_tokens = 0
    engine.run()
    assert engine.steps == [{"c": 10}, {"b": 10}, {"d": 10}]


@both_classes
def test_a_head_whose_images_are_not_encoded_yet_is_skipped(cls):
    s = build(cls)
    s.ec_connector = EncoderConnector()
    s.ec_connector.pending = {"b"}
    engine = Engine(s)
    b = request("b", 10, 1)
    b.mm_features = [object()]
    s.add_request(b)
    add(s, c=(10, 2), d=(10, 2))
    assert engine.step().num_scheduled_tokens == {"c": 10}
    assert engine.step().num_scheduled_tokens == {"d": 10}
    assert engine.step().num_scheduled_tokens == {"c": 1, "d": 1}
    assert engine.outs[-1].ec_connector_metadata == f"meta {s.ec_connector.built}"
    assert s.ec_connector.built == 3, "the metadata was not built exactly once a step"
    b.mm_features = []
    s.ec_connector = None
    assert engine.step().num_scheduled_tokens == {"b": 10}
