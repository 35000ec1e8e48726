"""The command without rich, with closed or full streams, interrupted, and out of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_sched.cli import main
from neuron_sched.cli import replay as command
from tests.cli.support.command import COMMAND, faults


def test_without_rich_the_missing_package_is_one_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "rich", None)
    (fault,) = faults(capsys, "--requests", "5")
    assert fault == "the tables need rich: pip install rich, or ask for --json"


def test_without_rich_json_is_still_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["replay", "--requests", "5", "--json", "out.json"]) == 0
    assert capsys.readouterr() == ("", "the tables need rich: pip install rich\n")
    assert json.loads(Path("out.json").read_text())["completed"] == 5


def test_an_interrupt_prints_and_writes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "replay", interrupted)
    assert main(["replay", "--requests", "5", "--json", "out.json"]) == 130
    assert capsys.readouterr() == ("", "")
    assert not Path("out.json").exists()


def test_a_closed_pipe_prints_no_error():
    process = subprocess.Popen(
        [*COMMAND, "replay", "--requests", "300"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, message = process.communicate()
    assert (process.returncode, message) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_standard_output_is_reported():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "replay", "--requests", "5"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device\n")


def test_a_closed_standard_output_is_accepted_if_nothing_is_written_to_it(folder: Path):
    call = '"$0" -m neuron_sched replay --requests 5 --quiet --json out.json >&-'
    done = subprocess.run(["sh", "-c", call, sys.executable], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(Path("out.json").read_text())["completed"] == 5


@pytest.mark.parametrize("arguments", ["", "--quiet --json -", "--json -"])
def test_a_closed_standard_output_is_reported_if_it_is_needed(folder: Path, arguments: str):
    call = f'"$0" -m neuron_sched replay --requests 5 {arguments} >&-'
    done = subprocess.run(["sh", "-c", call, sys.executable], stderr=subprocess.PIPE, text=True)
    message = "error: standard output: closed: expected a file, a pipe or a terminal\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert list(folder.iterdir()) == []


def test_messages_do_not_replace_a_closed_standard_error_by_standard_output():
    call = '"$0" -m neuron_sched replay --requests 5 --scheduler mixed --dcp 1 --json - 2>&-'
    done = subprocess.run(["sh", "-c", call, sys.executable], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["completed"] == 5


def test_tables_do_not_need_standard_error():
    call = '"$0" -m neuron_sched replay --requests 5 2>&-'
    done = subprocess.run(["sh", "-c", call, sys.executable], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout.count("5 completed")) == (0, 1)


@pytest.mark.parametrize("function", ["synthetic", "replay", "encode_trace"])
def test_running_out_of_memory_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, function: str
):
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(command, function, exhausted)
    assert faults(capsys, "--requests", "5", "--write-trace", "t.csv") == ["out of memory: expected a smaller workload"]
