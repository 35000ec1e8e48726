"""Errors of the base class within a step: no request is lost, and the next step works."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from tests.vllm.support.engine_loop import LIMITS, Engine
from tests.vllm.support.errors import raise_on_call
from tests.vllm.support.requests import add, request_ids, waiting_ids
from tests.vllm.support.scenarios import SCENARIOS, blocked_requests_between_others, head_without_free_blocks
from tests.vllm.support.schedulers import both_classes, build, every_engine, num_free_blocks, with_connector

QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


class BoomError(Exception):
    """The error that the base class raises."""


def attributes(sched):
    """Return lists by name, limits by name, the names of callable instance attributes, and the running request ids.

    A step may replace them and must restore them.
    """
    lists = {
        name: getattr(sched, name)
        for name in (*QUEUES, "deferred_waiting", "running", "requests")
        if hasattr(sched, name)
    }
    limits = {name: getattr(sched, name, None) for name in LIMITS}
    limits["threshold"] = sched.scheduler_config.long_prefill_token_threshold
    callables = {name for name in vars(sched) if callable(vars(sched)[name])}
    return lists, limits, callables, request_ids(sched.running)


def request_states(sched):
    """Return the ids of each queue, the state of each request, and the number of free KV blocks.

    They do not change before the base class has admitted a request.
    """
    queues = {name: request_ids(getattr(sched, name)) for name in QUEUES if hasattr(sched, name)}
    queues["running"] = request_ids(sched.running)
    states = {
        rid: (r.status, r.num_computed_tokens, r.num_output_placeholders, r.num_tokens)
        for rid, r in sched.requests.items()
    }
    return queues, states, num_free_blocks(sched)


def check_restored(sched, before, arrived):
    """Assert that the attributes are those `before` the step and that the requests are in the order `arrived`."""
    lists, limits, callables, running = before
    lists_after, limits_after, callables_after, running_after = attributes(sched)
    for name, value in lists.items():
        assert lists_after[name] is value, f"{name} is another object"
    assert limits_after == limits
    assert callables_after == callables
    assert sorted(running_after + waiting_ids(sched)) == sorted(
        rid for rid, r in sched.requests.items() if not r.is_finished()
    )
    position = {rid: i for i, rid in enumerate(arrived)}
    assert running_after[: len(running)] == running, "an admitted request is not at the end"
    for name in QUEUES:
        ids = request_ids(getattr(sched, name, ()))
        assert ids == sorted(ids, key=position.get), f"{name} out of order"
    sched.check()


# Methods that the base class calls in a step, and whether it may have admitted a request before the call. None: it has
# not before the first call, and may have before later ones.
RAISING_METHODS = [
    ("kv_cache_manager.new_step_starts", False),
    ("kv_cache_manager.allocate_slots", None),
    ("kv_cache_manager.get_computed_blocks", None),
    ("kv_cache_manager.get_blocks", None),
    ("kv_cache_manager.take_new_block_ids", True),
    ("encoder_cache_manager.get_freed_mm_hashes", True),
    ("_make_cached_request_data", True),
    ("_update_after_schedule", True),
    ("connector.get_num_new_matched_tokens", None),
    ("connector.update_state_after_alloc", None),
    ("connector.build_connector_meta", True),
    ("_build_kv_connector_meta", True),
]


def owner_and_name(sched, path):
    """Return the object that has the last attribute of a path, and the name of that attribute."""
    *owners, name = path.split(".")
    for owner in owners:
        sched = getattr(sched, owner)
    return sched, name


def schedule_or_error(sched):
    """Return (output, None), or (None, error) if the base class raises."""
    try:
        return sched.schedule(), None
    except BoomError as error:
        return None, error


def expected_outputs(sched):
    return {rid: r.max_tokens for rid, r in sched.requests.items()}


@both_classes
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("path", "admitted"), RAISING_METHODS, ids=[path for path, _ in RAISING_METHODS])
def test_no_request_is_lost_when_the_base_class_raises(cls, policy, path, admitted, monkeypatch):
    raised = 0
    for scenario in SCENARIOS:
        for call in range(1, 12):
            s, engine, arrived = scenario(lambda **config: with_connector(cls, policy=policy, **config))
            outputs_before = engine.outputs
            expected = expected_outputs(s)
            owner, name = owner_and_name(s, path)
            original = getattr(owner, name, None)
            if original is None:
                pytest.skip(f"this vLLM has no {path}")
            s.needs_kv_cache_zeroing = True  # Otherwise some releases do not take the new block ids.
            boom = BoomError(path)
            states = request_states(s)
            with monkeypatch.context() as patch:
                wrapper = raise_on_call(original, boom, call)
                patch.setattr(owner, name, wrapper)
                before = attributes(s)
                out, error = schedule_or_error(s)
                if error is not None:
                    assert error is boom
                    raised += 1
                    check_restored(s, before, arrived)
                    # The status of a request whose grammar is compiled may have changed to plain waiting.
                    none_admitted = admitted is False or (admitted is None and call == 1)
                    if none_admitted and scenario is not blocked_requests_between_others:
                        assert request_states(s)[:2] == states[:2], scenario.__name__
            if out is not None:
                break  # The step has fewer such calls.
            if any(r.status != RequestStatus.RUNNING for r in s.running):
                continue  # The status of an admitted request is not set yet. The stock scheduler fails as well.
            engine.run()
            assert engine.outputs == {**outputs_before, **expected}, f"{scenario.__name__}, call {call}"
            assert num_free_blocks(s) == 399
    assert raised, f"no scenario calls {path}"


@both_classes
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
def test_an_error_after_update_after_schedule_leaves_the_queues_intact(cls, scenario):
    """After `_update_after_schedule` the tokens count as computed, as in the stock scheduler."""
    s, _, arrived = scenario(lambda **config: build(cls, **config))
    original = s._update_after_schedule
    boom = BoomError()

    def raising_afterwards(out):
        original(out)
        raise boom

    s._update_after_schedule = raising_afterwards
    before = attributes(s)
    with pytest.raises(BoomError) as error:
        s.schedule()
    assert error.value is boom
    check_restored(s, before, arrived)
    del s._update_after_schedule
    s.schedule()
    s.check()
    s.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    s.check()
    assert num_free_blocks(s) == 399


@both_classes
def test_errors_in_many_steps_lose_no_request(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(100, 4), c=(10, 4))
    original = s.kv_cache_manager.allocate_slots
    for n in range(30):
        s.kv_cache_manager.allocate_slots = raise_on_call(original, BoomError())
        before = attributes(s)
        with pytest.raises(BoomError):
            s.schedule()
        check_restored(s, before, "abc")
        s.kv_cache_manager.allocate_slots = original
        if n % 3 == 0:
            engine.step()
        if not s.requests:
            break
    engine.run()
    assert engine.outputs == {"a": 9, "b": 4, "c": 4}


@both_classes
@pytest.mark.parametrize("next_step", ["prefill", "decode"])
def test_one_time_fields_of_an_empty_prefill_call_survive_an_error_of_the_decode_call(cls, next_step, monkeypatch):
    """The prefill call schedules no token and has taken the freed encoder outputs. The decode call raises."""
    s, engine, _ = head_without_free_blocks(lambda **config: with_connector(cls, **config))
    s.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    freed = [["h1"], ["h2"]]
    monkeypatch.setattr(s.encoder_cache_manager, "get_freed_mm_hashes", lambda: freed.pop(0) if freed else [])
    original, boom = s._make_cached_request_data, BoomError()
    s._make_cached_request_data = raise_on_call(original, boom, call=2)
    s.connector.built.clear()
    with pytest.raises(BoomError):
        s.schedule()
    s.check()
    s._make_cached_request_data = original
    assert s.connector.built == []
    if next_step == "decode":
        s.finish_requests("c", RequestStatus.FINISHED_ABORTED)
    out = engine.step()
    assert engine.kinds[-1][0] == next_step[0].upper()
    assert out.free_encoder_mm_hashes == ["h1", "h2"]
    assert out.finished_req_ids == ({"b"} if next_step == "prefill" else {"b", "c"})
    assert len(s.connector.built) == 1
    engine.run()


@both_classes
def test_a_keyboard_interrupt_propagates_and_loses_no_request(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 5))
    engine.step()
    add(s, b=(10, 5))
    original = s.kv_cache_manager.allocate_slots
    s.kv_cache_manager.allocate_slots = raise_on_call(original, KeyboardInterrupt())
    before = attributes(s)
    with pytest.raises(KeyboardInterrupt):
        s.schedule()
    check_restored(s, before, "ab")
    s.kv_cache_manager.allocate_slots = original
    engine.run()
    assert engine.outputs == {"a": 5, "b": 5}


@both_classes
def test_a_failed_prefill_step_does_not_count_for_the_interleave_bound(cls):
    s = build(cls, neuron_config={"max_consecutive_prefill_steps": 1})
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(10, 1))
    original = s.kv_cache_manager.allocate_slots
    for _ in range(3):
        s.kv_cache_manager.allocate_slots = raise_on_call(original, BoomError())
        with pytest.raises(BoomError):
            s.schedule()
    s.kv_cache_manager.allocate_slots = original
    assert engine.step().num_scheduled_tokens == {"b": 10}


@both_classes
def test_an_argument_unknown_to_the_base_class_loses_no_request(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 3))
    engine.step()
    add(s, b=(10, 3))
    before = attributes(s)
    with pytest.raises(TypeError, match="no_such_argument"):
        s.schedule(no_such_argument=1)
    check_restored(s, before, "ab")
    engine.run()
    assert engine.outputs == {"a": 3, "b": 3}


@both_classes
def test_an_error_in_an_override_of_can_schedule_loses_no_request(cls):

    class Faulty(cls):
        broken = False

        def can_schedule(self, req):
            if self.broken:
                raise BoomError
            return super().can_schedule(req)

    s = build(Faulty)
    engine = Engine(s)
    add(s, a=(10, 5))
    engine.step()
    add(s, b=(10, 5), c=(10, 5))
    s.broken = True
    before = attributes(s)
    with pytest.raises(BoomError):
        s.schedule()
    check_restored(s, before, "abc")
    s.broken = False
    engine.run()
    assert engine.outputs == {"a": 5, "b": 5, "c": 5}


@both_classes
def test_a_mixed_step_raises_with_the_request_and_its_tokens(cls):
    """The base class schedules a request that it was not shown: the error names it, and no request is lost."""

    class Mixing(cls):
        mix = False

        def _call_base_schedule(self, *args, **kwargs):
            out = super()._call_base_schedule(*args, **kwargs)
            if self.mix:
                out.num_scheduled_tokens["hidden"] = 1
                self.requests["hidden"].num_computed_tokens += 1
                out.scheduled_cached_reqs.req_ids.append("hidden")
                out.scheduled_cached_reqs.num_computed_tokens.append(10)
                out.scheduled_cached_reqs.new_block_ids.append(None)
                out.scheduled_cached_reqs.num_output_tokens.append(1)
            return out

    s = build(Mixing)
    engine = Engine(s)
    add(s, hidden=(10, 5))
    engine.step()
    add(s, b=(10, 5))
    s.mix = True
    before = attributes(s)
    with pytest.raises(RuntimeError) as error:
        s.schedule()
    assert "hidden" in str(error.value) and "1" in str(error.value)
    lists, limits, *_ = before
    lists_after, limits_after, *_ = attributes(s)
    assert all(lists_after[name] is value for name, value in lists.items()) and limits_after == limits
    assert request_ids(s.running) == ["hidden", "b"]
    assert waiting_ids(s) == []


@every_engine
def test_update_from_output_sees_the_restored_attributes(cls, ahead):
    seen = []

    class Recording(cls):
        def update_from_output(self, *args, **kwargs):
            seen.append((request_ids(self.running), waiting_ids(self), self.max_num_running_reqs))
            return super().update_from_output(*args, **kwargs)

    s = build(Recording, async_scheduling=bool(ahead))
    engine = Engine(s, ahead)
    add(s, a=(10, 5), b=(100, 5), c=(10, 5))
    engine.run()
    assert all(limit == 4 for *_, limit in seen)
    assert seen[0][:2] == ((["a", "b"], ["c"]) if ahead else (["a"], ["b", "c"]))
    assert engine.outputs == {"a": 5, "b": 5, "c": 5}
