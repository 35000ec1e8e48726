"""Bucket sizes, computed in the simplest way."""


def doubling(first, last):
    """Return `first`, then its doubles while they are below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def fit(buckets, count):
    """Return the smallest bucket that holds `count`, or 0 for 0."""
    return 0 if count == 0 else next(size for size in buckets if size >= count)


def ceil_div(tokens, size):
    return -(-tokens // size)
