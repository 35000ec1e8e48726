"""X01: invalid arguments raise an exception that names the field, and the scheduler stays usable."""

import contextlib
import gc
import itertools
import math
import random
import threading

import pytest

from neuron_sched import BucketScheduler, NeuronConfig, Request
from neuron_sched.trace import TraceRequest
from tests.exclusive.support.scheduler import NATIVE, add, advance, make, steps_until_done
from tests.support.bad_values import NOT_A_COUNT, Hostile

CONFIG = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16, "num_blocks": 20}


def assert_usable(s):
    """Assert case S04 in this scheduler: one-token requests take one step each."""
    add(NATIVE, s, x=(10, 1), y=(10, 1))
    assert steps_until_done(s) == [{"x": 10}, {"y": 10}]


@pytest.mark.parametrize(
    "value", [0, [], [-1], [2**31], [True], [1.0], [None], [[1]], ["1"], *NOT_A_COUNT[:-5], object()]
)
def test_x01_invalid_prompts_are_refused(value):
    with pytest.raises((TypeError, ValueError), match="prompt"):
        Request("a", value, 1)


@pytest.mark.parametrize("value", [0, *NOT_A_COUNT], ids=lambda value: type(value).__name__)
def test_x01_invalid_max_tokens_are_refused(value):
    with pytest.raises((TypeError, ValueError), match="max_tokens"):
        Request("a", 1, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("priority", value) for value in (2**63, -(2**63) - 1, 1.5, "1", True)),
        *(("stop_token_ids", value) for value in (5, "5", [-1], [2**31], [1.0], [True], [None])),
        *(("top_k", value) for value in (-2, 2**31, 1.5, "1")),
        *(("top_p", value) for value in (0, -1, 1.1, math.nan, math.inf, "1")),
        *(("temperature", value) for value in (-1, math.nan, math.inf, "1")),
    ],
)
def test_x01_invalid_options_of_a_request_are_refused(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        Request("a", 1, 1, **{field: value})


@pytest.mark.parametrize("value", [None, 1, b"a", ["a"], object(), Hostile()])
def test_x01_request_ids_must_be_strings(value):
    with pytest.raises(TypeError, match="id"):
        Request(value, 1, 1)
    s = make(NATIVE)
    for call in (s.request, s.cancel):
        with pytest.raises(TypeError):
            call(value)


@pytest.mark.parametrize("value", [None, 1, "a", {"id": "a"}, object(), Hostile()])
def test_x01_arguments_of_other_types_are_refused(value):
    s = make(NATIVE)
    with pytest.raises(TypeError):
        BucketScheduler(value)
    for call in (s.add, s.complete, s.schedule):
        with pytest.raises(TypeError):
            call(value)
    assert_usable(s)


def test_x01_steps_of_another_scheduler_are_refused():
    s, other = make(NATIVE), make(NATIVE)
    for scheduler in (s, other):
        add(NATIVE, scheduler, a=(10, 2))
    step, foreign = s.schedule(), other.schedule()
    with pytest.raises(ValueError, match="another scheduler"):
        s.complete(foreign)
    s.complete(step)
    other.complete(foreign)
    assert steps_until_done(s) == [{"a": 1}]


@pytest.mark.parametrize(
    "tokens", [5, "5", b"5", object(), ["5"], [1.0], [math.nan], [True], [-1], [2**31], [2**200], [[5]]]
)
def test_x01_invalid_tokens_are_refused(tokens):
    s = make(NATIVE)
    add(NATIVE, s, a=([1, 2], 2))
    step = s.schedule()
    with pytest.raises((TypeError, ValueError), match="tokens"):
        s.complete(step, tokens)
    s.check()
    assert s.request("a").num_computed_tokens == 0
    s.complete(step, [3])
    advance(s, [4])
    assert_usable(s)


def test_x01_tokens_that_raise_when_read_change_nothing():
    s = make(NATIVE)
    add(NATIVE, s, a=([1, 2], 2))
    step = s.schedule()
    for tokens in (Hostile(), [Hostile()]):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            s.complete(step, tokens)
    assert s.request("a").num_computed_tokens == 0
    s.complete(step, [3])


def test_x01_tokens_that_call_the_scheduler_while_they_are_read():
    s = make(NATIVE)
    add(NATIVE, s, a=([1, 2], 3), b=([1, 2], 3))
    step = s.schedule()

    class Tokens(list):
        def __iter__(self):
            s.cancel("b")
            s.check()
            assert s.num_running == 1
            s.complete(step, [7])
            yield 8

    with pytest.raises(ValueError, match="step"):
        s.complete(step, Tokens([8]))
    assert list(s.request("a").output_token_ids) == [7]
    s.check()


def test_x01_a_prompt_that_calls_the_scheduler_while_it_is_read():
    s = make(NATIVE)

    class Prompt(list):
        def __iter__(self):
            s.add(Request("inner", 5, 1))
            return super().__iter__()

    s.add(Request("outer", Prompt([1, 2]), 1))
    assert [advance(s, [0])[0].num_scheduled_tokens for _ in range(2)] == [{"inner": 5}, {"outer": 2}]


def test_x01_finalizers_may_call_the_scheduler():
    s = make(NATIVE, num_blocks=5000)

    class Watcher:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            s.check()
            s.cancel("unknown")

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for i in range(50):
            Watcher()
            add(NATIVE, s, **{f"r{i}": (10, 2)})
            step, outcomes = advance(s)
            assert (list(outcomes), step.num_scheduled_tokens, step.num_computed_tokens, step.finished_ids) is not None
    finally:
        gc.set_threshold(*threshold)
    steps_until_done(s)


def test_x01_calls_from_several_threads():
    s = make(NATIVE, max_num_seqs=6, max_prefills_per_batch=2, num_blocks=60, prefix_caching=True)
    unexpected = []

    def use(seed):
        rng = random.Random(seed)
        for i in range(300):
            with contextlib.suppress(ValueError):
                match rng.randrange(5):
                    case 0:
                        s.add(Request(f"{seed}-{i}", [1] * rng.randrange(1, 60), rng.randrange(1, 5)))
                    case 1:
                        s.cancel(f"{seed}-{rng.randrange(i + 1)}")
                    case 2:
                        s.explain()
                        s.check()
                    case _:
                        step = s.schedule(ahead=rng.random() < 0.3)
                        scheduled, computed = step.num_scheduled_tokens, step.num_computed_tokens
                        assert scheduled.keys() == computed.keys()
                        s.complete(step, [5] * len(scheduled))

    def collect_errors(seed):
        try:
            use(seed)
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=collect_errors, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unexpected
    s.check()
    while s.num_waiting or s.num_running:
        step = s.schedule()
        computed, scheduled = step.num_computed_tokens, step.num_scheduled_tokens
        prompts = {name: s.request(name).num_prompt_tokens for name in scheduled}
        s.complete(step, [5 if computed[n] + scheduled[n] >= prompts[n] else None for n in scheduled])
    assert s.free_blocks == 60


def test_x01_the_largest_values_are_accepted():
    most = 2**31 - 1
    s = make(NATIVE, max_num_batched_tokens=most, max_model_len=most, block_size=most, num_blocks=2, max_num_seqs=most)
    add(NATIVE, s, a=(most, most), b=(1, most, {"priority": -(2**63)}))
    assert advance(s)[0].num_scheduled_tokens == {"a": most}
    step = s.schedule()
    assert (step.num_scheduled_tokens, step.num_scheduled_tokens_padded) == ({"b": 1}, {"b": 128})
    s.complete(step)
    advance(s)
    s.cancel("b")


def test_x01_200000_waiting_requests():
    s = make(NATIVE)
    request = Request
    for i in range(200_000):
        s.add(request(str(i), 10, 1))
    assert (s.num_waiting, advance(s)[0].num_scheduled_tokens) == (200_000, {"0": 10})
    for i in range(1, 200_000):
        s.cancel(str(i))
    s.check()
    advance(s)
    assert_usable(s)


class Endless:
    """A sequence of length 1 whose iterator never ends."""

    def __len__(self):
        return 1

    def __getitem__(self, at):
        raise AssertionError("read by position")

    def __iter__(self):
        return itertools.repeat(7)


def test_x01_endless_and_oversized_sequences_are_refused():
    s = BucketScheduler(NeuronConfig(**CONFIG))
    s.add(Request("a", [1, 2, 3], 9))
    step = s.schedule()
    for tokens, error in [(itertools.repeat(1), TypeError), (range(10**12), ValueError), (Endless(), ValueError)]:
        with pytest.raises(error, match="tokens"):
            s.complete(step, tokens)
    assert s.complete(step, [5])[0].token == 5
    for field, fields in {"prompt": (range(10**12), 1), "stop_token_ids": (1, 1)}.items():
        stop = range(10**12) if field == "stop_token_ids" else ()
        with pytest.raises(ValueError, match=f"'x': {field}: 1000000000000 ids: expected at most"):
            Request("x", *fields, stop_token_ids=stop)
    assert Request("x", Endless(), 1).prompt == [7]
    with pytest.raises(ValueError, match="hash_ids"):
        TraceRequest("a", 0, 10, 1, hash_ids=range(10**12))
    for not_a_sequence in [{1, 2}, {1: 2}, b"12", bytearray(b"12"), iter([1])]:
        with pytest.raises(TypeError, match="prompt"):
            Request("x", not_a_sequence, 1)
