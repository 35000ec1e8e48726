"""Invariants of every scheduler output, and the expected result of every request."""

from tests.vllm.support.drivers import VllmDriver, run_workload
from tests.vllm.support.harness import computed_before


def output_checker(workload, sched, *, ahead):
    """Return a function that asserts the invariants of one output.

    A step has one phase, respects every limit, preempts no request and is padded to a bucket. If no other step is in
    flight, a step is empty only if no request is running.
    """

    def check(out):
        before, unpadded, padded = computed_before(out), out.num_scheduled_tokens, out.num_scheduled_tokens_padded
        assert padded.keys() == unpadded.keys() == before.keys()
        assert all(0 < count <= padded[name] for name, count in unpadded.items())
        assert not out.preempted_req_ids
        assert ahead or unpadded or not sched.running, "empty step while a request is running"
        assert len(sched.running) <= workload.max_num_seqs
        arrivals = workload.arrivals()
        prefills = {name for name in unpadded if before[name] < arrivals[name].prompt}
        assert prefills in (set(), unpadded.keys()), "mixed step"
        assert all(before[name] + count <= workload.max_model_len for name, count in unpadded.items())
        if prefills:
            assert len(prefills) <= sched.max_prefills_per_batch
            assert sum(unpadded.values()) <= sum(padded.values())
            assert sum(padded.values()) in sched.num_batched_tokens_buckets
            assert out.num_seqs_padded == 0
        elif unpadded:
            assert padded == unpadded
            assert set(unpadded.values()) == {1}
            assert out.num_seqs_padded == min(size for size in sched.num_seqs_buckets if size >= len(unpadded))
        sched.check()

    return check


def expected_result(workload, arrival):
    """Return [output tokens, finish reason] of a request that is not aborted."""
    if not workload.fits(arrival):
        return [[], "error"]
    tokens = []
    for position in range(arrival.prompt, arrival.prompt + arrival.max_tokens):
        tokens.append(arrival.token(position))
        if tokens[-1] in arrival.stop_token_ids:
            return [tokens, "stop"]
        if position + 1 >= workload.max_model_len:
            break
    return [tokens, "length"]


def run_and_check(workload, cls, *, ahead):
    """Run a workload and assert the invariants and the result of every request that is not aborted.

    Return {request id: [output tokens, finish reason]}.
    """
    driver = VllmDriver(cls, workload, asynchronous=ahead)
    results = run_workload(driver, ahead=ahead, check=output_checker(workload, driver.sched, ahead=ahead))
    assert driver.free_blocks == workload.num_blocks
    for name, arrival in workload.arrivals().items():
        if name not in workload.aborted():
            assert results[name] == expected_result(workload, arrival), name
    return results
