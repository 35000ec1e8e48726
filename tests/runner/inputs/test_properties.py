"""Every tensor of every fill equals the oracle's: random rows, invalid rows, and random steps of `BucketScheduler`."""

import contextlib
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from neuron_sched import BucketScheduler, DecodeRow, NeuronConfig, PrefillRow, Request
from tests.support.oracles import inputs as oracle_inputs
from tests.support.watched_inputs import WatchedInputs

IDS = "abcdef"
# How tokens are passed to `fill`: not at all, as a list, by a callable.
TOKEN_ARGUMENTS = ("none", "list", "callable")


@st.composite
def configs(draw, max_model_len=60):
    """Draw a small configuration, with any block size, up to three prompts per step, and context buckets."""
    seqs = draw(st.integers(1, 6))
    tokens = draw(st.integers(max(4, seqs), 40))
    length = draw(st.integers(2, max_model_len))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]))
    blocks = oracle_inputs.ceil_div(length, block_size)

    def sizes(last):
        return st.none() | st.sets(st.integers(1, last), max_size=3).map(lambda some: sorted({*some, last}))

    return NeuronConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        block_size=block_size,
        num_blocks=draw(st.integers(blocks, 4 * blocks)),
        num_batched_tokens_buckets=draw(sizes(min(tokens, length))),
        num_seqs_buckets=draw(sizes(seqs)),
        decode_context_length_buckets=draw(
            st.none() | st.sets(st.integers(1, length), min_size=1, max_size=3).map(sorted)
        ),
        max_prefills_per_batch=draw(st.integers(1, 3)),
        long_prefill_token_threshold=draw(st.just(0) | st.integers(1, 8)),
        prefix_caching=draw(st.booleans()),
        lookahead=draw(st.integers(0, 3)),
    )


sampling_params = st.tuples(
    st.just(-1) | st.integers(-1, 2**31 - 1),
    st.just(1.0) | st.floats(0, 1, exclude_min=True, width=32),
    st.just(0.0) | st.floats(0, 1000, width=32),
)
buffer_counts = st.integers(1, 3)
tokens = st.integers(0, 99) | st.integers(0, 2**31 - 1)


# Rows


def options(draw):
    top_k, top_p, temperature = draw(sampling_params)
    name = draw(st.none() | st.sampled_from(IDS))
    return {"top_k": top_k, "top_p": top_p, "temperature": temperature, "request_id": name}


def tables(config, end):
    """Draw a block table that holds the positions below `end`, and possibly later ones."""
    least = oracle_inputs.ceil_div(end, config.block_size)
    most = oracle_inputs.ceil_div(config.max_model_len, config.block_size)
    ids = st.integers(1, config.num_blocks)
    return st.lists(ids, min_size=least, max_size=most, unique=True)


@st.composite
def prefills(draw, config):
    """Draw the fields of the rows of a prefill that fits, except `emits`."""
    left, rows = config.num_batched_tokens_buckets[-1], []
    for _ in range(draw(st.integers(1, config.max_prefills_per_batch))):
        if left == 0:
            break
        start = draw(st.integers(0, config.max_model_len - 1))
        count = draw(st.integers(1, min(left, config.max_model_len - start)))
        left -= count
        ids = draw(st.lists(tokens, min_size=count, max_size=count))
        rows.append(
            {"token_ids": ids, "start": start, "block_ids": draw(tables(config, start + count)), **options(draw)}
        )
    return rows


@st.composite
def decodes(draw, config):
    """Draw the fields of the rows of a decode that fits, and a context bucket or `None`."""
    rows = []
    for _ in range(draw(st.integers(1, config.max_num_seqs))):
        position = draw(st.integers(0, config.max_model_len - 1))
        drafts = draw(st.just(0) | st.integers(0, config.max_model_len - 1 - position))
        blocks = draw(tables(config, position + 1))
        fields = {"token_id": draw(tokens), "position": position, "block_ids": blocks, "draft_tokens": drafts}
        rows.append({**fields, **options(draw)})
    needed = max(row["position"] + 1 + row["draft_tokens"] for row in rows)
    fitting = [size for size in config.decode_context_length_buckets if size >= needed]
    return rows, draw(st.none() | st.sampled_from(fitting))


@given(st.data(), configs(), buffer_counts)
def test_tensors_of_rows_equal_the_oracle(data, config, buffers):
    """A series of batches of changing size and order, with dummy batches in between."""
    watched = WatchedInputs(config, buffers=buffers)
    assert list(watched.inputs.shapes) == oracle_inputs.shapes(config)
    for kind in data.draw(st.lists(st.sampled_from(["prefill", "decode", "again", "dummy"]), min_size=1, max_size=8)):
        if kind == "prefill":
            rows = data.draw(prefills(config))
            emits = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
            given = [PrefillRow(**row, emits=emit) for row, emit in zip(rows, emits, strict=True)]
            assert watched.prefill(given, [oracle_inputs.Prefill(**row) for row in rows]).emits == emits
        elif kind == "decode":
            rows, bucket = data.draw(decodes(config))
            watched.decode([DecodeRow(**row) for row in rows], [oracle_inputs.Decode(**row) for row in rows], bucket)
        elif kind == "again":
            rows, _ = data.draw(decodes(config))
            for part in (rows, rows[::-1], rows[1:], rows[:1], rows):
                if part:
                    watched.decode([DecodeRow(**row) for row in part], [oracle_inputs.Decode(**row) for row in part])
        else:
            watched.dummy(data.draw(st.sampled_from(oracle_inputs.shapes(config))))
    watched.assert_no_shared_memory()


# Invalid rows


@st.composite
def with_fault(draw, config, rows, vocab_size):
    """Draw one fault in one of the rows. Return the rows and a pattern for the message."""
    rows = [dict(row) for row in rows]
    at = draw(st.integers(0, len(rows) - 1))
    row, widest = rows[at], oracle_inputs.ceil_div(config.max_model_len, config.block_size)
    prefill = "start" in row
    count = len(row["token_ids"]) if prefill else 1
    end = row["start" if prefill else "position"] + count
    kind = draw(
        st.sampled_from(
            ["position", "few blocks", "many blocks", "no tokens", "block id", "duplicate", "token id", "drafts"]
        )
    )
    if kind == "position":
        beyond = draw(st.integers(1, 5) | st.just(2**31 - 1 - config.max_model_len))
        row["start" if prefill else "position"] = config.max_model_len - count + beyond
        row["block_ids"] = list(range(1, widest + 1))
        return rows, rf"rows\[{at}\].*position.*{config.max_model_len - 1 + beyond}"
    if kind == "few blocks":
        needed = oracle_inputs.ceil_div(end, config.block_size)
        row["block_ids"] = row["block_ids"][: draw(st.integers(0, needed - 1))]
        return rows, rf"rows\[{at}\].*block_ids: {len(row['block_ids'])} "
    if kind == "many blocks":
        row["block_ids"] = list(range(1, widest + draw(st.integers(2, 9))))
        return rows, rf"rows\[{at}\].*block_ids: {len(row['block_ids'])} "
    if kind == "block id":
        invalid = draw(st.sampled_from([0, config.num_blocks + 1, 2**31 - 1]))
        row["block_ids"] = [*row["block_ids"]]
        row["block_ids"][draw(st.integers(0, len(row["block_ids"]) - 1))] = invalid
        return rows, rf"rows\[{at}\].*block_ids: {invalid}\b"
    if kind == "duplicate" and len(row["block_ids"]) > 1:
        first, second = draw(st.lists(st.integers(0, len(row["block_ids"]) - 1), min_size=2, max_size=2, unique=True))
        row["block_ids"] = [*row["block_ids"]]
        row["block_ids"][second] = row["block_ids"][first]
        return rows, rf"rows\[{at}\].*block_ids: {row['block_ids'][first]}\b"
    if kind == "drafts" and not prefill:
        row["draft_tokens"] = (
            config.max_model_len - end + draw(st.integers(1, 5) | st.just(2**31 - 1 - config.max_model_len))
        )
        return rows, rf"rows\[{at}\].*draft_tokens: {row['draft_tokens']}\b"
    if kind == "no tokens" and prefill:
        row["token_ids"] = []
        return rows, rf"rows\[{at}\].*token_ids"
    invalid = draw(st.integers(vocab_size, min(vocab_size + 2, 2**31 - 1)) | st.just(2**31 - 1))
    if prefill:
        row["token_ids"] = [*row["token_ids"]]
        row["token_ids"][draw(st.integers(0, count - 1))] = invalid
    else:
        row["token_id"] = invalid
    return rows, rf"rows\[{at}\].*token_ids?: {invalid}\b"


def in_vocabulary(rows, vocab_size):
    for row in rows:
        if "token_ids" in row:
            row["token_ids"] = [token % vocab_size for token in row["token_ids"]]
        else:
            row["token_id"] %= vocab_size
    return rows


@given(st.data(), configs(), buffer_counts, st.integers(1, 2**31 - 1))
def test_invalid_rows_are_named_and_write_nothing(data, config, buffers, vocab_size):
    watched = WatchedInputs(config, buffers=buffers, vocab_size=vocab_size)
    for _ in range(data.draw(st.integers(1, 3))):
        rows = in_vocabulary(data.draw(prefills(config)), vocab_size)
        watched.prefill([PrefillRow(**row) for row in rows], [oracle_inputs.Prefill(**row) for row in rows])
        invalid, match = data.draw(with_fault(config, rows, vocab_size))
        watched.refused(lambda invalid=invalid: watched.inputs.prefill([PrefillRow(**row) for row in invalid]), match)
        rows = in_vocabulary(data.draw(decodes(config))[0], vocab_size)
        watched.decode([DecodeRow(**row) for row in rows], [oracle_inputs.Decode(**row) for row in rows])
        invalid, match = data.draw(with_fault(config, rows, vocab_size))
        watched.refused(lambda invalid=invalid: watched.inputs.decode([DecodeRow(**row) for row in invalid]), match)


@given(st.data(), configs(), buffer_counts)
def test_rows_that_fit_no_shape_write_nothing(data, config, buffers):
    watched = WatchedInputs(config, buffers=buffers)
    inputs = watched.inputs
    prompts, _ = [PrefillRow(**row) for row in data.draw(prefills(config))], watched.dummy(inputs.shapes[0])
    rows, _ = data.draw(decodes(config))
    decoding, _ = [DecodeRow(**row) for row in rows], watched.dummy(inputs.shapes[-1])
    most = config.max_prefills_per_batch
    watched.refused(lambda: inputs.prefill((prompts * (most + 1))[: most + 1]), f"rows: {most + 1} ")
    most = config.max_num_seqs
    watched.refused(lambda: inputs.decode((decoding * (most + 1))[: most + 1]), f"rows: {most + 1} ")
    watched.refused(lambda: inputs.prefill([]), "rows")
    watched.refused(lambda: inputs.decode([]), "rows")
    last = config.num_batched_tokens_buckets[-1]
    if last < config.max_model_len:
        blocks = range(1, oracle_inputs.ceil_div(last + 1, config.block_size) + 1)
        watched.refused(lambda: inputs.prefill([PrefillRow([1] * (last + 1), 0, list(blocks))]), f"rows: {last + 1} ")
    needed = max(row["position"] + 1 + row["draft_tokens"] for row in rows)
    for bucket in {*config.decode_context_length_buckets, 0, -1, needed - 1, config.max_model_len + 1, 2**31, 2**70}:
        if bucket in config.decode_context_length_buckets and bucket >= needed:
            watched.decode(decoding, [oracle_inputs.Decode(**row) for row in rows], bucket)
        else:
            watched.refused(lambda bucket=bucket: inputs.decode(decoding, bucket), f"context_bucket: {bucket}\\b")
    for bucket in ("8", 8.0, [8], True, object()):
        watched.refused(lambda bucket=bucket: inputs.decode(decoding, bucket), "context_bucket")


# Steps of a scheduler


class TrackedRequest:
    """A request as tracked by the test: its tokens so far (`None` if unknown), and whether it is live."""

    def __init__(self, prompt, sampling):
        self.known = not isinstance(prompt, int)
        self.tokens = [None] * prompt if isinstance(prompt, int) else list(prompt)
        self.prompt_len = len(self.tokens)
        self.sampling = sampling
        self.live = True


class PlannedStep:
    """A step with its values at the time of planning, and the tracked requests of its rows."""

    def __init__(self, step, tracked):
        self.step = step
        ids = list(step.num_scheduled_tokens)
        self.requests = {name: tracked[name] for name in ids}
        blocks = {name: step.block_ids(name) for name in ids}
        self.values = SimpleNamespace(
            kind=step.kind,
            num_scheduled_tokens=step.num_scheduled_tokens,
            num_computed_tokens=step.num_computed_tokens,
            padded_tokens=step.padded_tokens,
            block_ids=blocks.__getitem__,
        )

    def sequences(self, given):
        """Return the tokens of each request. `given` holds those of the rows whose token is unknown."""
        found = {}
        for name, request in self.requests.items():
            found[name] = list(request.tokens)
            if name in given:
                position = self.values.num_computed_tokens[name]
                found[name][position : position + 1] = [given[name]]
        return found

    def unknown(self):
        """Return the ids of the rows without a known token, in batch order."""
        names = []
        for name, request in self.requests.items():
            start, count = self.values.num_computed_tokens[name], self.values.num_scheduled_tokens[name]
            needed = request.tokens[start : start + count]
            if len(needed) < count or None in needed:
                names.append(name)
        return names

    def emits(self):
        """Return for each row whether it computes the last prompt token or a later one."""
        counts, computed = self.values.num_scheduled_tokens, self.values.num_computed_tokens
        return [computed[name] + counts[name] >= request.prompt_len for name, request in self.requests.items()]

    def needed_context(self, config):
        """Return the context length in tokens that the longest row needs, drafts included."""
        longest = max(self.values.num_computed_tokens.values())
        return longest + 1 + oracle_inputs.drafts(config, longest)


# Prompt (token ids, often with a common prefix, or a length), max_tokens, sampling parameters.
requests = st.tuples(
    st.sampled_from([[1] * 40, [1, 2] * 20]).flatmap(lambda ids: st.integers(1, 40).map(lambda count: ids[:count]))
    | st.lists(st.integers(1, 2), min_size=1, max_size=8)
    | st.integers(1, 8),
    st.integers(1, 4) | st.integers(5, 50),
    sampling_params,
)


class Filling(RuleBasedStateMachine):
    """A scheduler and its inputs: each fill of a step equals the oracle or is refused."""

    @initialize(config=configs(max_model_len=40), buffers=buffer_counts, first=st.lists(requests, max_size=6))
    def start(self, config, buffers, first):
        self.config = config
        self.scheduler = BucketScheduler(config)
        self.watched = WatchedInputs(config, buffers=buffers)
        self.tracked = {}
        self.in_flight = []  # at most two steps: the older one and the one planned ahead
        self.old = []  # completed and void steps
        for name, request in zip(IDS, first, strict=False):
            self.add(name, request)

    @rule(name=st.sampled_from(IDS), request=requests)
    def add(self, name, request):
        prompt, max_tokens, sampling = request
        top_k, top_p, temperature = sampling
        options = {"top_k": top_k, "top_p": top_p, "temperature": temperature, "stop_token_ids": [3]}
        with contextlib.suppress(ValueError):
            self.scheduler.add(Request(name, prompt, max_tokens, **options))
            self.tracked[name] = TrackedRequest(prompt, sampling)

    @rule(name=st.sampled_from(IDS))
    def cancel(self, name):
        if self.scheduler.cancel(name):
            self.tracked[name].live = False

    @rule(ahead=st.booleans())
    def schedule(self, ahead):
        if ahead and len(self.in_flight) == 2:
            return
        if not ahead:
            self.old += self.in_flight
            self.in_flight.clear()
        self.in_flight.append(PlannedStep(self.scheduler.schedule(ahead=ahead), self.tracked))
        self.old = self.old[-3:]

    @precondition(lambda self: self.in_flight)
    @rule(ids=st.lists(st.sampled_from([1, 1, 1, 2, 2, 3, 2**31 - 1]), min_size=1), with_tokens=st.booleans())
    def complete(self, ids, with_tokens):
        planned = self.in_flight.pop(0)
        emitted = []
        for at, (name, request) in enumerate(planned.requests.items()):
            end = planned.values.num_computed_tokens[name] + planned.values.num_scheduled_tokens[name]
            passed = end >= request.prompt_len and (with_tokens or request.known)
            emitted.append(ids[at % len(ids)] if passed else None)
        for outcome in self.scheduler.complete(planned.step, emitted):
            request = planned.requests[outcome.id]
            request.tokens.append(outcome.token)
            request.live = outcome.finish_reason is None
        self.old.append(planned)

    @rule(
        count=st.integers(2, 8),
        ahead=st.integers(0, 1),
        ids=st.lists(st.sampled_from([1, 1, 2, 2, 2, 3]), min_size=1),
        argument=st.sampled_from(TOKEN_ARGUMENTS),
        token=tokens,
        bucket=st.integers(0, 9),
    )
    def steps(self, count, ahead, ids, argument, token, bucket):
        """Run steps as an engine does: fill each step when it is scheduled, possibly with the one before in flight."""
        for _ in range(count):
            while len(self.in_flight) < 1 + ahead:
                self.schedule(ahead=bool(self.in_flight))
            self.fill(which=ahead, argument=argument, token=token, bucket=bucket)
            if self.in_flight[0].values.kind == "idle":
                return
            self.complete(ids=ids, with_tokens=True)

    @precondition(lambda self: self.in_flight)
    @rule(which=st.integers(0, 1), argument=st.sampled_from(TOKEN_ARGUMENTS), token=tokens, bucket=st.integers(0, 4))
    def fill(self, which, argument, token, bucket):
        planned = self.in_flight[min(which, len(self.in_flight) - 1)]
        if planned.values.kind == "idle":
            self.watched.refused(lambda: self.watched.inputs.fill(planned.step), "idle")
            return
        prefill = planned.values.kind == "prefill"
        unknown = planned.unknown()
        context = self.context(planned, bucket)
        given = {name: (token + at) % 2**31 for at, name in enumerate(unknown)}
        call = self.call(planned, argument, given, context)
        if prefill and argument == "list":
            self.watched.refused(call, "tokens: ")
        elif context is not None and context < planned.needed_context(self.config):
            self.watched.refused(call, f"context_bucket: {context}")
        elif unknown and (prefill or argument == "none"):
            self.watched.refused(call, "too old|" + "|".join(map(repr, unknown)))
        else:
            # Also with cancelled rows: their blocks are reused only by steps that run later.
            self.accepted(planned, call, given, context)

    @precondition(lambda self: self.old)
    @rule(which=st.integers(0, 3))
    def fill_of_an_old_step(self, which):
        """Fill a completed or void step. It is refused if a request of it has ended, as its blocks may be reused."""
        planned = self.old[which % len(self.old)]
        fill = self.watched.inputs.fill
        ended = not all(request.live for request in planned.requests.values())
        reasons = {
            "idle": planned.values.kind == "idle",
            "too old": ended,
            "token_ids: unknown": planned.unknown(),
        }
        if match := "|".join(reason for reason, applies in reasons.items() if applies):
            self.watched.refused(lambda: fill(planned.step), match)
            return
        self.accepted(planned, lambda: fill(planned.step), {}, None)

    def context(self, planned, bucket):
        """Return a context bucket, possibly too small, or `None`."""
        sizes = self.config.decode_context_length_buckets
        return sizes[bucket] if planned.values.kind == "decode" and bucket < len(sizes) else None

    def call(self, planned, argument, given, context):
        fill = self.watched.inputs.fill
        if argument == "list":
            known = [given.get(name) for name in planned.requests]
            return lambda: fill(planned.step, known, context_bucket=context)
        if argument == "callable":

            def sampled(names):
                assert names == list(given)
                return [given[name] for name in names]

            return lambda: fill(planned.step, sampled, context_bucket=context)
        return lambda: fill(planned.step, context_bucket=context)

    def accepted(self, planned, call, given, context):
        values = planned.values
        sampling = {name: request.sampling for name, request in planned.requests.items()}
        expected = oracle_inputs.of_step(self.config, values, planned.sequences(given), sampling, context)
        assert values.padded_tokens == expected[0][1], "scheduler and oracle disagree on the padded size"
        unpadded = sum(values.num_scheduled_tokens.values())
        batch = self.watched.fill(call, expected, ids=list(planned.requests), unpadded=unpadded)
        assert batch.emits == planned.emits()

    def teardown(self):
        if hasattr(self, "watched"):
            self.watched.assert_no_shared_memory()


TestFilling = pytest.mark.timeout(0)(Filling.TestCase)
TestFilling.settings = settings(deadline=None, stateful_step_count=40)
