"""vLLM's own scheduler raises in the middle of a step: everybody is still there, and the next step works."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from vllm_harness import request
from vllm_setup import (
    LIMITS,
    Engine,
    add,
    both_classes,
    build,
    compiled,
    names,
    queued,
    raising_once,
    usable_free,
    with_connector,
)

QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


class BoomError(Exception):
    """What the base raises."""


def objects(sched):
    """What a step may have exchanged, and what its numbers were."""
    held = {
        name: getattr(sched, name)
        for name in (*QUEUES, "deferred_waiting", "running", "requests")
        if hasattr(sched, name)
    }
    numbers = {name: getattr(sched, name, None) for name in LIMITS}
    numbers["threshold"] = sched.scheduler_config.long_prefill_token_threshold
    own = {name for name in vars(sched) if callable(vars(sched)[name])}
    return held, numbers, own, names(sched.running)


def contents(sched):
    """What every request looks like from outside: nothing of it may change before somebody is admitted."""
    queues = {name: names(getattr(sched, name)) for name in QUEUES if hasattr(sched, name)}
    queues["running"] = names(sched.running)
    each = {
        rid: (r.status, r.num_computed_tokens, r.num_output_placeholders, r.num_tokens)
        for rid, r in sched.requests.items()
    }
    return queues, each, usable_free(sched)


def check_put_back(sched, before, arrived):
    held, numbers, own, ran = before
    found, now, own_now, _ = objects(sched)
    for name, thing in held.items():
        assert found[name] is thing, f"{name} is another object"
    assert now == numbers
    assert own_now == own
    everywhere = names(sched.running) + queued(sched)
    assert sorted(everywhere) == sorted(rid for rid, r in sched.requests.items() if not r.is_finished())
    position = {rid: i for i, rid in enumerate(arrived)}
    assert names(sched.running)[: len(ran)] == ran, "newcomers come last"
    for name in QUEUES:
        ids = names(getattr(sched, name, ()))
        assert ids == sorted(ids, key=position.get), f"{name} out of order"
    sched.check()


# --- situations in which a step begins ---


def first_prompt(make):
    s = make()
    add(s, a=(100, 3), b=(20, 3), c=(20, 2))
    return s, Engine(s), "abc"


def head_beside_hidden_decodes(make):
    s = make()
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(3):
        engine.step()
    add(s, c=(20, 2), d=(20, 2))
    return s, engine, "abcd"


def chunk_beside_hidden_decodes(make):
    s = make()
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(3):
        engine.step()
    add(s, c=(150, 2), d=(20, 2))
    engine.step()
    return s, engine, "abcd"


def decodes_alone(make):
    s = make(max_num_seqs=3)
    engine = Engine(s)
    add(s, a=(16, 20), b=(16, 20), c=(16, 20))
    for _ in range(3):
        engine.step()
    add(s, d=(20, 2))
    return s, engine, "abcd"


def packed_heads(make):
    s = make(neuron_config={"max_prefills_per_batch": 3}, max_num_seqs=6)
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    engine.step()
    engine.step()
    add(s, c=(20, 2), d=(20, 2), e=(20, 3), f=(100, 2))
    return s, engine, "abcdef"


def waiters_in_between(make):
    s = make()
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    g, h = request("g", 10, 2, grammar=True), request("h", 10, 2, grammar=True)
    for r in (g, request("c", 20, 2), h, request("d", 20, 2)):
        s.add_request(r)
    engine.step()
    compiled(g)
    compiled(h)
    return s, engine, "agchd"


def head_that_finds_no_room(make):
    """Two passes: the base is asked for c in vain, then for the decodes."""
    s = make()
    engine = Engine(s)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(3):
        engine.step()
    add(s, c=(20, 2))
    original = s.kv_cache_manager.allocate_slots
    refusals = [1]

    def once(req, *args, **kwargs):
        if req.status != RequestStatus.RUNNING and refusals:
            refusals.pop()
            return None
        return original(req, *args, **kwargs)

    s.kv_cache_manager.allocate_slots = once
    return s, engine, "abc"


def capped(make):
    s = make(long_prefill_token_threshold=32)
    engine = Engine(s)
    add(s, a=(10, 9), b=(60, 2))
    engine.step()
    return s, engine, "ab"


def capped_alone(make):
    s = make(long_prefill_token_threshold=32)
    engine = Engine(s)
    add(s, a=(150, 2))
    return s, engine, "a"


def planned_chunk(make):
    s = make(max_num_batched_tokens=1024, max_model_len=1024, neuron_config={"chunking": "bucket"})
    engine = Engine(s)
    add(s, b=(10, 9))
    engine.step()
    add(s, a=(530, 2))
    return s, engine, "ba"


SITUATIONS = [
    first_prompt,
    head_beside_hidden_decodes,
    chunk_beside_hidden_decodes,
    decodes_alone,
    packed_heads,
    waiters_in_between,
    head_that_finds_no_room,
    capped,
    capped_alone,
    planned_chunk,
]

# Where the base may raise: (attribute path, whether anything may have been admitted by then).
POINTS = [
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


def place(sched, path):
    *owners, name = path.split(".")
    for owner in owners:
        sched = getattr(sched, owner)
    return sched, name


def outcome(sched):
    try:
        return sched.schedule(), None
    except BoomError as error:
        return None, error


def outputs_wanted(sched):
    return {rid: r.max_tokens for rid, r in sched.requests.items()}


@both_classes
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("path", "admitted"), POINTS, ids=[path for path, _ in POINTS])
def test_the_base_raises(cls, policy, path, admitted, monkeypatch):
    raised = 0
    for situation in SITUATIONS:
        for call in range(1, 12):
            s, engine, arrived = situation(lambda **config: with_connector(cls, policy=policy, **config))
            already = engine.outputs
            wanted = outputs_wanted(s)
            owner, name = place(s, path)
            original = getattr(owner, name, None)
            if original is None:
                pytest.skip(f"this vLLM has no {path}")
            s.needs_kv_cache_zeroing = True  # else some releases do not ask for new blocks
            boom = BoomError(path)
            looked = contents(s)
            with monkeypatch.context() as patch:
                wrapper = raising_once(original, boom, call)
                patch.setattr(owner, name, wrapper)
                before = objects(s)
                out, error = outcome(s)
                if error is not None:
                    assert error is boom
                    raised += 1
                    check_put_back(s, before, arrived)
                    # A waiter that turned out to be ready may have become an ordinary one.
                    nobody_yet = admitted is False or (admitted is None and call == 1)
                    if nobody_yet and situation is not waiters_in_between:
                        assert contents(s)[:2] == looked[:2], situation.__name__
            if out is not None:
                break  # this step has no such call any more
            if any(r.status != RequestStatus.RUNNING for r in s.running):
                continue  # a stock scheduler cannot go on with it either: admitted, but its status was not set yet
            engine.run()
            assert engine.outputs == {**already, **wanted}, f"{situation.__name__}, call {call}"
            assert usable_free(s) == 399
    assert raised, f"no situation reaches {path}"


@both_classes
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda f: f.__name__)
def test_the_base_raises_after_everything(cls, situation):
    """Beyond `_update_after_schedule` tokens count as computed, in stock as here; the queues are whole all the same."""
    s, _, arrived = situation(lambda **config: build(cls, **config))
    original = s._update_after_schedule
    boom = BoomError()

    def late(out):
        original(out)
        raise boom

    s._update_after_schedule = late
    before = objects(s)
    with pytest.raises(BoomError) as error:
        s.schedule()
    assert error.value is boom
    check_put_back(s, before, arrived)
    del s._update_after_schedule
    s.schedule()
    s.check()
    s.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    s.check()
    assert usable_free(s) == 399


@both_classes
def test_the_base_raises_again_and_again(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(100, 4), c=(10, 4))
    original = s.kv_cache_manager.allocate_slots
    for n in range(30):
        s.kv_cache_manager.allocate_slots = raising_once(original, BoomError())
        before = objects(s)
        with pytest.raises(BoomError):
            s.schedule()
        check_put_back(s, before, "abc")
        s.kv_cache_manager.allocate_slots = original
        if n % 3 == 0:
            engine.step()
        if not s.requests:
            break
    engine.run()
    assert engine.outputs == {"a": 9, "b": 4, "c": 4}


@both_classes
@pytest.mark.parametrize("next_step", ["prefill", "decode"])
def test_what_the_first_of_two_passes_handed_out_is_not_lost(cls, next_step, monkeypatch):
    """The pass that placed nobody has taken the freed encoder outputs; the one after it raises."""
    s, engine, _ = head_that_finds_no_room(lambda **config: with_connector(cls, **config))
    s.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    freed = [["h1"], ["h2"]]
    monkeypatch.setattr(s.encoder_cache_manager, "get_freed_mm_hashes", lambda: freed.pop(0) if freed else [])
    original, boom = s._make_cached_request_data, BoomError()
    s._make_cached_request_data = raising_once(original, boom, call=2)
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
def test_a_keyboard_interrupt_passes_too(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 5))
    engine.step()
    add(s, b=(10, 5))
    original = s.kv_cache_manager.allocate_slots
    s.kv_cache_manager.allocate_slots = raising_once(original, KeyboardInterrupt())
    before = objects(s)
    with pytest.raises(KeyboardInterrupt):
        s.schedule()
    check_put_back(s, before, "ab")
    s.kv_cache_manager.allocate_slots = original
    engine.run()
    assert engine.outputs == {"a": 5, "b": 5}


@both_classes
def test_a_failed_prefill_step_does_not_count_for_the_turns(cls):
    s = build(cls, neuron_config={"max_consecutive_prefill_steps": 1})
    engine = Engine(s)
    add(s, a=(10, 9))
    engine.step()
    add(s, b=(10, 1))
    original = s.kv_cache_manager.allocate_slots
    for _ in range(3):
        s.kv_cache_manager.allocate_slots = raising_once(original, BoomError())
        with pytest.raises(BoomError):
            s.schedule()
    s.kv_cache_manager.allocate_slots = original
    assert engine.step().num_scheduled_tokens == {"b": 10}


@both_classes
def test_an_argument_that_the_base_does_not_take(cls):
    s = build(cls)
    engine = Engine(s)
    add(s, a=(10, 3))
    engine.step()
    add(s, b=(10, 3))
    before = objects(s)
    with pytest.raises(TypeError, match="no_such_argument"):
        s.schedule(no_such_argument=1)
    check_put_back(s, before, "ab")
    engine.run()
    assert engine.outputs == {"a": 3, "b": 3}


@both_classes
def test_can_schedule_raises(cls):
    """A faulty override is an error like any other of the base."""

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
    before = objects(s)
    with pytest.raises(BoomError):
        s.schedule()
    check_put_back(s, before, "abc")
    s.broken = False
    engine.run()
    assert engine.outputs == {"a": 5, "b": 5, "c": 5}


@both_classes
def test_a_mixed_step_is_refused_by_name(cls):
    """A base that schedules what it was not shown: the check names who and how much, and nobody is lost."""

    class Mixing(cls):
        mix = False

        def _call_base_schedule(self, *args, **kwargs):
            out = super()._call_base_schedule(*args, **kwargs)
            if self.mix:
                out.num_scheduled_tokens["intruder"] = 1
                self.requests["intruder"].num_computed_tokens += 1
                out.scheduled_cached_reqs.req_ids.append("intruder")
                out.scheduled_cached_reqs.num_computed_tokens.append(10)
                out.scheduled_cached_reqs.new_block_ids.append(None)
                out.scheduled_cached_reqs.num_output_tokens.append(1)
            return out

    s = build(Mixing)
    engine = Engine(s)
    add(s, intruder=(10, 5))
    engine.step()
    add(s, b=(10, 5))
    s.mix = True
    before = objects(s)
    with pytest.raises(RuntimeError) as error:
        s.schedule()
    assert "intruder" in str(error.value) and "1" in str(error.value)
    held, numbers, *_ = before
    found, now, *_ = objects(s)
    assert all(found[name] is thing for name, thing in held.items()) and now == numbers
    assert names(s.running) == ["intruder", "b"]
    assert queued(s) == []


@both_classes
@pytest.mark.parametrize("ahead", [0, 1])
def test_update_from_output_runs_with_nothing_swapped(cls, ahead):
    if ahead and cls.__name__ == "NeuronScheduler":
        pytest.skip("the sync class runs under one-step engines only")
    seen = []

    class Looks(cls):
        def update_from_output(self, *args, **kwargs):
            seen.append((names(self.running), queued(self), self.max_num_running_reqs))
            return super().update_from_output(*args, **kwargs)

    s = build(Looks, async_scheduling=bool(ahead))
    engine = Engine(s, ahead)
    add(s, a=(10, 5), b=(100, 5), c=(10, 5))
    engine.run()
    assert all(limit == 4 for *_, limit in seen)
    assert seen[0][:2] == ((["a", "b"], ["c"]) if ahead else (["a"], ["b", "c"]))
    assert engine.outputs == {"a": 5, "b": 5, "c": 5}
