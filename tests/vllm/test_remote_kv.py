"""Requests whose KV blocks a connector loads: admission and queue order while they load and afterwards."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronScheduler, SchedulerState
from tests.vllm.support.engine_loop import Engine
from tests.vllm.support.grammar import set_compiled_grammar
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add, waiting_ids
from tests.vllm.support.schedulers import both_classes, every_engine, num_free_blocks, with_connector


@every_engine
def test_a_head_without_a_connector_answer_is_skipped_in_the_same_call(cls, ahead):
    s = with_connector(cls, async_scheduling=bool(ahead))
    engine = Engine(s, ahead)
    s.connector.answers = {"b": (None, False), "c": (None, False)}
    add(s, b=(10, 1), c=(10, 1), d=(10, 2), e=(10, 2))
    assert engine.step().num_scheduled_tokens == {"d": 10}
    assert waiting_ids(s) == ["b", "c", "e"]
    s.connector.answers = {}
    engine.run()
    assert engine.steps == [{"d": 10}, {"b": 10}, {"c": 10}, {"e": 10}, {"d": 1, "e": 1}]


@both_classes
def test_the_connector_is_queried_once_a_step_for_each_request(cls):
    s = with_connector(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    s.connector.answers = {"b": (None, False), "c": (None, False)}
    add(s, b=(10, 1), c=(10, 1))
    for _ in range(3):
        s.connector.lookups.clear()
        assert engine.step().num_scheduled_tokens == {"a": 1}, "no decode although no head could be admitted"
        assert s.connector.lookups == ["b", "c"]
    assert waiting_ids(s) == ["b", "c"]


@both_classes
def test_skipped_heads_do_not_count_towards_max_prefills_per_batch(cls):
    s = with_connector(cls, neuron_config={"max_prefills_per_batch": 2})
    engine = Engine(s)
    s.connector.answers = {"b": (None, False), "d": (None, False)}
    add(s, b=(10, 1), c=(10, 2), d=(10, 1), e=(10, 2), f=(10, 2))
    assert engine.step().num_scheduled_tokens == {"c": 10, "e": 10}
    assert waiting_ids(s) == ["b", "d", "f"]


@every_engine
def test_a_head_that_starts_to_load_is_skipped_in_the_same_call(cls, ahead):
    s = with_connector(cls, async_scheduling=bool(ahead))
    engine = Engine(s, ahead)
    s.connector.answers = {"p": (32, True)}
    add(s, p=(50, 2), b=(10, 2))
    assert engine.step().num_scheduled_tokens == {"b": 10}
    assert s.requests["p"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.step().num_scheduled_tokens == {"b": 1}
    engine.step(received=["p"])
    engine.step()
    assert engine.steps[2:3] == [{"p": 18}]
    engine.run()
    assert engine.outputs == {"p": 2, "b": 2}


@both_classes
def test_loaded_requests_are_admitted_in_order_of_arrival(cls):
    s = with_connector(cls)
    engine = Engine(s)
    s.connector.answers = {"p": (32, True), "q": (32, True)}
    add(s, p=(50, 1), q=(50, 1))
    assert engine.step().num_scheduled_tokens == {}
    engine.step(received=["q"])
    assert engine.step().num_scheduled_tokens == {"q": 18}
    engine.step(received=["p"])
    assert engine.step().num_scheduled_tokens == {"p": 18}
    s.connector.answers = {"r": (32, True), "t": (32, True)}
    add(s, r=(50, 1), t=(50, 1))
    assert engine.step().num_scheduled_tokens == {}
    engine.step(received=["t", "r"])
    engine.run()
    assert engine.steps[2:] == [{"r": 18}, {"t": 18}]


@both_classes
def test_loading_requests_keep_their_reservation(cls):
    """Of 7 usable blocks, p has 4 allocated for its load and 5 reserved, so 2 are left for other requests."""
    s = with_connector(cls, num_blocks=8)
    engine = Engine(s)
    s.connector.answers = {"p": (64, True)}
    add(s, p=(70, 3))
    engine.step()
    assert num_free_blocks(s) <= 3
    add(s, b=(30, 10))
    assert engine.step().num_scheduled_tokens == {}
    assert (s.explain().id, s.explain().reason) == ("b", "kv")
    assert (s.explain().needed, s.explain().reserved, s.explain().usable) == (3, 5, 7)
    engine.step(received=["p"])
    engine.run()
    assert engine.outputs == {"p": 3, "b": 10}
    assert engine.steps[0] == {"p": 6}


@both_classes
def test_a_loaded_request_is_admitted_before_a_head_that_needs_its_blocks(cls):
    """g arrived first and needs the whole KV cache. p has blocks allocated, which are freed only when p finishes."""
    s = with_connector(cls, num_blocks=8)
    engine = Engine(s)
    g = request("g", 60, 40, grammar=True)
    s.add_request(g)
    s.connector.answers = {"p": (64, True)}
    add(s, p=(70, 3))
    engine.step()
    assert s.requests["p"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    set_compiled_grammar(g)
    engine.step(received=["p"])
    engine.run(limit=100)
    assert engine.outputs == {"p": 3, "g": 40}


@both_classes
def test_an_aborted_loading_request_frees_its_blocks_after_the_load(cls):
    s = with_connector(cls)
    engine = Engine(s)
    s.connector.answers = {"p": (64, True)}
    add(s, p=(70, 3), a=(10, 9))
    engine.step()
    s.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    s.check()
    assert engine.step().finished_req_ids == {"p"}
    engine.step(received=["p"])
    engine.run()
    assert engine.outputs == {"a": 9}
    assert num_free_blocks(s) == 399


@both_classes
def test_blocks_of_a_failed_load_are_recomputed(cls):
    s = with_connector(cls)
    engine = Engine(s)
    s.connector.answers = {"p": (32, True)}
    add(s, p=(50, 2))
    engine.step()
    first = s.kv_cache_manager.get_block_ids("p")[0][0]
    engine.schedule()
    engine.process_outputs(invalid_block_ids={first}, finished_recving={"p"})
    s.connector.answers = {}
    s.check()
    engine.run()
    assert engine.steps == [{"p": 50}, {"p": 1}]
    assert engine.outputs == {"p": 2}


@both_classes
@pytest.mark.parametrize("both", [False, True], ids=["one-request", "two-requests"])
def test_a_decoding_request_whose_synchronous_load_failed_is_prefilling_again(cls, both):
    s = with_connector(cls)
    engine = Engine(s)
    s.connector.answers = {"p": (32, False), "q": (32, False)}
    add(s, a=(10, 9), p=(50, 3), q=(50, 3))
    for _ in range(4):
        engine.step()
    assert engine.steps == [{"a": 10}, {"p": 18}, {"q": 18}, {"a": 1, "p": 1, "q": 1}]
    invalid = {s.kv_cache_manager.get_block_ids(name)[0][0] for name in (("p", "q") if both else ("p",))}
    engine.schedule()
    engine.process_outputs(invalid_block_ids=invalid)
    s.check()
    assert s.has_prefill_in_running
    engine.run()
    recomputed = ["p", "q"] if both else ["p"]
    assert [list(step) for step in engine.steps[5 : 5 + len(recomputed)]] == [[name] for name in recomputed]
    assert [kind[0] for kind in engine.kinds[4 : 6 + len(recomputed)]] == ["D", *["P"] * len(recomputed), "D"]
    if cls is NeuronScheduler:  # The async base class also counts the token whose output was dropped.
        assert engine.steps[5] == {"p": 52}
    assert engine.outputs == {"a": 9, "p": 3, "q": 3}
    assert num_free_blocks(s) == 399


@both_classes
def test_a_failed_load_finishes_its_request_with_failure_policy_fail(cls):
    s = with_connector(cls, failed_load="fail", num_blocks=8)
    engine = Engine(s)
    s.connector.answers = {"p": (64, True)}
    add(s, p=(70, 2), a=(10, 4))
    engine.step()
    first = s.kv_cache_manager.get_block_ids("p")[0][0]
    engine.schedule()
    engine.process_outputs(invalid_block_ids={first})
    s.check()
    assert engine.errors == ["p"]
    if "p" in s.requests:  # Its blocks are kept until the transfer has finished.
        engine.step(received=["p"])
    add(s, b=(64, 2))
    engine.run()
    assert engine.outputs == {"p": 0, "a": 4, "b": 2}
    assert num_free_blocks(s) == 7


# --- the decode node of a disaggregated pair ---


REMOTE = {"do_remote_prefill": True, "do_remote_decode": False}


def add_remote(sched, *names, answer=(64, True)):
    """Add requests whose prompts of 64 tokens another node has computed, and set the connector's answer for each."""
    for name in names:
        r = request(name, 64, 3)
        r.kv_transfer_params = REMOTE
        sched.connector.answers[name] = answer
        sched.add_request(r)


@both_classes
def test_the_last_token_of_a_remotely_computed_prompt_is_a_decode(cls):
    s = with_connector(cls)
    engine = Engine(s)
    engine.remote_prefills = {"p"}
    add(s, a=(10, 20))
    engine.step()
    add_remote(s, "p")
    engine.step()
    engine.step(received=["p"])
    out = engine.step()
    assert list(out.num_scheduled_tokens.items()) == [("a", 1), ("p", 1)]
    assert (out.num_scheduled_tokens_padded, out.num_seqs_padded) == ({"a": 1, "p": 1}, 2)
    engine.run()
    assert engine.outputs == {"a": 20, "p": 3}
    assert set(engine.kinds[1:]) == {"D"}


@both_classes
def test_several_remotely_computed_prompts_start_to_load_in_one_call(cls):
    """A head that starts to load is skipped, and the next head is offered to the base class."""
    s = with_connector(cls)
    engine = Engine(s)
    add(s, a=(10, 20))
    engine.step()
    add_remote(s, "p", "q")
    add(s, c=(10, 2))
    assert engine.step().num_scheduled_tokens == {"c": 10}
    assert [s.requests[name].status for name in "pq"] == [RequestStatus.WAITING_FOR_REMOTE_KVS] * 2


@both_classes
def test_a_remotely_computed_prompt_without_an_answer_blocks_no_other(cls):
    s = with_connector(cls)
    engine = Engine(s)
    add_remote(s, "p", answer=(None, False))
    add_remote(s, "q")
    engine.step()
    assert s.requests["q"].status == RequestStatus.WAITING_FOR_REMOTE_KVS


@both_classes
def test_all_loaded_prompts_join_the_decoding_requests(cls):
    s = with_connector(cls)
    engine = Engine(s)
    engine.remote_prefills = {"p", "q"}
    add(s, a=(10, 20))
    engine.step()
    add_remote(s, "p", "q")
    engine.step()
    engine.step()
    engine.step(received=["p", "q"])
    engine.run()
    assert engine.outputs == {"a": 20, "p": 3, "q": 3}
    assert set(engine.kinds[1:]) == {"D"}, "a prefill step after the prompt of a"


@both_classes
def test_a_loaded_prompt_joins_the_decoding_requests_in_a_throttled_step(cls):
    s = with_connector(cls)
    engine = Engine(s)
    engine.remote_prefills = {"p"}
    add(s, a=(10, 20))
    engine.step()
    add_remote(s, "p")
    engine.step()
    engine.step(received=["p"])
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "p": 1}


@both_classes
def test_a_synchronously_loaded_prompt_is_a_decode(cls):
    s = with_connector(cls, neuron_config={"num_seqs_buckets": [2, 4]})
    engine = Engine(s)
    engine.remote_prefills = {"p"}
    add_remote(s, "p", answer=(63, False))
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"p": 1}, {"p": 1})
    assert out.num_seqs_padded == 2
    assert s.state == SchedulerState.ACTIVE_DECODE
    engine.run()
    assert engine.outputs == {"p": 3}


@both_classes
def test_a_loaded_prompt_without_other_requests_is_a_decode_step(cls):
    s = with_connector(cls, neuron_config={"num_seqs_buckets": [2, 4]})
    engine = Engine(s)
    engine.remote_prefills = {"p"}
    add_remote(s, "p")
    engine.step()
    engine.step(received=["p"])
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"p": 1}, {"p": 1})
    assert out.num_seqs_padded == 2
    assert (s.total_scheduled_tokens, s.total_padding_tokens) == (0, 0)
    engine.run()
    assert engine.outputs == {"p": 3}


@both_classes
@pytest.mark.parametrize(
    "params", [None, {"do_remote_prefill": True, "do_remote_decode": True}], ids=["plain", "prefill-node"]
)
def test_a_last_prompt_token_is_a_prefill_unless_another_node_computes_the_prompt(cls, params):
    s = with_connector(cls)
    engine = Engine(s)
    add(s, a=(10, 20))
    engine.step()
    s.connector.answers["p"] = (64, True)
    p = request("p", 64, 3)
    p.kv_transfer_params = params
    s.add_request(p)
    engine.step()
    engine.step(received=["p"])
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"p": 1}, {"p": 64})
    engine.run()
    assert engine.outputs == {"a": 20, "p": 3}


@both_classes
def test_skipping_many_heads_is_linear_in_their_number(cls):
    checked = []

    class Counting(cls):
        def _is_ready(self, request):
            checked.append(request.request_id)
            return super()._is_ready(request)

    s = with_connector(Counting)
    for i in range(200):
        s.connector.answers[f"p{i}"] = (None, False)
    add(s, **{f"p{i}": (10, 2) for i in range(200)}, last=(10, 2))
    assert Engine(s).step().num_scheduled_tokens == {"last": 10}
    assert len(checked) < 5 * 200
    assert waiting_ids(s) == [f"p{i}" for i in range(200)]


@both_classes
def test_v26_the_prefix_cache_lookup_of_a_skipped_head_is_not_counted(cls):
    """The skipped head is in the same call of the base class as an admitted one."""
    s = with_connector(cls, prefix_caching=True, neuron_config={"max_prefills_per_batch": 2})
    s.connector.answers["a"] = (None, False)
    add(s, a=(20, 2), b=(24, 2))
    assert s.schedule().num_scheduled_tokens == {"b": 24}
    stats = s.kv_cache_manager.prefix_cache_stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 24, 0)
