"""Backend "neuronx" on `neuronx_standin`, which has the documented signatures of torch_neuronx but no device."""

import sys

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

from neuron_sched import CompiledModel, DecodeRow, PaddedInputs, PrefillRow
from tests.runner.support import neuronx_standin
from tests.runner.support.models import CONFIG, SHAPES, LastSlotWriter, WeightedSum, expected


def with_states(base):
    """Return the model class with its KV cache in a parameter, as torch_neuronx requires."""

    class Stateful(base):
        state_names = ("kv",)

        def __init__(self):
            super().__init__()
            cache = self._buffers.pop("kv")
            self.kv = torch.nn.Parameter(cache, requires_grad=False)

    return Stateful


Stateful = with_states(WeightedSum)


@pytest.fixture
def neuron(monkeypatch):
    return install(monkeypatch)


def install(monkeypatch, **versions):
    modules, recorder = neuronx_standin.modules(**versions)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return recorder


def warm(build=Stateful, **arguments):
    model = CompiledModel(build, CONFIG, "neuronx", **arguments)
    model.warmup(progress=False)
    return model


def test_torch_neuronx_is_imported_only_for_this_backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)  # as if it were not installed
    CompiledModel(WeightedSum, CONFIG, "jit")
    with pytest.raises(ImportError, match="backend 'neuronx' needs torch_neuronx, which could not be imported"):
        CompiledModel(Stateful, CONFIG, "neuronx")


def test_logits_equal_those_of_the_whole_sequence(neuron):
    """All graphs share the KV cache of the first one: chunks and decodes of several shapes see each other's entries."""
    model, inputs = warm(), PaddedInputs(CONFIG)
    a, b = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [10, 0, 4]
    logits = model(inputs.prefill([PrefillRow(a[:6], 0, [3]), PrefillRow(b, 0, [5])]))
    assert logits.tolist() == [expected(model.module, a[:6]), expected(model.module, b)]
    model(inputs.prefill([PrefillRow(a[6:], 6, [3, 9])]))
    logits = model(inputs.decode([DecodeRow(1, 10, [3, 9]), DecodeRow(2, 3, [5]), DecodeRow(3, 0, [6])]))
    assert logits[:3].tolist() == [expected(model.module, tokens) for tokens in ([*a, 1], [*b, 2], [3])]


def test_each_shape_is_traced_once_and_placed_on_the_first_core(neuron):
    model = warm()
    assert len(neuron.traces) == len(model.report().graphs) == len(SHAPES)
    assert neuron.moves == [0] * len(SHAPES)
    assert [call["shapes"][0] for call in neuron.traces] == [(shape[1],) for shape in SHAPES]
    assert all(call["aliases"] == [1] for call in neuron.traces)
    model(PaddedInputs(CONFIG).dummy(SHAPES[0]))
    assert len(neuron.traces) == len(SHAPES)


def test_compiler_args_and_options_are_passed_to_trace(neuron):
    arguments = ["--auto-cast", "none"]
    warm(compiler_args=arguments, options={"compiler_workdir": "work", "inline_weights_to_neff": False})
    for call in neuron.traces:
        assert (call["compiler_args"], call["compiler_workdir"], call["inline_weights_to_neff"]) == (
            arguments,
            "work",
            False,
        )
    with pytest.raises(ValueError, match="input_output_aliases: expected none"):
        CompiledModel(Stateful, CONFIG, "neuronx", options={"input_output_aliases": {}})


def test_a_model_without_states_is_traced_without_aliases(neuron):
    class Stateless(torch.nn.Module):
        state_names = ()

        def forward(self, *, input_ids, logits_index, **others):
            return input_ids[logits_index].float()[:, None]

    batch = PaddedInputs(CONFIG).prefill([PrefillRow([7, 8, 9], 0, [1])])
    assert warm(Stateless)(batch).tolist() == [[9.0], [9.0]]
    assert all(call["aliases"] == [] for call in neuron.traces)


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (None, "the module has no state_names"),
        (("kv", "cache"), "state_names: 'cache': expected the name of a parameter"),
    ],
)
def test_missing_and_unknown_state_names_are_refused(neuron, names, match):
    class Unnamed(Stateful):
        state_names = names

    with pytest.raises(ValueError, match=match):
        CompiledModel(Unnamed, CONFIG, "neuronx")


def test_r07_warm_up_leaves_the_kv_cache_unchanged(neuron):
    model = warm()
    assert not model.module.kv.any()
    with pytest.raises(ValueError, match="the module wrote to 'kv'"):
        warm(with_states(LastSlotWriter))


def test_files_are_reused_only_if_everything_that_they_depend_on_is_equal(monkeypatch, tmp_path):
    """The second model reads all graphs. With another compiler, key or compiler argument, they are compiled again."""
    inputs = PaddedInputs(CONFIG)

    def traced(key="model", compiler_args=None, version="2.16.1"):
        recorder = install(monkeypatch, compiler_version=version)
        model = warm(key=key, cache_dir=tmp_path, compiler_args=compiler_args)
        tokens = [4, 9, 2]
        model(inputs.prefill([PrefillRow(tokens, 0, [5])]))
        logits = model(inputs.decode([DecodeRow(1, 3, [5])]))
        assert logits[0].tolist() == expected(model.module, [*tokens, 1])
        assert recorder.moves == [0] * len(SHAPES)
        return len(recorder.traces)

    assert [traced(), traced()] == [len(SHAPES), 0]
    assert len(list(tmp_path.iterdir())) == len(SHAPES)
    assert traced(version="2.17.0") == traced(key="other") == traced(compiler_args="-O1") == len(SHAPES)
    assert traced() == 0
