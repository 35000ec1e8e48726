"""Padded inputs and the compiled graphs that run on them.

`PaddedInputs` turns a step or rows into a `Batch`, whose arrays have one of the compiled shapes. `CompiledModel` holds
one graph for each of these shapes. torch is imported when a `CompiledModel` is created, not before.
"""

from neuron_sched._native import Batch, PaddedInputs
from neuron_sched.rows import DecodeRow, Ids, PrefillRow
from neuron_sched.runner.compiled import CompiledModel
from neuron_sched.runner.graph_report import GraphReport, ModelReport
from neuron_sched.runner.shape import Shape, ShapeError

__all__ = [
    "Batch",
    "CompiledModel",
    "DecodeRow",
    "GraphReport",
    "Ids",
    "ModelReport",
    "PaddedInputs",
    "PrefillRow",
    "Shape",
    "ShapeError",
]
