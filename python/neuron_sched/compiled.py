"""The guard in front of a model: one compiled graph for each shape of the configuration, and none for any other.

torch is imported by `CompiledModel` and not before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from neuron_sched._native import Batch, NeuronConfig, PaddedInputs
from neuron_sched.backends import make_backend
from neuron_sched.backends.base import Graph, Tensors
from neuron_sched.backends.traced import Traced
from neuron_sched.graph_cache import GraphCache, default_directory
from neuron_sched.graph_report import GraphReport, ModelReport, shape_name
from neuron_sched.module_state import differing, digests, scrambled

if TYPE_CHECKING:
    from neuron_sched.runner import Shape

logger = logging.getLogger(__name__)


class ShapeError(ValueError):
    """A batch for which no graph was compiled."""


@dataclass(slots=True)
class _Compiled:
    """A graph, what it takes (name, dtype, shape of each tensor) and what was counted."""

    graph: Graph
    takes: list[tuple[str, Any, tuple[int, ...]]]
    seconds: float
    cached: bool
    calls: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0


class CompiledModel:
    """The graphs of a model, one for each shape of `PaddedInputs(config).shapes`, compiled by `warmup()`.

    `build()` returns a `torch.nn.Module`; it is called once, here, and the module put into its evaluation mode. Its
    `forward` takes the tensors of a `Batch` by keyword, those of `batch.torch()`, and returns the logits, one row for
    each entry of `logits_index`. It keeps its KV cache in a buffer (for "neuronx" in a parameter, see `docs/runner.md`)
    and writes to it in place, nothing for slot -1.

    `backend` is "jit" (torch.jit.trace), "neuronx" (torch_neuronx.trace) or "eager" (nothing is compiled).
    `compiler_args` and `options` are keyword arguments of the trace function: the compiler's arguments for "neuronx",
    and further ones by name. With a `key`, graphs are kept on disk, in `cache_dir` or `~/.cache/neuron-sched/graphs`;
    it stands for all that the files cannot tell: the model's code, its settings, for "neuronx" its weights.

    Calls write to the one KV cache of the module, so they are for one thread at a time, as is `warmup()`; two models
    share nothing. `report()` may be called from any thread.

    ImportError when torch or torch_neuronx is missing; TypeError and ValueError name the argument at fault.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        config: NeuronConfig,
        backend: str = "jit",
        *,
        key: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        compiler_args: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        given: tuple[Any, Any, Any] = (config, key, options)
        if not isinstance(given[0], NeuronConfig):
            raise TypeError(f"config: {type(config).__name__}: expected a NeuronConfig")
        if not isinstance(given[1], str | None):
            raise TypeError(f"key: {key!r}: expected a text that names the model, or None for no cache")
        if not isinstance(given[2], Mapping | None):
            raise TypeError(f"options: {options!r}: expected a dict of keyword arguments")
        if key == "":
            raise ValueError("key: '': expected a text that names the model, or None for no cache")
        if cache_dir is not None and key is None:
            raise ValueError(f"cache_dir: {os.fspath(cache_dir)!r}: has no use without a key")
        self._backend = make_backend(backend, compiler_args, options)
        self._config = config
        self._module = _built(build)
        self._backend.check(self._module)
        self._cache = None
        if key is not None and isinstance(self._backend, Traced):
            self._cache = GraphCache(
                default_directory() if cache_dir is None else Path(cache_dir),
                self._backend,
                key=key,
                config=config,
                module=self._module,
                compiler_args=compiler_args,
                options=options,
            )
        self._graphs: dict[Shape, _Compiled] = {}
        self._warm = False

    @property
    def module(self) -> Any:
        """What `build()` returned. Its KV cache is that of the graphs (of "neuronx" not: theirs is on the device)."""
        return self._module

    @property
    def config(self) -> NeuronConfig:
        """The configuration that it was made with."""
        return self._config

    def warmup(self, progress: bool = True, *, check: bool = True) -> None:
        """Compiles the graph of each shape, or reads it from disk, and runs it once on a batch of padding.

        Every parameter and buffer is bit by bit afterwards what it was before, and no block is taken. `check` proves
        it, first on the module itself, before anything is compiled, while its KV cache holds random numbers: its
        buffers of floating point and of 8 bits. That costs memory of twice the buffers for that time, and reading all
        weights twice.

        `progress` shows a bar on a terminal (with rich, the extra `[cli]`); each graph and its time go to the log.

        ValueError naming the tensor when the module writes to it for slot -1, TypeError when it returns no tensor.
        After any exception `warmup()` may be called again, and goes on with the graphs that are missing; after it
        succeeded it does nothing.
        """
        if self._warm:
            return
        import torch

        inputs = PaddedInputs(self._config)
        missing = [shape for shape in inputs.shapes if shape not in self._graphs]
        with torch.no_grad():
            before = digests(self._backend.kept(self._module)) if check else {}
            if check:
                self._check_module(inputs)
            with _bar(len(missing), shown=progress) as move:
                for i, shape in enumerate(missing):
                    move(i, shape_name(shape))
                    made = self._graphs[shape] = self._compile(shape, inputs)
                    done = "read" if made.cached else "compiled"
                    logger.info("%s: %s in %.2f s", shape_name(shape), done, made.seconds)
            if changed := differing(before, digests(self._backend.kept(self._module)) if check else {}):
                for shape in missing:
                    del self._graphs[shape]
                raise _written(changed[0], "batches of padding")
        self._graphs = {shape: self._graphs[shape] for shape in inputs.shapes}
        self._warm = True

    def __call__(self, batch: Batch) -> Any:
        """The logits of the batch, from the graph of its shape: one row for each entry of `logits_index`.

        Those behind the real rows are of padding. Nothing is called, and ShapeError raised, when there is no graph of
        the shape or a tensor is not what the graph was compiled for; RuntimeError before `warmup()`.
        """
        if not self._warm:
            raise RuntimeError("the model has no graphs: call warmup() first")
        if not hasattr(batch, "torch"):
            raise TypeError(f"batch: {type(batch).__name__}: expected a Batch")
        try:
            compiled = self._graphs[batch.shape]
        except KeyError:
            raise ShapeError(_no_graph(batch.shape, list(self._graphs))) from None
        tensors = batch.torch()
        if _takes(tensors) != compiled.takes:
            raise ShapeError(_mismatch(batch.shape, _takes(tensors), compiled.takes))
        import torch

        with torch.no_grad():
            logits = compiled.graph(*tensors.values())
        compiled.calls += 1
        compiled.real_tokens += batch.num_real_tokens
        compiled.padded_tokens += batch.num_padded_tokens
        return logits

    def report(self) -> ModelReport:
        """The graphs so far: time, calls, real and padded tokens of each. Printed, it is a table."""
        graphs = {
            shape: GraphReport(made.seconds, made.cached, made.calls, made.real_tokens, made.padded_tokens)
            for shape, made in list(self._graphs.items())
        }
        return ModelReport(self._backend.name, graphs)

    def _check_module(self, inputs: PaddedInputs) -> None:
        """Calls the module on padding of every shape; refuses one that writes to its KV cache or returns no tensor."""
        with scrambled(self._module) as changed:
            for shape in inputs.shapes:
                _check_logits(self._module(**inputs.dummy(shape).torch()))
                if names := changed():
                    raise _written(names[0], f"a batch of padding of shape {shape}")

    def _compile(self, shape: Shape, inputs: PaddedInputs) -> _Compiled:
        started = perf_counter()
        tensors = inputs.dummy(shape).torch()
        path = self._cache.path(shape, tensors) if self._cache else None
        graph = self._cache.load(path) if self._cache and path else None
        cached = graph is not None
        if graph is None:
            graph = self._backend.compile(self._module, tensors)
            if self._cache and path:
                self._cache.save(graph, path)
        self._backend.attach(graph, self._module)
        for _ in range(self._backend.runs):
            # Filled again for each call: a module may change what it is given.
            _check_logits(graph(*inputs.dummy(shape).torch().values()))
        return _Compiled(graph, _takes(tensors), perf_counter() - started, cached)


def _built(build: Callable[[], Any]) -> Any:
    import torch

    if isinstance(build, torch.nn.Module):
        raise TypeError("build: is a torch.nn.Module: expected a function that returns one")
    module = build()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"build: returned {type(module).__name__}: expected a torch.nn.Module")
    return module.eval()


def _check_logits(logits: Any) -> None:
    import torch

    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"the module returned {type(logits).__name__}: expected one tensor, the logits")


def _written(name: str, by: str) -> ValueError:
    return ValueError(
        f"the module wrote to {name!r} in {by}: expected nothing to be written for slot -1, which is no index "
        "but means that a token has no slot"
    )


def _takes(tensors: Tensors) -> list[tuple[str, Any, tuple[int, ...]]]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def _no_graph(shape: Any, shapes: list[Shape]) -> str:
    alike = [known for known in shapes if known[0] == shape[0]] or shapes
    return f"shape {shape}: no graph was compiled for it: expected one of {', '.join(map(str, alike))}"


def _mismatch(shape: Shape, given: list[Any], takes: list[Any]) -> str:
    """What is wrong with the first tensor that is not as compiled."""
    names = [[name for name, _, _ in tensors] for tensors in (given, takes)]
    if names[0] != names[1]:
        return f"shape {shape}: tensors {names[0]}: its graph was compiled for {names[1]}"
    name, dtype, size, right, right_size = next(
        (name, dtype, size, right, right_size)
        for (name, dtype, size), (_, right, right_size) in zip(given, takes, strict=True)
        if (dtype, size) != (right, right_size)
    )
    return f"shape {shape}: {name}: {dtype} {list(size)}: its graph was compiled for {right} {list(right_size)}"


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """A bar over the graphs, moved by (number done, name of the next), where one is wanted and can be shown."""
    if not shown or find_spec("rich") is None:
        yield lambda done, name: None
        return
    from neuron_sched.report import progress_bar

    with progress_bar(total, "compiling") as move:
        yield lambda done, name: move(done, total, name) if move else None
