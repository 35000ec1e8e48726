"""`CompiledModel`: one compiled graph for each shape of the configuration. A batch of any other shape is refused.

torch is imported when a `CompiledModel` is created, not before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from neuron_sched._native import Batch, NeuronConfig, PaddedInputs
from neuron_sched.progress import progress_bar
from neuron_sched.runner.backends import make_backend
from neuron_sched.runner.backends.base import Graph
from neuron_sched.runner.backends.traced import Traced
from neuron_sched.runner.graph_cache import GraphCache, default_directory
from neuron_sched.runner.graph_report import GraphReport, ModelReport
from neuron_sched.runner.module_state import changed_names, digests, randomised_buffers
from neuron_sched.runner.shape import Shape, ShapeError, shape_name
from neuron_sched.runner.signature import Signature, mismatch_message, no_graph_message, signature_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _CompiledGraph:
    """A graph with its signature and its counters for `GraphReport`."""

    graph: Graph
    signature: Signature
    seconds: float
    cached: bool
    calls: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0


class CompiledModel:
    """Compiled graphs of a model, one for each shape in `PaddedInputs(config).shapes`. `warmup()` compiles them.

    `build()` returns a `torch.nn.Module`. It is called once, by the constructor, which puts the module into evaluation
    mode. `forward` takes the tensors of `batch.torch()` as keyword arguments and returns the logits, one row for each
    entry of `logits_index`. The module keeps its KV cache in a buffer (for "neuronx" in a parameter, see
    `docs/runner.md`), updates it in place, and writes nothing for slot -1.

    `backend` is "jit" (`torch.jit.trace`), "neuronx" (`torch_neuronx.trace`) or "eager" (no compilation).
    `compiler_args` and `options` become keyword arguments of the trace function: `compiler_args` holds the compiler's
    arguments and is for "neuronx" only, `options` holds further arguments by name.

    With a `key`, graphs are kept on disk, in `cache_dir` or `~/.cache/neuron-sched/graphs`. The key must change with
    everything that the cache cannot see: the model's code, its settings and, for "neuronx", its weights.

    All calls write to the one KV cache of the module, so only one thread at a time may call the model or `warmup()`.
    Two models share no state. `report()` may be called from any thread.

    Raise `ImportError` if torch or torch_neuronx is missing, and `TypeError` or `ValueError` naming an argument that is
    not valid.
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
        if not isinstance(config, NeuronConfig):
            raise TypeError(f"config: {type(config).__name__}: expected a NeuronConfig")
        if not isinstance(key, str | None):
            raise TypeError(f"key: {key!r}: expected a string that identifies the model, or None for no cache")
        if not isinstance(options, Mapping | None):
            raise TypeError(f"options: {options!r}: expected a dict of keyword arguments")
        if key == "":
            raise ValueError("key: '': expected a string that identifies the model, or None for no cache")
        if cache_dir is not None and key is None:
            raise ValueError(f"cache_dir: {os.fspath(cache_dir)!r}: expected None, because there is no key")
        self._backend = make_backend(backend, compiler_args, options)
        self._config = config
        self._module = _build_module(build)
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
        self._graphs: dict[Shape, _CompiledGraph] = {}
        self._warm = False

    @property
    def module(self) -> Any:
        """The module that `build()` returned.

        The graphs use its KV cache, except with backend "neuronx", whose graphs have theirs on the device.
        """
        return self._module

    @property
    def config(self) -> NeuronConfig:
        """The configuration that was passed to the constructor."""
        return self._config

    def warmup(self, progress: bool = True, *, check: bool = True) -> None:
        """Compile the graph of each shape, or load it from disk, and run it on a dummy batch (padding only).

        Every parameter and buffer has the same bits afterwards as before, and no KV block is allocated. `check`
        verifies this. It first calls the module itself, before anything is compiled, while random numbers fill its KV
        cache: its buffers of floating-point and 8-bit dtypes. This needs additional memory of twice the size of the
        buffers. All weights are read twice.

        `progress` shows a progress bar on a terminal (with rich, the extra `[cli]`). The time of each graph is logged
        at level INFO.

        Raise `ValueError` naming the tensor if the module writes to it for slot -1, and `TypeError` if the module does
        not return a tensor. After any exception `warmup()` may be called again, and compiles the graphs that are still
        missing. After it has succeeded, it does nothing.
        """
        if self._warm:
            return
        import torch

        inputs = PaddedInputs(self._config)
        missing = [shape for shape in inputs.shapes if shape not in self._graphs]
        with torch.no_grad():
            before = digests(self._backend.persistent_tensors(self._module)) if check else {}
            if check:
                self._check_module(inputs)
            with _progress(len(missing), shown=progress) as update:
                for i, shape in enumerate(missing):
                    update(i, shape_name(shape))
                    compiled = self._graphs[shape] = self._compile(shape, inputs)
                    origin = "read" if compiled.cached else "compiled"
                    logger.info("%s: %s in %.2f s", shape_name(shape), origin, compiled.seconds)
            after = digests(self._backend.persistent_tensors(self._module)) if check else {}
            if changed := changed_names(before, after):
                for shape in missing:
                    del self._graphs[shape]
                raise _write_error(changed[0], "the dummy batches of warm-up")
        self._graphs = {shape: self._graphs[shape] for shape in inputs.shapes}
        self._warm = True

    def __call__(self, batch: Batch) -> Any:
        """Return the logits of the batch from the graph of its shape: one row for each entry of `logits_index`.

        Logits of padding rows follow those of the unpadded rows and have no meaning.

        Raise `ShapeError`, without calling a graph, if there is no graph of the batch's shape or a tensor differs in
        name, dtype or shape from what the graph was compiled for. Raise `RuntimeError` before `warmup()`, and
        `TypeError` if `batch` is not a `Batch`.
        """
        if not self._warm:
            raise RuntimeError("the model has no graphs: call warmup() first")
        if not hasattr(batch, "torch"):
            raise TypeError(f"batch: {type(batch).__name__}: expected a Batch")
        try:
            compiled = self._graphs[batch.shape]
        except KeyError:
            raise ShapeError(no_graph_message(batch.shape, list(self._graphs))) from None
        tensors = batch.torch()
        if signature_of(tensors) != compiled.signature:
            raise ShapeError(mismatch_message(batch.shape, signature_of(tensors), compiled.signature))
        import torch

        with torch.no_grad():
            logits = compiled.graph(*tensors.values())
        compiled.calls += 1
        compiled.real_tokens += batch.num_real_tokens
        compiled.padded_tokens += batch.num_padded_tokens
        return logits

    def report(self) -> ModelReport:
        """Return time, calls and tokens, without and with padding, of each graph so far. `str()` makes it a table."""
        graphs = {
            shape: GraphReport(
                compiled.seconds, compiled.cached, compiled.calls, compiled.real_tokens, compiled.padded_tokens
            )
            for shape, compiled in list(self._graphs.items())
        }
        return ModelReport(self._backend.name, graphs)

    def _check_module(self, inputs: PaddedInputs) -> None:
        """Call the module on a dummy batch of every shape. Raise if it writes to its KV cache or returns no tensor."""
        with randomised_buffers(self._module) as changed_buffers:
            for shape in inputs.shapes:
                _check_logits(self._module(**inputs.dummy(shape).torch()))
                if names := changed_buffers():
                    raise _write_error(names[0], f"a dummy batch of shape {shape}")

    def _compile(self, shape: Shape, inputs: PaddedInputs) -> _CompiledGraph:
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
        for _ in range(self._backend.warmup_calls):
            # A module may change its inputs in place, so each call gets a newly filled batch.
            _check_logits(graph(*inputs.dummy(shape).torch().values()))
        return _CompiledGraph(graph, signature_of(tensors), perf_counter() - started, cached)


def _build_module(build: Callable[[], Any]) -> Any:
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


def _write_error(name: str, batch: str) -> ValueError:
    return ValueError(
        f"the module wrote to {name!r} in {batch}: expected no write for slot -1, which marks a token without a KV "
        "slot and is not an index"
    )


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar over the graphs if `shown`, and yield a callback `(number done, name of the next)`.

    The callback does nothing if no bar is shown.
    """
    with progress_bar(total, "compiling") if shown else nullcontext() as update:
        yield lambda done, following: update(done, total, following) if update else None
