"""Graphs of `CompiledModel` on disk: what finds them again, what does not, and what becomes of damaged ones."""

import os
import re
import stat
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import torch

from neuron_sched import CompiledModel, DecodeRow, NeuronConfig, PaddedInputs, PrefillRow, graph_cache
from torch_model import CONFIG, SHAPES, Weigher, expected


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where nothing is yet."""
    return tmp_path / "some" / "graphs"


@pytest.fixture
def inputs() -> PaddedInputs:
    return PaddedInputs(CONFIG)


def warm(cache: Path | None, build=Weigher, config: NeuronConfig = CONFIG, key: str | None = "weigher", **arguments):
    model = CompiledModel(build, config, key=key, cache_dir=cache, **arguments)
    model.warmup(progress=False)
    return model


def cached(model: CompiledModel) -> set:
    return {shape for shape, graph in model.report().graphs.items() if graph.cached}


def conversation(inputs: PaddedInputs):
    """Batches of which each reads what those of other shapes wrote."""
    a, b = list(range(10)), [4] * 30
    yield inputs.prefill([PrefillRow(a[:6], 0, [3]), PrefillRow([7, 1], 0, [5])])
    yield inputs.prefill([PrefillRow(b, 0, [9, 1, 2, 7])])
    yield inputs.prefill([PrefillRow(a[6:], 6, [3, 8])])
    yield inputs.decode([DecodeRow(2, 10, [3, 8])])
    yield inputs.decode([DecodeRow(5, 11, [3, 8]), DecodeRow(6, 2, [5])])
    yield inputs.decode([DecodeRow(8, 30, [9, 1, 2, 7])])
    yield inputs.decode([DecodeRow(3, 12, [3, 8]), DecodeRow(9, 31, [9, 1, 2, 7]), DecodeRow(1, 3, [5])])
    yield inputs.decode([DecodeRow(3, 32, [9, 1, 2, 7, 6])])


# Found again


def test_a_second_model_reads_every_graph(cache: Path, inputs: PaddedInputs, monkeypatch: pytest.MonkeyPatch):
    """Nothing is traced, and logits and KV cache are bit by bit those of graphs that were."""
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


def test_what_one_read_graph_writes_another_reads(cache: Path, inputs: PaddedInputs):
    """Prefill of 16, of 32, decode: the sums by hand need all three, and the module's own cache holds them."""
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


def test_read_graphs_use_the_weights_of_their_module(cache: Path, inputs: PaddedInputs):
    """A file holds no weights: those that were there when it was written are neither kept nor needed."""
    warm(cache)

    def other():
        model = Weigher()
        model.table.data += 100
        return model

    model = warm(cache, other)
    assert cached(model) == set(SHAPES)
    batch = inputs.prefill([PrefillRow([1, 2], 0, [4])])
    assert model(batch)[0].tolist() == expected(model.module, [1, 2])
    model.module.table.data -= 7
    assert model(batch)[0].tolist() == expected(model.module, [1, 2])


def test_a_file_holds_neither_weights_nor_kv_cache(cache: Path):
    config = NeuronConfig(**{**CONFIG.as_dict(), "num_blocks": 10_000})
    model = warm(cache, lambda: Weigher(config), config)
    assert model.module.kv.nbytes > 3_000_000
    assert max(file.stat().st_size for file in cache.iterdir()) < 100_000


def test_two_models_read_from_one_place_share_nothing(cache: Path, inputs: PaddedInputs):
    warm(cache)
    one, two = warm(cache), warm(cache)
    one(inputs.prefill([PrefillRow([1, 2], 0, [4])]))
    assert one.module.kv.any()
    assert not two.module.kv.any()


def test_another_configuration_finds_the_graphs_of_shapes_that_both_have(cache: Path):
    warm(cache)
    more = NeuronConfig(**{**CONFIG.as_dict(), "num_batched_tokens_buckets": [16, 24, 32]})
    assert set(PaddedInputs(more).shapes) - cached(warm(cache, config=more)) == {("prefill", 24)}


def test_what_was_compiled_before_an_interruption_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch):
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


# Not found


def changed(**changes) -> NeuronConfig:
    return NeuronConfig(**{**CONFIG.as_dict(), **changes})


class Wider(Weigher):
    def __init__(self):
        super().__init__()
        self.register_buffer("more", torch.zeros(3))


OTHERS = {
    "key": {"key": "weigher 2"},
    "dtype": {"build": lambda: Weigher().double()},
    "shape of the KV cache": {"config": changed(num_blocks=17), "build": lambda: Weigher(changed(num_blocks=17))},
    "a buffer more": {"build": Wider},
    "block size": {"config": changed(block_size=4, num_blocks=33), "build": lambda: Weigher(changed(block_size=4))},
    "longest sequence": {"config": changed(max_model_len=60, decode_context_length_buckets=[32, 60])},
    "options": {"options": {"strict": False}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_finds_nothing(cache: Path, other: str):
    warm(cache)
    files = set(cache.iterdir())
    model = warm(cache, **OTHERS[other])
    assert cached(model) == set()
    assert len(set(cache.iterdir()) - files) == len(model.report().graphs)
    assert cached(warm(cache)) == set(SHAPES), "and what was there is still there"


@pytest.mark.parametrize("place", ["torch", "neuron_sched"])
def test_another_version_finds_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    warm(cache)
    monkeypatch.setattr(torch if place == "torch" else graph_cache, "__version__", "99.1")
    assert cached(warm(cache)) == set()
    assert cached(warm(cache)) == set(SHAPES)


def test_without_a_key_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warm(None, key=None)
    warm(None, backend="eager")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"_compilation_unit": object()}, {"example_outputs": {1: 2, "a": 3}}], ids=repr)
def test_options_that_cannot_be_part_of_a_name_are_told(cache: Path, options: dict):
    with pytest.raises(ValueError, match=r"compiler_args, options: .*: with a key, expected texts"):
        CompiledModel(Weigher, CONFIG, key="weigher", cache_dir=cache, options=options)
    CompiledModel(Weigher, CONFIG, options=options)


# Damage


def flip(file: Path):
    data = bytearray(file.read_bytes())
    # Within the first entry, behind its header: the zip's own tables stay as they are.
    data[200] ^= 0xFF
    file.write_bytes(data)


DAMAGE = {
    "a bit": flip,
    "cut in half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "something else": lambda file: file.write_text("no graph"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_compiled_anew(cache: Path, inputs: PaddedInputs, damage: str):
    warm(cache)
    file = sorted(cache.iterdir())[2]
    DAMAGE[damage](file)
    with pytest.warns(UserWarning, match=re.escape(f"{file} cannot be read (")) as warned:
        model = warm(cache)
    assert len(warned) == 1
    assert len(cached(model)) == len(SHAPES) - 1
    for batch in conversation(inputs):
        assert model(batch).isfinite().all()
    assert cached(warm(cache)) == set(SHAPES), "it was replaced"


def test_an_entry_that_is_no_file_is_passed_over(cache: Path):
    warm(cache)
    file = min(cache.iterdir())
    file.unlink()
    file.mkdir()
    with pytest.warns(UserWarning, match="cannot be written"), pytest.warns(UserWarning, match="cannot be read"):
        model = warm(cache)
    assert set(model.report().graphs) == set(SHAPES)


def test_a_directory_that_cannot_be_made_is_a_warning(tmp_path: Path, inputs: PaddedInputs):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"cannot be written \(.*; the graph will be compiled again") as warned:
        model = warm(tmp_path / "file" / "graphs")
    assert len(warned) == len(SHAPES)
    assert cached(model) == set()
    batch = inputs.prefill([PrefillRow([1, 2], 0, [4])])
    assert model(batch)[0].tolist() == expected(model.module, [1, 2])


def test_a_write_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(graph, path):
        Path(path).write_bytes(b"the beginning")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.jit, "save", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        model = warm(cache)
    assert set(model.report().graphs) == set(SHAPES)
    assert list(cache.iterdir()) == []


def test_after_a_write_that_failed_the_graph_has_its_weights(
    cache: Path, monkeypatch: pytest.MonkeyPatch, inputs: PaddedInputs
):
    monkeypatch.setattr(torch.jit, "save", lambda graph, path: 1 / 0)
    with pytest.warns(UserWarning, match="division by zero"):
        model = warm(cache)
    for _ in range(2):
        logits = model(inputs.prefill([PrefillRow([1, 2], 0, [4])]))
        assert logits[0].tolist() == expected(model.module, [1, 2])


# The directory


def test_one_file_a_graph_and_nothing_else(cache: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warm(cache)
        warm(cache)
    names = [file.name for file in cache.iterdir()]
    assert len(names) == len(SHAPES)
    assert all(re.fullmatch(r"[0-9a-f]{64}\.pt", name) for name in names)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700, "files hold code that is run"


@pytest.mark.parametrize("xdg", ["cache", "", None])
def test_the_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: str | None):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(tmp_path / xdg))
    warm(None)
    place = tmp_path / ("cache" if xdg else ".cache") / "neuron-sched" / "graphs"
    assert len(list(place.iterdir())) == len(SHAPES)


def test_a_path_may_be_a_text(tmp_path: Path):
    warm(str(tmp_path / "graphs"))
    assert len(list((tmp_path / "graphs").iterdir())) == len(SHAPES)
