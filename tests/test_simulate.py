"""Replay from Python: the façade, the conversions, and the cases of the simulator."""

import json
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from neuron_sched import NeuronConfig
from neuron_sched.simulate import ConstantCost, TableCost, cost_of, profiles, replay
from neuron_sched.trace import TraceRequest, read_trace, synthetic, write_trace

COST = ConstantCost(prefill_ms=100, decode_ms=10)


def config(**changed: object) -> NeuronConfig:
    fields = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "block_size": 16,
        "num_blocks": 1024,
    }
    return NeuronConfig(**fields | changed)


def small_chat() -> list[TraceRequest]:
    return synthetic(requests=200, seed=42)


CHAT = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 16384, "num_blocks": 4096}


@pytest.mark.parametrize(
    ("arrival_s", "ttft_s", "e2e_s", "makespan_s"),
    [(0, 0.2, 0.22, 0.22), (0.05, 0.15, 0.17, 0.22), (1, 0.1, 0.12, 1.12)],
)
def test_m02_the_first_token_time_contains_the_waiting(arrival_s, ttft_s, e2e_s, makespan_s):
    workload = [TraceRequest("A", 0, 128, 3), TraceRequest("B", arrival_s, 128, 3)]
    report = replay(workload, config=config(), cost=COST)
    b = report.requests[1]
    assert (b.ttft_s, b.e2e_s, report.summary["makespan_s"]) == (ttft_s, e2e_s, makespan_s)
    assert b.mean_itl_s == 0.01


def test_m02_gaps_contain_the_prefills_in_between():
    report = replay([TraceRequest(name, 0, 128, 3) for name in "AB"], config=config(), cost=COST)
    assert [request.mean_itl_s for request in report.requests] == [0.06, 0.01]
    assert report.summary["itl_ms"]["mean"] == 35


def test_m04_one_output_has_no_gap():
    workload = [TraceRequest("A", 0, 128, 1), TraceRequest("B", 0, 128, 3)]
    report = replay(workload, config=config(), cost=COST)
    a, b = report.requests
    assert (a.ttft_s, a.e2e_s, a.mean_itl_s) == (0.1, 0.1, None)
    assert (b.ttft_s, b.e2e_s, b.mean_itl_s) == (0.2, 0.22, 0.01)
    assert report.summary["itl_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 10)
    alone = replay(workload[:1], config=config(), cost=COST)
    assert alone.summary["itl_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"))


@pytest.mark.parametrize("scheduler", ["bucket", "mixed"])
def test_m05_same_input_same_output(tmp_path, scheduler):
    def run(workload):
        return replay(workload, config=config(**CHAT), cost=COST, scheduler=scheduler)

    workload = small_chat()
    first, again = run(workload), run(small_chat())
    assert first.to_json() == again.to_json()
    assert json.loads(first.to_json()) == first.summary
    file = tmp_path / "chat.jsonl"
    write_trace(file, workload)
    replayed = run(read_trace(file))
    assert replayed.requests == first.requests
    assert replayed.to_json() == first.to_json()
    assert first.summary["completed"] == 200


def test_m05_requests_that_arrive_together_are_served_in_row_order():
    workload = [TraceRequest(name, 3 if name == "c" else 5, 128, 1) for name in "abcd"]
    report = replay(workload, config=config(), cost=COST, record_steps=True)
    assert [list(step.num_scheduled_tokens) for step in report.steps] == [["c"], ["a"], ["b"], ["d"]]


@pytest.mark.parametrize("scheduler", ["bucket", "mixed"])
def test_m07_outputs_end_with_the_model_length(scheduler):
    lengths = [(51, 100), (99, 5), (100, 5), (101, 5)]
    workload = [TraceRequest(str(row), 0, prompt, outputs) for row, (prompt, outputs) in enumerate(lengths)]
    limits = config(max_num_batched_tokens=100, max_model_len=100)
    report = replay(workload, config=limits, cost=COST, scheduler=scheduler)
    assert [request.output_tokens for request in report.requests] == [49, 1, 1, 0]
    assert report.summary["rejections"] == [{"id": "3", "reason": "prompt_too_long"}]
    assert report.requests[3][1:] == ("rejected", "prompt_too_long", 0.0, None, None, None, 0)


@pytest.mark.parametrize("scheduler", ["bucket", "mixed"])
def test_m08_idle_hours_cost_no_steps(scheduler):
    workload = [TraceRequest(str(hour), 3600 * hour, 128, 1) for hour in range(10)]
    report = replay(workload, config=config(), cost=COST, scheduler=scheduler)
    assert report.summary["steps"] == {"prefill": 10, "decode": 0}
    assert report.summary["makespan_s"] == 9 * 3600 + 0.1


def test_percentiles_are_those_of_numpy():
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


def test_gaps_and_padding_are_those_of_the_steps():
    report = replay(small_chat(), config=config(**CHAT), cost=COST, record_steps=True)
    left = {request.id: 0 for request in report.requests}
    prompts = {request.id: request.prompt_tokens for request in small_chat()}
    last, gaps = {}, []
    padded = {"prefill": 0, "decode": 0}
    for step in report.steps:
        padded[step.kind] += step.padded_tokens
        for name, tokens in step.num_scheduled_tokens.items():
            left[name] += tokens
            if left[name] < prompts[name]:
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


def test_steps_read_like_a_sequence():
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


def test_a_mixed_step_costs_its_prompt_and_its_decodes():
    workload = [TraceRequest("A", 0, 128, 3), TraceRequest("B", "0.05", 100, 2)]
    report = replay(workload, config=config(), cost=COST, scheduler="mixed", record_steps=True)
    assert [tuple(step) for step in report.steps] == [
        (0.0, 0.1, "prefill", {"A": 128}, 128),
        (0.1, 0.21, "prefill", {"A": 1, "B": 100}, 101),
        (0.21, 0.22, "decode", {"A": 1, "B": 1}, 2),
    ]
    assert report.summary["tokens"] == {"prompt": 228, "prompt_padded": 228, "decode": 2, "decode_padded": 2}
    assert report.summary["padding"] == {"prefill": {}, "decode": {}}


def test_waits_are_charged_to_the_head():
    workload = [TraceRequest("A", 0, 100, 3), TraceRequest("B", 0, 300, 1)]
    report = replay(workload, config=config(max_num_seqs=1), cost=COST)
    assert report.summary["wait_reasons"] == {"slots": 120}


def test_equal_hash_ids_share_their_prefix():
    workload = [
        TraceRequest("A", 0, 1000, 1, hash_ids=[7, 8]),
        TraceRequest("B", 1, 1000, 1, hash_ids=[7, 9]),
        TraceRequest("C", 2, 1000, 1, hash_ids=[7, 8]),
    ]

    def computed(**changed):
        report = replay(workload, config=config(**changed), cost=COST, record_steps=True)
        return [step.num_scheduled_tokens for step in report.steps]

    assert computed() == [{"A": 1000}, {"B": 1000}, {"C": 1000}]
    # The first 512 tokens are 32 blocks; of 1000 equal tokens 999 may be found, 62 blocks of 16.
    assert computed(prefix_caching=True) == [{"A": 1000}, {"B": 488}, {"C": 8}]


def test_priorities_decide_under_their_policy():
    workload = [TraceRequest(str(priority), 0, 128, 1, priority=priority) for priority in (5, 3, -1)]
    order = {
        policy: [
            next(iter(step.num_scheduled_tokens))
            for step in replay(workload, config=config(policy=policy), cost=COST, record_steps=True).steps
        ]
        for policy in ("fcfs", "priority")
    }
    assert order == {"fcfs": ["5", "3", "-1"], "priority": ["-1", "3", "5"]}


def test_progress_is_told_and_may_break_off():
    seen = []
    replay(small_chat(), config=config(**CHAT), cost=COST, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (200, 200)
    assert seen == sorted(seen)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(small_chat(), config=config(**CHAT), cost=COST, progress=stop)


def test_threads_and_callbacks_may_replay_at_the_same_time():
    workload = small_chat()

    def run(progress=None):
        return replay(workload, config=config(**CHAT), cost=COST, progress=progress).to_json()

    expected, inner = run(), []
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: run(), range(8)))
    assert run(lambda done, total: inner.append(run())) == expected
    assert {*reports, *inner} == {expected}


@pytest.mark.parametrize("name", profiles())
def test_profiles_load_and_replay(name):
    cost = TableCost.load(name)
    report = replay(small_chat()[:20], config=config(**CHAT), cost=cost)
    assert report.summary["completed"] == 20
    text = (Path(__file__).parents[1] / f"python/neuron_sched/profiles/{name}.toml").read_text()
    assert "Publisher:" in text
    assert "SDK" in text


def test_two_profiles_ship():
    assert profiles() == ["llama-3-8b-trn1", "llama-3.1-8b-inf2"]
    assert TableCost.load("llama-3-8b-trn1").prefill == {128: Decimal("17.09"), 4096: Decimal("153.02")}


def test_a_profile_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[prefill]\n128 = 100\n[decode]\n1 = 10.0000005\n")
    workload = [TraceRequest("A", 0, 50, 2)]
    report = replay(workload, config=config(), cost=cost_of(str(file)))
    # Half a nanosecond goes up.
    assert report.requests[0].e2e_s == 0.110000001


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[prefill", "not TOML"),
        ("prefill = 3", "prefill: expected a table"),
        ("[prefill]\n128 = 1\n", "decode: expected a table"),
        ("[prefill]\nx = 1\n[decode]\n1 = 1\n", "prefill: x: expected a whole number"),
        ("prefil = 1\n[prefill]\n128 = 1\n[decode]\n1 = 1\n[spare]\n", "prefil, spare: expected description, prefill"),
        ("[prefill]\n128 = -1\n[decode]\n1 = nan\n", "prefill: -1: expected a number of at least 0"),
        ("[prefill]\n0 = 1\n[decode]\n1 = 1\n", "prefill: 0: expected sizes from 1"),
    ],
)
def test_bad_profiles_are_refused(tmp_path, content, complaint):
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        cost_of(str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prefill_ms=100", "expected prefill_ms=N,decode_ms=N"),
        ("prefill_ms=1,decode_ms=2,prefill_ms=3", "expected prefill_ms=N,decode_ms=N"),
        ("prefill_ms=x,decode_ms=-2", "prefill_ms: 'x': expected a finite decimal number\ndecode_ms: '-2'"),
        ("no-such-profile", "one of llama-3-8b-trn1, llama-3.1-8b-inf2"),
    ],
)
def test_bad_costs_are_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        cost_of(text)


def test_costs_of_the_command_line():
    assert cost_of("prefill_ms=100, decode_ms=2.5") == ConstantCost("100", "2.5")
    assert cost_of("llama-3-8b-trn1") == TableCost.load("llama-3-8b-trn1")


@pytest.mark.parametrize("arrival_s", [0.1, "0.1", "1e-1", Decimal("0.1"), np.float64(0.1)])
def test_arrivals_are_exact(arrival_s):
    assert TraceRequest("a", arrival_s, 1, 1).arrival_ns == 100_000_000


def test_arrivals_of_whole_seconds_and_beyond_floats():
    assert TraceRequest("a", np.int64(3), 1, 1).arrival_ns == 3_000_000_000
    assert TraceRequest("a", "1700158546.680590001", 1, 1).arrival_ns == 1_700_158_546_680_590_001


BAD = [True, None, -1, "x", 1.5, float("nan"), float("inf"), 10**30, [], b"1"]


@pytest.mark.parametrize("field", ["id", "arrival_s", "prompt_tokens", "output_tokens", "priority", "hash_ids"])
@pytest.mark.parametrize("value", BAD, ids=repr)
def test_x01_bad_fields_are_named(field, value):
    fields = {"id": "a", "arrival_s": 0, "prompt_tokens": 600, "output_tokens": 3, "priority": 0, "hash_ids": [1, 2]}
    good = {("id", "x"), ("arrival_s", 1.5), ("priority", -1), ("priority", None), ("hash_ids", None)}
    if any(field == name and value is not True and value == fine for name, fine in good):
        TraceRequest(**fields | {field: value})
        return
    with pytest.raises(ValueError, match=f"^{field}: "):
        TraceRequest(**fields | {field: value})


def test_all_bad_fields_are_told_at_once():
    with pytest.raises(ValueError, match="arrival_s: ") as caught:
        TraceRequest(1, -1, 0, 0)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "id",
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
    ]


def test_each_512_prompt_tokens_need_a_hash_id():
    assert TraceRequest("a", 0, 1024, 1, hash_ids=(1, 2, 3)).hash_ids == (1, 2, 3)
    with pytest.raises(ValueError, match=r"hash_ids: .*expected 3 ids, one for each 512 of 1025 prompt tokens"):
        TraceRequest("a", 0, 1025, 1, hash_ids=[1, 2])
    with pytest.raises(ValueError, match="hash_ids: -1: expected a whole number"):
        TraceRequest("a", 0, 5, 1, hash_ids=[-1])


def test_requests_are_values():
    one, same = (TraceRequest("a", "0.5", 600, 3, priority=2, hash_ids=[1, 2]) for _ in range(2))
    assert (one, hash(one)) == (same, hash(same))
    assert one != TraceRequest("b", "0.5", 600, 3, priority=2, hash_ids=[1, 2])
    assert one != "a"
    assert repr(one) == (
        "TraceRequest(id='a', arrival_s=0.5, prompt_tokens=600, output_tokens=3, priority=2, hash_ids=[1, 2])"
    )
    with pytest.raises(AttributeError):
        one.priority = 3


def test_bad_replays_are_refused():
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


def test_a_report_shows_its_size():
    report = replay([TraceRequest("A", 0, 128, 3), TraceRequest("B", 0, 5000, 3)], config=config(), cost=COST)
    assert repr(report) == "Report(completed=1, rejected=1, makespan_s=0.12)"


def test_nothing_in_nothing_out():
    summary = replay([], config=config(), cost=COST).summary
    assert (summary["completed"], summary["makespan_s"], summary["requests_per_s"]) == (0, 0, None)
    assert summary["ttft_ms"]["p99"] is None
