"""Stand-ins for torch_neuronx and neuronxcc that record their calls, for machines without a Neuron device.

The signatures are those of the AWS Neuron documentation, "PyTorch NeuronX Tracing API" (torch_neuronx.trace) and
"PyTorch NeuronX NeuronCore Placement APIs" (torch_neuronx.move_trace_to_device). A trace is TorchScript for the CPU. As
in torch_neuronx, the trace holds its states in `states`; outputs that alias a state are not returned but become its
content, and a move to a device replaces the tensors of the states.
"""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn


@dataclass
class Recorder:
    """Arguments of the recorded calls, in order."""

    traces: list[dict[str, Any]] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)


def modules(compiler_version="2.16.1") -> tuple[dict[str, ModuleType], Recorder]:
    """Return the stand-in modules by name, to be inserted into `sys.modules`, and the recorder of their calls."""
    recorder = Recorder()
    torch_neuronx, neuronxcc = ModuleType("torch_neuronx"), ModuleType("neuronxcc")
    torch_neuronx.__version__, neuronxcc.__version__ = "2.5.1", compiler_version

    def trace(
        func,
        example_inputs,
        *_,
        input_output_aliases={},  # noqa: B006 - the documented default
        compiler_workdir=None,
        compiler_args=None,
        partitioner_config=None,
        inline_weights_to_neff=True,
        cpu_backend=False,
    ):
        recorder.traces.append(
            {
                "shapes": [tuple(tensor.shape) for tensor in example_inputs],
                "aliases": list(input_output_aliases.values()),
                "compiler_workdir": compiler_workdir,
                "compiler_args": compiler_args,
                "inline_weights_to_neff": inline_weights_to_neff,
            }
        )
        assert _ == () and partitioner_config is None and not cpu_backend
        assert list(input_output_aliases.values()) == list(range(1, len(input_output_aliases) + 1))
        return torch.jit.trace(Aliased(func, list(input_output_aliases)), example_inputs, check_trace=False)

    def move_trace_to_device(trace, device_id):
        recorder.moves.append(device_id)
        for name, tensor in list(trace.states._parameters.items()):
            if not any(tensor.data_ptr() == moved.data_ptr() for moved in on_device):
                on_device.append(tensor.clone())
                trace.states._parameters[name] = on_device[-1]

    on_device: list[torch.Tensor] = []
    torch_neuronx.trace, torch_neuronx.move_trace_to_device = trace, move_trace_to_device
    return {"torch_neuronx": torch_neuronx, "neuronxcc": neuronxcc}, recorder


class Aliased(nn.Module):
    """Calls `func` with its own states in place of the aliased parameters."""

    def __init__(self, func, aliased):
        super().__init__()
        self.func = func
        self.states = nn.ParameterList(nn.Parameter(tensor.clone(), requires_grad=False) for tensor in aliased)
        self.aliased_entries = [
            (submodule._parameters, name, tensor, aliased.index(tensor))
            for submodule in func.modules()
            for name, tensor in submodule._parameters.items()
            if any(tensor is other for other in aliased)
        ]

    def forward(self, *inputs):
        for parameters, name, _, index in self.aliased_entries:
            parameters[name] = self.states[index]
        try:
            outputs = self.func(*inputs)
        finally:
            for parameters, name, tensor, _ in self.aliased_entries:
                parameters[name] = tensor
        if not len(self.states):
            return outputs
        for state, new in zip(self.states, outputs[1:], strict=True):
            state.copy_(new)
        return outputs[0]
