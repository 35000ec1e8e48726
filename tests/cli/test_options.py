"""Options of the command line, and the faults reported for invalid values."""

from __future__ import annotations

import sys

import pytest

from neuron_sched import NeuronConfig, __version__
from neuron_sched.cli import main
from neuron_sched.cli import replay as command
from neuron_sched.cli.options import OPTIONS
from tests.cli.support.command import faults


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
def test_options_set_the_fields_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], field: str, value: object
):
    seen = []
    monkeypatch.setattr(command, "replay", lambda *_, config, **__: seen.append(config) or sys.exit(0))
    with pytest.raises(SystemExit):
        main(["replay", "--requests", "1", *arguments])
    found = getattr(seen[0], field)
    assert (list(found) if isinstance(value, list) else found) == value


def test_c01_all_invalid_limits_are_reported_before_the_run(capsys: pytest.CaptureFixture[str]):
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


def test_c01_a_step_has_at_least_one_token_per_batch_slot(capsys: pytest.CaptureFixture[str]):
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
        (["--write-trace", "t.txt"], "t.txt: expected a name that ends in .csv"),
        (["--write-trace", "absent/t.csv"], "--write-trace: absent/t.csv: expected a file in an existing folder"),
        (["--json", "."], "--json: .: "),
    ],
)
def test_a_fault_is_one_line_that_names_the_option(
    capsys: pytest.CaptureFixture[str], arguments: list[str], start: str
):
    (fault,) = faults(capsys, *arguments)
    assert fault.startswith(start)


@pytest.mark.parametrize("arguments", [["replay", "--no-such-option"], ["replay", "a", "b"], ["unknown"], []])
def test_usage_errors_exit_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
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


def test_version_is_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"neuron-sched {__version__}\n"


def test_a_second_cost_for_a_token_bucket_is_rejected():
    command = ["replay", "--requests", "5", "--quiet", "--prefill-cost", "1024=garbage,1024=30"]
    assert main(command) == 2
