"""X01: whatever a caller passes, an exception that names the field comes back, and the scheduler stays usable."""

import contextlib
import gc
import itertools
import math
import random
import threading

import pytest

from bucket_setup import NATIVE, add, advance, make, steps_until_done
from neuron_sched import BucketScheduler, NeuronConfig, Request
from neuron_sched.trace import TraceRequest

CONFIG = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16, "num_blocks": 20}


class Hostile:
    """Raises whenever it is asked anything."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __index__(self):
        raise RuntimeError("no index")

    def __iter__(self):
        raise RuntimeError("no iter")


NO_COUNT = [
    -1,
    2**31,
    2**63,
    2**64,
    2**200,
    "7",
    b"7",
    None,
    1.5,
    math.nan,
    math.inf,
    True,
    [1],
    {},
    object(),
    Hostile(),
]


def still_right(s):
    """S04 in this scheduler: one-token requests take one step each."""
    add(NATIVE, s, x=(10, 1), y=(10, 1))
    assert steps_until_done(s) == [{"x": 10}, {"y": 10}]


@pytest.mark.parametrize("value", [0, *NO_COUNT], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"]
)
def test_x01_required_counts_of_the_configuration(field, value):
    with pytest.raises(ValueError, match=f"(?m)^{field}: "):
        NeuronConfig(**{**CONFIG, field: value})


NO_LIST = [[], [0, 64], [64, 64], [128], [32], ["64"], [True], [64.0], [math.nan], [None], "64", 64, {64: 1}, object()]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_batched_tokens_buckets", value) for value in NO_LIST),
        *(("kv_segment_size_buckets", value) for value in NO_LIST),
        *(("num_seqs_buckets", value) for value in ([], [0, 2], [1], [4], "2", 2, ["2"])),
        *(("decode_context_length_buckets", value) for value in ([], [0], [257], [2, 1], "256", 256)),
        *(("max_prefills_per_batch", value) for value in (0, -1, 2**31, "1", 1.0, True)),
        *(("max_consecutive_prefill_steps", value) for value in (0, -1, 2**31, "1", 1.0, True)),
        *(("min_decode_steps", value) for value in (0, -1, 2**31, "1", 1.0, True)),
        *(("long_prefill_token_threshold", value) for value in (-1, 2**31, "1", 1.0, True)),
        *(("lookahead", value) for value in (-1, 2**31, "1", 1.0, True)),
        *(("dcp", value) for value in (0, -1, 2**31, "1", 1.0, True)),
        *(("kv_admission", value) for value in ("", "Reserve", b"reserve", 1, ["reserve"])),
        *(("chunking", value) for value in ("", "auto", 1)),
        *(("policy", value) for value in ("", "lifo", 1)),
        *(("prefix_caching", value) for value in (1, 0, "yes", [])),
        *(
            ("prefill_cost", value)
            for value in ({}, {32: 1.0}, {64: -1.0}, {64: math.nan}, {64: "1"}, {"64": 1}, [64], 1)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_x01_options_of_the_configuration(field, value):
    with pytest.raises(ValueError, match=f"(?m)^{field}: "):
        NeuronConfig(**{**CONFIG, field: value})


def test_x01_every_fault_has_a_line():
    bad = {**CONFIG, "max_num_seqs": 0, "block_size": "7", "policy": 3, "chunking": "x"}
    del bad["num_blocks"]
    with pytest.raises(ValueError) as raised:
        NeuronConfig(**bad)
    fields = {line.split(":")[0] for line in str(raised.value).splitlines()}
    assert fields == {"max_num_seqs", "block_size", "num_blocks", "policy", "chunking"}


def test_b04_lists_are_copied_and_tuples_accepted():
    sizes = [32, 64]
    config = NeuronConfig(**CONFIG, num_batched_tokens_buckets=sizes, num_seqs_buckets=(1, 2))
    sizes.append(7)
    config.num_batched_tokens_buckets.append(7)
    assert list(config.num_batched_tokens_buckets) == [32, 64]
    assert list(config.num_seqs_buckets) == [1, 2]


@pytest.mark.parametrize("value", [0, [], [-1], [2**31], [True], [1.0], [None], [[1]], ["1"], *NO_COUNT[:-5], object()])
def test_x01_prompts(value):
    with pytest.raises((TypeError, ValueError), match="prompt"):
        Request("a", value, 1)


@pytest.mark.parametrize("value", [0, *NO_COUNT], ids=lambda value: type(value).__name__)
def test_x01_max_tokens(value):
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
def test_x01_options_of_a_request(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        Request("a", 1, 1, **{field: value})


@pytest.mark.parametrize("value", [None, 1, b"a", ["a"], object(), Hostile()])
def test_x01_ids_are_strings(value):
    with pytest.raises(TypeError, match="id"):
        Request(value, 1, 1)
    s = make(NATIVE)
    for call in (s.request, s.cancel):
        with pytest.raises(TypeError):
            call(value)


@pytest.mark.parametrize("value", [None, 1, "a", {"id": "a"}, object(), Hostile()])
def test_x01_foreign_objects(value):
    s = make(NATIVE)
    with pytest.raises(TypeError):
        BucketScheduler(value)
    for call in (s.add, s.complete, s.schedule):
        with pytest.raises(TypeError):
            call(value)
    still_right(s)


def test_x01_steps_of_others_are_refused():
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
def test_x01_tokens(tokens):
    s = make(NATIVE)
    add(NATIVE, s, a=([1, 2], 2))
    step = s.schedule()
    with pytest.raises((TypeError, ValueError), match="tokens"):
        s.complete(step, tokens)
    s.check()
    assert s.request("a").num_computed_tokens == 0
    s.complete(step, [3])
    advance(s, [4])
    still_right(s)


def test_x01_hostile_tokens_change_nothing():
    s = make(NATIVE)
    add(NATIVE, s, a=([1, 2], 2))
    step = s.schedule()
    for tokens in (Hostile(), [Hostile()]):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            s.complete(step, tokens)
    assert s.request("a").num_computed_tokens == 0
    s.complete(step, [3])


def test_x01_tokens_that_call_back():
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


def test_x01_a_prompt_that_calls_back():
    s = make(NATIVE)

    class Prompt(list):
        def __iter__(self):
            s.add(Request("inner", 5, 1))
            return super().__iter__()

    s.add(Request("outer", Prompt([1, 2]), 1))
    assert [advance(s, [0])[0].num_scheduled_tokens for _ in range(2)] == [{"inner": 5}, {"outer": 2}]


def test_x01_finalizers_may_use_the_scheduler():
    s = make(NATIVE, num_blocks=5000)

    class Watcher:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            s.check()
            s.cancel("nobody")

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


def test_x01_use_from_several_threads():
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

    def watched(seed):
        try:
            use(seed)
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=watched, args=(seed,)) for seed in range(6)]
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


def test_x01_the_largest_values():
    most = 2**31 - 1
    s = make(NATIVE, max_num_batched_tokens=most, max_model_len=most, block_size=most, num_blocks=2, max_num_seqs=most)
    add(NATIVE, s, a=(most, most), b=(1, most, {"priority": -(2**63)}))
    assert advance(s)[0].num_scheduled_tokens == {"a": most}
    step = s.schedule()
    assert (step.num_scheduled_tokens, step.num_scheduled_tokens_padded) == ({"b": 1}, {"b": 128})
    s.complete(step)
    advance(s)
    s.cancel("b")


def test_x01_many_adds():
    s = make(NATIVE)
    request = Request
    for i in range(200_000):
        s.add(request(str(i), 10, 1))
    assert (s.num_waiting, advance(s)[0].num_scheduled_tokens) == (200_000, {"0": 10})
    for i in range(1, 200_000):
        s.cancel(str(i))
    s.check()
    advance(s)
    still_right(s)


class Endless:
    """Says that it has one item, and never stops giving more."""

    def __len__(self):
        return 1

    def __getitem__(self, at):
        raise AssertionError("read by position")

    def __iter__(self):
        return itertools.repeat(7)


def test_x01_nothing_is_read_without_end():
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
    for no_sequence in [{1, 2}, {1: 2}, b"12", bytearray(b"12"), iter([1])]:
        with pytest.raises(TypeError, match="prompt"):
            Request("x", no_sequence, 1)
