"""Requests that wait for something outside the scheduler, or that vLLM's own pass skips, and whose turn it is then."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler, SchedulerState
from vllm_harness import request
from vllm_setup import (
    Engine,
    add,
    both_classes,
    build,
    build_ahead,
    compiled,
    every_engine,
    lora,
    queued,
    usable_free,
    with_connector,
    with_lora,
)


def grammar_request(name, prompt_len=10, max_tokens=2, **more):
    return request(name, prompt_len, max_tokens, grammar=True, **more)


# --- grammars ---


@every_engine
def test_a_waiter_does_not_stop_those_behind_it(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    g = grammar_request("g")
    s.add_request(g)
    add(s, a=(10, 2), b=(10, 2))
    for _ in range(6):
        engine.step()
    assert engine.steps == [{"a": 10}, {"b": 10}, {"a": 1, "b": 1}]
    compiled(g)
    engine.run()
    assert engine.outputs == {"a": 2, "b": 2, "g": 2}


@both_classes
def test_a_waiter_keeps_its_turn(cls):
    s = build(cls, max_num_seqs=1)
    engine = Engine(s)
    add(s, a=(10, 3))
    engine.step()
    g1, g2 = grammar_request("g1", max_tokens=1), grammar_request("g2", max_tokens=1)
    for r in (g1, request("b", 10, 1), g2, request("c", 10, 1)):
        s.add_request(r)
    engine.step()
    compiled(g2)
    compiled(g1)
    engine.run()
    assert engine.steps == [{"a": 10}, {"a": 1}, {"a": 1}, {"g1": 10}, {"b": 10}, {"g2": 10}, {"c": 10}]


@both_classes
def test_waiters_are_polled_in_order_of_arrival(cls):
    s = build(cls)
    engine = Engine(s)
    waiters = [grammar_request(f"g{i}", max_tokens=1) for i in range(4)]
    for r in waiters:
        s.add_request(r)
    engine.step()
    for i in (3, 1, 2, 0):
        compiled(waiters[i])
    engine.run()
    assert engine.steps == [{f"g{i}": 10} for i in range(4)]


@both_classes
def test_only_ready_waiters_start_and_the_rest_keep_their_order(cls):
    s = build(cls)
    engine = Engine(s)
    waiters = [grammar_request(f"g{i}", max_tokens=1) for i in range(4)]
    for r in waiters:
        s.add_request(r)
    compiled(waiters[2])
    assert engine.step().num_scheduled_tokens == {"g2": 10}
    assert engine.step().num_scheduled_tokens == {}
    compiled(waiters[3])
    compiled(waiters[0])
    add(s, z=(10, 1))
    for _ in range(3):
        engine.step()
    assert engine.steps[1:] == [{"g0": 10}, {"g3": 10}, {"z": 10}]
    assert queued(s) == ["g1"]


@both_classes
def test_priority_over_waiters_and_ready_ones(cls):
    s = build(cls, policy="priority", max_num_seqs=1)
    engine = Engine(s)
    g = grammar_request("g", max_tokens=1, priority=1)
    s.add_request(g)
    for name, priority in {"lo": 9, "mid": 3, "hi": 0}.items():
        s.add_request(request(name, 10, 1, priority=priority))
    assert engine.step().num_scheduled_tokens == {"hi": 10}
    compiled(g)
    engine.run()
    assert engine.steps[1:] == [{"g": 10}, {"mid": 10}, {"lo": 10}]


class Polled:
    """A structured output request whose grammar counts how often it is looked at."""

    def __init__(self, inner):
        self.inner = inner
        self.polls = 0

    @property
    def grammar(self):
        self.polls += 1
        return self.inner.grammar

    def __getattr__(self, name):
        return getattr(self.inner, name)


@both_classes
def test_each_waiter_is_polled_at_most_once_a_step(cls):
    s = build(cls)
    engine = Engine(s)
    waiters = [grammar_request(f"g{i}") for i in range(5)]
    for r in waiters:
        r.structured_output_request = Polled(r.structured_output_request)
        s.add_request(r)
    add(s, a=(10, 9))
    for _ in range(4):
        engine.step()
    assert max(r.structured_output_request.polls for r in waiters) <= 4


@both_classes
def test_waiters_do_not_count_as_prompts_that_wait(cls):
    s = build(cls, neuron_config={"max_consecutive_prefill_steps": 1})
    engine = Engine(s)
    s.add_request(grammar_request("g"))
    add(s, a=(10, 5))
    for _ in range(3):
        engine.step()
    assert engine.kinds == ["P10", "D", "D"]
    assert (s.explain().id, s.explain().reason) == ("g", "blocked")
    add(s, b=(10, 1))
    assert engine.step().num_scheduled_tokens == {"b": 10}, "no decode step was owed to anybody"


@every_engine
def test_abort_of_a_waiter(cls, ahead):
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    s.add_request(grammar_request("g"))
    add(s, a=(10, 3))
    engine.step()
    s.finish_requests("g", RequestStatus.FINISHED_ABORTED)
    s.check()
    assert queued(s) == []
    assert engine.step().finished_req_ids == {"g"}
    engine.run()
    assert engine.outputs == {"a": 3}


@both_classes
@pytest.mark.parametrize("beside", [0, 5], ids=["alone", "beside-decodes"])
def test_a_grammar_that_cannot_be_compiled_ends_its_request(cls, beside):
    s = build(cls)
    if not hasattr(s, "grammar_compile_error_reqs"):
        pytest.skip("this vLLM raises when a grammar cannot be compiled")
    engine = Engine(s)
    if beside:
        add(s, a=(10, beside))
        engine.step()
    g = grammar_request("g")
    s.add_request(g)
    engine.step()
    compiled(g, ValueError("no such grammar"))
    engine.run(limit=20)
    assert engine.errors == ["g"]
    assert engine.outputs == {"g": 0, **({"a": 5} if beside else {})}


# --- remote KV ---


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
    g = grammar_request("g", 60, 40)
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


# --- adapters ---


@every_engine
def test_adapters_in_use_are_those_of_the_hidden_decodes_too(cls, ahead):
    """One adapter at a time: b waits until a has ended, c needs none."""
    s = with_lora(cls, max_loras=1, async_scheduling=bool(ahead))
    engine = Engine(s, ahead)
    s.add_request(lora(request("a", 10, 4), 1))
    engine.step()
    s.add_request(lora(request("b", 10, 2), 2))
    add(s, c=(10, 2))
    s.add_request(lora(request("d", 10, 2), 1))
    engine.run()
    assert engine.steps[:3] == [{"a": 10}, {"c": 10}, {"d": 10}]
    assert engine.outputs == {"a": 4, "b": 2, "c": 2, "d": 2}
    assert [step for step in engine.steps if "b" in step and len(step) > 1] == []


@both_classes
def test_adapters_within_a_packed_prefill(cls):
    s = with_lora(cls, max_loras=1, neuron_config={"max_prefills_per_batch": 2})
    engine = Engine(s)
    for name, number in {"a": 1, "b": 2, "c": 1}.items():
        s.add_request(lora(request(name, 10, 2), number))
    assert engine.step().num_scheduled_tokens == {"a": 10, "c": 10}
    engine.run()
    assert engine.steps[1:] == [{"a": 1, "c": 1}, {"b": 10}, {"b": 1}]


@both_classes
def test_adapters_of_a_packed_prefill_and_of_hidden_decodes_together(cls):
    """Two adapters at a time: a's and one more; the third would be one too many in the next decode step."""
    s = with_lora(cls, max_loras=2, neuron_config={"max_prefills_per_batch": 3}, max_num_seqs=6)
    engine = Engine(s)
    s.add_request(lora(request("a", 10, 6), 1))
    engine.step()
    for name, number in {"b": 2, "c": 3, "d": 2, "e": 1}.items():
        s.add_request(lora(request(name, 10, 2), number))
    assert engine.step().num_scheduled_tokens == {"b": 10, "d": 10, "e": 10}
    engine.run()
    assert engine.outputs == {"a": 6, "b": 2, "c": 2, "d": 2, "e": 2}


# --- what vLLM's pass skips for other reasons ---


@both_classes
def test_stale_output_in_flight_lets_the_next_start(cls):
    s = build(cls)
    engine = Engine(s)
    b = request("b", 10, 1)
    if not hasattr(b, "num_stale_output_tokens"):
        pytest.skip("this vLLM keeps no count of stale output")
    b.num_stale_output_tokens = 1
    s.add_request(b)
    add(s, c=(10, 1), d=(10, 1))
    assert engine.step().num_scheduled_tokens == {"c": 10}
    b.num_stale_output_tokens = 0
    engine.run()
    assert engine.steps == [{"c": 10}, {"b": 10}, {"d": 10}]


class EncoderConnector:
    """Another node encodes images; `pending` are the requests whose images have not come."""

    def __init__(self):
        self.pending = set()
        self.built = 0

    def ensure_cache_available(self, request, num_computed_tokens):
        return request.request_id not in self.pending

    def build_connector_meta(self, scheduler_output):
        self.built += 1
        return f"meta {self.built}"

    def request_finished(self, request):
        return False, None

    def take_unavailable_requests(self):
        return ()

    def get_ec_connector_stats(self):
        return None

    def has_pending_push_work(self):
        return False


@both_classes
def test_images_on_their_way_let_the_next_start(cls):
    s = build(cls)
    s.ec_connector = EncoderConnector()
    s.ec_connector.pending = {"b"}
    engine = Engine(s)
    b = request("b", 10, 1)
    b.mm_features = [object()]
    s.add_request(b)
    add(s, c=(10, 2), d=(10, 2))
    assert engine.step().num_scheduled_tokens == {"c": 10}
    assert engine.step().num_scheduled_tokens == {"d": 10}
    assert engine.step().num_scheduled_tokens == {"c": 1, "d": 1}
    assert engine.outs[-1].ec_connector_metadata == f"meta {s.ec_connector.built}"
    assert s.ec_connector.built == 3, "once a step, also when a prefill pass came to nothing"
    b.mm_features = []
    s.ec_connector = None
    assert engine.step().num_scheduled_tokens == {"b": 10}


# --- sessions with streamed input ---


def session(name, prompt_len, max_tokens, resumable=True):
    r = request(name, prompt_len, max_tokens)
    r.resumable = resumable
    return r


@every_engine
def test_a_waiting_session_keeps_its_slot(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=2)
    engine = Engine(s, ahead)
    s.add_request(session("s", 10, 2))
    add(s, a=(10, 30))
    for _ in range(5):
        engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    add(s, b=(10, 2))
    for _ in range(3):
        assert engine.step().num_scheduled_tokens == {"a": 1}
    assert (s.explain().id, s.explain().reason) == ("b", "slots")
    s.add_request(session("s", 1, 1, resumable=False))
    s.check()
    engine.run()
    assert engine.outputs == {"s": 2, "a": 30, "b": 2}


@both_classes
def test_a_session_may_become_as_long_as_the_model_allows(cls):
    """6 usable blocks of 16, model length 64: the session counts 4, so b (3 blocks) has to wait."""
    s = build(cls, max_model_len=64, num_blocks=7)
    engine = Engine(s)
    s.add_request(session("s", 10, 2))
    engine.step()
    engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    add(s, b=(30, 10))
    assert engine.step().num_scheduled_tokens == {}
    why = s.explain()
    assert (why.id, why.reason, why.needed, why.reserved, why.usable) == ("b", "kv", 3, 4, 6)
    s.add_request(session("s", 1, 1, resumable=False))
    s.check()
    engine.run()
    assert engine.outputs == {"s": 2, "b": 10}


@every_engine
def test_a_session_goes_on_with_a_prefill_of_what_is_new(cls, ahead):
    """The last sampled token of a turn is dropped: 10 + 2 kept outputs are computed, 20 tokens are new."""
    s = build_ahead(cls, ahead)
    engine = Engine(s, ahead)
    s.add_request(session("s", 10, 3))
    add(s, a=(10, 30))
    for _ in range(7):
        engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    s.add_request(session("s", 20, 3))
    s.check()
    out = engine.step()
    assert (out.num_scheduled_tokens, out.num_scheduled_tokens_padded) == ({"s": 20}, {"s": 64})
    assert engine.step().num_scheduled_tokens == {"a": 1, "s": 1}
    for _ in range(4):
        engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    s.add_request(session("s", 1, 1, resumable=False))
    engine.run()
    assert engine.outputs == {"s": 6, "a": 30}
    assert usable_free(s) == 399


@both_classes
def test_input_that_came_early_is_used_when_the_turn_ends(cls):
    s = build(cls)
    engine = Engine(s)
    s.add_request(session("s", 10, 2))
    s.add_request(session("s", 6, 2))
    s.add_request(session("s", 1, 1, resumable=False))
    s.check()
    engine.run()
    assert engine.steps == [{"s": 10}, {"s": 1}, {"s": 6}, {"s": 1}]
    assert engine.outputs == {"s": 4}


@both_classes
@pytest.mark.parametrize("early", [False, True], ids=["input-comes-late", "input-came-early"])
def test_a_session_that_goes_on_does_not_wait_for_one_who_needs_its_blocks(cls, early):
    """7 usable blocks, 4 of them promised to the session: x (4) waits for its end, and must not keep it from ending."""
    s = build(cls, max_model_len=64, num_blocks=8)
    engine = Engine(s)
    s.add_request(session("s", 10, 2))
    engine.step()
    add(s, x=(50, 10), y=(10, 2))
    if early:
        s.add_request(session("s", 5, 2))
    engine.step()
    if not early:
        assert engine.step().num_scheduled_tokens == {}
        assert (s.explain().id, s.explain().reason) == ("x", "kv")
        s.add_request(session("s", 5, 2))
    assert engine.step().num_scheduled_tokens == {"s": 5}
    engine.step()
    s.add_request(session("s", 1, 1, resumable=False))
    engine.run(limit=50)
    assert engine.outputs == {"s": 4, "x": 10, "y": 2}


@both_classes
@pytest.mark.parametrize("early", [False, True], ids=["input-comes-late", "input-came-early"])
def test_a_session_that_goes_on_does_not_wait_for_one_who_needs_its_slot(cls, early):
    """Both slots belong to sessions; p came before their next turns and holds blocks, but has no slot."""
    s = with_connector(cls, max_num_seqs=2)
    engine = Engine(s)
    s.connector.answers["p"] = (32, True)
    s.add_request(session("s", 10, 4))
    engine.step()
    add(s, p=(50, 2))
    assert engine.step().num_scheduled_tokens == {"s": 1}
    assert s.requests["p"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    s.add_request(session("t", 10, 1))
    if early:
        s.add_request(session("s", 5, 1))
    assert engine.step().num_scheduled_tokens == {"t": 10}
    assert engine.step().num_scheduled_tokens == {"s": 1}
    assert engine.step(received=["p"]).num_scheduled_tokens == {"s": 1}
    if not early:
        assert engine.step().num_scheduled_tokens == {}
        assert (s.explain().id, s.explain().reason) == ("p", "slots")
        s.add_request(session("s", 5, 1))
    assert list(engine.step().num_scheduled_tokens) == ["s"]
    for name in "st":
        s.add_request(session(name, 1, 1, resumable=False))
    engine.run(limit=50)
    assert engine.outputs["p"] == 2


@both_classes
def test_a_session_starts_only_where_its_longest_fits(cls):
    """6 usable blocks, 3 of them a's: the session may become 4 blocks long."""
    s = build(cls, max_model_len=64, num_blocks=7)
    engine = Engine(s)
    add(s, a=(30, 10))
    engine.step()
    s.add_request(session("s", 10, 1))
    assert engine.step().num_scheduled_tokens == {"a": 1}
    why = s.explain()
    assert (why.id, why.reason, why.needed, why.reserved, why.usable) == ("s", "kv", 4, 3, 6)


@every_engine
def test_abort_of_a_session_that_waits_for_input(cls, ahead):
    s = build_ahead(cls, ahead, max_num_seqs=1)
    engine = Engine(s, ahead)
    s.add_request(session("s", 10, 2))
    for _ in range(4):
        engine.step()
    add(s, b=(10, 2))
    assert engine.step().num_scheduled_tokens == {}
    s.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    s.check()
    engine.run()
    assert engine.outputs == {"s": 2, "b": 2}
    assert usable_free(s) == 399


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


def test_names_of_classes():
    """Both ways of asking for the classes give the same ones."""
    import neuron_sched

    assert neuron_sched.NeuronScheduler is NeuronScheduler
    assert neuron_sched.NeuronAsyncScheduler is NeuronAsyncScheduler


@both_classes
def test_a_session_that_outgrows_the_model_ends_with_an_error(cls):
    """200 tokens and a next prompt of 150, model length 256: the session ends, and nobody waits behind it."""
    s = build(cls, max_model_len=256, max_num_batched_tokens=64)
    engine = Engine(s)
    s.add_request(session("s", 200, 3))
    for _ in range(8):
        engine.step()
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    s.add_request(session("s", 150, 3))
    add(s, x=(10, 2))
    s.check()
    engine.run()
    assert engine.errors == ["s"] and engine.outputs["x"] == 2
    assert usable_free(s) == 399


@both_classes
def test_nobody_is_asked_while_all_slots_are_taken(cls):
    s = build(cls, max_num_seqs=1)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    waiter = grammar_request("g")
    waiter.structured_output_request = Polled(waiter.structured_output_request)
    s.add_request(waiter)
    for _ in range(4):
        engine.step()
    assert waiter.structured_output_request.polls == 0


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
def test_one_without_an_adapter_does_not_saturate_a_rank(cls):
    s = with_lora(cls)
    engine = Engine(s)
    s.add_request(lora(request("a", 10, 30), 1))
    engine.step()
    s.add_request(lora(request("b", 10, 3), 2))
    engine.step()
    add(s, c=(10, 2))
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"a": 1}
    assert engine.step().num_scheduled_tokens == {"c": 10}


@both_classes
def test_v26_a_look_up_that_came_to_nothing_is_not_counted(cls):
    """Also where the head that was passed over shares the pass with one that starts."""
    s = with_connector(cls, prefix_caching=True, neuron_config={"max_prefills_per_batch": 2})
    s.connector.answers["a"] = (None, False)
    add(s, a=(20, 2), b=(24, 2))
    assert s.schedule().num_scheduled_tokens == {"b": 24}
    stats = s.kv_cache_manager.prefix_cache_stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 24, 0)
