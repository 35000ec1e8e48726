"""Backend "neuronx": `torch_neuronx.trace`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neuron_sched.runner.backends.base import Graph, Tensors, import_library
from neuron_sched.runner.backends.traced import Traced, positional_class


class NeuronX(Traced):
    """Compiles with `torch_neuronx.trace`. `compiler_args` and `options` are passed to it unchanged.

    The module lists its states, the tensors that keep their content between calls (the KV cache), in `state_names`;
    `()` means none. States are parameters, because torch_neuronx cannot alias buffers. The module writes to them in
    place as with any backend. The graph returns their new content as additional outputs, and `input_output_aliases`
    maps these outputs to the same device memory.

    All graphs are placed on the first NeuronCore that the process sees (`NEURON_RT_VISIBLE_CORES`). By default,
    torch_neuronx would distribute them over the cores in turn. The states of the first graph move to the device with
    it. Every later graph is given the same tensors before its first call, after which a graph accepts no others.

    Weights are part of the graph and of its file, so the cache key must identify them. A graph is saved before it is
    placed on the device.
    """

    name = "neuronx"
    warmup_calls = 1

    def __init__(self, compiler_args: Any, options: dict[str, Any]) -> None:
        self._neuronx = import_library("torch_neuronx", "backend 'neuronx'")
        if "input_output_aliases" in options:
            raise ValueError("options: input_output_aliases: expected none, because they follow from state_names")
        self._arguments = options if compiler_args is None else {**options, "compiler_args": compiler_args}
        self._states: dict[str, Any] | None = None

    def check(self, module: Any) -> None:
        names = getattr(module, "state_names", None)
        if names is None:
            raise ValueError(
                "backend 'neuronx': the module has no state_names: expected the names of the parameters that it "
                "writes to, such as ('kv',), or () if it keeps nothing between calls"
            )
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name in names:
            if name not in parameters:
                raise ValueError(
                    f"state_names: {name!r}: expected the name of a parameter of the module, a "
                    "torch.nn.Parameter(..., requires_grad=False): torch_neuronx keeps nothing else on the device"
                )

    def compiler(self) -> str:
        compiler = import_library("neuronxcc", "a cache key for backend 'neuronx'")
        return f"torch_neuronx {self._neuronx.__version__}, neuronx-cc {compiler.__version__}"

    def compile(self, module: Any, tensors: Tensors) -> Graph:
        traceable = positional_class()(module, tuple(tensors))
        arguments = dict(self._arguments)
        if states := _states(module):
            traceable = _functional_class()(traceable, [f"module.{name}" for name in states])
            arguments["input_output_aliases"] = {state: 1 + i for i, state in enumerate(states.values())}
        graph: Graph = self._neuronx.trace(traceable, tuple(tensors.values()), **arguments)
        return graph

    def attach(self, graph: Any, module: Any) -> None:
        for name, tensor in (self._states or {}).items():
            graph.states._parameters[name] = tensor
        self._neuronx.move_trace_to_device(graph, 0)
        if self._states is None:
            self._states = dict(graph.states._parameters.items())

    def persistent_tensors(self, module: Any) -> dict[str, Any]:
        """Return the states by name, on the device once a graph is there. Weights in a graph cannot change."""
        states = _states(module)
        return states if self._states is None else dict(zip(states, self._states.values(), strict=True))


def _states(module: Any) -> dict[str, Any]:
    """Return the states by name in the order of the module's parameters.

    torch_neuronx sorts them in this order, and all graphs must agree on it.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    chosen = {id(parameters[name]) for name in module.state_names}
    return {name: tensor for name, tensor in module.named_parameters() if id(tensor) in chosen}


@functools.cache
def _functional_class() -> Any:
    """Return the module class that leaves its states unchanged and returns their new content after the logits."""
    import torch

    class Functional(torch.nn.Module):
        def __init__(self, module: Any, names: list[str]) -> None:
            super().__init__()
            self.module = module
            self.names = names

        def forward(self, *tensors: Any) -> Any:
            # Look the parameters up in each call: a move to the device may have replaced them.
            parameters = dict(self.module.named_parameters())
            states = [parameters[name] for name in self.names]
            # torch-xla identifies an input by its tensor object, and no longer does after an in-place write to it.
            copies = [state.clone() for state in states]
            with _parameters_replaced(self.module, list(zip(states, copies, strict=True))):
                logits = self.module(*tensors)
            return (logits, *copies)

    return Functional


@contextmanager
def _parameters_replaced(module: Any, pairs: list[tuple[Any, Any]]) -> Iterator[None]:
    """Replace parameters of the module by other tensors while the block runs. `pairs` holds (parameter, replacement).

    `torch.func.functional_call` would do the same, but not under tracing.
    """
    replacements = {id(parameter): replacement for parameter, replacement in pairs}
    entries = [
        (submodule._parameters, name, tensor)
        for submodule in module.modules()
        for name, tensor in submodule._parameters.items()
        if id(tensor) in replacements
    ]
    try:
        for parameters, name, tensor in entries:
            parameters[name] = replacements[id(tensor)]
        yield
    finally:
        for parameters, name, tensor in entries:
            parameters[name] = tensor
