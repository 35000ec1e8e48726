"""The command `replay`: input traces, output files, schedulers and cost profiles."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from neuron_sched import NeuronConfig
from neuron_sched.cli import main
from neuron_sched.cli import replay as command
from neuron_sched.simulate import ConstantCost, replay
from neuron_sched.trace import read_trace, synthetic
from tests.cli.support.command import COMMAND, faults, summary
from tests.support.paths import TRACES

REJECTED = "prompt_tokens,output_tokens\n10,5\n20000,5\n" + "30000,5\n" * 6
BAD_ROWS = (
    '{"arrival_s": 0, "prompt_tokens": 100, "output_tokens": 5}\n'
    "\n"
    '{"arrival_s": 2, "prompt_tokens": 100}\r\n'
    '{"arrival_s": 3, "prompt_tokens": 0, "output_tokens": 5}\n'
    '{"arrival_s": 4, "prompt_tokens": 100, "output_tokens": 0}\n'
    '{"arrival_s": 5, "prompt_tokens": 100, "outp'
)


# Input traces


def test_m09_bad_rows_end_the_command(capsys: pytest.CaptureFixture[str]):
    Path("bad.jsonl").write_bytes(BAD_ROWS.encode())
    found = faults(capsys, "bad.jsonl", "--json", "out.json")
    assert [line.split(": ")[:2] for line in found] == [
        ["bad.jsonl:3", "output_tokens"],
        ["bad.jsonl:4", "prompt_tokens"],
        ["bad.jsonl:5", "output_tokens"],
        ["bad.jsonl:6", "row"],
    ]


def test_m09_bad_rows_are_skipped_and_counted(capsys: pytest.CaptureFixture[str]):
    Path("bad.jsonl").write_bytes(BAD_ROWS.encode())
    assert summary("bad.jsonl", "--skip-bad")["completed"] == 1
    assert capsys.readouterr().err == "4 rows skipped\n"


@pytest.mark.parametrize("data", [b"", b"a,b\n1,2\n", b"\x7fELF\0", b"\x1f\x8b\x08"])
def test_a_file_that_is_not_a_trace_is_one_fault(capsys: pytest.CaptureFixture[str], data: bytes):
    Path("t").write_bytes(data)
    assert len(faults(capsys, "t")) == 1


def test_options_of_the_synthetic_workload_are_rejected_with_a_trace(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(REJECTED)
    (fault,) = faults(capsys, "t.csv", "--requests", "5", "--rate", "1")
    assert fault.startswith("--requests, --rate: ")


def test_the_trace_is_not_overwritten(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(REJECTED)
    (fault,) = faults(capsys, "t.csv", "--json", "./t.csv")
    assert fault == "--json: ./t.csv: expected a file other than the trace"


@pytest.mark.parametrize("results", ["t.csv", "./t.csv", "sub/../t.csv", "link"])
@pytest.mark.parametrize("exists", [True, False])
def test_summary_and_trace_are_not_written_to_one_file(
    folder: Path, capsys: pytest.CaptureFixture[str], results: str, exists: bool
):
    Path("sub").mkdir()
    Path("link").symlink_to(folder / "t.csv")
    if exists:
        Path("t.csv").write_text("old content")
    assert faults(capsys, "--requests", "5", "--json", results, "--write-trace", "t.csv") == [
        "--json, --write-trace: t.csv: expected two different files"
    ]
    assert not exists or Path("t.csv").read_text() == "old content"


def test_rejected_requests_are_listed_with_the_reason(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(REJECTED)
    assert main(["replay", "t.csv", "--json", "out.json"]) == 3
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "7 requests of 8 rejected:",
        *(f"  {row}: prompt_too_long" for row in range(1, 6)),
        "  and 2 more",
    ]
    assert "1 completed, 7 rejected" in output.out
    result = json.loads(Path("out.json").read_text())
    assert (result["completed"], result["rejected"]) == (1, 7)
    assert result["rejections"][0] == {"id": "1", "reason": "prompt_too_long"}


# Output


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.csv.gz"])
def test_m05_a_written_trace_replays_to_the_same_bytes(name: str):
    arguments = ["replay", "--requests", "200", "--seed", "42", "--quiet", "--write-trace", name]
    for file in ("first.json", "second.json"):
        assert main([*arguments, "--json", file]) == 0
    assert main(["replay", name, "--quiet", "--json", "replayed.json"]) == 0
    first = Path("first.json").read_bytes()
    assert json.loads(first)["completed"] == 200
    assert Path("second.json").read_bytes() == first
    assert Path("replayed.json").read_bytes() == first


def test_m05_a_written_trace_gives_the_same_times_of_each_request():
    main(["replay", "--requests", "200", "--seed", "42", "--quiet", "--write-trace", "t.csv"])
    config = NeuronConfig(
        max_num_seqs=96, max_num_batched_tokens=8192, max_model_len=16384, block_size=32, num_blocks=8192
    )
    cost = ConstantCost(prefill_ms=100, decode_ms=25)
    generated = replay(synthetic(200, seed=42), config=config, cost=cost)
    written = replay(read_trace("t.csv"), config=config, cost=cost)
    assert list(written.requests) == list(generated.requests)
    assert len(generated.requests) == 200


def test_json_has_the_documented_keys_in_order():
    assert list(summary("--requests", "20")) == [
        *("completed", "rejected", "rejections", "makespan_s", "requests_per_s", "output_tokens_per_s"),
        *("ttft_ms", "itl_ms", "e2e_ms", "queue_ms", "steps", "tokens", "padding", "wait_reasons"),
    ]


def test_json_on_standard_output_is_the_only_output(capsys: pytest.CaptureFixture[str]):
    assert main(["replay", "--requests", "20", "--json", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["completed"] == 20
    assert output.err == ""


def test_output_files_replace_existing_ones_atomically(folder: Path):
    Path("link.json").symlink_to("out.json")
    Path("out.json").write_text("old")
    assert main(["replay", "--requests", "5", "--quiet", "--json", "link.json", "--write-trace", "t.csv"]) == 0
    assert json.loads(Path("out.json").read_text())["completed"] == 5
    assert sorted(path.name for path in folder.iterdir()) == ["link.json", "out.json", "t.csv"]
    assert main(["replay", "--requests", "5", "--quiet", "--json", "/dev/null"]) == 0
    assert not Path("/dev/null").is_file()


def test_a_failed_write_is_one_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def full(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_atomically", full)
    assert faults(capsys, "--requests", "5", "--json", "o.json") == [
        "o.json: cannot be written: No space left on device"
    ]


def test_tables_fit_80_columns_and_are_plain_when_piped():
    done = subprocess.run([*COMMAND, "replay", "--requests", "300"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "a synthetic chat workload: 300 requests"
    assert any(line.split() == ["requests", "300", "completed"] for line in lines)


def test_the_bucket_scheduler_pads_and_the_mixed_one_does_not():
    bucket, mixed = (summary("--requests", "100", "--scheduler", name) for name in ("bucket", "mixed"))
    assert bucket["completed"] == mixed["completed"] == 100
    assert bucket["tokens"]["prompt_padded"] > bucket["tokens"]["prompt"]
    assert mixed["padding"] == {"prefill": {}, "decode": {}}


def test_options_that_the_mixed_scheduler_ignores_are_named(capsys: pytest.CaptureFixture[str]):
    summary("--requests", "5", "--scheduler", "mixed", "--policy", "priority", "--max-num-seqs", "4", "--dcp=1")
    assert capsys.readouterr().err == "no effect with --scheduler mixed: --policy, --dcp\n"


def test_shorter_prefill_steps_lower_the_time_to_first_token():
    slow, fast = (summary("--requests", "100", "--cost", f"prefill_ms={ms},decode_ms=25") for ms in ("100", "50.5"))
    assert fast["ttft_ms"]["mean"] < slow["ttft_ms"]["mean"]


# Cost profiles


@pytest.mark.parametrize(
    ("arguments", "extrapolated"),
    [
        (["--max-num-seqs", "96", "--rate", "100"], "prefill times beyond 4,096 tokens, decode times beyond 8 rows"),
        (["--max-num-seqs", "96", "--max-num-batched-tokens", "4096", "--rate", "100"], "decode times beyond 8 rows"),
        (["--max-num-seqs", "8", "--scheduler", "mixed"], "prefill times beyond 4,096 tokens"),
    ],
)
def test_extrapolated_step_times_are_reported(
    capsys: pytest.CaptureFixture[str], arguments: list[str], extrapolated: str
):
    summary("--requests", "100", "--cost", "llama-3-8b-trn1", *arguments)
    assert capsys.readouterr() == ("", f"extrapolated: {extrapolated} (llama-3-8b-trn1 ends there)\n")


@pytest.mark.parametrize("scheduler", ["bucket", "mixed"])
def test_step_times_within_the_points_of_a_profile_are_not_reported(capsys: pytest.CaptureFixture[str], scheduler: str):
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "4096")
    summary("--requests", "100", "--cost", "llama-3-8b-trn1", "--scheduler", scheduler, *limits)
    assert capsys.readouterr() == ("", "")


# Published traces


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not next to this checkout")
def test_a_published_trace_saturates_32_batch_slots_but_not_96():
    arguments = [
        str(TRACES / "azure2023_conv_first10min.csv"),
        *("--max-num-batched-tokens", "8192", "--max-model-len", "16384", "--block-size", "32"),
        *("--num-blocks", "8192", "--cost", "prefill_ms=100,decode_ms=25"),
    ]
    enough, few = (summary(*arguments, "--max-num-seqs", slots) for slots in ("96", "32"))
    assert enough["completed"] == few["completed"] == 2867
    assert 100 < enough["ttft_ms"]["mean"] < 400
    assert 100_000 < few["ttft_ms"]["mean"] < 200_000
