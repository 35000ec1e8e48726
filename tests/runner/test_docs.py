"""Runs the Python blocks of docs/runner.md, and the example that it and the README show."""

import doctest
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: make vllm-env")

import neuron_sched
from tests.support.doctests import run_blocks
from tests.support.pages import NEEDS_TORCH, README, commands
from tests.support.paths import ROOT


def test_python_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(NEEDS_TORCH, {"__name__": "__main__"})


def test_the_example():
    """The exit status is 0 if all tokens equal the reference. The README shows the same command."""
    ((command, shown),) = commands(NEEDS_TORCH, "python")
    assert commands(README, "python") == [(command, "")]
    environment = {**os.environ, "PYTHONPATH": str(Path(neuron_sched.__file__).parent.parent)}
    program = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert doctest.OutputChecker().check_output(shown, done.stdout, doctest.ELLIPSIS), done.stdout
