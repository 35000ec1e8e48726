"""One step ahead, and with draft tokens: who is ready for a token, and how wide a decode step may be."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

import random

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from neuron_sched.vllm.scheduler import NeuronAsyncScheduler, NeuronScheduler
from vllm_harness import request
from vllm_setup import DRAFTS, Engine, accepted, add, build, check_padding, drafting, names, phase, queued, usable_free


def ahead():
    s = build(NeuronAsyncScheduler, async_scheduling=True)
    return s, Engine(s, ahead=1)


# --- who is ready ---


def test_a_decode_with_its_last_token_on_the_way_is_not_ready():
    s, engine = ahead()
    add(s, a=(10, 3), b=(10, 6))
    scheduled = [engine.step().num_scheduled_tokens for _ in range(8)]
    both = {"a": 1, "b": 1}
    assert scheduled == [{"a": 10}, {"b": 10}, both, both, {"b": 1}, {"b": 1}, {"b": 1}, {}]
    engine.run()
    assert engine.outputs == {"a": 3, "b": 6}


def test_a_decode_at_the_model_length_is_not_ready():
    s = build(NeuronAsyncScheduler, async_scheduling=True, max_model_len=64)
    engine = Engine(s, ahead=1)
    add(s, a=(60, 50))
    assert [engine.step().num_scheduled_tokens for _ in range(5)] == [{"a": 60}, {"a": 1}, {"a": 1}, {"a": 1}, {}]
    assert engine.outputs == {"a": 4}


def test_a_throttle_idles_nobody_when_no_decode_is_ready():
    """a's last token is on its way: nothing to decode, so the prompt goes on although prefills are throttled."""
    s, engine = ahead()
    add(s, a=(10, 1))
    engine.step()
    add(s, b=(10, 2))
    assert s.running == [s.requests["a"]]
    assert engine.step(throttle_prefills=True).num_scheduled_tokens == {"b": 10}


def test_turns_are_owed_to_ready_decodes_only():
    s = build(NeuronAsyncScheduler, async_scheduling=True, neuron_config={"max_consecutive_prefill_steps": 1})
    engine = Engine(s, ahead=1)
    add(s, a=(10, 1), b=(10, 1), c=(10, 1), d=(10, 1))
    assert [engine.step().num_scheduled_tokens for _ in range(4)] == [{n: 10} for n in "abcd"]


@pytest.mark.parametrize("when", range(8))
def test_aborts_with_outputs_in_flight(when):
    s, engine = ahead()

    def abort(t):
        if t == when:
            s.finish_requests(["a", "c"], RequestStatus.FINISHED_ABORTED)
            s.check()

    engine.run({0: [request("a", 100, 4), request("b", 10, 4), request("c", 20, 4)]}, before=abort)
    assert engine.outputs["b"] == 4
    assert (names(s.running), queued(s), usable_free(s)) == ([], [], 399)


def test_an_id_that_comes_again_after_an_abort():
    s, engine = ahead()
    add(s, b=(10, 9))
    engine.step()
    add(s, a=(10, 4))
    engine.step()
    s.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.step()
    add(s, a=(10, 4))
    s.check()
    engine.run()
    assert engine.outputs["b"] == 9
    assert engine.finished["a"] == "length"
    assert usable_free(s) == 399


@pytest.mark.parametrize("seed", range(20))
def test_random_loads_one_step_ahead(seed):
    rng = random.Random(seed)
    s = build(
        NeuronAsyncScheduler,
        async_scheduling=True,
        max_num_seqs=rng.choice([1, 2, 4]),
        num_blocks=rng.choice([18, 40, 400]),
        prefix_caching=rng.random() < 0.5,
        neuron_config={
            "max_consecutive_prefill_steps": rng.choice([None, 1, 2]),
            "max_prefills_per_batch": rng.choice([1, 2]),
        },
    )
    free = usable_free(s)
    lengths = {f"r{i}": (rng.randint(1, 150), rng.randint(1, 12)) for i in range(12)}
    arrivals = {}
    for name, one in lengths.items():
        arrivals.setdefault(rng.randint(0, 30), []).append(request(name, *one))
    engine = Engine(s, ahead=1).run(arrivals)
    assert engine.outputs == {name: outputs for name, (_, outputs) in lengths.items()}
    assert usable_free(s) == free


# --- drafts ---


@pytest.mark.parametrize("seed", range(12))
def test_every_decode_step_is_as_wide_as_all_drafts_or_one(seed):
    """Near the model length drafting ends for good, so that no step has a width that nobody compiled."""
    rng = random.Random(seed)
    model_len = 128
    s = build(
        NeuronAsyncScheduler, edit=drafting, async_scheduling=True, max_model_len=model_len, max_num_batched_tokens=128
    )
    a = request("a", 20, 500)
    s.add_request(a)
    widths, computed, in_flight = [], [], []
    while s.requests:
        out = s.schedule()
        if out.num_scheduled_tokens:
            kind = phase(s, out)
            check_padding(s, out, kind)
            widths.append(out.num_scheduled_tokens["a"])
            computed.append(a.num_computed_tokens)
        in_flight.append(out)
        if len(in_flight) > 1:
            accepted(s, in_flight.pop(0), lambda rid, drafts: 1 + rng.randint(0, drafts))
        s.check()
        assert len(widths) < 300
    assert a.num_output_tokens == model_len - 20
    widths, computed = widths[1:], computed[:-1]
    assert set(widths) <= {1, 1 + DRAFTS}
    assert widths == sorted(widths, reverse=True), "once ended, drafting does not come back"
    limit = model_len - 3 - 2 * DRAFTS
    first_narrow = widths.index(1)
    assert max(computed[:first_narrow], default=0) <= limit < computed[first_narrow]


def test_drafts_of_the_sync_class_are_decodes():
    s = build(NeuronScheduler, edit=drafting, max_model_len=128, max_num_batched_tokens=128)
    add(s, a=(20, 20), b=(20, 20))
    for _ in range(2):
        accepted(s, s.schedule(), lambda rid, drafts: 1)
    s.update_draft_token_ids(DraftTokenIds(["a", "b"], [[7, 7, 7], []]))
    out = s.schedule()
    assert phase(s, out) == "D"
    assert out.num_scheduled_tokens == out.num_scheduled_tokens_padded == {"a": 4, "b": 1}
    assert out.num_seqs_padded == 2
    accepted(s, out, lambda rid, drafts: 1 + drafts)
    assert s.requests["a"].num_output_tokens == 5
    s.check()
