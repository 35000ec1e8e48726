"""Replay of a workload on a virtual clock.

The real schedulers schedule every step, a cost model gives the duration of the step, and nothing sleeps:

>>> from neuron_sched import NeuronConfig
>>> from neuron_sched.simulate import ConstantCost, replay
>>> from neuron_sched.trace import TraceRequest
>>> config = NeuronConfig(
...     max_num_seqs=2, max_num_batched_tokens=1024, max_model_len=1024, block_size=16, num_blocks=512
... )
>>> workload = [TraceRequest("A", 0, 128, 3), TraceRequest("B", 0.05, 128, 3)]
>>> report = replay(workload, config=config, cost=ConstantCost(prefill_ms=100, decode_ms=10))
>>> [request.ttft_s for request in report.requests]
[0.1, 0.15]
>>> report.summary["steps"]
{'prefill': 2, 'decode': 2}
"""

from neuron_sched.simulate.cost import ConstantCost, Cost, TableCost, cost_of
from neuron_sched.simulate.profile import profiles
from neuron_sched.simulate.replaying import replay
from neuron_sched.simulate.report import Report, RequestRecord, StepRecord

__all__ = [
    "ConstantCost",
    "Cost",
    "Report",
    "RequestRecord",
    "StepRecord",
    "TableCost",
    "cost_of",
    "profiles",
    "replay",
]
