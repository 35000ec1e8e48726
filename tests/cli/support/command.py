"""Calls of the command `neuron-sched replay` in this process, and the command line to start it in another."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from neuron_sched.cli import main

COMMAND = [sys.executable, "-m", "neuron_sched"]


def faults(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Run `replay` and return the faults it reports. Assert that it exits with status 2 and writes nothing else."""
    before = sorted(Path.cwd().iterdir())
    assert main(["replay", *arguments]) == 2
    assert sorted(Path.cwd().iterdir()) == before, "something was written"
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert all(line.startswith("error: ") for line in lines), output.err
    return [line.removeprefix("error: ") for line in lines]


def summary(*arguments: str) -> dict:
    """Run `replay` and return the content of its JSON file."""
    assert main(["replay", *arguments, "--json", "summary.json", "--quiet"]) == 0
    return json.loads(Path("summary.json").read_text())
