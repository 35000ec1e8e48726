"""torch_neuronx.trace."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neuron_sched.backends.base import Graph, Tensors, imported
from neuron_sched.backends.traced import Traced, positional


class NeuronX(Traced):
    """torch_neuronx.trace. `compiler_args` and `options` are keyword arguments of it, passed on as they are.

    The module names the tensors that outlive a call, its KV cache, as `state_names`: parameters, because torch_neuronx
    aliases no buffers (`()` for a module that keeps nothing). The graph returns their new contents as further outputs,
    and `input_output_aliases` makes these the same device memory; the module itself writes in place as everywhere.

    All graphs go to the first NeuronCore that the process sees (`NEURON_RT_VISIBLE_CORES`): by default torch_neuronx
    deals them out in turn. The states of the first graph are moved there with it, and every later graph is given the
    same tensors before its first call: afterwards it takes no others.

    Weights are part of the graph, so of the file: a cache key must name them. Files are made before a graph is on the
    device.
    """

    name = "neuronx"
    runs = 1

    def __init__(self, compiler_args: Any, options: dict[str, Any]) -> None:
        self._neuronx = imported("torch_neuronx", "backend 'neuronx'")
        if "input_output_aliases" in options:
            raise ValueError("options: input_output_aliases are made from the module's state_names: expected none")
        self._arguments = options if compiler_args is None else {**options, "compiler_args": compiler_args}
        self._states: dict[str, Any] | None = None

    def check(self, module: Any) -> None:
        names = getattr(module, "state_names", None)
        if names is None:
            raise ValueError(
                "backend 'neuronx': the module has no state_names: expected the names of the parameters that it "
                "writes to, as ('kv',), or () when it keeps nothing between calls"
            )
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name in names:
            if name not in parameters:
                raise ValueError(
                    f"state_names: {name!r}: expected a parameter of the module, as "
                    "torch.nn.Parameter(..., requires_grad=False): torch_neuronx keeps nothing else on the device"
                )

    def compiler(self) -> str:
        compiler = imported("neuronxcc", "a cache key for backend 'neuronx'")
        return f"torch_neuronx {self._neuronx.__version__}, neuronx-cc {compiler.__version__}"

    def compile(self, module: Any, tensors: Tensors) -> Graph:
        whole = positional()(module, tuple(tensors))
        arguments = dict(self._arguments)
        if states := _states(module):
            whole = _functional()(whole, [f"module.{name}" for name in states])
            arguments["input_output_aliases"] = {state: 1 + i for i, state in enumerate(states.values())}
        graph: Graph = self._neuronx.trace(whole, tuple(tensors.values()), **arguments)
        return graph

    def attach(self, graph: Any, module: Any) -> None:
        for name, tensor in (self._states or {}).items():
            graph.states._parameters[name] = tensor
        self._neuronx.move_trace_to_device(graph, 0)
        if self._states is None:
            self._states = dict(graph.states._parameters.items())

    def kept(self, module: Any) -> dict[str, Any]:
        """The states on the device, once there are any; the weights in a graph cannot change."""
        states = _states(module)
        return states if self._states is None else dict(zip(states, self._states.values(), strict=True))


def _states(module: Any) -> dict[str, Any]:
    """The states in the order of the module: torch_neuronx sorts them so, and all graphs must agree."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    chosen = {id(parameters[name]) for name in module.state_names}
    return {name: tensor for name, tensor in module.named_parameters() if id(tensor) in chosen}


@functools.cache
def _functional() -> Any:
    """The class of modules that leave their states alone and return the new contents behind the logits."""
    import torch

    class Functional(torch.nn.Module):
        def __init__(self, module: Any, names: list[str]) -> None:
            super().__init__()
            self.module = module
            self.names = names

        def forward(self, *tensors: Any) -> Any:
            # Looked up anew: on its way to the device the module may have been given other parameters.
            parameters = dict(self.module.named_parameters())
            states = [parameters[name] for name in self.names]
            # torch-xla knows an input by its tensor object, and one that was written to is no input any more.
            copies = [state.clone() for state in states]
            with _replaced(self.module, list(zip(states, copies, strict=True))):
                logits = self.module(*tensors)
            return (logits, *copies)

    return Functional


@contextmanager
def _replaced(module: Any, pairs: list[tuple[Any, Any]]) -> Iterator[None]:
    """While the block runs, the module has other tensors as these parameters. (torch.func cannot while tracing.)"""
    copies = {id(state): copy for state, copy in pairs}
    places = [
        (part._parameters, name, tensor)
        for part in module.modules()
        for name, tensor in part._parameters.items()
        if id(tensor) in copies
    ]
    try:
        for parameters, name, tensor in places:
            parameters[name] = copies[id(tensor)]
        yield
    finally:
        for parameters, name, tensor in places:
            parameters[name] = tensor
