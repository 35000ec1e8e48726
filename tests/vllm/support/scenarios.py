"""Scenarios: states of a scheduler before a step.

Each function calls `build` with configuration and returns the scheduler, its engine and the request ids in order of
arrival. Decodes that the base class does not see during a prefill step are hidden.
"""

from vllm.v1.request import RequestStatus

from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.grammar import set_compiled_grammar
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add


def first_prompts(build):
    s = build()
    add(s, a=(100, 3), b=(20, 3), c=(20, 2))
    return s, Engine(s), "abc"


def head_with_hidden_decodes(build):
    s = build()
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(3):
        engine.step()
    add(s, c=(20, 2), d=(20, 2))
    return s, engine, "abcd"


def chunk_with_hidden_decodes(build):
    s = build()
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(3):
        engine.step()
    add(s, c=(150, 2), d=(20, 2))
    engine.step()
    return s, engine, "abcd"


def decodes_without_free_slot(build):
    s = build(max_num_seqs=3)
    engine = Engine(s)
    add(s, a=(16, 20), b=(16, 20), c=(16, 20))
    for _ in range(3):
        engine.step()
    add(s, d=(20, 2))
    return s, engine, "abcd"


def packed_heads(build):
    s = build(neuron_config={"max_prefills_per_batch": 3}, max_num_seqs=6)
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    engine.step()
    engine.step()
    add(s, c=(20, 2), d=(20, 2), e=(20, 3), f=(100, 2))
    return s, engine, "abcdef"


def blocked_requests_between_others(build):
    s = build()
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    g, h = request("g", 10, 2, grammar=True), request("h", 10, 2, grammar=True)
    for r in (g, request("c", 20, 2), h, request("d", 20, 2)):
        s.add_request(r)
    engine.step()
    set_compiled_grammar(g)
    set_compiled_grammar(h)
    return s, engine, "agchd"


def head_without_free_blocks(build):
    """Return a scenario with two calls of the base class: the first allocates no blocks for c, the second decodes."""
    s = build()
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(3):
        engine.step()
    add(s, c=(20, 2))
    original = s.kv_cache_manager.allocate_slots
    failures = [None]

    def fail_once(req, *args, **kwargs):
        if req.status != RequestStatus.RUNNING and failures:
            return failures.pop()
        return original(req, *args, **kwargs)

    s.kv_cache_manager.allocate_slots = fail_once
    return s, engine, "abc"


def capped_chunk(build):
    s = build(long_prefill_token_threshold=32)
    engine = Engine(s)
    add(s, a=(10, 9), b=(60, 2))
    engine.step()
    return s, engine, "ab"


def long_prompt_alone(build):
    s = build(long_prefill_token_threshold=32)
    engine = Engine(s)
    add(s, a=(150, 2))
    return s, engine, "a"


def chunk_up_to_bucket(build):
    s = build(max_num_batched_tokens=1024, max_model_len=1024, neuron_config={"chunking": "bucket"})
    engine = Engine(s)
    add(s, b=(10, 9))
    engine.step()
    add(s, a=(530, 2))
    return s, engine, "ba"


SCENARIOS = [
    first_prompts,
    head_with_hidden_decodes,
    chunk_with_hidden_decodes,
    decodes_without_free_slot,
    packed_heads,
    blocked_requests_between_others,
    head_without_free_blocks,
    capped_chunk,
    long_prompt_alone,
    chunk_up_to_bucket,
]
