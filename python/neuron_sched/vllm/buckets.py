"""Bucket helpers under the names that users of the production Neuron plug-in know."""

from collections.abc import Sequence

from neuron_sched._native import Buckets, NeuronConfig

__all__ = ["get_bucket_for_count", "get_default_num_batched_tokens_buckets", "get_default_num_seqs_buckets"]


def get_default_num_batched_tokens_buckets(max_num_batched_tokens: int) -> list[int]:
    """Prefill sizes in tokens: doubling from 128 while below the maximum, then the maximum itself.

    >>> get_default_num_batched_tokens_buckets(1000)
    [128, 256, 512, 1000]
    """
    return _config(max_num_batched_tokens, 1).num_batched_tokens_buckets


def get_default_num_seqs_buckets(max_num_seqs: int) -> list[int]:
    """Decode batch sizes in rows: doubling from 1 while below the maximum, then the maximum itself.

    >>> get_default_num_seqs_buckets(6)
    [1, 2, 4, 6]
    """
    return _config(max_num_seqs, max_num_seqs).num_seqs_buckets


def get_bucket_for_count(count: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `count`; 0 for 0. ValueError when negative or above the last bucket.

    >>> get_bucket_for_count(129, [128, 256])
    256
    """
    return Buckets(list(buckets)).fit(count)


def _config(tokens: int, seqs: int) -> NeuronConfig:
    return NeuronConfig(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=tokens, block_size=tokens, num_blocks=1
    )
