"""Requests whose KV blocks come from elsewhere: whose turn it is while they are loaded, and after."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronScheduler, SchedulerState
from vllm_harness import request
from vllm_setup import Engine, add, both_classes, compiled, every_engine, queued, usable_free, with_connector


@every_engine
def test_a_connector_without_an_answer_lets_the_next_start_in_the_same_pass(cls, ahead):
    s = with_connector(cls, async_scheduling=bool(ahead))
    engine = Engine(s, ahead)
    s.connector.answers = {"b": (None, False), "c": (None, False)}
    add(s, b=(10, 1), c=(10, 1), d=(10, 2), e=(10, 2))
    assert engine.step().num_scheduled_tokens == {"d": 10}
    assert queued(s) == ["b", "c", "e"]
    s.connector.answers = {}
    engine.run()
    assert engine.steps == [{"d": 10}, {"b": 10}, {"c": 10}, {"e": 10}, {"d": 1, "e": 1}]


@both_classes
def test_a_connector_is_asked_once_a_step(cls):
    s = with_connector(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    s.connector.answers = {"b": (None, False), "c": (None, False)}
    add(s, b=(10, 1), c=(10, 1))
    for _ in range(3):
        s.connector.asked.clear()
        assert engine.step().num_scheduled_tokens == {"a": 1}, "nobody could be placed: the decodes run"
        assert s.connector.asked == ["b", "c"]
    assert queued(s) == ["b", "c"]


@both_classes
def test_skipped_heads_do_not_count_towards_the_prefills_of_a_pass(cls):
    s = with_connector(cls, neuron_config={"max_prefills_per_batch": 2})
    engine = Engine(s)
    s.connector.answers = {"b": (None, False), "d": (None, False)}
    add(s, b=(10, 1), c=(10, 2), d=(10, 1), e=(10, 2), f=(10, 2))
    assert engine.step().num_scheduled_tokens == {"c": 10, "e": 10}
    assert queued(s) == ["b", "d", "f"]


@every_engine
def test_a_load_that_begins_lets_the_next_start_in_the_same_pass(cls, ahead):
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
def test_finished_loads_start_in_order_of_arrival(cls):
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
def test_loading_requests_count_for_the_cache(cls):
    """7 usable blocks: p holds 4 for its load and needs 5 in all, so 2 are left for others."""
    s = with_connector(cls, num_blocks=8)
    engine = Engine(s)
    s.connector.answers = {"p": (64, True)}
    add(s, p=(70, 3))
    engine.step()
    assert usable_free(s) <= 3
    add(s, b=(30, 10))
    assert engine.step().num_scheduled_tokens == {}
    assert (s.explain().id, s.explain().reason) == ("b", "kv")
    assert (s.explain().needed, s.explain().reserved, s.explain().usable) == (3, 5, 7)
    engine.step(received=["p"])
    engine.run()
    assert engine.outputs == {"p": 3, "b": 10}
    assert engine.steps[0] == {"p": 6}


@both_classes
def test_whoever_holds_blocks_never_waits_behind_one_who_needs_them(cls):
    """g came first and needs the whole cache; p holds a part of it meanwhile and must be able to finish."""
    s = with_connector(cls, num_blocks=8)
    engine = Engine(s)
    g = request("g", 60, 40, grammar=True)
    s.add_request(g)
    s.connector.answers = {"p": (64, True)}
    add(s, p=(70, 3))
    engine.step()
    assert s.requests["p"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    compiled(g)
    engine.step(received=["p"])
    engine.run(limit=100)
    assert engine.outputs == {"p": 3, "g": 40}


@both_classes
def test_abort_of_a_loading_request_frees_its_blocks_when_the_load_has_ended(cls):
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
    assert usable_free(s) == 399


@both_classes
def test_a_failed_load_is_computed_here(cls):
    s = with_connector(cls)
    engine = Engine(s)
    s.connector.answers = {"p": (32, True)}
    add(s, p=(50, 2))
    engine.step()
    first = s.kv_cache_manager.get_block_ids("p")[0][0]
    engine.schedule()
    engine.settle(invalid_block_ids={first}, finished_recving={"p"})
    s.connector.answers = {}
    s.check()
    engine.run()
    assert engine.steps == [{"p": 50}, {"p": 1}]
    assert engine.outputs == {"p": 2}


@both_classes
@pytest.mark.parametrize("both", [False, True], ids=["one", "two"])
def test_a_decode_whose_loaded_blocks_failed_is_a_prompt_again(cls, both):
    """The blocks were loaded in the step itself; when they turn out to be bad the prompt is computed here."""
    s = with_connector(cls)
    engine = Engine(s)
    s.connector.answers = {"p": (32, False), "q": (32, False)}
    add(s, a=(10, 9), p=(50, 3), q=(50, 3))
    for _ in range(4):
        engine.step()
    assert engine.steps == [{"a": 10}, {"p": 18}, {"q": 18}, {"a": 1, "p": 1, "q": 1}]
    bad = {s.kv_cache_manager.get_block_ids(name)[0][0] for name in (("p", "q") if both else ("p",))}
    engine.schedule()
    engine.settle(invalid_block_ids=bad)
    s.check()
    assert s.has_prefill_in_running
    engine.run()
    again = ["p", "q"] if both else ["p"]
    assert [list(step) for step in engine.steps[5 : 5 + len(again)]] == [[name] for name in again]
    assert [kind[0] for kind in engine.kinds[4 : 6 + len(again)]] == ["D", *["P"] * len(again), "D"]
    if cls is NeuronScheduler:  # the async base counts the token whose output was dropped once more
        assert engine.steps[5] == {"p": 52}
    assert engine.outputs == {"a": 9, "p": 3, "q": 3}
    assert usable_free(s) == 399


@both_classes
def test_a_failed_load_ends_its_request_where_that_is_the_policy(cls):
    s = with_connector(cls, failed_load="fail", num_blocks=8)
    engine = Engine(s)
    s.connector.answers = {"p": (64, True)}
    add(s, p=(70, 2), a=(10, 4))
    engine.step()
    first = s.kv_cache_manager.get_block_ids("p")[0][0]
    engine.schedule()
    engine.settle(invalid_block_ids={first})
    s.check()
    assert engine.errors == ["p"]
    if "p" in s.requests:  # its blocks are kept until the transfer has ended
        engine.step(received=["p"])
    add(s, b=(64, 2))
    engine.run()
    assert engine.outputs == {"p": 0, "a": 4, "b": 2}
    assert usable_free(s) == 7


# --- a node that only decodes ---


def remote(name, prompt_len, max_tokens, **params):
    r = request(name, prompt_len, max_tokens)
    r.kv_transfer_params = params
    return r


@both_classes
def test_the_last_token_of_a_remote_prompt_is_a_decode(cls):
    s = with_connector(cls)
    engine = Engine(s)
    engine.remote = {"p"}
    add(s, a=(10, 20))
    engine.step()
    s.connector.answers["p"] = (64, True)
    s.add_request(remote("p", 64, 3, do_remote_prefill=True, do_remote_decode=False))
    engine.step()
    engine.step(received=["p"])
    out = engine.step()
    assert list(out.num_scheduled_tokens.items()) == [("a", 1), ("p", 1)]
    assert (out.num_scheduled_tokens_padded, out.num_seqs_padded) == ({"a": 1, "p": 1}, 2)
    engine.run()
    assert engine.outputs == {"a": 20, "p": 3}
    assert set(engine.kinds[1:]) == {"D"}


REMOTE = {"do_remote_prefill": True, "do_remote_decode": False}


@both_classes
def test_loads_of_several_remote_prompts_begin_in_one_pass(cls):
    """A head whose load begins is blocked for that step, and the next one has its chance, remote as well."""
    s = with_connector(cls)
    engine = Engine(s)
    add(s, a=(10, 20))
    engine.step()
    for name in ("p", "q"):
        s.connector.answers[name] = (64, True)
        s.add_request(remote(name, 64, 3, **REMOTE))
    add(s, c=(10, 2))
    assert engine.step().num_scheduled_tokens == {"c": 10}
    assert [s.requests[name].status for name in "pq"] == [RequestStatus.WAITING_FOR_REMOTE_KVS] * 2


@both_classes
def test_a_remote_prompt_without_an_answer_stops_no_other_remote_one(cls):
    s = with_connector(cls)
    engine = Engine(s)
    s.connector.answers = {"p": (None, False), "q": (64, True)}
    for name in ("p", "q"):
        s.add_request(remote(name, 64, 3, **REMOTE))
    engine.step()
    assert s.requests["q"].status == RequestStatus.WAITING_FOR_REMOTE_KVS


@both_classes
def test_remote_prompts_that_have_come_all_join_the_decodes(cls):
    s = with_connector(cls)
    engine = Engine(s)
    engine.remote = {"p", "q"}
    add(s, a=(10, 20))
    engine.step()
    for name in ("p", "q"):
        s.connector.answers[name] = (64, True)
        s.add_request(remote(name, 64, 3, **REMOTE))
    engine.step()
    engine.step()
    engine.step(received=["p", "q"])
    engine.run()
    assert engine.outputs == {"a": 20, "p": 3, "q": 3}
    assert set(engine.kinds[1:]) == {"D"}, "every step after a's prompt was a decode"


@both_classes
def test_a_remote_prompt_joins_the_decodes_of_a_throttled_step(cls):
    s = with_connector(cls)
    engine = Engine(s)
    engine.remote = {"p"}
    add(s, a=(10, 20))
    engine.step()
    s.connector.answers["p"] = (64, True)
    s.add_request(remote("p", 64, 3, do_remote_prefill=True, do_remote_decode=False))
    engine.step()
    engine.step(received=["p"])
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1, "p": 1}


@both_classes
def test_a_remote_prompt_found_in_the_step_itself_is_a_decode_too(cls):
    s = with_connector(cls, neuron_config={"num_seqs_buckets": [2, 4]})
    engine = Engine(s)
    engine.remote = {"p"}
    s.connector.answers["p"] = (63, False)
    s.add_request(remote("p", 64, 3, do_remote_prefill=True, do_remote_decode=False))
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"p": 1}, {"p": 1})
    assert out.num_seqs_padded == 2
    assert s.state == SchedulerState.ACTIVE_DECODE
    engine.run()
    assert engine.outputs == {"p": 3}


@both_classes
def test_a_lone_remote_prompt_starts_no_prefill_step(cls):
    s = with_connector(cls, neuron_config={"num_seqs_buckets": [2, 4]})
    engine = Engine(s)
    engine.remote = {"p"}
    s.connector.answers["p"] = (64, True)
    s.add_request(remote("p", 64, 3, do_remote_prefill=True, do_remote_decode=False))
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
def test_other_single_tokens_are_prefills(cls, params):
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
def test_passing_over_many_heads_looks_at_each_of_them_a_few_times(cls):
    looks = []

    class Looking(cls):
        def _is_ready(self, request):
            looks.append(request.request_id)
            return super()._is_ready(request)

    s = with_connector(Looking)
    for i in range(200):
        s.connector.answers[f"p{i}"] = (None, False)
    add(s, **{f"p{i}": (10, 2) for i in range(200)}, last=(10, 2))
    assert Engine(s).step().num_scheduled_tokens == {"last": 10}
    assert len(looks) < 5 * 200
    assert queued(s) == [f"p{i}" for i in range(200)]


@both_classes
def test_v26_a_look_up_that_came_to_nothing_is_not_counted(cls):
    """Also where the head that was passed over shares the pass with one that starts."""
    s = with_connector(cls, prefix_caching=True, neuron_config={"max_prefills_per_batch": 2})
    s.connector.answers["a"] = (None, False)
    add(s, a=(20, 2), b=(24, 2))
    assert s.schedule().num_scheduled_tokens == {"b": 24}
    stats = s.kv_cache_manager.prefix_cache_stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 24, 0)
