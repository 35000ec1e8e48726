"""Backend "neuronx" on `neuronx_standin`, which has torch_neuronx's published signatures: nothing here has a device."""

import sys

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

import neuronx_standin
from neuron_sched import CompiledModel, DecodeRow, PaddedInputs, PrefillRow
from torch_model import CONFIG, SHAPES, LastSlotWriter, Weigher, expected


def with_states(base):
    """The model with its KV cache as the parameter that torch_neuronx asks for."""

    class Stateful(base):
        state_names = ("kv",)

        def __init__(self):
            super().__init__()
            cache = self._buffers.pop("kv")
            self.kv = torch.nn.Parameter(cache, requires_grad=False)

    return Stateful


Stateful = with_states(Weigher)


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


def test_it_is_asked_for_by_name_and_then_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)  # as where it is not installed
    CompiledModel(Weigher, CONFIG, "jit")
    with pytest.raises(ImportError, match="backend 'neuronx' needs torch_neuronx, which could not be imported"):
        CompiledModel(Stateful, CONFIG, "neuronx")


def test_logits_are_those_of_the_whole_sequence(neuron):
    """Chunks and decodes of several shapes: all graphs have one KV cache, the first one's."""
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


def test_arguments_are_passed_on(neuron):
    arguments = ["--auto-cast", "none"]
    warm(compiler_args=arguments, options={"compiler_workdir": "work", "inline_weights_to_neff": False})
    for call in neuron.traces:
        assert (call["compiler_args"], call["compiler_workdir"], call["inline_weights_to_neff"]) == (
            arguments,
            "work",
            False,
        )
    with pytest.raises(ValueError, match="input_output_aliases are made from the module's state_names"):
        CompiledModel(Stateful, CONFIG, "neuronx", options={"input_output_aliases": {}})


def test_a_model_without_states_is_traced_as_it_is(neuron):
    class Stateless(torch.nn.Module):
        state_names = ()

        def forward(self, *, input_ids, logits_index, **others):
            return input_ids[logits_index].float()[:, None]

    batch = PaddedInputs(CONFIG).prefill([PrefillRow([7, 8, 9], 0, [1])])
    assert warm(Stateless)(batch).tolist() == [[9.0], [9.0]]
    assert all(call["aliases"] == [] for call in neuron.traces)


@pytest.mark.parametrize(
    ("names", "match"),
    [(None, "the module has no state_names"), (("kv", "cache"), "state_names: 'cache': expected a parameter")],
)
def test_states_that_are_not_named(neuron, names, match):
    class Unnamed(Stateful):
        state_names = names

    with pytest.raises(ValueError, match=match):
        CompiledModel(Unnamed, CONFIG, "neuronx")


def test_r07_warm_up_leaves_the_cache_as_it_is(neuron):
    model = warm()
    assert not model.module.kv.any()
    with pytest.raises(ValueError, match="the module wrote to 'kv'"):
        warm(with_states(LastSlotWriter))


def test_files_are_found_again_under_everything_that_they_depend_on(monkeypatch, tmp_path):
    """The second model reads all graphs; another compiler, key or compiler argument makes them anew."""
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
