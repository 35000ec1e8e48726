"""`replay` of parsed requests against the pure-Python baseline; both sides compute the whole summary."""

from pathlib import Path
from time import process_time

import pytest
from python_baseline import baseline_replay

from neuron_sched import NeuronConfig
from neuron_sched.simulate import ConstantCost, replay
from neuron_sched.trace import TraceRequest, read_trace, synthetic

TRACE = Path(__file__).parents[2] / "shared/traces/azure2023_conv_first10min.csv"
CONFIG = NeuronConfig(max_num_seqs=96, max_num_batched_tokens=8192, max_model_len=16384, block_size=32, num_blocks=8192)


# The synthetic workload has fewer running requests, so a step costs the baseline less and the gate is lower.
@pytest.mark.parametrize(("workload", "at_least"), [("azure2023_conv_first10min", 50), ("synthetic", 40)])
def test_replay(ratio, workload, at_least):
    if workload != "synthetic" and not TRACE.exists():
        pytest.skip("needs the published traces beside the checkout")
    requests = synthetic() if workload == "synthetic" else read_trace(TRACE)
    arrivals = [
        (request.arrival_ns, request.prompt_tokens, request.output_tokens, request.id)
        for request in sorted(requests, key=lambda request: request.arrival_ns)
    ]
    cost = ConstantCost(prefill_ms=100, decode_ms=25)

    def baseline():
        return baseline_replay(arrivals, CONFIG, 100_000_000, 25_000_000)

    def ours():
        return replay(requests, config=CONFIG, cost=cost).summary

    assert ours() == baseline()
    ratio(baseline, ours, at_least=at_least, rounds=9, round_s=0.1)


def test_m08_time_is_linear_in_the_number_of_requests(note):
    cost = ConstantCost(prefill_ms=100, decode_ms=10)

    def seconds(count):
        workload = [TraceRequest(str(row), 0, 16, 1) for row in range(count)]
        start = process_time()
        report = replay(workload, config=CONFIG, cost=cost)
        assert report.summary["completed"] == count
        return process_time() - start

    # The two sizes alternate, so that the small run does not start with warm caches.
    few, many = zip(*((seconds(1_000), seconds(100_000)) for _ in range(9)), strict=True)
    growth = min(many) / min(few)
    note(f"100,000 requests take {growth:.0f} times as long as 1,000")
    assert growth < 150
