"""Hypothesis strategies of workloads."""

from hypothesis import strategies as st

from tests.vllm.support.workload import Arrival, StepEvents, Workload


def buckets_up_to(last: int):
    """Draw `None`, for the default buckets, or an increasing list of up to 4 sizes that ends at `last`."""
    return st.none() | st.sets(st.integers(1, last), max_size=3).map(lambda sizes: sorted({*sizes, last}))


@st.composite
def workloads(
    draw,
    *,
    prefix_caching: bool | None = False,
    packed: bool = True,
    aborts_in_flight: bool = True,
    resubmit: bool = False,
):
    """Draw a workload. In four of five its limits are small, so that steps reach them often.

    `prefix_caching`: `None` draws it. `packed`: whether a step may have several prompts. `aborts_in_flight`: whether
    requests are aborted while a step is in flight. `resubmit`: whether ids are used a second time.
    """
    large = draw(st.integers(0, 4)) == 4
    seqs = draw(st.sampled_from([3, 2, 4, 5, 6, 1]))
    if large:
        tokens, length = draw(st.integers(64, 600)), draw(st.integers(64, 900))
        block_size = draw(st.sampled_from([16, 32]))
    else:
        tokens, length = draw(st.integers(max(4, seqs), 40)), draw(st.integers(5, 40))
        block_size = draw(st.integers(1, 8))
    budget = min(tokens, length)
    max_blocks = -(-length // block_size)
    reserves_max_len = draw(st.integers(0, 4)) == 4
    buckets = draw(buckets_up_to(budget))
    options = {
        "num_batched_tokens_buckets": buckets,
        "num_seqs_buckets": draw(buckets_up_to(seqs)),
        "max_prefills_per_batch": draw(st.integers(1, 4)) if packed else None,
        "kv_admission": "max_model_len" if reserves_max_len else None,
        "max_consecutive_prefill_steps": draw(st.none() | st.integers(1, 3)),
        "min_decode_steps": draw(st.none() | st.integers(1, 3)),
        "chunking": draw(st.sampled_from([None, "bucket"])),
    }
    if buckets is not None and draw(st.booleans()):
        options["prefill_cost"] = {size: draw(st.integers(0, 9)) for size in buckets}
    else:
        bucket_fields = st.sampled_from(["kv_segment_size_buckets", "num_batched_tokens_buckets"])
        options[draw(bucket_fields)] = options.pop("num_batched_tokens_buckets")
    options = {name: value for name, value in options.items() if value is not None}
    short = st.integers(1, max(1, budget // 3))
    lengths = short | short | st.integers(1, length - 1) | st.integers(1, length + 1)
    arrivals = st.builds(
        Arrival,
        prompt=lengths,
        max_tokens=st.integers(1, 5) | st.integers(1, min(2 * length, 30)),
        prefix_group=st.integers(0, 2),
        unique_end=st.booleans(),
        priority=st.integers(-1, 1),
        stop=st.sampled_from([None, None, None, 0, 3, 5]),
    )
    added = st.just([]) | st.lists(arrivals, max_size=2) | st.lists(arrivals, min_size=1, max_size=4)
    step = st.tuples(added, st.booleans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 40))
    drawn_steps = draw(st.lists(step, min_size=draw(st.integers(1, 8)), max_size=14))
    throttled, aborting = draw(st.booleans()), draw(st.booleans())
    num_added, steps = 0, []
    for add, throttle, before, during, pick in drawn_steps:
        num_added += len(add)
        target = [pick % num_added] if num_added and aborting else []
        steps.append(
            StepEvents(
                add=add,
                abort=target if before == 9 else [],
                throttle=throttled and throttle,
                abort_in_flight=target if aborts_in_flight and during == 9 else [],
                resubmit=target if resubmit and before == 8 else [],
            )
        )
    return Workload(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        block_size=block_size,
        num_blocks=max_blocks + draw(st.integers(0 if reserves_max_len else -(max_blocks // 2), 3 * max_blocks)),
        steps=steps,
        prefix_caching=draw(st.booleans()) if prefix_caching is None else prefix_caching,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        long_prefill_token_threshold=draw(st.just(0) | st.just(0) | st.integers(1, max(2, budget // 2))),
        options=options,
    )
