"""docs/runner.md, "A vLLM worker": the program runs the steps of both schedulers."""

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from tests.support.pages import NEEDS_VLLM_TOO, blocks
from tests.support.paths import ROOT
from tests.vllm.support.harness import request
from tests.vllm.support.schedulers import build_ahead, every_engine

PAGE = ROOT / "docs/runner.md"
NUM_BLOCKS = 400


def next_token(token, position):
    """Return the token that the fake model samples after a token at a position."""
    return (7 * token + position) % 97


def model(batch):
    """Return logits, shape `[rows, 97]`, float32: highest at the next token of each row, NaN in padding rows."""
    logits = np.full((len(batch.logits_index), 97), np.nan, np.float32)
    for row in range(len(batch.request_ids)):
        at = batch.logits_index[row]
        logits[row] = np.arange(97) == next_token(batch.input_ids[at], batch.positions[at])
    return logits


def runner(vllm_config):
    """Return the `Runner` that the page defines."""
    ((line, text),) = [(line, text) for line, text in blocks(PAGE, "python") if NEEDS_VLLM_TOO.search(text)]
    names = {"__name__": "docs"}
    exec(compile("\n" * line + text, PAGE, "exec"), names)
    return names["Runner"](vllm_config, NUM_BLOCKS, model)


@every_engine
def test_the_worker_of_the_page_gives_each_request_the_tokens_of_the_model(cls, ahead):
    configs = []
    s = build_ahead(cls, ahead, edit=configs.append, num_blocks=NUM_BLOCKS)
    worker = runner(configs[0])
    assert worker.inputs.config == s.neuron_config
    requests = {f"r{i}": request(f"r{i}", 1 + 17 * i, 1 + 2 * i) for i in range(6)}
    expected = {}
    for name, req in requests.items():
        tokens = list(req.prompt_token_ids)
        for _ in range(req.max_tokens):
            tokens.append(next_token(tokens[-1], len(tokens) - 1))
        expected[name] = tokens[req.num_prompt_tokens :]
        s.add_request(req)
    emitted, in_flight = {name: [] for name in requests}, []
    while s.requests:
        out = s.schedule()
        in_flight.append((out, worker.execute_model(out)))
        while len(in_flight) > ahead:
            out, running = in_flight.pop(0)
            result = running.get_output() if out.num_scheduled_tokens else running
            for outputs in s.update_from_output(out, result).values():
                for output in outputs.outputs:
                    emitted[output.request_id] += output.new_token_ids
    assert emitted == expected
