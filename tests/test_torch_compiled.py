"""`CompiledModel` with torch: warm-up, the guard, the report."""

import logging
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

import torch_model
from neuron_sched import CompiledModel, DecodeRow, NeuronConfig, PaddedInputs, PrefillRow, ShapeError
from torch_model import CONFIG, SHAPES, NaNPadding, Weigher, expected

BACKENDS = ("eager", "jit")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def inputs() -> PaddedInputs:
    return PaddedInputs(CONFIG)


def warm(build=Weigher, backend="jit", **arguments) -> CompiledModel:
    model = CompiledModel(build, CONFIG, backend, **arguments)
    model.warmup(progress=False)
    return model


def bits(module) -> dict[str, bytes]:
    kept = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in kept}


# Results


def test_padding_is_never_seen_in_the_logits(backend: str, inputs: PaddedInputs):
    """Two prompts in one bucket, a chunk behind what is cached, decodes of both: equal to sums by hand."""
    model = warm(backend=backend)
    a, b = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [10, 0, 4]
    batch = inputs.prefill([PrefillRow(a[:6], 0, [3]), PrefillRow(b, 0, [5])])
    assert (batch.shape, batch.num_real_tokens) == (("prefill", 16), 9)
    logits = model(batch)
    assert logits.tolist() == [expected(model.module, a[:6]), expected(model.module, b)]
    logits = model(inputs.prefill([PrefillRow(a[6:], 6, [3, 9])]))
    assert logits[0].tolist() == expected(model.module, a)
    logits = model(inputs.decode([DecodeRow(1, 10, [3, 9]), DecodeRow(2, 3, [5]), DecodeRow(3, 0, [6])]))
    assert logits.shape == (4, torch_model.VOCAB)
    assert logits[:3].tolist() == [expected(model.module, tokens) for tokens in ([*a, 1], [*b, 2], [3])]


def test_only_the_slots_of_real_tokens_are_written(backend: str, inputs: PaddedInputs):
    model = warm(backend=backend)
    model.module.kv.fill_(7.0)
    model(inputs.prefill([PrefillRow([1, 2, 3], 7, [4, 2])]))
    changed = (model.module.kv != 7.0).any(dim=1).nonzero().flatten().tolist()
    assert changed == [16, 17, 39]


def test_r08_nan_in_padding_rows_warns_nobody(backend: str, inputs: PaddedInputs):
    """R08: three decodes in a bucket of four."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", category=DeprecationWarning)
        model = warm(NaNPadding, backend)
        logits = model(inputs.decode([DecodeRow(token, 0, [token]) for token in (3, 1, 2)]))
    assert logits[:3].tolist() == [expected(model.module, [token]) for token in (3, 1, 2)]
    assert all(map(math.isnan, logits[3].tolist()))


def test_logits_want_no_gradient(backend: str, inputs: PaddedInputs):
    assert not warm(backend=backend)(inputs.dummy(SHAPES[0])).requires_grad


def test_the_module_is_put_into_evaluation_mode():
    assert not warm(backend="eager").module.training


# Warm-up


def test_r07_warmup_and_dummies_leave_every_bit(backend: str, inputs: PaddedInputs):
    """R07: a pattern that has NaNs in it, the warm-up of all shapes, one dummy of each."""
    model = CompiledModel(Weigher, CONFIG, backend)
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
    """R03: by the name of the tensor, before anything is compiled, and nothing of it stays."""
    model = CompiledModel(getattr(torch_model, fault), CONFIG, backend)
    before = bits(model.module)
    first = ("decode", 1, 32) if fault == "DecodeWriter" else ("prefill", 16)
    with pytest.raises(ValueError) as raised:
        model.warmup(progress=False)
    assert f"the module wrote to 'kv' in a batch of padding of shape {first}" in str(raised.value)
    assert "slot -1" in str(raised.value)
    assert bits(model.module) == before
    assert model.report().graphs == {}


def test_r03_a_cache_in_a_parameter_is_checked_if_it_is_a_state():
    class InParameter(torch_model.LastSlotZeroer):
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
def test_r03_caches_of_other_types_and_layouts(backend: str, cache: Callable, fault: str | None):
    """A zero for a zero is seen in all but wider integers, which may be indices and so keep what they hold."""

    class Quantised(getattr(torch_model, fault or "Weigher")):
        def __init__(self):
            super().__init__()
            self.kv = cache(self.kv.shape)

    model = CompiledModel(Quantised, CONFIG, backend)
    before = bits(model.module)
    if fault is None or (fault == "LastSlotZeroer" and model.module.kv.dtype == torch.int16):
        model.warmup(progress=False)
    else:
        for _ in range(2):
            with pytest.raises(ValueError, match="the module wrote to 'kv' in a batch of padding"):
                model.warmup(progress=False)
    assert bits(model.module) == before


def test_a_buffer_that_stands_for_many_is_left_alone(backend: str):
    class Expanded(torch_model.Weigher):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1).expand(8))

    warm(Expanded, backend)


def test_a_model_that_changes_its_inputs(backend: str, inputs: PaddedInputs):
    """Each call gets what was filled for it."""
    model = warm(torch_model.InputChanger, backend)
    assert model(inputs.prefill([PrefillRow([1, 2, 3], 0, [1])]))[0].tolist() == expected(model.module, [1, 2, 3])


def test_a_model_that_changes_a_weight_is_refused(backend: str):
    model = CompiledModel(torch_model.WeightWriter, CONFIG, backend)
    for _ in range(2):  # the second try is not let off because graphs are there
        with pytest.raises(ValueError, match="the module wrote to 'seen' in batches of padding"):
            model.warmup(progress=False)
        assert model.report().graphs == {}


def test_without_the_check_nothing_is_refused(backend: str, inputs: PaddedInputs):
    model = CompiledModel(torch_model.LastSlotWriter, CONFIG, backend)
    model.warmup(progress=False, check=False)
    assert set(model.report().graphs) == set(SHAPES)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("fault", "returned"), [("Pair", "tuple"), ("NothingAtAll", "NoneType")])
def test_a_model_that_returns_no_tensor_is_refused(backend: str, fault: str, returned: str, check: bool):
    if (backend, fault) == ("jit", "NothingAtAll") and not check:
        pytest.skip("torch.jit.trace itself refuses it")
    model = CompiledModel(getattr(torch_model, fault), CONFIG, backend)
    with pytest.raises(TypeError, match=f"the module returned {returned}: expected one tensor"):
        model.warmup(progress=False, check=check)


def test_an_interrupted_warmup_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, inputs: PaddedInputs):
    traced, trace = [], torch.jit.trace

    def flaky(module, tensors, **options):
        traced.append(len(tensors[0]))
        if len(traced) == 4:
            raise KeyboardInterrupt
        return trace(module, tensors, **options)

    monkeypatch.setattr(torch.jit, "trace", flaky)
    model = CompiledModel(Weigher, CONFIG)
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
    """B03: a model length of 317 is the length of the tensors, and nothing is compiled for 512."""
    config = NeuronConfig(max_num_seqs=2, max_num_batched_tokens=512, max_model_len=317, block_size=16, num_blocks=40)
    traced, trace = [], torch.jit.trace

    def counted(module, tensors, **options):
        traced.append(tuple(len(tensor) for tensor in tensors[:1]))
        return trace(module, tensors, **options)

    monkeypatch.setattr(torch.jit, "trace", counted)
    model = CompiledModel(lambda: Weigher(config), config)
    model.warmup(progress=False)
    model.warmup(progress=False)
    assert traced == [(128,), (256,), (317,), (1,), (2,)]
    inputs = PaddedInputs(config)
    prompt = [i % torch_model.VOCAB for i in range(300)]
    batch = inputs.prefill([PrefillRow(prompt, 0, range(1, 20))])
    assert (batch.shape, batch.num_padded_tokens) == (("prefill", 317), 317)
    assert model(batch)[0].tolist() == expected(model.module, prompt)
    for shape in inputs.shapes:
        for _ in range(3):
            model(inputs.dummy(shape))
    assert len(traced) == 5
    assert set(model.report().graphs) == set(inputs.shapes)


def test_options_go_to_the_trace(monkeypatch: pytest.MonkeyPatch):
    given, trace = [], torch.jit.trace

    def recorded(module, tensors, **options):
        given.append(options)
        return trace(module, tensors, **options)

    monkeypatch.setattr(torch.jit, "trace", recorded)
    warm(options={"strict": False})
    assert given == [{"check_trace": False, "strict": False}] * len(SHAPES)


# Progress


def test_no_bar_off_a_terminal_but_a_line_a_graph_in_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, logger="neuron_sched"):
        CompiledModel(Weigher, CONFIG).warmup(progress=True)
    assert capsys.readouterr() == ("", "")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(SHAPES)
    assert lines[0].startswith("prefill 16: compiled in ") and lines[0].endswith(" s")
    assert lines[-1].startswith("decode 4, context 64: compiled in ")


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, progress: bool):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    CompiledModel(Weigher, CONFIG).warmup(progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("compiling" in err and f"/{len(SHAPES)}" in err) == progress


# The guard


class Recorder(Weigher):
    """Knows what it was called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, **tensors):
        self.calls.append(tuple(tensors))
        return super().forward(**tensors)


def test_the_module_gets_the_tensors_by_name_in_their_order(inputs: PaddedInputs):
    model = warm(Recorder, "eager")
    for shape in (SHAPES[0], SHAPES[-1]):
        model(inputs.dummy(shape))
        assert model.module.calls[-1] == tuple(inputs.dummy(shape).arrays())


def other_config(**changes) -> NeuronConfig:
    return NeuronConfig(**{**CONFIG.as_dict(), **changes})


def test_a_shape_outside_the_table_is_refused_before_any_call(backend: str):
    """No shape outside the warm-up set, ever."""
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


def test_tensors_that_were_not_compiled_for_are_refused_before_any_call(inputs: PaddedInputs):
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


def test_a_call_before_warmup_is_told(inputs: PaddedInputs):
    model = CompiledModel(Recorder, CONFIG)
    with pytest.raises(RuntimeError, match=r"call warmup\(\) first"):
        model(inputs.dummy(SHAPES[0]))
    assert model.module.calls == []


def test_what_is_no_batch_is_told():
    with pytest.raises(TypeError, match="batch: dict: expected a Batch"):
        warm(backend="eager")({})


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: "a model", "build: returned str: expected a torch.nn.Module"),
        (lambda: Weigher, "build: returned type"),
        (Weigher(), "build: is a torch.nn.Module: expected a function that returns one"),
    ],
)
def test_a_build_that_makes_no_module_is_told(build, told: str):
    with pytest.raises(TypeError, match=told):
        CompiledModel(build, CONFIG)


def test_build_is_called_once_and_its_error_passes():
    built = []

    def build():
        built.append(Weigher())
        return built[-1]

    model = warm(build)
    assert built == [model.module]
    with pytest.raises(ZeroDivisionError):
        CompiledModel(lambda: 1 / 0, CONFIG)


def test_two_models_side_by_side_share_nothing(backend: str, inputs: PaddedInputs):
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
    assert model.report().unused == SHAPES, "warm-up does not count"
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


def test_a_report_stays_as_it_was(inputs: PaddedInputs):
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
