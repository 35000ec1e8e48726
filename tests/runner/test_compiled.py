"""`CompiledModel` with torch: results, warm-up, refused batches, report."""

import logging
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

from neuron_sched import CompiledModel, DecodeRow, NeuronConfig, PaddedInputs, PrefillRow, ShapeError
from tests.runner.support import models
from tests.runner.support.models import CONFIG, SHAPES, NaNPadding, WeightedSum, expected

BACKENDS = ("eager", "jit")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def inputs() -> PaddedInputs:
    return PaddedInputs(CONFIG)


def warm(build=WeightedSum, backend="jit", **arguments) -> CompiledModel:
    model = CompiledModel(build, CONFIG, backend, **arguments)
    model.warmup(progress=False)
    return model


def bits(module) -> dict[str, bytes]:
    """Return the bits of every parameter and buffer."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors}


# Results


def test_padding_does_not_affect_the_logits(backend: str, inputs: PaddedInputs):
    """Two prompts in one bucket, a chunk after cached tokens, and decodes of both give the expected sums."""
    model = warm(backend=backend)
    a, b = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [10, 0, 4]
    batch = inputs.prefill([PrefillRow(a[:6], 0, [3]), PrefillRow(b, 0, [5])])
    assert (batch.shape, batch.num_real_tokens) == (("prefill", 16), 9)
    logits = model(batch)
    assert logits.tolist() == [expected(model.module, a[:6]), expected(model.module, b)]
    logits = model(inputs.prefill([PrefillRow(a[6:], 6, [3, 9])]))
    assert logits[0].tolist() == expected(model.module, a)
    logits = model(inputs.decode([DecodeRow(1, 10, [3, 9]), DecodeRow(2, 3, [5]), DecodeRow(3, 0, [6])]))
    assert logits.shape == (4, models.VOCAB)
    assert logits[:3].tolist() == [expected(model.module, tokens) for tokens in ([*a, 1], [*b, 2], [3])]


def test_only_the_slots_of_unpadded_tokens_are_written(backend: str, inputs: PaddedInputs):
    model = warm(backend=backend)
    model.module.kv.fill_(7.0)
    model(inputs.prefill([PrefillRow([1, 2, 3], 7, [4, 2])]))
    changed = (model.module.kv != 7.0).any(dim=1).nonzero().flatten().tolist()
    assert changed == [16, 17, 39]


def test_r08_nan_in_padding_rows_gives_no_warning(backend: str, inputs: PaddedInputs):
    """R08: three decodes in a bucket of four."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", category=DeprecationWarning)
        model = warm(NaNPadding, backend)
        logits = model(inputs.decode([DecodeRow(token, 0, [token]) for token in (3, 1, 2)]))
    assert logits[:3].tolist() == [expected(model.module, [token]) for token in (3, 1, 2)]
    assert all(map(math.isnan, logits[3].tolist()))


def test_logits_require_no_gradient(backend: str, inputs: PaddedInputs):
    assert not warm(backend=backend)(inputs.dummy(SHAPES[0])).requires_grad


def test_the_module_is_put_into_evaluation_mode():
    assert not warm(backend="eager").module.training


# Warm-up


def test_r07_warmup_and_dummy_batches_change_no_bit(backend: str, inputs: PaddedInputs):
    """R07: the KV cache holds a pattern with NaNs during warm-up and one dummy batch of each shape."""
    model = CompiledModel(WeightedSum, CONFIG, backend)
    kv = model.module.kv
    kv.view(torch.int32).copy_(torch.arange(kv.numel()).reshape(kv.shape) * 0x01234567 % 2**31)
    assert kv.isnan().any()
    before = bits(model.module)
    model.warmup(progress=False)
    assert bits(model.module) == before
    for shape in SHAPES:
        batch = inputs.dummy(shape)
        assert (batch.slot_mapping == -1).all()
        model(batch)
    assert bits(model.module) == before


@pytest.mark.parametrize("fault", ["LastSlotWriter", "LastSlotZeroer", "DecodeWriter"])
def test_r03_a_model_that_writes_for_slot_minus_one_is_refused(backend: str, fault: str):
    """R03: the message names the tensor, nothing is compiled, and the write is undone."""
    model = CompiledModel(getattr(models, fault), CONFIG, backend)
    before = bits(model.module)
    first = ("decode", 1, 32) if fault == "DecodeWriter" else ("prefill", 16)
    with pytest.raises(ValueError) as raised:
        model.warmup(progress=False)
    assert f"the module wrote to 'kv' in a dummy batch of shape {first}" in str(raised.value)
    assert "slot -1" in str(raised.value)
    assert bits(model.module) == before
    assert model.report().graphs == {}


def test_r03_a_cache_in_a_parameter_is_checked_if_it_is_a_state():
    class InParameter(models.LastSlotZeroer):
        state_names = ("kv",)

        def __init__(self):
            super().__init__()
            kv = self.kv
            del self.kv
            self.kv = torch.nn.Parameter(kv, requires_grad=False)

    with pytest.raises(ValueError, match="wrote to 'kv'"):
        warm(InParameter)


CACHES = {
    "int8": lambda shape: torch.zeros(shape, dtype=torch.int8),
    "uint8": lambda shape: torch.zeros(shape, dtype=torch.uint8),
    "int16": lambda shape: torch.zeros(shape, dtype=torch.int16),
    "bfloat16": lambda shape: torch.zeros(shape, dtype=torch.bfloat16),
    "transposed": lambda shape: torch.zeros(shape[::-1]).t(),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("fault", ["LastSlotWriter", "LastSlotZeroer", None])
def test_r03_writes_to_caches_of_other_dtypes_and_layouts_are_found(backend: str, cache: Callable, fault: str | None):
    """Zeros written to an empty cache are found too, except in wider integers, which may be indices."""

    class Quantised(getattr(models, fault or "WeightedSum")):
        def __init__(self):
            super().__init__()
            self.kv = cache(self.kv.shape)

    model = CompiledModel(Quantised, CONFIG, backend)
    before = bits(model.module)
    if fault is None or (fault == "LastSlotZeroer" and model.module.kv.dtype == torch.int16):
        model.warmup(progress=False)
    else:
        for _ in range(2):
            with pytest.raises(ValueError, match="the module wrote to 'kv' in a dummy batch"):
                model.warmup(progress=False)
    assert bits(model.module) == before


def test_an_expanded_buffer_is_not_written_to(backend: str):
    class Expanded(models.WeightedSum):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1).expand(8))

    warm(Expanded, backend)


def test_a_model_that_changes_its_inputs_gives_correct_logits(backend: str, inputs: PaddedInputs):
    """Inputs that a call has changed are not passed to a later call."""
    model = warm(models.InputChanger, backend)
    assert model(inputs.prefill([PrefillRow([1, 2, 3], 0, [1])]))[0].tolist() == expected(model.module, [1, 2, 3])


def test_a_model_that_changes_a_weight_is_refused(backend: str):
    model = CompiledModel(models.WeightWriter, CONFIG, backend)
    for _ in range(2):  # the second attempt is refused as well
        with pytest.raises(ValueError, match="the module wrote to 'seen' in the dummy batches of warm-up"):
            model.warmup(progress=False)
        assert model.report().graphs == {}


def test_without_check_no_model_is_refused(backend: str, inputs: PaddedInputs):
    model = CompiledModel(models.LastSlotWriter, CONFIG, backend)
    model.warmup(progress=False, check=False)
    assert set(model.report().graphs) == set(SHAPES)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("fault", "returned"), [("PairReturner", "tuple"), ("NoneReturner", "NoneType")])
def test_a_model_that_returns_no_tensor_is_refused(backend: str, fault: str, returned: str, check: bool):
    if (backend, fault) == ("jit", "NoneReturner") and not check:
        pytest.skip("torch.jit.trace itself refuses it")
    model = CompiledModel(getattr(models, fault), CONFIG, backend)
    with pytest.raises(TypeError, match=f"the module returned {returned}: expected one tensor"):
        model.warmup(progress=False, check=check)


def test_an_interrupted_warmup_continues_with_the_missing_graphs(monkeypatch: pytest.MonkeyPatch, inputs: PaddedInputs):
    traced, trace = [], torch.jit.trace

    def interrupted(module, tensors, **options):
        traced.append(len(tensors[0]))
        if len(traced) == 4:
            raise KeyboardInterrupt
        return trace(module, tensors, **options)

    monkeypatch.setattr(torch.jit, "trace", interrupted)
    model = CompiledModel(WeightedSum, CONFIG)
    before = bits(model.module)
    with pytest.raises(KeyboardInterrupt):
        model.warmup(progress=False)
    assert bits(model.module) == before
    assert tuple(model.report().graphs) == SHAPES[:3]
    with pytest.raises(RuntimeError, match="warmup"):
        model(inputs.dummy(SHAPES[0]))
    model.warmup(progress=False)
    assert tuple(model.report().graphs) == SHAPES
    assert traced == [shape[1] for shape in (*SHAPES[:4], *SHAPES[3:])]
    assert model(inputs.prefill([PrefillRow([4], 0, [1])]))[0].tolist() == expected(model.module, [4])


def test_b03_each_shape_is_compiled_once_and_no_other(monkeypatch: pytest.MonkeyPatch):
    """B03: with `max_model_len` 317 the largest tensors have length 317, and nothing is compiled for 512."""
    config = NeuronConfig(max_num_seqs=2, max_num_batched_tokens=512, max_model_len=317, block_size=16, num_blocks=40)
    traced, trace = [], torch.jit.trace

    def counted(module, tensors, **options):
        traced.append(tuple(len(tensor) for tensor in tensors[:1]))
        return trace(module, tensors, **options)

    monkeypatch.setattr(torch.jit, "trace", counted)
    model = CompiledModel(lambda: WeightedSum(config), config)
    model.warmup(progress=False)
    model.warmup(progress=False)
    assert traced == [(128,), (256,), (317,), (1,), (2,)]
    inputs = PaddedInputs(config)
    prompt = [i % models.VOCAB for i in range(300)]
    batch = inputs.prefill([PrefillRow(prompt, 0, range(1, 20))])
    assert (batch.shape, batch.num_padded_tokens) == (("prefill", 317), 317)
    assert model(batch)[0].tolist() == expected(model.module, prompt)
    for shape in inputs.shapes:
        for _ in range(3):
            model(inputs.dummy(shape))
    assert len(traced) == 5
    assert set(model.report().graphs) == set(inputs.shapes)


def test_options_are_passed_to_trace(monkeypatch: pytest.MonkeyPatch):
    given, trace = [], torch.jit.trace

    def recorded(module, tensors, **options):
        given.append(options)
        return trace(module, tensors, **options)

    monkeypatch.setattr(torch.jit, "trace", recorded)
    warm(options={"strict": False})
    assert given == [{"check_trace": False, "strict": False}] * len(SHAPES)


# Progress


def test_without_a_terminal_there_is_no_bar_and_each_graph_is_logged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, logger="neuron_sched"):
        CompiledModel(WeightedSum, CONFIG).warmup(progress=True)
    assert capsys.readouterr() == ("", "")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(SHAPES)
    assert lines[0].startswith("prefill 16: compiled in ") and lines[0].endswith(" s")
    assert lines[-1].startswith("decode 4, context 64: compiled in ")


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, progress: bool
):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    CompiledModel(WeightedSum, CONFIG).warmup(progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("compiling" in err and f"/{len(SHAPES)}" in err) == progress


# Refused batches


class Recorder(WeightedSum):
    """Records the names of the tensors in each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, **tensors):
        self.calls.append(tuple(tensors))
        return super().forward(**tensors)


def test_the_module_is_called_with_the_tensors_by_name_in_order(inputs: PaddedInputs):
    model = warm(Recorder, "eager")
    for shape in (SHAPES[0], SHAPES[-1]):
        model(inputs.dummy(shape))
        assert model.module.calls[-1] == tuple(inputs.dummy(shape).arrays())


def other_config(**changes) -> NeuronConfig:
    return NeuronConfig(**{**CONFIG.as_dict(), **changes})


def test_a_shape_without_a_graph_is_refused_before_any_call(backend: str):
    """Only shapes that were warmed up run."""
    model = warm(Recorder, backend)
    calls = len(model.module.calls)
    other = PaddedInputs(other_config(num_batched_tokens_buckets=[24, 32]))
    with pytest.raises(ShapeError) as raised:
        model(other.prefill([PrefillRow([1], 0, [1])]))
    assert str(raised.value) == (
        "shape ('prefill', 24): no graph was compiled for it: expected one of ('prefill', 16), ('prefill', 32)"
    )
    assert len(model.module.calls) == calls
    assert model.report().calls == 0


def test_tensors_that_differ_from_the_graph_are_refused_before_any_call(inputs: PaddedInputs):
    model = warm(Recorder, "eager")
    calls = len(model.module.calls)
    other = PaddedInputs(other_config(max_model_len=80, decode_context_length_buckets=[32, 64, 80]))
    with pytest.raises(ShapeError, match=r"block_table: torch.int32 \[2, 10\]: .* torch.int32 \[2, 8\]"):
        model(other.prefill([PrefillRow([1], 0, [1])]))

    def altered(change):
        tensors = inputs.dummy(SHAPES[0]).torch()
        change(tensors)
        return SimpleNamespace(shape=SHAPES[0], torch=lambda: tensors, num_real_tokens=0, num_padded_tokens=16)

    with pytest.raises(ShapeError, match=r"positions: torch.int32 \[16\]: .* torch.int64 \[16\]"):
        model(altered(lambda tensors: tensors.update(positions=tensors["positions"].int())))
    with pytest.raises(ShapeError, match="its graph was compiled for"):
        model(altered(lambda tensors: tensors.pop("cu_seqlens")))
    assert len(model.module.calls) == calls
    assert model.report().calls == 0
    model(altered(lambda tensors: None))
    assert model.report().calls == 1


def test_a_call_before_warmup_is_refused(inputs: PaddedInputs):
    model = CompiledModel(Recorder, CONFIG)
    with pytest.raises(RuntimeError, match=r"call warmup\(\) first"):
        model(inputs.dummy(SHAPES[0]))
    assert model.module.calls == []


def test_an_argument_that_is_not_a_batch_is_refused():
    with pytest.raises(TypeError, match="batch: dict: expected a Batch"):
        warm(backend="eager")({})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: "a model", "build: returned str: expected a torch.nn.Module"),
        (lambda: WeightedSum, "build: returned type"),
        (WeightedSum(), "build: is a torch.nn.Module: expected a function that returns one"),
    ],
)
def test_a_build_argument_that_returns_no_module_is_refused(build, message: str):
    with pytest.raises(TypeError, match=message):
        CompiledModel(build, CONFIG)


def test_build_is_called_once_and_its_error_propagates():
    built = []

    def build():
        built.append(WeightedSum())
        return built[-1]

    model = warm(build)
    assert built == [model.module]
    with pytest.raises(ZeroDivisionError):
        CompiledModel(lambda: 1 / 0, CONFIG)


def test_two_models_share_no_state(backend: str, inputs: PaddedInputs):
    one, two = warm(backend=backend), warm(backend=backend)
    before = bits(two.module)
    batch = inputs.prefill([PrefillRow([1, 2], 0, [1])])
    one(batch)
    assert bits(two.module) == before
    assert (one.report().calls, two.report().calls) == (1, 0)
    assert one(batch).tolist() == two(batch).tolist()


# The report


def test_calls_and_tokens_are_counted_by_shape(inputs: PaddedInputs):
    model = warm()
    assert model.report().unused == SHAPES, "calls during warm-up are not counted"
    for count in (3, 16, 17):
        model(inputs.prefill([PrefillRow([1] * count, 0, [1, 2, 3])]))
    for rows in (1, 3, 3):
        model(inputs.decode([DecodeRow(1, 2, [1 + i]) for i in range(rows)]))
    report = model.report()
    counted = {
        shape: (graph.calls, graph.real_tokens, graph.padded_tokens)
        for shape, graph in report.graphs.items()
        if graph.calls
    }
    assert counted == {
        ("prefill", 16): (2, 19, 32),
        ("prefill", 32): (1, 17, 32),
        ("decode", 1, 32): (1, 1, 1),
        ("decode", 4, 32): (2, 6, 8),
    }
    assert (report.calls, report.real_tokens, report.padded_tokens) == (6, 43, 73)
    assert report.unused == tuple(shape for shape in SHAPES if shape not in counted)
    assert tuple(report.graphs) == SHAPES
    assert all(graph.seconds > 0 and not graph.cached for graph in report.graphs.values())
    assert str(report).splitlines()[-1].startswith(f"{len(SHAPES)} graphs, {len(SHAPES) - 4} never used")


def test_a_report_does_not_change_after_later_calls(inputs: PaddedInputs):
    model = warm(backend="eager")
    report = model.report()
    model(inputs.dummy(SHAPES[0]))
    assert report.calls == 0


def test_a_call_that_raises_is_not_counted(inputs: PaddedInputs):
    model = warm(backend="eager")
    model.module.forward = lambda **tensors: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(inputs.dummy(SHAPES[0]))
    assert model.report().calls == 0
