"""`vllm serve` of a tiny model with `NeuronAsyncScheduler`, queried over HTTP."""

import contextlib
import json
import re
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import psutil
import requests
from vllm.platforms import current_platform

from tests.vllm.support.model import write_model
from tests.vllm.support.server import command, free_port, process, wait_until_healthy

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


@contextlib.contextmanager
def serving(folder, **flags):
    """Start a server and wait until it answers. Print its log if the block raises."""
    url, log = f"http://127.0.0.1:{(port := free_port())}", folder / "server.log"
    arguments = command("serve", write_model(folder / "model"), host="127.0.0.1", port=port, **{**FLAGS, **flags})
    with process(arguments, log) as child:
        wait_until_healthy(child, url)
        yield SimpleNamespace(url=url, log=log, child=child, model=folder / "model")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def logged_server(request, server):
    """The server. If the test fails, the lines that the server logged during the test are printed."""
    failed, start = request.session.testsfailed, server.log.stat().st_size
    yield server
    if request.session.testsfailed > failed:
        print(f"---- {server.log.name}\n{server.log.read_bytes()[start:][-20_000:].decode(errors='replace')}")


# The tokens of a to z. Most others have no text or are part of a character, and are not streamed immediately.
LETTERS = list(range(67, 93))


def complete(server, prompt, **options):
    """Return the response to a completion request."""
    defaults = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "allowed_token_ids": LETTERS}
    body = {**defaults, "prompt": prompt, **options}
    return requests.post(f"{server.url}/v1/completions", json=body, timeout=120, stream=options.get("stream", False))


def events(response):
    """Yield the events of a streamed completion as they arrive."""
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def metric(server, name, **labels):
    """Return the sum of a metric over its samples with these labels."""
    required = [f'{label}="{value}"' for label, value in labels.items()]
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    samples = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    found = [float(value) for given, value in samples if all(label in given for label in required)]
    assert found, f"no metric {name}"
    return sum(found)


def check_alive(server):
    """Assert that the server still answers."""
    assert server.child.poll() is None
    answer = complete(server, "hello")
    assert answer.status_code == 200, answer.text


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds} s"
        time.sleep(0.1)


@pytest.mark.server
def test_the_engine_is_asynchronous_and_uses_the_scheduler_class(logged_server):
    assert initialized_schedulers(logged_server.log) == [("NeuronAsyncScheduler", 2)]


def initialized_schedulers(log):
    """Return (class name, batches in flight) of each engine that the log reports."""
    log = log.read_text()
    names = re.findall(r"Initialized (\w+) on vLLM .* buckets ", log)
    return list(zip(names, map(int, re.findall(r"Batch queue is enabled with size (\d+)", log)), strict=True))


@pytest.mark.server
def test_a_streamed_completion_equals_the_unstreamed_one(logged_server):
    whole = complete(logged_server, "Once upon a time", max_tokens=20).json()
    assert whole["usage"] == {**whole["usage"], "prompt_tokens": 16, "completion_tokens": 20}
    parts = list(events(complete(logged_server, "Once upon a time", max_tokens=20, stream=True)))
    assert len(parts) > 1
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


@contextlib.contextmanager
def suspended_engine(server):
    """Suspend the engine process within the block. The API server process continues."""
    processes = psutil.Process(server.child.pid).children(recursive=True)
    (engine,) = [process for process in processes if "EngineCore" in "".join(process.cmdline())]
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


@pytest.mark.server
def test_the_request_of_a_client_that_disconnects_is_aborted(logged_server):
    """Its KV blocks are freed, and the next client is served."""
    before, start = metric(logged_server, "vllm:generation_tokens_total"), logged_server.log.stat().st_size
    with complete(logged_server, "a long completion", max_tokens=1400, stream=True) as response:
        parts = events(response)
        assert next(parts)["choices"][0]["finish_reason"] is None
        # Otherwise the tiny model could finish before the server notices that the client has disconnected.
        with suspended_engine(logged_server):
            assert metric(logged_server, "vllm:num_requests_running") == 1
            response.close()
            wait_until(lambda: re.search(rb"Request \S+ aborted", logged_server.log.read_bytes()[start:]))
    wait_until(lambda: metric(logged_server, "vllm:num_requests_running") == 0)
    check_alive(logged_server)
    assert metric(logged_server, "vllm:generation_tokens_total") - before < 1400, (
        "the aborted request was computed to completion"
    )
    assert metric(logged_server, "vllm:num_requests_running") == metric(logged_server, "vllm:num_requests_waiting") == 0
    assert metric(logged_server, "vllm:kv_cache_usage_perc") == 0


@pytest.mark.server
def test_a_prompt_above_max_model_len_gets_status_400(logged_server):
    answer = complete(logged_server, "x" * (MAX_MODEL_LEN + 1))
    assert answer.status_code == 400
    assert str(MAX_MODEL_LEN) in answer.text
    check_alive(logged_server)


@pytest.mark.server
def test_a_request_that_can_never_run_gets_status_500(logged_server):
    """Its worst case is within `max_model_len` and above the KV cache. Other requests are served."""
    answer = complete(logged_server, "x" * (USABLE_TOKENS - 6), max_tokens=8)
    assert answer.status_code == 500, answer.text
    check_alive(logged_server)
    # The largest request that fits: the last output token needs no KV slot.
    answer = complete(logged_server, "x" * (USABLE_TOKENS - 7), max_tokens=8)
    assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.server
def test_structured_output_follows_its_json_schema(logged_server):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green", "blue"]}},
        "required": ["ok", "colour"],
        "additionalProperties": False,
    }
    options = {"max_tokens": 60, "ignore_eos": False, "structured_outputs": {"json": schema}, "allowed_token_ids": None}
    answer = complete(logged_server, "Tell me a colour", **options).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert json.loads(answer["text"]).keys() == {"ok", "colour"}


def bench(server, folder, requests):
    """Run vLLM's load client against the server and return its result file."""
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
def test_200_requests_of_the_load_client(logged_server, tmp_path):
    result = bench(logged_server, tmp_path, 200)
    assert (result["completed"], result["failed"]) == (200, 0)
    assert result["total_output_tokens"] > 200
    assert metric(logged_server, "vllm:num_preemptions_total") == 0
    check_alive(logged_server)


REFUSED = {
    "sync class in an async engine": {"scheduler-cls": "neuron_sched.NeuronScheduler"},
    "invalid bucket": {"additional-config": json.dumps({"neuron_config": {"num_seqs_buckets": [1, 2, 4]}})},
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Return (process, log) by name, of servers that are started at the same time to save time."""
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
    ("name", "message"),
    [
        ("sync class in an async engine", r"neuron_sched\.NeuronAsyncScheduler.*--no-async-scheduling"),
        ("invalid bucket", r"num_seqs_buckets: .*8"),
    ],
)
def test_a_server_with_an_invalid_configuration_does_not_start(refused, name, message):
    child, log = refused[name]
    assert child.wait(300) != 0
    text = log.read_text()
    assert re.search(rf"ValueError: .*{message}", text), text[-20_000:]


@pytest.mark.slow_server
def test_two_data_parallel_ranks(tmp_path):
    with serving(tmp_path, **{"data-parallel-size": 2}) as server:
        result = bench(server, tmp_path, 200)
        assert (result["completed"], result["failed"]) == (200, 0)
        ranks = {rank for rank in range(2) if metric(server, "vllm:request_success_total", engine=rank)}
        assert ranks == {0, 1}, "a rank has served no request"
    assert initialized_schedulers(server.log) == [("NeuronAsyncScheduler", 2)] * 2
