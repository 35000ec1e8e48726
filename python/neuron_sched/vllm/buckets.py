"""Bucket helpers under the names that the production Neuron plug-in uses."""

from collections.abc import Sequence

from neuron_sched._native import Buckets, NeuronConfig

__all__ = ["get_bucket_for_count", "get_default_num_batched_tokens_buckets", "get_default_num_seqs_buckets"]


def get_default_num_batched_tokens_buckets(max_num_batched_tokens: int) -> list[int]:
    """Return the default token buckets: 128, doubled while below the maximum, then the maximum itself.

    >>> get_default_num_batched_tokens_buckets(1000)
    [128, 256, 512, 1000]
    """
    return _config(max_num_batched_tokens, 1).num_batched_tokens_buckets


def get_default_num_seqs_buckets(max_num_seqs: int) -> list[int]:
    """Return the default batch buckets: 1, doubled while below the maximum, then the maximum itself.

    >>> get_default_num_seqs_buckets(6)
    [1, 2, 4, 6]
    """
    return _config(max_num_seqs, max_num_seqs).num_seqs_buckets


def get_bucket_for_count(count: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `count`, or 0 if `count` is 0.

    Raises `ValueError` if `count` is negative or above the last bucket.

    >>> get_bucket_for_count(129, [128, 256])
    256
    """
    return Buckets(list(buckets)).fit(count)


def _config(tokens: int, seqs: int) -> NeuronConfig:
    """Return a configuration whose bucket lists are the defaults for these maxima."""
    return NeuronConfig(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=tokens, block_size=tokens, num_blocks=1
    )
