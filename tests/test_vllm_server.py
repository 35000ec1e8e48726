"""A real server: `vllm serve` of a tiny model with our class, asked over HTTP as its users ask it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import psutil
import requests
from vllm.platforms import current_platform

import neuron_sched
import vllm_plugin
from vllm_model import write_model

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="this vLLM is not built for the CPU"),
]

MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 2048, 32, 49
USABLE_TOKENS = (NUM_BLOCKS - 1) * BLOCK_SIZE
FLAGS = {
    "load-format": "dummy",
    "dtype": "float32",
    "enforce-eager": True,
    "max-model-len": MAX_MODEL_LEN,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 512,
    "block-size": BLOCK_SIZE,
    "num-gpu-blocks-override": NUM_BLOCKS,
    "kv-cache-memory-bytes": 64 << 20,
    "served-model-name": "tiny",
    "structured-outputs-config": json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
    "scheduler-cls": "neuron_sched.NeuronAsyncScheduler",
    "enable-log-requests": True,
}


def command(*arguments, **flags):
    """The command line of `vllm`."""
    given = []
    for name, value in flags.items():
        given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *map(str, arguments), *given]


def environment():
    """With the package under test and the plug-in of vllm_plugin."""
    folders = [Path(neuron_sched.__file__).parent.parent, *vllm_plugin.__path__, os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder),
        "VLLM_LOGGING_LEVEL": "INFO",
    }


@contextlib.contextmanager
def process(arguments, log):
    """A command that runs with everything it starts in a group of its own, which does not outlive the block."""
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
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until_it_answers(child, url):
    deadline = time.monotonic() + 300
    while True:
        assert child.poll() is None, f"the server went with exit code {child.returncode}"
        assert time.monotonic() < deadline, "the server does not come up"
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{url}/health", timeout=10).status_code == 200:
                return
        time.sleep(0.5)


@contextlib.contextmanager
def serving(folder, **flags):
    """A server that answers; its log is shown when it does not come up."""
    url, log = f"http://127.0.0.1:{(port := free_port())}", folder / "server.log"
    arguments = command("serve", write_model(folder / "model"), host="127.0.0.1", port=port, **{**FLAGS, **flags})
    with process(arguments, log) as child:
        until_it_answers(child, url)
        yield SimpleNamespace(url=url, log=log, child=child, model=folder / "model")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def told(request, server):
    """The server, and what it wrote to its log during a test that failed."""
    failed, start = request.session.testsfailed, server.log.stat().st_size
    yield server
    if request.session.testsfailed > failed:
        print(f"---- {server.log.name}\n{server.log.read_bytes()[start:][-20_000:].decode(errors='replace')}")


# a to z. Most other tokens have no text, or are a part of a character, and are not streamed at once.
LETTERS = list(range(67, 93))


def complete(server, prompt, **more):
    fixed = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "allowed_token_ids": LETTERS}
    body = {**fixed, "prompt": prompt, **more}
    return requests.post(f"{server.url}/v1/completions", json=body, timeout=120, stream=more.get("stream", False))


def events(response):
    """The parts of a streamed completion, as they come."""
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def metric(server, name, **labels):
    """The sum of a metric over its samples that carry these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    samples = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    found = [float(value) for given, value in samples if all(label in given for label in wanted)]
    assert found, f"no metric {name}"
    return sum(found)


def lives(server):
    assert server.child.poll() is None
    answer = complete(server, "still there?")
    assert answer.status_code == 200, answer.text
    return answer.json()


def eventually(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)


@pytest.mark.server
def test_the_engine_is_asynchronous_and_has_our_class(told):
    assert initialized(told.log) == [("NeuronAsyncScheduler", 2)]


def initialized(log):
    """The schedulers that started, and how many batches their engines keep in flight, as the log has it."""
    log = log.read_text()
    names = re.findall(r"Initialized (\w+) on vLLM .* buckets ", log)
    return list(zip(names, map(int, re.findall(r"Batch queue is enabled with size (\d+)", log)), strict=True))


@pytest.mark.server
def test_completions_are_streamed(told):
    whole = complete(told, "Once upon a time", max_tokens=20).json()
    assert whole["usage"] == {**whole["usage"], "prompt_tokens": 16, "completion_tokens": 20}
    parts = list(events(complete(told, "Once upon a time", max_tokens=20, stream=True)))
    assert len(parts) > 1
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


@contextlib.contextmanager
def engine_stands_still(server):
    """Its process is stopped within the block; the process that answers HTTP goes on."""
    processes = psutil.Process(server.child.pid).children(recursive=True)
    (engine,) = [process for process in processes if "EngineCore" in "".join(process.cmdline())]
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


@pytest.mark.server
def test_a_client_that_hangs_up(told):
    """Its request is aborted and holds nothing any more; the next client is served."""
    before, start = metric(told, "vllm:generation_tokens_total"), told.log.stat().st_size
    with complete(told, "for ever", max_tokens=1400, stream=True) as response:
        parts = events(response)
        assert next(parts)["choices"][0]["finish_reason"] is None
        # A tiny model would have computed the rest before the server has seen that nobody listens.
        with engine_stands_still(told):
            assert metric(told, "vllm:num_requests_running") == 1
            response.close()
            eventually(lambda: re.search(rb"Request \S+ aborted", told.log.read_bytes()[start:]))
    eventually(lambda: metric(told, "vllm:num_requests_running") == 0)
    lives(told)
    assert metric(told, "vllm:generation_tokens_total") - before < 1400, "it was not computed to its end"
    assert metric(told, "vllm:num_requests_running") == metric(told, "vllm:num_requests_waiting") == 0
    assert metric(told, "vllm:kv_cache_usage_perc") == 0


@pytest.mark.server
def test_a_prompt_that_is_too_long(told):
    answer = complete(told, "x" * (MAX_MODEL_LEN + 1))
    assert answer.status_code == 400
    assert str(MAX_MODEL_LEN) in answer.text
    lives(told)


@pytest.mark.server
def test_a_request_that_can_never_fit(told):
    """Within max_model_len, but above the whole KV cache: an error for it, service for the others."""
    answer = complete(told, "x" * (USABLE_TOKENS - 6), max_tokens=8)
    assert answer.status_code == 500, answer.text
    lives(told)
    # The largest that fits: the last token needs no place.
    answer = complete(told, "x" * (USABLE_TOKENS - 7), max_tokens=8)
    assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.server
def test_output_held_to_a_json_schema(told):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green", "blue"]}},
        "required": ["ok", "colour"],
        "additionalProperties": False,
    }
    more = {"max_tokens": 60, "ignore_eos": False, "structured_outputs": {"json": schema}, "allowed_token_ids": None}
    answer = complete(told, "Tell me a colour", **more).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert json.loads(answer["text"]).keys() == {"ok", "colour"}


def bench(server, folder, requests):
    """vLLM's own load client; what it counted."""
    flags = {
        "backend": "vllm",
        "base-url": server.url,
        "model": "tiny",
        "tokenizer": server.model,
        "dataset-name": "random",
        "random-input-len": 200,
        "random-output-len": 16,
        "random-range-ratio": 0.9,
        "num-prompts": requests,
        "ignore-eos": True,
        "temperature": 0,
        "save-result": True,
        "result-dir": folder,
        "result-filename": "result.json",
    }
    with process(command("bench", "serve", **flags), folder / "bench.log") as child:
        assert child.wait(400) == 0
        return json.loads((folder / "result.json").read_text())


@pytest.mark.server
def test_two_hundred_requests_of_the_load_client(told, tmp_path):
    result = bench(told, tmp_path, 200)
    assert (result["completed"], result["failed"]) == (200, 0)
    assert result["total_output_tokens"] > 200
    assert metric(told, "vllm:num_preemptions_total") == 0
    lives(told)


REFUSED = {
    "sync class under an async engine": {"scheduler-cls": "neuron_sched.NeuronScheduler"},
    "wrong bucket": {"additional-config": json.dumps({"neuron_config": {"num_seqs_buckets": [1, 2, 4]}})},
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """{name: (process, log)}, started together to save time."""
    folder = tmp_path_factory.mktemp("refused")
    model = write_model(folder / "model")
    with contextlib.ExitStack() as running:
        started = {}
        for name, flags in REFUSED.items():
            arguments, log = command("serve", model, port=free_port(), **{**FLAGS, **flags}), folder / f"{name}.log"
            started[name] = running.enter_context(process(arguments, log)), log
        yield started


@pytest.mark.server
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("sync class under an async engine", r"neuron_sched\.NeuronAsyncScheduler.*--no-async-scheduling"),
        ("wrong bucket", r"num_seqs_buckets: .*8"),
    ],
)
def test_a_server_that_refuses_to_start(refused, name, sentence):
    child, log = refused[name]
    assert child.wait(300) != 0
    text = log.read_text()
    assert re.search(rf"ValueError: .*{sentence}", text), text[-20_000:]


@pytest.mark.slow_server
def test_two_data_parallel_ranks(tmp_path):
    with serving(tmp_path, **{"data-parallel-size": 2}) as server:
        result = bench(server, tmp_path, 200)
        assert (result["completed"], result["failed"]) == (200, 0)
        ranks = {rank for rank in range(2) if metric(server, "vllm:request_success_total", engine=rank)}
        assert ranks == {0, 1}, "both have served"
    assert initialized(server.log) == [("NeuronAsyncScheduler", 2)] * 2
