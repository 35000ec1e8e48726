"""The function `replay`: the cases of the simulator, the figures of the report, and invalid arguments."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from neuron_sched.simulate import ConstantCost, TableCost, replay
from neuron_sched.trace import TraceRequest, read_trace, write_trace
from tests.simulate.support.workloads import CHAT, COST, config, small_chat


@pytest.mark.parametrize(
    ("arrival_s", "ttft_s", "e2e_s", "makespan_s"),
    [(0, 0.2, 0.22, 0.22), (0.05, 0.15, 0.17, 0.22), (1, 0.1, 0.12, 1.12)],
)
def test_m02_time_to_first_token_includes_queueing(arrival_s, ttft_s, e2e_s, makespan_s):
    workload = [TraceRequest("A", 0, 128, 3), TraceRequest("B", arrival_s, 128, 3)]
    report = replay(workload, config=config(), cost=COST)
    b = report.requests[1]
    assert (b.ttft_s, b.e2e_s, report.summary["makespan_s"]) == (ttft_s, e2e_s, makespan_s)
    assert b.mean_itl_s == 0.01


def test_m02_inter_token_latency_includes_prefills_of_other_requests():
    report = replay([TraceRequest(name, 0, 128, 3) for name in "AB"], config=config(), cost=COST)
    assert [request.mean_itl_s for request in report.requests] == [0.06, 0.01]
    assert report.summary["itl_ms"]["mean"] == 35


def test_m04_a_single_output_token_has_no_inter_token_latency():
    workload = [TraceRequest("A", 0, 128, 1), TraceRequest("B", 0, 128, 3)]
    report = replay(workload, config=config(), cost=COST)
    a, b = report.requests
    assert (a.ttft_s, a.e2e_s, a.mean_itl_s) == (0.1, 0.1, None)
    assert (b.ttft_s, b.e2e_s, b.mean_itl_s) == (0.2, 0.22, 0.01)
    assert report.summary["itl_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 10)
    alone = replay(workload[:1], config=config(), cost=COST)
    assert alone.summary["itl_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"))


@pytest.mark.parametrize("scheduler", ["bucket", "mixed"])
def test_m05_equal_input_gives_equal_output(tmp_path, scheduler):
    def run(workload):
        return replay(workload, config=config(**CHAT), cost=COST, scheduler=scheduler)

    workload = small_chat()
    first, second = run(workload), run(small_chat())
    assert first.to_json() == second.to_json()
    assert json.loads(first.to_json()) == first.summary
    file = tmp_path / "chat.jsonl"
    write_trace(file, workload)
    replayed = run(read_trace(file))
    assert replayed.requests == first.requests
    assert replayed.to_json() == first.to_json()
    assert first.summary["completed"] == 200


def test_m05_requests_with_equal_arrival_are_scheduled_in_row_order():
    workload = [TraceRequest(name, 3 if name == "c" else 5, 128, 1) for name in "abcd"]
    report = replay(workload, config=config(), cost=COST, record_steps=True)
    assert [list(step.num_scheduled_tokens) for step in report.steps] == [["c"], ["a"], ["b"], ["d"]]


@pytest.mark.parametrize("scheduler", ["bucket", "mixed"])
def test_m07_outputs_are_capped_at_the_model_length(scheduler):
    lengths = [(51, 100), (99, 5), (100, 5), (101, 5)]
    workload = [TraceRequest(str(row), 0, prompt, outputs) for row, (prompt, outputs) in enumerate(lengths)]
    limits = config(max_num_batched_tokens=100, max_model_len=100)
    report = replay(workload, config=limits, cost=COST, scheduler=scheduler)
    assert [request.output_tokens for request in report.requests] == [49, 1, 1, 0]
    assert report.summary["rejections"] == [{"id": "3", "reason": "prompt_too_long"}]
    assert report.requests[3][1:] == ("rejected", "prompt_too_long", 0.0, None, None, None, 0)


@pytest.mark.parametrize("scheduler", ["bucket", "mixed"])
def test_m08_idle_time_takes_no_steps(scheduler):
    workload = [TraceRequest(str(hour), 3600 * hour, 128, 1) for hour in range(10)]
    report = replay(workload, config=config(), cost=COST, scheduler=scheduler)
    assert report.summary["steps"] == {"prefill": 10, "decode": 0}
    assert report.summary["makespan_s"] == 9 * 3600 + 0.1


def test_percentiles_equal_those_of_numpy():
    report = replay(small_chat(), config=config(**CHAT), cost=TableCost.load("llama-3-8b-trn1"), record_steps=True)
    times = {"ttft_ms": [], "e2e_ms": []}
    for request in report.requests:
        times["ttft_ms"].append(round(request.ttft_s * 1e9) / 1e6)
        times["e2e_ms"].append(round(request.e2e_s * 1e9) / 1e6)
    for name, values in times.items():
        found = report.summary[name]
        assert [found["p50"], found["p90"], found["p99"]] == list(np.percentile(values, [50, 90, 99])), name
        assert found["mean"] == pytest.approx(np.mean(values), rel=1e-12)
        assert found["max"] == max(values)


def test_inter_token_latency_and_padding_agree_with_the_steps():
    report = replay(small_chat(), config=config(**CHAT), cost=COST, record_steps=True)
    computed_tokens = {request.id: 0 for request in report.requests}
    prompts = {request.id: request.prompt_tokens for request in small_chat()}
    last, gaps = {}, []
    padded = {"prefill": 0, "decode": 0}
    for step in report.steps:
        padded[step.kind] += step.padded_tokens
        for name, tokens in step.num_scheduled_tokens.items():
            computed_tokens[name] += tokens
            if computed_tokens[name] < prompts[name]:
                continue
            if name in last:
                gaps.append(round((step.end_s - last[name]) * 1e9) / 1e6)
            last[name] = step.end_s
    itl = report.summary["itl_ms"]
    assert [itl["p50"], itl["p90"], itl["p99"], itl["max"]] == [*np.percentile(gaps, [50, 90, 99]), max(gaps)]
    assert itl["mean"] == pytest.approx(np.mean(gaps), rel=1e-12)
    for kind, name in (("prefill", "prompt_padded"), ("decode", "decode_padded")):
        buckets = report.summary["padding"][kind]
        assert sum(bucket["padded"] for bucket in buckets.values()) == padded[kind] == report.summary["tokens"][name]
        assert all(bucket["padded"] == int(size) * bucket["steps"] for size, bucket in buckets.items())


def test_steps_are_a_sequence():
    report = replay([TraceRequest("A", 0, 128, 4)], config=config(), cost=COST, record_steps=True)
    steps = report.steps
    assert len(steps) == 4
    assert steps[0] == (0.0, 0.1, "prefill", {"A": 128}, 128)
    assert steps[-1] == steps[3] == (0.12, 0.13, "decode", {"A": 1}, 1)
    assert [step.kind for step in steps] == ["prefill", "decode", "decode", "decode"]
    assert steps[1:3] == list(steps)[1:3]
    with pytest.raises(IndexError):
        steps[4]
    with pytest.raises(ValueError, match="record_steps"):
        _ = replay([], config=config(), cost=COST).steps


def test_a_mixed_step_costs_a_prefill_and_a_decode():
    workload = [TraceRequest("A", 0, 128, 3), TraceRequest("B", "0.05", 100, 2)]
    report = replay(workload, config=config(), cost=COST, scheduler="mixed", record_steps=True)
    assert [tuple(step) for step in report.steps] == [
        (0.0, 0.1, "prefill", {"A": 128}, 128),
        (0.1, 0.21, "prefill", {"A": 1, "B": 100}, 101),
        (0.21, 0.22, "decode", {"A": 1, "B": 1}, 2),
    ]
    assert report.summary["tokens"] == {"prompt": 228, "prompt_padded": 228, "decode": 2, "decode_padded": 2}
    assert report.summary["padding"] == {"prefill": {}, "decode": {}}


def test_waiting_time_is_counted_for_the_head_of_the_queue():
    workload = [TraceRequest("A", 0, 100, 3), TraceRequest("B", 0, 300, 1)]
    report = replay(workload, config=config(max_num_seqs=1), cost=COST)
    assert report.summary["wait_reasons"] == {"slots": 120}


def test_equal_hash_ids_are_prefix_cache_hits():
    workload = [
        TraceRequest("A", 0, 1000, 1, hash_ids=[7, 8]),
        TraceRequest("B", 1, 1000, 1, hash_ids=[7, 9]),
        TraceRequest("C", 2, 1000, 1, hash_ids=[7, 8]),
    ]

    def computed(**changed):
        report = replay(workload, config=config(**changed), cost=COST, record_steps=True)
        return [step.num_scheduled_tokens for step in report.steps]

    assert computed() == [{"A": 1000}, {"B": 1000}, {"C": 1000}]
    # The first hash id covers 512 tokens, which are 32 blocks. At least one token of a prompt is computed, so at most
    # 62 full blocks (992 tokens) of an equal prompt are cached.
    assert computed(prefix_caching=True) == [{"A": 1000}, {"B": 488}, {"C": 8}]


def test_priorities_order_the_queue_under_the_priority_policy_only():
    workload = [TraceRequest(str(priority), 0, 128, 1, priority=priority) for priority in (5, 3, -1)]
    order = {
        policy: [
            next(iter(step.num_scheduled_tokens))
            for step in replay(workload, config=config(policy=policy), cost=COST, record_steps=True).steps
        ]
        for policy in ("fcfs", "priority")
    }
    assert order == {"fcfs": ["5", "3", "-1"], "priority": ["-1", "3", "5"]}


def test_progress_is_reported_and_an_exception_of_it_ends_the_run():
    seen = []
    replay(small_chat(), config=config(**CHAT), cost=COST, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (200, 200)
    assert seen == sorted(seen)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(small_chat(), config=config(**CHAT), cost=COST, progress=stop)


def test_replays_in_threads_and_callbacks_do_not_affect_each_other():
    workload = small_chat()

    def run(progress=None):
        return replay(workload, config=config(**CHAT), cost=COST, progress=progress).to_json()

    expected, inner = run(), []
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: run(), range(8)))
    assert run(lambda done, total: inner.append(run())) == expected
    assert {*reports, *inner} == {expected}


def test_invalid_arguments_are_rejected():
    one = TraceRequest("a", 0, 1, 1)
    with pytest.raises(ValueError, match="id: 'a': expected each id once"):
        replay([one, one], config=config(), cost=COST, record_steps=True)
    with pytest.raises(ValueError, match="scheduler: 'best'"):
        replay([one], config=config(), cost=COST, scheduler="best")
    with pytest.raises(TypeError, match="requests"):
        replay(["a"], config=config(), cost=COST)
    with pytest.raises(TypeError, match=r"^config: None: expected a NeuronConfig$"):
        replay([one], config=None, cost=COST)
    with pytest.raises(TypeError, match=r"^cost: None: expected a ConstantCost or a TableCost$"):
        replay([one], config=config(), cost=None)
    with pytest.raises(ValueError, match=r"^cost: "):
        replay([TraceRequest("a", 0, 1, 2)], config=config(), cost=ConstantCost(9 * 10**12, 9 * 10**12))


def test_repr_of_a_report_has_counts_and_makespan():
    report = replay([TraceRequest("A", 0, 128, 3), TraceRequest("B", 0, 5000, 3)], config=config(), cost=COST)
    assert repr(report) == "Report(completed=1, rejected=1, makespan_s=0.12)"


def test_an_empty_workload_gives_an_empty_summary():
    summary = replay([], config=config(), cost=COST).summary
    assert (summary["completed"], summary["makespan_s"], summary["requests_per_s"]) == (0, 0, None)
    assert summary["ttft_ms"]["p99"] is None
