"""Traces: arrival time, prompt tokens and output tokens of each request of a workload.

`read_trace` recognises the format of a file by its content, not by its name:

* Azure LLM inference CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`;
* Mooncake JSON lines: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`;
* plain CSV or JSON lines: `arrival_s`, `prompt_tokens`, `output_tokens`, and optionally `id`, `priority`, `hash_ids`.

Each of them may be compressed with gzip. Arrival times are exact: text is converted to whole nanoseconds without
passing through a float.
"""

from neuron_sched._native import TraceRequest
from neuron_sched.trace.errors import BadRow, TraceError
from neuron_sched.trace.reading import Trace, read_trace
from neuron_sched.trace.synthesis import synthetic
from neuron_sched.trace.writing import encode_trace, write_trace

__all__ = ["BadRow", "Trace", "TraceError", "TraceRequest", "encode_trace", "read_trace", "synthetic", "write_trace"]
