"""vLLM's commands in child processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import requests

import neuron_sched
from tests.vllm.support import plugin


def command(*arguments, **flags):
    """Return a command line of `vllm`. A flag that is `True` has no value."""
    options = []
    for name, value in flags.items():
        options += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *map(str, arguments), *options]


def environment():
    """Return environment variables with which a child process finds this package and the test plug-in."""
    folders = [Path(neuron_sched.__file__).parent.parent, *plugin.__path__, os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder),
        "VLLM_LOGGING_LEVEL": "INFO",
    }


@contextlib.contextmanager
def process(arguments, log):
    """Run a command in its own process group, which is terminated when the block ends. Yield the process."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            arguments, env=environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield child
    except BaseException:
        print(f"---- {log.name}\n{log.read_text(errors='replace')[-20_000:]}")
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def free_port():
    """Return a TCP port that is free on the loopback interface."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_healthy(child, url):
    """Wait up to 300 s until the server answers. Fail if its process exits."""
    deadline = time.monotonic() + 300
    while True:
        assert child.poll() is None, f"the server exited with status {child.returncode}"
        assert time.monotonic() < deadline, "the server did not answer within 300 s"
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{url}/health", timeout=10).status_code == 200:
                return
        time.sleep(0.5)
