"""`VllmInputs` on real schedulers: whatever a step is, its arrays are those that the scheduler's own requests give.

`Watch` compares every fill with the slow oracle; a test looks at what it is about besides.
"""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

import oracle_inputs
from inputs_setup import assert_batch
from neuron_sched.vllm import config, inputs
from neuron_sched.vllm.scheduler import NeuronAsyncScheduler
from vllm_harness import request
from vllm_inputs_setup import WAYS, Watch
from vllm_setup import add, both_classes, build, build_ahead, every_engine, with_connector

every_way = pytest.mark.parametrize("way", WAYS)


def abort(sched, *names):
    sched.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)


# --- cases ---


@every_engine
def test_v21_first_chunk_gets_the_whole_budget(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=1024)
    watch = Watch(s)
    add(s, a=(32, 9))
    watch.step(ahead)
    watch.step(ahead)
    add(s, b=(300, 2))
    chunks = [batch for batch in watch.run(ahead) if batch.request_ids == ("b",) and batch.kind == "prefill"]
    assert [batch.num_real_tokens for batch in chunks] == [128, 128, 44]
    assert [batch.emits for batch in chunks] == [[False], [False], [True]]


@every_engine
def test_v21_the_block_that_an_aligned_decode_takes_is_in_its_table(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=1024)
    watch = Watch(s)
    add(s, a=(32, 4), b=(10, 2))
    tables = []
    for _ in range(3):
        watch.step(ahead)
        tables.append(watch.batches[-1].block_table[:, :4].tolist())
    assert tables == [[[1, 2, -1, -1]], [[3, -1, -1, -1]], [[1, 2, 4, -1], [3, -1, -1, -1]]]
    assert watch.batches[-1].slot_mapping.tolist() == [4 * 16, 3 * 16 + 10]
    watch.run(ahead)


@every_engine
def test_v27_no_row_beyond_the_end(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=100)
    add(s, a=(98, 10), b=(10, 3))
    watch = Watch(s)
    watch.run(ahead)
    assert [(b.request_ids, b.num_real_tokens) for b in watch.batches] == [
        (("a",), 98),
        (("b",), 10),
        (("a", "b"), 2),
        (("b",), 1),
    ]
    assert max(batch.positions.max() for batch in watch.batches) == 98


@every_engine
def test_r06_padding_never_counts(cls, ahead):
    """5,000 of a prompt padded to 8,192, then, with 1,000 tokens cached, 4,000 padded to 4,096."""
    s = build_ahead(
        cls,
        ahead,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        num_blocks=2000,
        block_size=8,
        prefix_caching=True,
    )
    watch = Watch(s)
    ids = [5 + i % 900 for i in range(5000)]
    for name, shared in (("a", 5000), ("b", 1000)):
        prompt = ids[:shared] + [999] * (5000 - shared)
        s.add_request(request(name, token_ids=prompt, max_tokens=2, block_size=8))
        watch.step(ahead)
        prefill = watch.batches[-1]
        watch.step(ahead)
        decode = watch.batches[-1]
        assert (decode.kind, decode.positions.tolist(), decode.context_lens.tolist()) == ("decode", [5000], [5001])
        watch.run(ahead)
        computed = 0 if name == "a" else 1000
        assert (prefill.num_real_tokens, prefill.cached_seq_len.tolist()) == (5000 - computed, [[computed]])
        assert prefill.shape == ("prefill", 8192 if name == "a" else 4096)
        assert prefill.logits_index.tolist() == [5000 - computed - 1]


@every_engine
def test_r08_a_token_for_each_real_row_and_none_for_a_middle_chunk(cls, ahead):
    s = build_ahead(cls, ahead)
    add(s, a=(10, 9), b=(10, 9), c=(10, 9))
    watch = Watch(s)
    for _ in range(4):
        watch.step(ahead)
    decode = watch.batches[-1]
    assert (decode.num_real_tokens, decode.num_padded_tokens, decode.emits) == (3, 4, [True] * 3)
    add(s, d=(100, 2))
    watch.step(ahead)
    middle = watch.batches[-1]
    assert (middle.request_ids, middle.num_real_tokens, middle.emits) == (("d",), 64, [False])
    watch.run(ahead)


# --- whatever a step is ---


@every_engine
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_packed_chunks_prefix_hits_contexts_and_sampling(cls, ahead, prefix_caching):
    s = build_ahead(
        cls,
        ahead,
        max_num_seqs=6,
        prefix_caching=prefix_caching,
        neuron_config={"max_prefills_per_batch": 3, "decode_context_length_buckets": [32, 64, 128]},
    )
    ids = [5 + i % 900 for i in range(200)]
    watch = Watch(s, buffers=2, vocab_size=1000)
    for i, count in enumerate((20, 16, 33, 150, 150, 40)):
        params = {"temperature": 0.25 * i, "top_k": i, "top_p": 1 - i / 10}
        s.add_request(request(f"r{i}", token_ids=ids[:count], max_tokens=20, params=params))
        if i in {1, 2}:
            for _ in range(4):
                watch.step(ahead)
    batches = watch.run(ahead)
    assert {batch.shape[2] for batch in batches if batch.kind == "decode"} == {32, 64, 256}
    prefills = [batch for batch in batches if batch.kind == "prefill"]
    assert max(len(batch.request_ids) for batch in prefills) > 1
    assert max(batch.cached_seq_len[0, 0] for batch in prefills if batch.request_ids[0] == "r2") == 16 * prefix_caching


@both_classes
def test_a_larger_context_bucket_is_filled_when_asked_for(cls):
    s = build(cls, neuron_config={"decode_context_length_buckets": [32, 64, 256]})
    add(s, a=(10, 4))
    watch = Watch(s)
    watch.step()
    for bucket in (None, 64, 256):
        watch.step(context_bucket=bucket)
        assert watch.batches[-1].shape == ("decode", 1, bucket or 32)


@every_engine
@every_way
def test_tokens_of_steps_in_flight(cls, ahead, way):
    s = build_ahead(cls, ahead)
    watch = Watch(s, buffers=2)
    add(s, a=(70, 9), b=(10, 5), c=(20, 1))
    for _ in range(5):
        watch.step(ahead, way)
    add(s, d=(30, 3))
    watch.run(ahead, way)
    assert watch.inputs.num_in_flight == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_several_steps_in_flight(depth):
    """Deeper than vLLM goes without pipeline parallelism: tokens come by callable, and outputs in order."""
    s = build_ahead(NeuronAsyncScheduler, 1)
    watch = Watch(s, buffers=depth + 1)
    add(s, a=(10, 12), b=(10, 9))
    seen = set()
    for _ in range(6):
        watch.step(depth)
        seen.add(watch.inputs.num_in_flight)
    assert max(seen) == depth
    watch.run(depth)


@every_engine
def test_a_step_of_nobody_is_none_and_tells_who_ended(cls, ahead):
    s = build_ahead(cls, ahead)
    watch = Watch(s)
    add(s, a=(10, 1))
    watch.step()
    assert (watch.inputs.num_requests, len(watch.batches)) == (1, 1)
    watch.step()
    assert (watch.inputs.num_requests, len(watch.batches)) == (0, 1)


# --- who ends, starts over or comes again ---


@every_engine
def test_aborts_between_steps_and_ids_that_are_used_again(cls, ahead):
    """The end of the old one and the beginning of the new one come in the same output."""
    s = build_ahead(cls, ahead)
    watch = Watch(s)
    add(s, a=(100, 5), b=(10, 9))
    watch.step(ahead)
    for prompt_len in (40, 70, 20):
        abort(s, "a")
        s.add_request(request("a", token_ids=[prompt_len] * prompt_len, max_tokens=4))
        out = watch.step(ahead)
        assert out.finished_req_ids == {"a"}
        for _ in range(2):
            watch.step(ahead)
    watch.run(ahead)


@pytest.mark.parametrize("way", ["list", "call"])
def test_the_row_in_flight_of_an_ended_request_is_nobodys(way):
    """a is aborted, and its id used again, while a decode of the old one is in flight."""
    s = build_ahead(NeuronAsyncScheduler, 1)
    watch = Watch(s)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(4):
        watch.step(1, way)
    assert watch.in_flight[-1].places == {"a": 12, "b": 12}
    abort(s, "a")
    s.add_request(request("a", token_ids=[3] * 12, max_tokens=4))
    out = s.schedule()
    assert (out.finished_req_ids, [new.req_id for new in out.scheduled_new_reqs]) == ({"a"}, ["a"])
    watch.fill(out, way)
    watch.deliver()  # the old one's token for position 12, where the new one goes on
    watch.run(1, way)


@every_engine
@pytest.mark.parametrize("as_new", [False, True], ids=["resumed", "as-new"])
def test_everybody_starts_over_after_a_reset(cls, ahead, as_new):
    """The newer of vLLM's runners is told of a new request, with all tokens beside the prompt, and of no end before."""
    s = build_ahead(cls, ahead, prefix_caching=True)
    s.use_v2_model_runner = as_new
    watch = Watch(s)
    add(s, a=(100, 20), b=(10, 20))
    resumed = set()
    for number in range(30):
        if number in {1, 6, 7, 15}:
            assert s.reset_prefix_cache(reset_running_requests=True)
        out = watch.step(ahead)
        resumed |= out.scheduled_cached_reqs.resumed_req_ids
        resumed |= {new.req_id for new in out.scheduled_new_reqs if len(new.prefill_token_ids or ()) > 100}
        assert watch.inputs.num_requests <= 2
    assert "a" in resumed
    watch.run(ahead)


@every_engine
def test_a_session_goes_on_with_more_input(cls, ahead):
    s = build_ahead(cls, ahead)
    watch = Watch(s)

    def part(prompt_len, resumable):
        r = request("s", prompt_len, 2)
        r.resumable = resumable
        return r

    s.add_request(part(20, resumable=True))
    add(s, a=(10, 30))
    for _ in range(6):
        watch.step(ahead)
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    s.add_request(part(30, resumable=False))
    watch.run(ahead)


@both_classes
def test_the_last_token_of_a_prompt_from_elsewhere_is_a_decode(cls):
    """p is told for the first time in a decode step, with all but its last token computed."""
    s = with_connector(cls)
    watch = Watch(s)
    add(s, a=(10, 20))
    watch.step()
    s.connector.answers["p"] = (64, True)
    r = request("p", 64, 3)
    r.kv_transfer_params = {"do_remote_prefill": True, "do_remote_decode": False}
    s.add_request(r)
    watch.step()
    watch.fill(s.schedule())
    watch.deliver(finished_recving={"p"})
    watch.step()
    batch = watch.batches[-1]
    assert (batch.request_ids, batch.positions.tolist()) == (("a", "p"), [12, 63])
    watch.run()


# --- the rest of the contract ---


@both_classes
def test_outputs_may_come_from_another_process(cls):
    s = build(cls)
    watch = Watch(s)
    add(s, a=(100, 3), b=(10, 3))
    fill = watch.inputs.fill
    watch.inputs.fill = lambda out, *rest, **options: fill(pickle.loads(pickle.dumps(out)), *rest, **options)
    watch.run()
    assert [batch.kind for batch in watch.batches] == ["prefill"] * 3 + ["decode"] * 2


def test_the_configuration_is_that_of_the_scheduler():
    """A worker reads it from the same arguments, and has the same shapes."""
    found = []

    def edit(vllm_config):
        found.append(config.read(vllm_config, 400, runs_ahead=False))

    s = build(edit=edit, neuron_config={"decode_context_length_buckets": [64]})
    assert found == [s.neuron_config]
    worker = inputs.VllmInputs(found[0], buffers=2)
    assert worker.config is found[0]
    assert list(worker.shapes) == oracle_inputs.shapes(s.neuron_config)
    for shape in worker.shapes:
        batch = worker.dummy(shape)
        assert_batch(batch, oracle_inputs.dummy(s.neuron_config, shape), ids=[], real=0)
    assert worker.num_in_flight == 0


def test_another_thread_may_accept():
    """As in vLLM's worker processes, where outputs are taken in beside the next step."""
    s = build_ahead(NeuronAsyncScheduler, 1, max_num_batched_tokens=256)
    watch = Watch(s, buffers=2)
    add(s, a=(10, 200), b=(20, 200))
    with ThreadPoolExecutor(1) as other:
        while s.requests:
            out = s.schedule()
            expected, unknown = watch.expected(out)
            accepting = [other.submit(watch.accept, step) for step in watch.in_flight]
            batch = watch.inputs.fill(out, lambda ids, unknown=unknown: [unknown[name] for name in ids])
            for done in accepting:
                done.result()
            if batch is not None:
                assert_batch(batch, expected, ids=list(out.num_scheduled_tokens), real=batch.num_real_tokens)
                watch.ran(out, batch)
            while len(watch.in_flight) > (batch is not None):
                watch.deliver()
    assert watch.number > 200


def test_a_list_that_accepts_while_it_is_read():
    """Outputs are accepted in order, so one call begins after the other has ended."""
    s = build()
    worker = inputs.VllmInputs(s.neuron_config)
    add(s, a=(10, 5))
    worker.fill(s.schedule())

    class Accepts(list):
        def __iter__(self):
            worker.accept([[7]])
            return super().__iter__()

    with pytest.raises(RuntimeError, match="another accept"):
        worker.accept(Accepts([[8]]))
    assert worker.num_in_flight == 1
    worker.accept([[9]])
    assert worker.num_in_flight == 0


def test_the_callable_may_ask_for_no_fill():
    """Outputs are told in order, so one fill begins after the other has ended."""
    s = build_ahead(NeuronAsyncScheduler, 1)
    worker = inputs.VllmInputs(s.neuron_config)
    add(s, a=(10, 5))
    worker.fill(s.schedule())
    out = s.schedule()

    def ask(_):
        worker.fill(out, [7])

    with pytest.raises(RuntimeError, match="another fill"):
        worker.fill(out, ask)
    assert worker.fill(out, [7]).input_ids.tolist() == [7]
