"""docs/vllm.md: its Python and its commands are run, and every line of a log or an error that it shows is produced.

The page shows what vLLM 0.32.0 says of itself; on other releases the number is put in its place.
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
from test_docs import blocks, commands, run_doctest, table
from test_vllm_server import free_port, process, until_it_answers
from vllm_harness import build, request, step
from vllm_model import write_model
from vllm_setup import Logged

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:  # up to 0.26
    from vllm.utils import FlexibleArgumentParser

PAGE = Path(__file__).parent.parent / "docs/vllm.md"
TEXT = PAGE.read_text()
SHOWN_RELEASE = "0.32.0"
# What the arguments of the page say, and what the tests with a small cache change.
SHAPE = {"max_num_seqs": 8, "max_model_len": 2048, "max_num_batched_tokens": 512, "block_size": 32, "num_blocks": 513}
SMALL = {**SHAPE, "num_blocks": 49}
# The tiny model has no weights, and is not to be compiled.
TINY = {"load_format": "dummy", "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}


def one_line(text):
    return " ".join(text.split())


SHOWN = [one_line(text) for _, text in blocks(PAGE, "text")]


# Every sentence that the page shows


def refusal(cls=NeuronScheduler, neuron_config=None, **shape):
    with pytest.raises((ValueError, RuntimeError)) as error:
        build(cls, neuron_config=neuron_config, **shape)
    return f"{error.type.__name__}: {error.value}"


def warning_of(**shape):
    with Logged() as log:
        build(NeuronScheduler, **shape)
    return log.warnings[0]


def start_line():
    with Logged() as log:
        build(NeuronAsyncScheduler, async_scheduling=True, neuron_config=arguments_of_ours(), **SHAPE)
    return log.infos[0]


def never_fits():
    s = build(NeuronScheduler, **SMALL)
    with Logged() as log:
        s.add_request(request("big", 1530, 8))
    return log.warnings[0]


def dropped():
    s = build(NeuronScheduler, **SHAPE)
    with Logged() as log:
        s.add_request(request("a", 10))
        s.add_request(request("a", 20))
    return log.errors[0]


def watchdog():
    s = build(NeuronScheduler, **SHAPE)
    s.add_request(request("a", 10, 3, grammar=True))
    with Logged() as log:
        for _ in range(100):
            step(s)
    return log.warnings[0]


def without_vllm():
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


def built_differently():
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Scheduler, "_free_blocks")
        return refusal()


def outside_the_range():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.34.0")
        return warning_of()


BROKEN = {"max_prefills_per_batch": 0, "num_batched_tokens_buckets": [128, 256], "kv_admission": "hope"}
SENTENCES = {
    "the line at the start": start_line,
    "a cache for no longest sequence": lambda: warning_of(**SMALL),
    "a request that can never run": never_fits,
    "an id that is taken": dropped,
    "the watchdog": watchdog,
    "sync class": lambda: refusal(async_scheduling=True),
    "no mapping": lambda: refusal(neuron_config=["chunking"]),
    "told twice": lambda: refusal(neuron_config={"max_num_seqs": 8}),
    "broken rules": lambda: refusal(neuron_config=BROKEN, **SHAPE),
    "max_model_len": lambda: refusal(neuron_config={"kv_admission": "max_model_len"}, **SMALL),
    "without vLLM": without_vllm,
    "built differently": built_differently,
    "outside the range": outside_the_range,
}


@pytest.mark.parametrize("name", SENTENCES)
def test_it_says_what_the_page_shows(name):
    said = one_line(SENTENCES[name]()).replace(vllm.__version__, SHOWN_RELEASE)
    assert said in SHOWN


def test_every_sentence_is_tested():
    assert len(SHOWN) == len(set(SHOWN)) == len(SENTENCES)


# Tables


def test_every_field_has_an_example_that_is_taken():
    rows = table(PAGE, "field", "an example, as JSON")
    examples = {re.match(r"\[`(\w+)`\]", field)[1]: json.loads(example.strip("`")) for field, example in rows}
    assert tuple(examples) == config.FIELDS
    for field, value in examples.items():
        more = {"chunking": "bucket"} if field == "prefill_cost" else {}
        s = build(NeuronScheduler, neuron_config={field: value, **more}, **SHAPE)
        taken = getattr(s.neuron_config, field)
        assert taken == ({int(k): v for k, v in value.items()} if isinstance(value, dict) else value)
        default = getattr(build(NeuronScheduler, **SHAPE).neuron_config, field)
        assert taken != default, "an example of the default shows nothing"


def test_the_other_fields_and_their_flags():
    rows = table(PAGE, "field", "flag of vLLM")
    flags = {field.strip("`"): re.match(r"`(--[\w-]+)`", flag)[1] for field, flag in rows}
    assert flags == config._FLAGS


def test_vllm_knows_the_flags_of_the_page():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    known = {flag for action in parser._actions for flag in action.option_strings}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert len(used) > 10
    assert used - known == set()


def test_names_on_the_scheduler():
    """What the page says that one finds on a scheduler and on its output."""
    s = build(NeuronScheduler, **SHAPE)
    s.add_request(request("a", 10))
    output = step(s)
    named = set(re.findall(r"`(\w+)(?:\(request\))?`", TEXT))
    found = {name for name in named if hasattr(s, name) or hasattr(output, name)}
    assert {"SchedulerState", "get_bucket_for_count"} <= {name for name in named if hasattr(module, name)}
    assert {name for name in named if name.startswith("get_") and not hasattr(module, name)} == set()
    assert {"can_schedule", "at_capacity", "num_seqs_padded", "_grammar_bitmask", "refusal", "empty_steps"} <= found
    assert {name for name in named if re.match(r"(num_|total_|_)", name)} - found <= {"num_blocks"} | set(config.FIELDS)


# Python


@pytest.fixture
def model_here(tmp_path, monkeypatch):
    """A model under the name that the page gives it."""
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "MODEL")


@pytest.fixture
def one_process(monkeypatch):
    """vLLM's engine in this process. What it leaves behind in it is taken back."""
    from vllm.distributed import cleanup_dist_env_and_memory

    environment, set_num_threads, state = dict(os.environ), torch.set_num_threads, random.getstate()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    torch.set_num_threads = set_num_threads
    random.setstate(state)
    cleanup_dist_env_and_memory()
    os.environ.clear()
    os.environ.update(environment)


on_a_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="this vLLM is not built for the CPU")


@on_a_cpu
@pytest.mark.engine
@pytest.mark.filterwarnings("default")  # libraries that vLLM loads warn
def test_python_blocks(model_here, one_process, monkeypatch):
    """The blocks are one program, with the engine of the first for all."""
    llms, original = [], vllm.LLM

    def tiny(*args, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()):  # its log is no output of the example
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


def test_the_class_that_tells(caplog):
    """The example of a subclass: run alone, since no engine takes a thousand steps here."""
    (text,) = (text for _, text in blocks(PAGE, "python") if "class TellingScheduler" in text)
    names = {"__name__": "docs"}
    exec(compile(text, PAGE, "exec"), names)
    s = build(names["TellingScheduler"], async_scheduling=True, **SHAPE)
    s.add_request(request("a", 10, 3, grammar=True))
    with caplog.at_level(logging.INFO, "vllm.neuron_sched"):
        for _ in range(1000):
            step(s)
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Head of")]
    assert told == [f"Head of the queue: {s.explain()}"]
    assert s.explain().reason == "blocked"


# Commands


def arguments():
    """The arguments of a container, as the page gives them."""
    (text,) = (text for _, text in blocks(PAGE, "yaml"))
    read = yaml.safe_load(text)
    return [*read["command"], *read["args"]]


def arguments_of_ours():
    given = arguments()
    return json.loads(given[given.index("--additional-config") + 1])["neuron_config"]


def test_the_commands_of_the_page():
    """The first is the README's too, and the beginning of the container's, which the server below is started with."""
    ((first, _),) = commands(PAGE, "vllm")
    assert commands(PAGE.parent.parent / "README.md", "vllm") == [(first, "")]
    assert shlex.split(first) == arguments()[: len(shlex.split(first))]
    shell = "".join(text for _, text in blocks(PAGE, "console", "sh", "bash"))
    assert re.findall(r"^\$ (\S+)", shell, re.MULTILINE) == ["vllm", "curl"], "no other command is there to be run"


@on_a_cpu
@pytest.mark.server
def test_the_server(model_here, tmp_path):
    """It starts with the documented arguments, says the documented line and answers the documented request."""
    log, port = tmp_path / "server.log", free_port()
    given = arguments()
    assert given[0] == "vllm"
    hidden = ["--host=127.0.0.1", f"--port={port}"]
    for name, value in TINY.items():
        flag = f"--{name.replace('_', '-')}"
        hidden.append(flag if value is True else f"{flag}={value}")
    with process([sys.executable, "-m", "vllm.entrypoints.cli.main", *given[1:], *hidden], log) as child:
        until_it_answers(child, f"http://127.0.0.1:{port}")
        assert start_line() in log.read_text()
        assert re.search(r"Using custom scheduler class .* is not\s+public", log.read_text())

        ((asked, _),) = commands(PAGE, "curl")
        answer = subprocess.run(
            shlex.split(asked.replace("localhost:8000", f"127.0.0.1:{port}")), capture_output=True, check=True
        )
        answer = json.loads(answer.stdout)
        assert (answer["model"], answer["usage"]["prompt_tokens"]) == ("MODEL", 16)
        assert 1 <= answer["usage"]["completion_tokens"] <= 20
        assert child.poll() is None
