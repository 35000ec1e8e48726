"""Requests that wait for a grammar, or that vLLM's own pass skips, and whose turn it is then."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import request
from vllm_setup import Engine, add, both_classes, build, build_ahead, compiled, every_engine, queued


def grammar_request(name, prompt_len=10, max_tokens=2, **more):
    return request(name, prompt_len, max_tokens, grammar=True, **more)


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


def test_names_of_classes():
    """Both ways of asking for the classes give the same ones."""
    import neuron_sched

    assert neuron_sched.NeuronScheduler is NeuronScheduler
    assert neuron_sched.NeuronAsyncScheduler is NeuronAsyncScheduler


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
