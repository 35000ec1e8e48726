"""Values that no caller should pass."""

import math


class Hostile:
    """Raises `RuntimeError` from every conversion."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __index__(self):
        raise RuntimeError("no index")

    def __float__(self):
        raise RuntimeError("no float")

    def __iter__(self):
        raise RuntimeError("no iter")


NOT_A_COUNT = [
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
"""Values that are not a count: out of the 32-bit range, or of another type."""
