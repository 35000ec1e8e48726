"""docs/runner.md, "A vLLM worker": its program runs steps of both schedulers, and its list of refusals is whole."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from test_docs import NEEDS_VLLM_TOO, blocks
from vllm_harness import request
from vllm_setup import build_ahead, every_engine

PAGE = Path(__file__).parent.parent / "docs/runner.md"
NUM_BLOCKS = 400


def following(token, position):
    """The token that the made-up model puts behind one at that position."""
    return (7 * token + position) % 97


def model(batch):
    """Logits of each row whose largest is that of the following token; those of padding are not numbers."""
    logits = np.full((len(batch.logits_index), 97), np.nan, np.float32)
    for row in range(len(batch.request_ids)):
        at = batch.logits_index[row]
        logits[row] = np.arange(97) == following(batch.input_ids[at], batch.positions[at])
    return logits


def runner(vllm_config):
    ((line, text),) = [(line, text) for line, text in blocks(PAGE, "python") if NEEDS_VLLM_TOO.search(text)]
    names = {"__name__": "docs"}
    exec(compile("\n" * line + text, PAGE, "exec"), names)
    return names["Runner"](vllm_config, NUM_BLOCKS, model)


@every_engine
def test_the_worker_of_the_page(cls, ahead):
    """The tokens of every request are those of the model alone."""
    read = []
    s = build_ahead(cls, ahead, edit=read.append, num_blocks=NUM_BLOCKS)
    worker = runner(read[0])
    assert worker.inputs.config == s.neuron_config
    requests = {f"r{i}": request(f"r{i}", 1 + 17 * i, 1 + 2 * i) for i in range(6)}
    expected = {}
    for name, one in requests.items():
        tokens = list(one.prompt_token_ids)
        for _ in range(one.max_tokens):
            tokens.append(following(tokens[-1], len(tokens) - 1))
        expected[name] = tokens[one.num_prompt_tokens :]
        s.add_request(one)
    emitted, in_flight = {name: [] for name in requests}, []
    while s.requests:
        out = s.schedule()
        in_flight.append((out, worker.execute_model(out)))
        while len(in_flight) > ahead:
            out, running = in_flight.pop(0)
            result = running.get_output() if out.num_scheduled_tokens else running
            for outputs in s.update_from_output(out, result).values():
                for one in outputs.outputs:
                    emitted[one.request_id] += one.new_token_ids
    assert emitted == expected
