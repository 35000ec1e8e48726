"""`VllmInputs` with real schedulers: the arrays of each step match the scheduler's requests.

`CheckedWorker` compares each fill with the oracle. The tests assert only what is specific to them.
"""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make vllm-env")

from vllm.v1.request import RequestStatus

from neuron_sched.vllm import config, inputs
from neuron_sched.vllm.scheduler import NeuronAsyncScheduler
from tests.support.oracles import inputs as oracle_inputs
from tests.support.watched_inputs import assert_batch
from tests.vllm.support.checked_worker import TOKEN_SOURCES, CheckedWorker
from tests.vllm.support.harness import request
from tests.vllm.support.requests import add
from tests.vllm.support.schedulers import both_classes, build, build_ahead, every_engine, with_connector

every_token_source = pytest.mark.parametrize("way", TOKEN_SOURCES)


def abort(sched, *names):
    sched.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)


# --- field cases ---


@every_engine
def test_v21_the_first_chunk_uses_the_whole_token_budget(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=1024)
    worker = CheckedWorker(s)
    add(s, a=(32, 9))
    worker.step(ahead)
    worker.step(ahead)
    add(s, b=(300, 2))
    chunks = [batch for batch in worker.run(ahead) if batch.request_ids == ("b",) and batch.kind == "prefill"]
    assert [batch.num_real_tokens for batch in chunks] == [128, 128, 44]
    assert [batch.emits for batch in chunks] == [[False], [False], [True]]


@every_engine
def test_v21_a_block_allocated_by_a_block_aligned_decode_is_in_its_block_table(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=1024)
    worker = CheckedWorker(s)
    add(s, a=(32, 4), b=(10, 2))
    tables = []
    for _ in range(3):
        worker.step(ahead)
        tables.append(worker.batches[-1].block_table[:, :4].tolist())
    assert tables == [[[1, 2, -1, -1]], [[3, -1, -1, -1]], [[1, 2, 4, -1], [3, -1, -1, -1]]]
    assert worker.batches[-1].slot_mapping.tolist() == [4 * 16, 3 * 16 + 10]
    worker.run(ahead)


@every_engine
def test_v27_no_row_is_beyond_max_model_len(cls, ahead):
    s = build_ahead(cls, ahead, max_num_batched_tokens=128, max_model_len=100)
    add(s, a=(98, 10), b=(10, 3))
    worker = CheckedWorker(s)
    worker.run(ahead)
    assert [(b.request_ids, b.num_real_tokens) for b in worker.batches] == [
        (("a",), 98),
        (("b",), 10),
        (("a", "b"), 2),
        (("b",), 1),
    ]
    assert max(batch.positions.max() for batch in worker.batches) == 98


@every_engine
def test_r06_padding_does_not_count_as_computed(cls, ahead):
    """A prompt of 5,000 tokens is padded to 8,192. With 1,000 cached tokens, its other 4,000 are padded to 4,096."""
    s = build_ahead(
        cls,
        ahead,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        num_blocks=2000,
        block_size=8,
        prefix_caching=True,
    )
    worker = CheckedWorker(s)
    ids = [5 + i % 900 for i in range(5000)]
    for name, shared in (("a", 5000), ("b", 1000)):
        prompt = ids[:shared] + [999] * (5000 - shared)
        s.add_request(request(name, token_ids=prompt, max_tokens=2, block_size=8))
        worker.step(ahead)
        prefill = worker.batches[-1]
        worker.step(ahead)
        decode = worker.batches[-1]
        assert (decode.kind, decode.positions.tolist(), decode.context_lens.tolist()) == ("decode", [5000], [5001])
        worker.run(ahead)
        computed = 0 if name == "a" else 1000
        assert (prefill.num_real_tokens, prefill.cached_seq_len.tolist()) == (5000 - computed, [[computed]])
        assert prefill.shape == ("prefill", 8192 if name == "a" else 4096)
        assert prefill.logits_index.tolist() == [5000 - computed - 1]


@every_engine
def test_r08_each_unpadded_row_emits_a_token_except_a_middle_chunk(cls, ahead):
    s = build_ahead(cls, ahead)
    add(s, a=(10, 9), b=(10, 9), c=(10, 9))
    worker = CheckedWorker(s)
    for _ in range(4):
        worker.step(ahead)
    decode = worker.batches[-1]
    assert (decode.num_real_tokens, decode.num_padded_tokens, decode.emits) == (3, 4, [True] * 3)
    add(s, d=(100, 2))
    worker.step(ahead)
    middle = worker.batches[-1]
    assert (middle.request_ids, middle.num_real_tokens, middle.emits) == (("d",), 64, [False])
    worker.run(ahead)


# --- kinds of steps ---


@every_engine
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_packed_chunks_prefix_cache_hits_context_buckets_and_sampling_parameters(cls, ahead, prefix_caching):
    s = build_ahead(
        cls,
        ahead,
        max_num_seqs=6,
        prefix_caching=prefix_caching,
        neuron_config={"max_prefills_per_batch": 3, "decode_context_length_buckets": [32, 64, 128]},
    )
    ids = [5 + i % 900 for i in range(200)]
    worker = CheckedWorker(s, buffers=2, vocab_size=1000)
    for i, count in enumerate((20, 16, 33, 150, 150, 40)):
        params = {"temperature": 0.25 * i, "top_k": i, "top_p": 1 - i / 10}
        s.add_request(request(f"r{i}", token_ids=ids[:count], max_tokens=20, params=params))
        if i in {1, 2}:
            for _ in range(4):
                worker.step(ahead)
    batches = worker.run(ahead)
    assert {batch.shape[2] for batch in batches if batch.kind == "decode"} == {32, 64, 256}
    prefills = [batch for batch in batches if batch.kind == "prefill"]
    assert max(len(batch.request_ids) for batch in prefills) > 1
    assert max(batch.cached_seq_len[0, 0] for batch in prefills if batch.request_ids[0] == "r2") == 16 * prefix_caching


@both_classes
def test_a_larger_context_bucket_is_filled_on_request(cls):
    s = build(cls, neuron_config={"decode_context_length_buckets": [32, 64, 256]})
    add(s, a=(10, 4))
    worker = CheckedWorker(s)
    worker.step()
    for bucket in (None, 64, 256):
        worker.step(context_bucket=bucket)
        assert worker.batches[-1].shape == ("decode", 1, bucket or 32)


@every_engine
@every_token_source
def test_decode_tokens_sampled_by_steps_in_flight(cls, ahead, way):
    s = build_ahead(cls, ahead)
    worker = CheckedWorker(s, buffers=2)
    add(s, a=(70, 9), b=(10, 5), c=(20, 1))
    for _ in range(5):
        worker.step(ahead, way)
    add(s, d=(30, 3))
    worker.run(ahead, way)
    assert worker.inputs.num_in_flight == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_several_steps_in_flight(depth):
    """More steps than vLLM has in flight without pipeline parallelism."""
    s = build_ahead(NeuronAsyncScheduler, 1)
    worker = CheckedWorker(s, buffers=depth + 1)
    add(s, a=(10, 12), b=(10, 9))
    seen = set()
    for _ in range(6):
        worker.step(depth)
        seen.add(worker.inputs.num_in_flight)
    assert max(seen) == depth
    worker.run(depth)


@every_engine
def test_an_empty_step_gives_none_and_forgets_finished_requests(cls, ahead):
    s = build_ahead(cls, ahead)
    worker = CheckedWorker(s)
    add(s, a=(10, 1))
    worker.step()
    assert (worker.inputs.num_requests, len(worker.batches)) == (1, 1)
    worker.step()
    assert (worker.inputs.num_requests, len(worker.batches)) == (0, 1)


# --- finished, resumed and paused requests ---


@every_engine
def test_the_id_of_an_aborted_request_can_be_reused(cls, ahead):
    """One output reports the id as finished and schedules the new request."""
    s = build_ahead(cls, ahead)
    worker = CheckedWorker(s)
    add(s, a=(100, 5), b=(10, 9))
    worker.step(ahead)
    for prompt_len in (40, 70, 20):
        abort(s, "a")
        s.add_request(request("a", token_ids=[prompt_len] * prompt_len, max_tokens=4))
        out = worker.step(ahead)
        assert out.finished_req_ids == {"a"}
        for _ in range(2):
            worker.step(ahead)
    worker.run(ahead)


@pytest.mark.parametrize("way", ["list", "call"])
def test_a_row_in_flight_of_a_finished_request_does_not_change_a_new_request_with_its_id(way):
    """Request a is aborted while its decode is in flight, and its id is reused."""
    s = build_ahead(NeuronAsyncScheduler, 1)
    worker = CheckedWorker(s)
    add(s, a=(10, 9), b=(10, 9))
    for _ in range(4):
        worker.step(1, way)
    assert worker.in_flight[-1].sampled_positions == {"a": 12, "b": 12}
    abort(s, "a")
    s.add_request(request("a", token_ids=[3] * 12, max_tokens=4))
    out = s.schedule()
    assert (out.finished_req_ids, [new.req_id for new in out.scheduled_new_reqs]) == ({"a"}, ["a"])
    worker.fill(out, way)
    worker.deliver()  # The token that request a sampled for position 12, where the new request continues.
    worker.run(1, way)


@every_engine
@pytest.mark.parametrize("as_new", [False, True], ids=["resumed", "as-new"])
def test_all_requests_are_resumed_after_a_reset(cls, ahead, as_new):
    """vLLM's newer model runner receives a resumed request as a new one, without a report that it has finished."""
    s = build_ahead(cls, ahead, prefix_caching=True)
    s.use_v2_model_runner = as_new
    worker = CheckedWorker(s)
    add(s, a=(100, 20), b=(10, 20))
    resumed = set()
    for number in range(30):
        if number in {1, 6, 7, 15}:
            assert s.reset_prefix_cache(reset_running_requests=True)
        out = worker.step(ahead)
        resumed |= out.scheduled_cached_reqs.resumed_req_ids
        resumed |= {new.req_id for new in out.scheduled_new_reqs if len(new.prefill_token_ids or ()) > 100}
        assert worker.inputs.num_requests <= 2
    assert "a" in resumed
    worker.run(ahead)


@every_engine
def test_a_paused_session_continues_with_its_next_input(cls, ahead):
    s = build_ahead(cls, ahead)
    worker = CheckedWorker(s)

    def session_input(prompt_len, resumable):
        r = request("s", prompt_len, 2)
        r.resumable = resumable
        return r

    s.add_request(session_input(20, resumable=True))
    add(s, a=(10, 30))
    for _ in range(6):
        worker.step(ahead)
    assert s.requests["s"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    s.add_request(session_input(30, resumable=False))
    worker.run(ahead)


@both_classes
def test_the_last_token_of_a_remotely_computed_prompt_is_a_decode(cls):
    """The first step that schedules p is a decode, with all tokens but the last computed."""
    s = with_connector(cls)
    worker = CheckedWorker(s)
    add(s, a=(10, 20))
    worker.step()
    s.connector.answers["p"] = (64, True)
    r = request("p", 64, 3)
    r.kv_transfer_params = {"do_remote_prefill": True, "do_remote_decode": False}
    s.add_request(r)
    worker.step()
    worker.fill(s.schedule())
    worker.deliver(finished_recving={"p"})
    worker.step()
    batch = worker.batches[-1]
    assert (batch.request_ids, batch.positions.tolist()) == (("a", "p"), [12, 63])
    worker.run()


# --- other properties ---


@both_classes
def test_outputs_can_come_from_another_process(cls):
    s = build(cls)
    worker = CheckedWorker(s)
    add(s, a=(100, 3), b=(10, 3))
    fill = worker.inputs.fill
    worker.inputs.fill = lambda out, *rest, **options: fill(pickle.loads(pickle.dumps(out)), *rest, **options)
    worker.run()
    assert [batch.kind for batch in worker.batches] == ["prefill"] * 3 + ["decode"] * 2


def test_a_worker_reads_the_configuration_of_the_scheduler():
    """Both read the same arguments, so the worker has the shapes of the scheduler."""
    configs = []

    def edit(vllm_config):
        configs.append(config.read(vllm_config, 400, runs_ahead=False))

    s = build(edit=edit, neuron_config={"decode_context_length_buckets": [64]})
    assert configs == [s.neuron_config]
    worker = inputs.VllmInputs(configs[0], buffers=2)
    assert worker.config is configs[0]
    assert list(worker.shapes) == oracle_inputs.shapes(s.neuron_config)
    for shape in worker.shapes:
        batch = worker.dummy(shape)
        assert_batch(batch, oracle_inputs.dummy(s.neuron_config, shape), ids=[], unpadded=0)
    assert worker.num_in_flight == 0


def test_another_thread_can_accept_during_a_fill():
    """In vLLM's worker processes, another thread accepts outputs while the next step is filled."""
    s = build_ahead(NeuronAsyncScheduler, 1, max_num_batched_tokens=256)
    worker = CheckedWorker(s, buffers=2)
    add(s, a=(10, 200), b=(20, 200))
    with ThreadPoolExecutor(1) as thread:
        while s.requests:
            out = s.schedule()
            expected, unknown = worker.expected(out)
            accepting = [thread.submit(worker.accept, step) for step in worker.in_flight]
            batch = worker.inputs.fill(out, lambda ids, unknown=unknown: [unknown[name] for name in ids])
            for future in accepting:
                future.result()
            if batch is not None:
                assert_batch(batch, expected, ids=list(out.num_scheduled_tokens), unpadded=batch.num_real_tokens)
                worker.record_sampled(out, batch)
            while len(worker.in_flight) > (batch is not None):
                worker.deliver()
    assert worker.number > 200


def test_accept_within_accept_is_refused():
    """Steps are accepted in order, so two calls must not overlap."""
    s = build()
    worker = inputs.VllmInputs(s.neuron_config)
    add(s, a=(10, 5))
    worker.fill(s.schedule())

    class AcceptingList(list):
        def __iter__(self):
            worker.accept([[7]])
            return super().__iter__()

    with pytest.raises(RuntimeError, match="another accept"):
        worker.accept(AcceptingList([[8]]))
    assert worker.num_in_flight == 1
    worker.accept([[9]])
    assert worker.num_in_flight == 0


def test_fill_within_fill_is_refused():
    """Steps are filled in order, so two calls must not overlap."""
    s = build_ahead(NeuronAsyncScheduler, 1)
    worker = inputs.VllmInputs(s.neuron_config)
    add(s, a=(10, 5))
    worker.fill(s.schedule())
    out = s.schedule()

    def filling(_):
        worker.fill(out, [7])

    with pytest.raises(RuntimeError, match="another fill"):
        worker.fill(out, filling)
    assert worker.fill(out, [7]).input_ids.tolist() == [7]
