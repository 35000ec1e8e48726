"""Graphs of `CompiledModel` on disk: when they are reused, when they are not, and how damaged files are handled."""

import os
import re
import stat
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

from neuron_sched import CompiledModel, DecodeRow, NeuronConfig, PaddedInputs, PrefillRow
from neuron_sched.runner import graph_cache
from tests.runner.support.models import CONFIG, SHAPES, WeightedSum, expected


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Path of a directory that does not exist yet."""
    return tmp_path / "some" / "graphs"


@pytest.fixture
def inputs() -> PaddedInputs:
    return PaddedInputs(CONFIG)


def warm(
    cache: Path | None, build=WeightedSum, config: NeuronConfig = CONFIG, key: str | None = "weighted-sum", **arguments
):
    model = CompiledModel(build, config, key=key, cache_dir=cache, **arguments)
    model.warmup(progress=False)
    return model


def cached(model: CompiledModel) -> set:
    return {shape for shape, graph in model.report().graphs.items() if graph.cached}


def conversation(inputs: PaddedInputs):
    """Yield batches that read KV entries written by batches of other shapes."""
    a, b = list(range(10)), [4] * 30
    yield inputs.prefill([PrefillRow(a[:6], 0, [3]), PrefillRow([7, 1], 0, [5])])
    yield inputs.prefill([PrefillRow(b, 0, [9, 1, 2, 7])])
    yield inputs.prefill([PrefillRow(a[6:], 6, [3, 8])])
    yield inputs.decode([DecodeRow(2, 10, [3, 8])])
    yield inputs.decode([DecodeRow(5, 11, [3, 8]), DecodeRow(6, 2, [5])])
    yield inputs.decode([DecodeRow(8, 30, [9, 1, 2, 7])])
    yield inputs.decode([DecodeRow(3, 12, [3, 8]), DecodeRow(9, 31, [9, 1, 2, 7]), DecodeRow(1, 3, [5])])
    yield inputs.decode([DecodeRow(3, 32, [9, 1, 2, 7, 6])])


# Files that are reused


def test_a_second_model_reads_every_graph(cache: Path, inputs: PaddedInputs, monkeypatch: pytest.MonkeyPatch):
    """No graph is traced, and logits and KV cache equal those of traced graphs bit by bit."""
    assert cached(warm(cache)) == set()
    traced = warm(None, key=None)
    monkeypatch.setattr(torch.jit, "trace", lambda *_, **__: pytest.fail("traced"))
    read = warm(cache)
    assert cached(read) == set(SHAPES)
    assert all(" read " in line for line in str(read.report()).splitlines()[1:-1])
    shapes = set()
    for batch in conversation(inputs):
        shapes.add(batch.shape)
        assert torch.equal(read(batch)[: len(batch.request_ids)], traced(batch)[: len(batch.request_ids)])
        assert torch.equal(read.module.kv, traced.module.kv)
    assert len(shapes) > 4


def test_graphs_read_from_files_share_one_kv_cache(cache: Path, inputs: PaddedInputs):
    """Prefills of 16 and 32 and a decode: the expected sums need the entries of all three, in the module's KV cache."""
    warm(cache)
    model = warm(cache)
    a = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3
    model(inputs.prefill([PrefillRow(a[:5], 0, [3])]))
    model(inputs.prefill([PrefillRow(a[5:], 5, [3, 9, 1, 5])]))
    logits = model(inputs.decode([DecodeRow(7, 30, [3, 9, 1, 5])]))
    assert logits[0].tolist() == expected(model.module, [*a, 7])
    assert torch.equal(model.module.kv[24:32], model.module.table[a[:8]])
    model.module.kv.zero_()
    logits = model(inputs.decode([DecodeRow(7, 30, [3, 9, 1, 5])]))
    assert logits[0].tolist() == (31 * model.module.table[7]).tolist()


def test_graphs_read_from_files_use_the_weights_of_their_module(cache: Path, inputs: PaddedInputs):
    """A file contains no weights, so the graph uses those of the module that reads it."""
    warm(cache)

    def other():
        model = WeightedSum()
        model.table.data += 100
        return model

    model = warm(cache, other)
    assert cached(model) == set(SHAPES)
    batch = inputs.prefill([PrefillRow([1, 2], 0, [4])])
    assert model(batch)[0].tolist() == expected(model.module, [1, 2])
    model.module.table.data -= 7
    assert model(batch)[0].tolist() == expected(model.module, [1, 2])


def test_a_file_contains_neither_weights_nor_kv_cache(cache: Path):
    config = NeuronConfig(**{**CONFIG.as_dict(), "num_blocks": 10_000})
    model = warm(cache, lambda: WeightedSum(config), config)
    assert model.module.kv.nbytes > 3_000_000
    assert max(file.stat().st_size for file in cache.iterdir()) < 100_000


def test_two_models_read_from_one_directory_share_no_state(cache: Path, inputs: PaddedInputs):
    warm(cache)
    one, two = warm(cache), warm(cache)
    one(inputs.prefill([PrefillRow([1, 2], 0, [4])]))
    assert one.module.kv.any()
    assert not two.module.kv.any()


def test_another_configuration_reads_the_graphs_of_common_shapes(cache: Path):
    warm(cache)
    more = NeuronConfig(**{**CONFIG.as_dict(), "num_batched_tokens_buckets": [16, 24, 32]})
    assert set(PaddedInputs(more).shapes) - cached(warm(cache, config=more)) == {("prefill", 24)}


def test_graphs_compiled_before_an_interruption_are_read(cache: Path, monkeypatch: pytest.MonkeyPatch):
    trace, count = torch.jit.trace, iter(range(100))

    def interrupted(*arguments, **options):
        if next(count) == 3:
            raise KeyboardInterrupt
        return trace(*arguments, **options)

    monkeypatch.setattr(torch.jit, "trace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm(cache)
    monkeypatch.undo()
    assert cached(warm(cache)) == set(SHAPES[:3])


# Files that are not reused


def changed(**changes) -> NeuronConfig:
    return NeuronConfig(**{**CONFIG.as_dict(), **changes})


class WithAnotherBuffer(WeightedSum):
    def __init__(self):
        super().__init__()
        self.register_buffer("more", torch.zeros(3))


OTHERS = {
    "key": {"key": "weighted-sum 2"},
    "dtype": {"build": lambda: WeightedSum().double()},
    "shape of the KV cache": {"config": changed(num_blocks=17), "build": lambda: WeightedSum(changed(num_blocks=17))},
    "another buffer": {"build": WithAnotherBuffer},
    "block size": {"config": changed(block_size=4, num_blocks=33), "build": lambda: WeightedSum(changed(block_size=4))},
    "max_model_len": {"config": changed(max_model_len=60, decode_context_length_buckets=[32, 60])},
    "options": {"options": {"strict": False}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_reads_no_graph(cache: Path, other: str):
    warm(cache)
    files = set(cache.iterdir())
    model = warm(cache, **OTHERS[other])
    assert cached(model) == set()
    assert len(set(cache.iterdir()) - files) == len(model.report().graphs)
    assert cached(warm(cache)) == set(SHAPES), "the earlier files are kept"


@pytest.mark.parametrize("package", ["torch", "neuron_sched"])
def test_another_version_reads_no_graph(cache: Path, monkeypatch: pytest.MonkeyPatch, package: str):
    warm(cache)
    monkeypatch.setattr(torch if package == "torch" else graph_cache, "__version__", "99.1")
    assert cached(warm(cache)) == set()
    assert cached(warm(cache)) == set(SHAPES)


def test_without_a_key_no_file_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warm(None, key=None)
    warm(None, backend="eager")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"_compilation_unit": object()}, {"example_outputs": {1: 2, "a": 3}}], ids=repr)
def test_options_that_cannot_be_serialised_are_refused(cache: Path, options: dict):
    with pytest.raises(ValueError, match=r"compiler_args, options: .*: with a key, expected strings"):
        CompiledModel(WeightedSum, CONFIG, key="weighted-sum", cache_dir=cache, options=options)
    CompiledModel(WeightedSum, CONFIG, options=options)


# Damaged files and failed writes


def flip(file: Path):
    data = bytearray(file.read_bytes())
    # Within the data of the first entry, so that the directory of the zip file stays intact.
    data[200] ^= 0xFF
    file.write_bytes(data)


DAMAGE = {
    "a flipped byte": flip,
    "cut in half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "not a graph": lambda file: file.write_text("no graph"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_replaced_with_a_warning(cache: Path, inputs: PaddedInputs, damage: str):
    warm(cache)
    file = sorted(cache.iterdir())[2]
    DAMAGE[damage](file)
    with pytest.warns(UserWarning, match=re.escape(f"{file} cannot be read (")) as warned:
        model = warm(cache)
    assert len(warned) == 1
    assert len(cached(model)) == len(SHAPES) - 1
    for batch in conversation(inputs):
        assert model(batch).isfinite().all()
    assert cached(warm(cache)) == set(SHAPES), "the damaged file was replaced"


def test_a_directory_in_place_of_a_file_is_skipped_with_a_warning(cache: Path):
    warm(cache)
    file = min(cache.iterdir())
    file.unlink()
    file.mkdir()
    with pytest.warns(UserWarning, match="cannot be written"), pytest.warns(UserWarning, match="cannot be read"):
        model = warm(cache)
    assert set(model.report().graphs) == set(SHAPES)


def test_a_cache_directory_that_cannot_be_created_gives_a_warning(tmp_path: Path, inputs: PaddedInputs):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"cannot be written \(.*; the graph will be compiled again") as warned:
        model = warm(tmp_path / "file" / "graphs")
    assert len(warned) == len(SHAPES)
    assert cached(model) == set()
    batch = inputs.prefill([PrefillRow([1, 2], 0, [4])])
    assert model(batch)[0].tolist() == expected(model.module, [1, 2])


def test_a_failed_write_leaves_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(graph, path):
        Path(path).write_bytes(b"partial content")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.jit, "save", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        model = warm(cache)
    assert set(model.report().graphs) == set(SHAPES)
    assert list(cache.iterdir()) == []


def test_the_graph_keeps_its_weights_after_a_failed_write(
    cache: Path, monkeypatch: pytest.MonkeyPatch, inputs: PaddedInputs
):
    monkeypatch.setattr(torch.jit, "save", lambda graph, path: 1 / 0)
    with pytest.warns(UserWarning, match="division by zero"):
        model = warm(cache)
    for _ in range(2):
        logits = model(inputs.prefill([PrefillRow([1, 2], 0, [4])]))
        assert logits[0].tolist() == expected(model.module, [1, 2])


# The directory


def test_the_directory_contains_one_file_per_graph(cache: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warm(cache)
        warm(cache)
    names = [file.name for file in cache.iterdir()]
    assert len(names) == len(SHAPES)
    assert all(re.fullmatch(r"[0-9a-f]{64}\.pt", name) for name in names)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700, "the files contain code that torch executes"


@pytest.mark.parametrize("xdg", ["cache", "", None])
def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: str | None):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(tmp_path / xdg))
    warm(None)
    directory = tmp_path / ("cache" if xdg else ".cache") / "neuron-sched" / "graphs"
    assert len(list(directory.iterdir())) == len(SHAPES)


def test_cache_dir_may_be_a_string(tmp_path: Path):
    warm(str(tmp_path / "graphs"))
    assert len(list((tmp_path / "graphs").iterdir())) == len(SHAPES)
