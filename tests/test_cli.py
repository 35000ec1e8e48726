"""The command line: exit statuses, messages, files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_sched import NeuronConfig, __version__, cli
from neuron_sched.cli import main
from neuron_sched.options import OPTIONS
from neuron_sched.simulate import ConstantCost, replay
from neuron_sched.trace import read_trace, synthetic

TRACES = Path(__file__).parents[2] / "shared" / "traces"
COMMAND = [sys.executable, "-m", "neuron_sched"]

REFUSED = "prompt_tokens,output_tokens\n10,5\n20000,5\n" + "30000,5\n" * 6
BAD = (
    '{"arrival_s": 0, "prompt_tokens": 100, "output_tokens": 5}\n'
    "\n"
    '{"arrival_s": 2, "prompt_tokens": 100}\r\n'
    '{"arrival_s": 3, "prompt_tokens": 0, "output_tokens": 5}\n'
    '{"arrival_s": 4, "prompt_tokens": 100, "output_tokens": 0}\n'
    '{"arrival_s": 5, "prompt_tokens": 100, "outp'
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def faults(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The faults of a call that must end with status 2, print nothing else and write nothing."""
    before = sorted(Path.cwd().iterdir())
    assert main(["replay", *arguments]) == 2
    assert sorted(Path.cwd().iterdir()) == before, "something was written"
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert all(line.startswith("error: ") for line in lines), output.err
    return [line.removeprefix("error: ") for line in lines]


def summary(*arguments: str) -> dict:
    assert main(["replay", *arguments, "--json", "summary.json", "--quiet"]) == 0
    return json.loads(Path("summary.json").read_text())


# The configuration


def test_every_field_of_the_configuration_has_an_option():
    config = NeuronConfig(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, block_size=1, num_blocks=1)
    assert {option.field for option in OPTIONS} == set(config.as_dict())


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max-num-seqs", "12"], "max_num_seqs", 12),
        (["--num-batched-tokens-buckets", "512, 8192"], "num_batched_tokens_buckets", [512, 8192]),
        (
            ["--prefill-cost=512=17.1,8192=90", "--num-batched-tokens-buckets=512,8192"],
            "prefill_cost",
            {512: 17.1, 8192: 90.0},
        ),
        (["--prefix-caching"], "prefix_caching", True),
        (["--no-prefix-caching"], "prefix_caching", False),
        (["--policy", "priority"], "policy", "priority"),
        (["--max-consecutive-prefill-steps", "2"], "max_consecutive_prefill_steps", 2),
        ([], "max_num_batched_tokens", 8192),
    ],
)
def test_options_reach_the_configuration(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], field: str, value: object
):
    seen = []
    monkeypatch.setattr(cli, "replay", lambda *_, config, **__: seen.append(config) or sys.exit(0))
    with pytest.raises(SystemExit):
        main(["replay", "--requests", "1", *arguments])
    found = getattr(seen[0], field)
    assert (list(found) if isinstance(value, list) else found) == value


def test_c01_limits_are_checked_at_the_door(capsys: pytest.CaptureFixture[str]):
    found = faults(
        capsys,
        *("--max-num-batched-tokens", "0"),
        *("--max-num-seqs", "0"),
        *("--max-model-len", "0"),
        *("--num-blocks", "0"),
        *("--block-size", "-16"),
        *("--json", "out.json"),
        *("--write-trace", "out.csv"),
        "absent.csv",
    )
    assert sorted(line.rsplit(": ", 1)[0] for line in found) == [
        "--block-size: -16",
        "--max-model-len: 0",
        "--max-num-batched-tokens: 0",
        "--max-num-seqs: 0",
        "--num-blocks: 0",
        "absent.csv: cannot be read",
    ]


def test_c01_a_step_takes_at_least_a_token_a_slot(capsys: pytest.CaptureFixture[str]):
    (fault,) = faults(capsys, "--max-num-batched-tokens", "64", "--max-num-seqs", "128")
    assert fault == "--max-num-batched-tokens: 64: expected at least max_num_seqs = 128"


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--max-num-seqs", "many"], "--max-num-seqs: 'many': "),
        (["--max-num-seqs", "1.5"], "--max-num-seqs: '1.5': "),
        (["--num-seqs-buckets", "1,x"], "--num-seqs-buckets: [1, 'x']: "),
        (["--num-seqs-buckets", ""], "--num-seqs-buckets: "),
        (["--num-seqs-buckets", "1,2"], "--num-seqs-buckets: "),
        (["--prefill-cost", "17"], "--prefill-cost: '17': "),
        (["--prefill-cost", "128=x"], "--prefill-cost: {128: 'x'}: "),
        (["--chunking", "odd"], "--chunking: 'odd': "),
        (["--kv-admission", "no"], "--kv-admission: 'no': "),
        (["--policy", "lifo"], "--policy: 'lifo': "),
        (["--dcp", "99999999999999999999"], "--dcp: 99999999999999999999: "),
        (["--requests", "0"], "--requests: 0: "),
        (["--rate", "nan"], "--rate: nan: "),
        (["--cost", "prefill_ms=1"], "--cost: "),
        (["--cost", "prefill_ms=x,decode_ms=1"], "--cost: prefill_ms: "),
        (["--cost", ""], "--cost: '': expected prefill_ms=N,decode_ms=N, or the name or file of a profile"),
        (["--cost", "absent.toml"], "--cost: "),
        (["--cost", "no-such-profile"], "--cost: "),
        (["--cost", "prefill_ms=9e12,decode_ms=9e12"], "--cost: "),
        (["--requests", "1000000000000"], "--requests: 1000000000000: "),
        (["rate_per_s"], "rate_per_s: cannot be read"),
        (["--write-trace", "t.txt"], "t.txt: the name of a trace"),
        (["--write-trace", "absent/t.csv"], "--write-trace: absent/t.csv: "),
        (["--json", "."], "--json: .: "),
    ],
)
def test_faults_are_told_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], start: str):
    (fault,) = faults(capsys, *arguments)
    assert fault.startswith(start)


@pytest.mark.parametrize("arguments", [["replay", "--no-such-option"], ["replay", "a", "b"], ["unknown"], []])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: neuron-sched" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["replay", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert [option.flag for option in OPTIONS if option.flag not in text] == []


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"neuron-sched {__version__}\n"


# Traces in


def test_m09_bad_rows_end_the_call(capsys: pytest.CaptureFixture[str]):
    Path("bad.jsonl").write_bytes(BAD.encode())
    found = faults(capsys, "bad.jsonl", "--json", "out.json")
    assert [line.split(": ")[:2] for line in found] == [
        ["bad.jsonl:3", "output_tokens"],
        ["bad.jsonl:4", "prompt_tokens"],
        ["bad.jsonl:5", "output_tokens"],
        ["bad.jsonl:6", "row"],
    ]


def test_m09_bad_rows_are_skipped_and_counted(capsys: pytest.CaptureFixture[str]):
    Path("bad.jsonl").write_bytes(BAD.encode())
    assert summary("bad.jsonl", "--skip-bad")["completed"] == 1
    assert capsys.readouterr().err == "4 rows skipped\n"


@pytest.mark.parametrize("data", [b"", b"a,b\n1,2\n", b"\x7fELF\0", b"\x1f\x8b\x08"])
def test_files_that_are_no_traces(capsys: pytest.CaptureFixture[str], data: bytes):
    Path("t").write_bytes(data)
    assert len(faults(capsys, "t")) == 1


def test_synthetic_knobs_do_not_go_with_a_trace(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(REFUSED)
    (fault,) = faults(capsys, "t.csv", "--requests", "5", "--rate", "1")
    assert fault.startswith("--requests, --rate: ")


def test_the_trace_is_not_overwritten(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(REFUSED)
    (fault,) = faults(capsys, "t.csv", "--json", "./t.csv")
    assert fault == "--json: ./t.csv: is the trace itself"


@pytest.mark.parametrize("results", ["t.csv", "./t.csv", "sub/../t.csv", "link"])
@pytest.mark.parametrize("exists", [True, False])
def test_two_results_do_not_go_to_one_file(
    folder: Path, capsys: pytest.CaptureFixture[str], results: str, exists: bool
):
    Path("sub").mkdir()
    Path("link").symlink_to(folder / "t.csv")
    if exists:
        Path("t.csv").write_text("as it was")
    assert faults(capsys, "--requests", "5", "--json", results, "--write-trace", "t.csv") == [
        "--json, --write-trace: t.csv: is one file: expected two"
    ]
    assert not exists or Path("t.csv").read_text() == "as it was"


def test_refused_requests_are_named(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(REFUSED)
    assert main(["replay", "t.csv", "--json", "out.json"]) == 3
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "7 requests of 8 refused:",
        *(f"  {row}: prompt_too_long" for row in range(1, 6)),
        "  and 2 more",
    ]
    assert "1 completed, 7 refused" in output.out
    result = json.loads(Path("out.json").read_text())
    assert (result["completed"], result["rejected"]) == (1, 7)
    assert result["rejections"][0] == {"id": "1", "reason": "prompt_too_long"}


# Results out


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


def test_m05_times_of_each_request_are_the_same():
    main(["replay", "--requests", "200", "--seed", "42", "--quiet", "--write-trace", "t.csv"])
    config = NeuronConfig(
        max_num_seqs=96, max_num_batched_tokens=8192, max_model_len=16384, block_size=32, num_blocks=8192
    )
    cost = ConstantCost(prefill_ms=100, decode_ms=25)
    made = replay(synthetic(200, seed=42), config=config, cost=cost)
    read = replay(read_trace("t.csv"), config=config, cost=cost)
    assert list(read.requests) == list(made.requests)
    assert len(made.requests) == 200


def test_json_has_the_stable_names_in_order():
    assert list(summary("--requests", "20")) == [
        *("completed", "rejected", "rejections", "makespan_s", "requests_per_s", "output_tokens_per_s"),
        *("ttft_ms", "itl_ms", "e2e_ms", "queue_ms", "steps", "tokens", "padding", "wait_reasons"),
    ]


def test_json_on_standard_output_is_all_there_is(capsys: pytest.CaptureFixture[str]):
    assert main(["replay", "--requests", "20", "--json", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["completed"] == 20
    assert output.err == ""


def test_files_are_written_whole(folder: Path):
    Path("link.json").symlink_to("out.json")
    Path("out.json").write_text("old")
    assert main(["replay", "--requests", "5", "--quiet", "--json", "link.json", "--write-trace", "t.csv"]) == 0
    assert json.loads(Path("out.json").read_text())["completed"] == 5
    assert sorted(path.name for path in folder.iterdir()) == ["link.json", "out.json", "t.csv"]
    assert main(["replay", "--requests", "5", "--quiet", "--json", "/dev/null"]) == 0
    assert not Path("/dev/null").is_file()


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def full(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "write_atomically", full)
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


def test_schedulers_differ():
    bucket, mixed = (summary("--requests", "100", "--scheduler", name) for name in ("bucket", "mixed"))
    assert bucket["completed"] == mixed["completed"] == 100
    assert bucket["tokens"]["prompt_padded"] > bucket["tokens"]["prompt"]
    assert mixed["padding"] == {"prefill": {}, "decode": {}}


def test_options_that_the_mixed_scheduler_ignores_are_named(capsys: pytest.CaptureFixture[str]):
    summary("--requests", "5", "--scheduler", "mixed", "--policy", "priority", "--max-num-seqs", "4", "--dcp=1")
    assert capsys.readouterr().err == "no effect with --scheduler mixed: --policy, --dcp\n"


def test_a_shorter_step_is_a_sooner_token():
    slow, fast = (summary("--requests", "100", "--cost", f"prefill_ms={ms},decode_ms=25") for ms in ("100", "50.5"))
    assert fast["ttft_ms"]["mean"] < slow["ttft_ms"]["mean"]


# Profiles


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-num-seqs", "96", "--rate", "100"], "prefill times beyond 4,096 tokens, decode times beyond 8 rows"),
        (["--max-num-seqs", "96", "--max-num-batched-tokens", "4096", "--rate", "100"], "decode times beyond 8 rows"),
        (["--max-num-seqs", "8", "--scheduler", "mixed"], "prefill times beyond 4,096 tokens"),
    ],
)
def test_what_a_profile_has_no_points_for_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str):
    summary("--requests", "100", "--cost", "llama-3-8b-trn1", *arguments)
    assert capsys.readouterr() == ("", f"extrapolated: {told} (llama-3-8b-trn1 ends there)\n")


@pytest.mark.parametrize("scheduler", ["bucket", "mixed"])
def test_nothing_is_told_within_the_points_of_a_profile(capsys: pytest.CaptureFixture[str], scheduler: str):
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "4096")
    summary("--requests", "100", "--cost", "llama-3-8b-trn1", "--scheduler", scheduler, *limits)
    assert capsys.readouterr() == ("", "")


# Without rich, interrupted, unread


def test_without_rich_the_advice_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    (fault,) = faults(capsys, "--requests", "5")
    assert fault == "the tables need rich: pip install rich, or ask for --json"


def test_without_rich_json_is_written_all_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["replay", "--requests", "5", "--json", "out.json"]) == 0
    assert capsys.readouterr() == ("", "the tables need rich: pip install rich\n")
    assert json.loads(Path("out.json").read_text())["completed"] == 5


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "replay", interrupted)
    assert main(["replay", "--requests", "5", "--json", "out.json"]) == 130
    assert capsys.readouterr() == ("", "")
    assert not Path("out.json").exists()


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(
        [*COMMAND, "replay", "--requests", "300"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, message = process.communicate()
    assert (process.returncode, message) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_standard_output_is_told():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "replay", "--requests", "5"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device\n")


def test_a_closed_standard_output_does_not_matter_where_nothing_goes_there(folder: Path):
    call = '"$0" -m neuron_sched replay --requests 5 --quiet --json out.json >&-'
    done = subprocess.run(["sh", "-c", call, sys.executable], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(Path("out.json").read_text())["completed"] == 5


def test_a_size_is_given_one_cost():
    command = ["replay", "--requests", "5", "--quiet", "--prefill-cost", "1024=garbage,1024=30"]
    assert main(command) == 2


@pytest.mark.parametrize("arguments", ["", "--quiet --json -", "--json -"])
def test_a_closed_standard_output_is_told(folder: Path, arguments: str):
    call = f'"$0" -m neuron_sched replay --requests 5 {arguments} >&-'
    done = subprocess.run(["sh", "-c", call, sys.executable], stderr=subprocess.PIPE, text=True)
    told = "error: standard output: is closed: expected a file, a pipe or a terminal\n"
    assert (done.returncode, done.stderr) == (2, told)
    assert list(folder.iterdir()) == []


def test_messages_never_go_to_standard_output():
    call = '"$0" -m neuron_sched replay --requests 5 --scheduler mixed --dcp 1 --json - 2>&-'
    done = subprocess.run(["sh", "-c", call, sys.executable], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["completed"] == 5


def test_tables_do_without_standard_error():
    call = '"$0" -m neuron_sched replay --requests 5 2>&-'
    done = subprocess.run(["sh", "-c", call, sys.executable], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout.count("5 completed")) == (0, 1)


@pytest.mark.parametrize("function", ["synthetic", "replay", "encode_trace"])
def test_memory_that_runs_out_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, function: str
):
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cli, function, exhausted)
    assert faults(capsys, "--requests", "5", "--write-trace", "t.csv") == ["out of memory: expected a smaller workload"]


# Published traces


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not beside this checkout")
def test_slots_decide_whether_a_published_trace_saturates():
    arguments = [
        str(TRACES / "azure2023_conv_first10min.csv"),
        *("--max-num-batched-tokens", "8192", "--max-model-len", "16384", "--block-size", "32"),
        *("--num-blocks", "8192", "--cost", "prefill_ms=100,decode_ms=25"),
    ]
    enough, few = (summary(*arguments, "--max-num-seqs", slots) for slots in ("96", "32"))
    assert enough["completed"] == few["completed"] == 2867
    assert 100 < enough["ttft_ms"]["mean"] < 400
    assert 100_000 < few["ttft_ms"]["mean"] < 200_000
