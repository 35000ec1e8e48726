"""docs/vllm.md: its Python and its commands run, and each log line and error that it shows is produced.

The page shows messages with release 0.32.0 of vLLM. On other releases, 0.32.0 is substituted before a comparison.
"""

import contextlib
import io
import json
import logging
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import torch
import vllm
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

import neuron_sched
from neuron_sched import NeuronAsyncScheduler, NeuronScheduler
from neuron_sched.vllm import config
from neuron_sched.vllm import scheduler as module
from tests.support.doctests import run_doctest
from tests.support.pages import blocks, commands, table
from tests.support.paths import ROOT
from tests.vllm.support.harness import build, request, step
from tests.vllm.support.log import LogCapture
from tests.vllm.support.model import write_model
from tests.vllm.support.server import free_port, process, wait_until_healthy

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:  # up to 0.26
    from vllm.utils import FlexibleArgumentParser

PAGE = ROOT / "docs/vllm.md"
TEXT = PAGE.read_text()
SHOWN_RELEASE = "0.32.0"
# The arguments of the page, and the same with a KV cache that is smaller than max_model_len.
SHAPE = {"max_num_seqs": 8, "max_model_len": 2048, "max_num_batched_tokens": 512, "block_size": 32, "num_blocks": 513}
SMALL = {**SHAPE, "num_blocks": 49}
# The test model has no weights and is not compiled.
TINY = {"load_format": "dummy", "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}


def one_line(text):
    return " ".join(text.split())


needs_cpu_platform = pytest.mark.skipif(not current_platform.is_cpu(), reason="this vLLM is not built for the CPU")

SHOWN = [one_line(text) for _, text in blocks(PAGE, "text")]


# Messages that the page shows


def refusal_message(cls=NeuronScheduler, neuron_config=None, **shape):
    with pytest.raises((ValueError, RuntimeError)) as error:
        build(cls, neuron_config=neuron_config, **shape)
    return f"{error.type.__name__}: {error.value}"


def first_warning(**shape):
    with LogCapture() as log:
        build(NeuronScheduler, **shape)
    return log.warnings[0]


def startup_line():
    with LogCapture() as log:
        build(NeuronAsyncScheduler, async_scheduling=True, neuron_config=neuron_config_argument(), **SHAPE)
    return log.infos[0]


def unservable_request():
    s = build(NeuronScheduler, **SMALL)
    with LogCapture() as log:
        s.add_request(request("big", 1530, 8))
    return log.warnings[0]


def duplicate_id():
    s = build(NeuronScheduler, **SHAPE)
    with LogCapture() as log:
        s.add_request(request("a", 10))
        s.add_request(request("a", 20))
    return log.errors[0]


def watchdog():
    s = build(NeuronScheduler, **SHAPE)
    s.add_request(request("a", 10, 3, grammar=True))
    with LogCapture() as log:
        for _ in range(100):
            step(s)
    return log.warnings[0]


def vllm_not_installed():
    code = (
        "import sys, importlib.abc\n"
        "class Hidden(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'vllm': raise ModuleNotFoundError(\"No module named 'vllm'\")\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import neuron_sched\n"
        "neuron_sched.NeuronScheduler\n"
    )
    path = str(Path(neuron_sched.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    return done.stderr.strip().splitlines()[-1]


def missing_method():
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Scheduler, "_free_blocks")
        return refusal_message()


def untested_release():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.34.0")
        return first_warning()


INVALID = {"max_prefills_per_batch": 0, "num_batched_tokens_buckets": [128, 256], "kv_admission": "hope"}
MESSAGES = {
    "startup line": startup_line,
    "KV cache below max_model_len": lambda: first_warning(**SMALL),
    "request that can never run": unservable_request,
    "id in use": duplicate_id,
    "watchdog": watchdog,
    "sync class in an async engine": lambda: refusal_message(async_scheduling=True),
    "neuron_config is no mapping": lambda: refusal_message(neuron_config=["chunking"]),
    "field of a vLLM flag": lambda: refusal_message(neuron_config={"max_num_seqs": 8}),
    "invalid fields": lambda: refusal_message(neuron_config=INVALID, **SHAPE),
    "max_model_len above the KV cache": lambda: refusal_message(
        neuron_config={"kv_admission": "max_model_len"}, **SMALL
    ),
    "vLLM not installed": vllm_not_installed,
    "missing method": missing_method,
    "untested release": untested_release,
}


@pytest.mark.parametrize("name", MESSAGES)
def test_each_message_is_on_the_page(name):
    message = one_line(MESSAGES[name]()).replace(vllm.__version__, SHOWN_RELEASE)
    assert message in SHOWN


def test_each_message_of_the_page_is_tested():
    assert len(SHOWN) == len(set(SHOWN)) == len(MESSAGES)


# Tables


def test_the_example_of_each_field_is_accepted_and_differs_from_the_default():
    rows = table(PAGE, "field", "an example, as JSON")
    examples = {re.match(r"\[`(\w+)`\]", field)[1]: json.loads(example.strip("`")) for field, example in rows}
    assert tuple(examples) == config.FIELDS
    for field, value in examples.items():
        required = {"chunking": "bucket"} if field == "prefill_cost" else {}
        s = build(NeuronScheduler, neuron_config={field: value, **required}, **SHAPE)
        configured = getattr(s.neuron_config, field)
        assert configured == ({int(k): v for k, v in value.items()} if isinstance(value, dict) else value)
        default = getattr(build(NeuronScheduler, **SHAPE).neuron_config, field)
        assert configured != default, "the example is the default"


def test_the_flag_of_each_other_field():
    rows = table(PAGE, "field", "flag of vLLM")
    flags = {field.strip("`"): re.match(r"`(--[\w-]+)`", flag)[1] for field, flag in rows}
    assert flags == config._FLAGS


@needs_cpu_platform  # The defaults of the flags depend on the platform.
def test_vllm_has_each_flag_of_the_page():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    known = {flag for action in parser._actions for flag in action.option_strings}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert len(used) > 10
    assert used - known == set()


def test_the_scheduler_and_its_output_have_the_documented_names():
    s = build(NeuronScheduler, **SHAPE)
    s.add_request(request("a", 10))
    output = step(s)
    documented = set(re.findall(r"`(\w+)(?:\(request\))?`", TEXT))
    found = {name for name in documented if hasattr(s, name) or hasattr(output, name)}
    assert {"SchedulerState", "get_bucket_for_count"} <= {name for name in documented if hasattr(module, name)}
    assert {name for name in documented if name.startswith("get_") and not hasattr(module, name)} == set()
    assert {"can_schedule", "at_capacity", "num_seqs_padded", "_grammar_bitmask", "refusal", "empty_steps"} <= found
    assert {name for name in documented if re.match(r"(num_|total_|_)", name)} - found <= {"num_blocks"} | set(
        config.FIELDS
    )


def test_both_import_paths_give_the_same_classes():
    assert neuron_sched.NeuronScheduler is module.NeuronScheduler
    assert neuron_sched.NeuronAsyncScheduler is module.NeuronAsyncScheduler


# Python


@pytest.fixture
def model_in_cwd(tmp_path, monkeypatch):
    """Write a model into the current folder, with the name that the page uses."""
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "MODEL")


@pytest.fixture
def one_process(monkeypatch):
    """Run vLLM's engine in this process, and restore the process state that it changes."""
    from vllm.distributed import cleanup_dist_env_and_memory

    environment, set_num_threads, state = dict(os.environ), torch.set_num_threads, random.getstate()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    torch.set_num_threads = set_num_threads
    random.setstate(state)
    cleanup_dist_env_and_memory()
    os.environ.clear()
    os.environ.update(environment)


@needs_cpu_platform
@pytest.mark.engine
@pytest.mark.filterwarnings("default")  # Libraries that vLLM imports raise warnings.
def test_python_blocks(model_in_cwd, one_process, monkeypatch):
    """All blocks run as one program, so the engine that the first creates is used by all."""
    llms, original = [], vllm.LLM

    def tiny(*args, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()):  # The log of the engine is not output of the example.
            llms.append(original(*args, **{**TINY, **kwargs}))
        return llms[-1]

    monkeypatch.setattr(vllm, "LLM", tiny)
    names = {"__name__": "docs"}
    try:
        for line, text in blocks(PAGE, "python"):
            if ">>>" in text:
                run_doctest(text, names, PAGE, line)
            else:
                exec(compile("\n" * line + text, PAGE, "exec"), names)
    finally:
        for llm in llms:
            llm.llm_engine.engine_core.shutdown()
    assert len(llms) == 1


def test_the_logging_subclass_logs_the_explanation_each_1000_steps(caplog):
    """The test drives the scheduler itself, since a thousand steps of an engine would take too long."""
    (text,) = (text for _, text in blocks(PAGE, "python") if "class LoggingScheduler" in text)
    names = {"__name__": "docs"}
    exec(compile(text, PAGE, "exec"), names)
    s = build(names["LoggingScheduler"], async_scheduling=True, **SHAPE)
    s.add_request(request("a", 10, 3, grammar=True))
    with caplog.at_level(logging.INFO, "vllm.neuron_sched"):
        for _ in range(1000):
            step(s)
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Head of")]
    assert logged == [f"Head of the queue: {s.explain()}"]
    assert s.explain().reason == "blocked"


# Commands


def arguments():
    """Return the container arguments of the page."""
    (text,) = (text for _, text in blocks(PAGE, "yaml"))
    container = yaml.safe_load(text)
    return [*container["command"], *container["args"]]


def neuron_config_argument():
    """Return the `neuron_config` of the container arguments."""
    given = arguments()
    return json.loads(given[given.index("--additional-config") + 1])["neuron_config"]


def test_the_commands_of_the_page_are_those_that_are_tested():
    """The README shows the same `vllm` command, and the container arguments of `test_the_server` start with it."""
    ((first, _),) = commands(PAGE, "vllm")
    assert commands(PAGE.parent.parent / "README.md", "vllm") == [(first, "")]
    assert shlex.split(first) == arguments()[: len(shlex.split(first))]
    shell = "".join(text for _, text in blocks(PAGE, "console", "sh", "bash"))
    assert re.findall(r"^\$ (\S+)", shell, re.MULTILINE) == ["vllm", "curl"], "the page has a command that no test runs"


@needs_cpu_platform
@pytest.mark.server
def test_the_server(model_in_cwd, tmp_path):
    """It starts with the documented arguments, logs the documented line and answers the documented request."""
    log, port = tmp_path / "server.log", free_port()
    given = arguments()
    assert given[0] == "vllm"
    test_flags = ["--host=127.0.0.1", f"--port={port}"]
    for name, value in TINY.items():
        flag = f"--{name.replace('_', '-')}"
        test_flags.append(flag if value is True else f"{flag}={value}")
    with process([sys.executable, "-m", "vllm.entrypoints.cli.main", *given[1:], *test_flags], log) as child:
        wait_until_healthy(child, f"http://127.0.0.1:{port}")
        assert startup_line() in log.read_text()
        assert re.search(r"Using custom scheduler class .* is not\s+public", log.read_text())

        ((command, _),) = commands(PAGE, "curl")
        answer = subprocess.run(
            shlex.split(command.replace("localhost:8000", f"127.0.0.1:{port}")), capture_output=True, check=True
        )
        answer = json.loads(answer.stdout)
        assert (answer["model"], answer["usage"]["prompt_tokens"]) == ("MODEL", 16)
        assert 1 <= answer["usage"]["completion_tokens"] <= 20
        assert child.poll() is None
