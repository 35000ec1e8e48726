"""Configuration of the vLLM classes: its sources, the values that are refused, and the releases of vLLM."""

import sys
import types

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import neuron_sched
from neuron_sched.vllm import requirements
from neuron_sched.vllm.scheduler import NeuronScheduler
from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.log import LogCapture
from tests.vllm.support.requests import add
from tests.vllm.support.schedulers import both_classes, build

BUCKETS = {"max_num_batched_tokens": 8192, "max_model_len": 1000}


def refusal(cls, neuron_config, **config):
    """Assert that the configuration is refused. Return the message."""
    with pytest.raises(ValueError) as error:
        build(cls, neuron_config=neuron_config, **config)
    return str(error.value)


@both_classes
@pytest.mark.parametrize("bad", [[], ["max_prefills_per_batch"], "fast", 3, True], ids=repr)
def test_a_neuron_config_that_is_not_a_mapping_is_refused(cls, bad):
    message = refusal(cls, bad)
    assert "neuron_config" in message and repr(bad) in message
    assert "\n" not in message


@both_classes
@pytest.mark.parametrize("empty", [None, {}], ids=repr)
def test_an_empty_neuron_config_selects_the_defaults(cls, empty):
    s = build(cls, neuron_config=empty, **BUCKETS)
    assert s.num_batched_tokens_buckets == [128, 256, 512, 1000]
    assert s.num_seqs_buckets == [1, 2, 4]
    assert s.max_prefills_per_batch == 1
    assert (s.neuron_config.kv_admission, s.neuron_config.chunking) == ("reserve", "fixed")


@both_classes
@pytest.mark.parametrize(
    "buckets",
    [
        [512, 256, 1000],
        [256, 256, 1000],
        [0, 1000],
        [128, 512],
        [128, 1000, 2000],
        ["128", 1000],
        [],
        [True, 1000],
        [128.0, 1000],
        [-128, 1000],
        "1000",
        1000,
        {"128": 1},
    ],
    ids=repr,
)
def test_invalid_token_buckets_are_refused(cls, buckets):
    message = refusal(cls, {"num_batched_tokens_buckets": buckets}, **BUCKETS)
    assert "num_batched_tokens_buckets" in message
    assert "1000" in message
    if buckets in ([512, 256, 1000], [256, 256, 1000], [128, 512], [128, 1000, 2000], [0, 1000]):
        assert any(str(value) in message for value in buckets)


@both_classes
@pytest.mark.parametrize("buckets", [[2, 1, 4], [1, 2], [1, 2, 8], [0, 4], [], ["1", 4], [True, 4], 4], ids=repr)
def test_invalid_batch_buckets_are_refused(cls, buckets):
    message = refusal(cls, {"num_seqs_buckets": buckets})
    assert "num_seqs_buckets" in message and "4" in message


@both_classes
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_prefills_per_batch", 0),
        ("max_prefills_per_batch", "2"),
        ("max_prefills_per_batch", True),
        ("max_prefills_per_batch", 1.5),
        ("max_consecutive_prefill_steps", 0),
        ("max_consecutive_prefill_steps", -1),
        ("min_decode_steps", 0),
        ("kv_admission", "hope"),
        ("kv_admission", 1),
        ("chunking", "none"),
        ("prefill_cost", {128: "x"}),
        ("prefill_cost", [1, 2]),
        ("decode_context_length_buckets", [512, 4096]),
        ("decode_context_length_buckets", []),
    ],
)
def test_an_invalid_field_is_refused_with_its_value(cls, field, value):
    message = refusal(cls, {field: value}, **BUCKETS)
    assert field in message
    assert repr(value) in message or str(value) in message
    assert "\n" not in message


@both_classes
def test_all_invalid_fields_are_reported_at_once(cls):
    message = refusal(cls, {"max_prefills_per_batch": 0, "num_seqs_buckets": [1], "kv_admission": "hope"})
    assert all(field in message for field in ("max_prefills_per_batch", "num_seqs_buckets", "kv_admission"))
    assert len(message.splitlines()) == 3


@both_classes
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 8),
        ("max_num_batched_tokens", 64),
        ("max_model_len", 256),
        ("block_size", 16),
        ("num_blocks", 10),
        ("long_prefill_token_threshold", 5),
        ("prefix_caching", True),
        ("policy", "priority"),
    ],
)
def test_a_field_that_a_vllm_flag_sets_is_refused_in_neuron_config(cls, field, value):
    message = refusal(cls, {field: value})
    assert field in message


@both_classes
def test_unknown_keys_are_ignored(cls):
    s = build(cls, neuron_config={"on_device_sampling": True, "max_prefills_per_batch": 2})
    assert s.max_prefills_per_batch == 2


@both_classes
def test_bucket_lists_are_copied(cls):
    buckets = [128, 1000]
    s = build(cls, neuron_config={"num_batched_tokens_buckets": buckets}, **BUCKETS)
    buckets.append(5)
    assert s.num_batched_tokens_buckets == [128, 1000]


@both_classes
def test_segment_sizes_become_the_token_buckets(cls):
    s = build(cls, neuron_config={"kv_segment_size_buckets": [256, 1000]}, **BUCKETS)
    assert s.num_batched_tokens_buckets == [256, 1000]


@both_classes
def test_vllm_settings_become_fields_of_the_config(cls):
    s = build(
        cls,
        max_num_seqs=6,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        num_blocks=100,
        block_size=32,
        policy="priority",
        long_prefill_token_threshold=100,
        prefix_caching=True,
    )
    config = s.neuron_config
    assert isinstance(config, neuron_sched.NeuronConfig)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (6, 2048, 4096)
    assert (config.block_size, config.num_blocks) == (32, 99)
    assert (config.policy, config.long_prefill_token_threshold, config.prefix_caching) == ("priority", 100, True)


@both_classes
def test_max_model_len_admission_reserves_full_sequences(cls):
    """Each request reserves 4 of 9 usable blocks, for 64 tokens, so two requests run at once."""
    s = build(cls, max_model_len=64, num_blocks=10, neuron_config={"kv_admission": "max_model_len"})
    engine = Engine(s)
    add(s, a=(10, 2), b=(10, 2), c=(10, 2))
    engine.step()
    engine.step()
    assert (s.explain().id, s.explain().reason) == ("c", "kv")
    engine.run()
    assert engine.steps[2:] == [{"a": 1, "b": 1}, {"c": 10}, {"c": 1}]


# --- the production plug-in ---


@pytest.fixture
def plugin(monkeypatch):
    """Return a stand-in for the plug-in's bucket resolver. Its `calls` has the arguments of the last calls."""
    module = types.ModuleType("vllm_neuron.utils.bucket_utils")
    module.calls = {}

    def tokens(
        max_num_batched_tokens,
        *,
        configured_buckets=None,
        use_configured_buckets=False,
        auto_buckets=None,
        dcp_stride=1,
    ):
        module.calls["tokens"] = {
            "max": max_num_batched_tokens,
            "configured": configured_buckets,
            "use_configured": use_configured_buckets,
            "auto": auto_buckets,
            "stride": dcp_stride,
        }
        if use_configured_buckets:
            return list(configured_buckets)
        return list(auto_buckets) if auto_buckets else [max_num_batched_tokens // 2, max_num_batched_tokens]

    def segments(max_num_batched_tokens, max_model_len):
        module.calls["segments"] = (max_num_batched_tokens, max_model_len)
        if max_num_batched_tokens >= max_model_len:
            return None, None
        if max_num_batched_tokens not in (512, 1024, 2048, 4096, 8192):
            raise ValueError(f"{max_num_batched_tokens} is not a supported chunked prefill size")
        return [max_num_batched_tokens], [max_num_batched_tokens]

    def validate(buckets, max_num_seqs):
        module.calls["validated"] = (list(buckets), max_num_seqs)
        if buckets[-1] != max_num_seqs:
            raise ValueError("must equal max_num_seqs")
        return list(buckets)

    module.resolve_num_batched_tokens_buckets = tokens
    module.resolve_segmented_prefill_config = segments
    module.validate_num_seqs_buckets = validate
    module.get_default_num_seqs_buckets = lambda max_num_seqs: [max_num_seqs]
    root, utils = types.ModuleType("vllm_neuron"), types.ModuleType("vllm_neuron.utils")
    root.__path__ = utils.__path__ = []
    root.utils, utils.bucket_utils = utils, module
    for name, package in {"vllm_neuron": root, "vllm_neuron.utils": utils, module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, package)
    return module


@both_classes
def test_the_plugin_resolves_the_buckets(cls, plugin):
    s = build(cls, max_num_batched_tokens=1024, max_model_len=1000, max_num_seqs=6)
    assert s.num_batched_tokens_buckets == [500, 1000]
    assert s.num_seqs_buckets == [6]
    assert (plugin.calls["tokens"]["max"], plugin.calls["tokens"]["use_configured"]) == (1000, False)
    engine = Engine(s)
    add(s, a=(300, 2))
    assert engine.step().num_scheduled_tokens_padded == {"a": 500}
    assert engine.step().num_seqs_padded == 6


@both_classes
def test_the_plugin_resolves_the_segment_size_as_the_only_token_bucket(cls, plugin):
    s = build(cls, max_num_batched_tokens=2048, max_model_len=4096, num_blocks=600)
    assert s.num_batched_tokens_buckets == [2048]
    assert plugin.calls["segments"] == (2048, 4096)
    engine = Engine(s)
    add(s, a=(5, 1))
    assert engine.step().num_scheduled_tokens_padded == {"a": 2048}


@both_classes
def test_the_plugin_receives_the_configured_buckets(cls, plugin):
    given = {"num_batched_tokens_buckets": [256, 1000], "num_seqs_buckets": [2, 4]}
    s = build(cls, neuron_config=given, max_num_batched_tokens=1024, max_model_len=1000)
    assert (s.num_batched_tokens_buckets, s.num_seqs_buckets) == ([256, 1000], [2, 4])
    assert plugin.calls["tokens"]["configured"] == [256, 1000]
    assert plugin.calls["tokens"]["use_configured"]
    assert plugin.calls["validated"] == ([2, 4], 4)


@both_classes
def test_values_that_the_plugin_refuses_are_refused(cls, plugin):
    with pytest.raises(ValueError, match="not a supported chunked prefill size"):
        build(cls, max_num_batched_tokens=3000, max_model_len=8192)
    with pytest.raises(ValueError, match="must equal max_num_seqs"):
        build(cls, neuron_config={"num_seqs_buckets": [1, 2]}, max_num_batched_tokens=1024, max_model_len=1000)


# --- releases ---


@both_classes
@pytest.mark.parametrize("version", ["0.23.1", "0.34.0", "1.0.0"])
def test_a_release_outside_the_range_is_warned_about_once(cls, version, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    with LogCapture() as log:
        build(cls)
    (warning,) = log.warnings
    assert version in warning and "0.24" in warning and "0.33" in warning


@both_classes
def test_the_installed_release_causes_no_warning(cls):
    with LogCapture() as log:
        build(cls)
    assert log.warnings == []


def required_private_methods():
    """Return the required methods of the base class that are not part of its public interface."""
    groups = [(name,) if isinstance(name, str) else name for name in requirements.METHODS]
    return [name for group in groups for name in group if name in vars(Scheduler) and name.startswith("_")]


@both_classes
@pytest.mark.parametrize("name", required_private_methods())
def test_a_release_without_a_required_method_is_refused_with_its_name(cls, name, monkeypatch):
    monkeypatch.delattr(Scheduler, name)
    if name in vars(AsyncScheduler):
        monkeypatch.delattr(AsyncScheduler, name)
    with pytest.raises(RuntimeError) as error:
        build(cls)
    assert name in str(error.value)
    assert vllm.__version__ in str(error.value) and "0.24" in str(error.value) and "0.33" in str(error.value)


def test_the_classes_are_attributes_of_the_package():
    assert neuron_sched.NeuronScheduler is NeuronScheduler
    assert neuron_sched.NeuronAsyncScheduler.__name__ == "NeuronAsyncScheduler"


@both_classes
def test_an_invalid_config_is_refused_before_the_base_class_is_constructed(cls, monkeypatch):
    """No block is allocated and no connector is started for an invalid configuration."""

    def construct(self, *args, **kwargs):
        raise AssertionError("the base class was constructed first")

    monkeypatch.setattr(Scheduler, "__init__", construct)
    with pytest.raises(ValueError, match="kv_admission"):
        build(cls, neuron_config={"kv_admission": "hope"})
    with pytest.raises(ValueError, match="num_seqs_buckets"):
        build(cls, neuron_config={"num_seqs_buckets": [1]})


@both_classes
def test_encoder_decoder_models_are_refused(cls):
    def edit(vllm_config):
        vllm_config.model_config = types.SimpleNamespace(model="whisper", is_encoder_decoder=True)

    with pytest.raises(ValueError, match="model: whisper: expected a decoder-only model"):
        build(cls, edit=edit)
