"""`NeuronConfig`: messages name each invalid field (X01), and lists are copied."""

import math

import pytest

from neuron_sched import NeuronConfig
from tests.support.bad_values import NOT_A_COUNT

CONFIG = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16, "num_blocks": 20}


@pytest.mark.parametrize("value", [0, *NOT_A_COUNT], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"]
)
def test_x01_invalid_required_fields_are_named(field, value):
    with pytest.raises(ValueError, match=f"(?m)^{field}: "):
        NeuronConfig(**{**CONFIG, field: value})


NOT_A_BUCKET_LIST = [
    [],
    [0, 64],
    [64, 64],
    [128],
    [32],
    ["64"],
    [True],
    [64.0],
    [math.nan],
    [None],
    "64",
    64,
    {64: 1},
    object(),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_batched_tokens_buckets", value) for value in NOT_A_BUCKET_LIST),
        *(("kv_segment_size_buckets", value) for value in NOT_A_BUCKET_LIST),
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
def test_x01_invalid_optional_fields_are_named(field, value):
    with pytest.raises(ValueError, match=f"(?m)^{field}: "):
        NeuronConfig(**{**CONFIG, field: value})


def test_x01_every_invalid_field_has_a_line_in_the_message():
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
