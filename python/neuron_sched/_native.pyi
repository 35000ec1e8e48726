"""Native half of `neuron_sched`. Use the names that the package exports."""

from collections.abc import Sequence
from typing import TypedDict, final, type_check_only

__version__: str

@type_check_only
class BuildInfo(TypedDict):
    profile: str | None
    commit: str | None
    target: str | None

def build_info() -> BuildInfo:
    """What the extension was built from.

    `profile` is `"debug"` or `"release"`, `target` the platform triple, `commit` that of the sources, or
    None where they were no git checkout.
    """

@final
class Buckets:
    """An ascending list of compiled sizes, and the smallest one that holds a count.

    >>> buckets = Buckets([128, 256, 512])
    >>> buckets.fit(129)
    256
    >>> buckets.fit(0)
    0
    >>> buckets.fit(513)
    Traceback (most recent call last):
    ValueError: count: 513: expected at most the last bucket, 512
    """

    def __new__(cls, sizes: Sequence[int]) -> Buckets:
        """`sizes`: a list or tuple of positive whole numbers, strictly ascending, at least one; else ValueError."""

    def fit(self, count: int) -> int:
        """The smallest size that holds `count`; 0 for 0; ValueError when negative or above the last size."""

    @property
    def sizes(self) -> list[int]:
        """All sizes, ascending."""

    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class NeuronConfig:
    """Checked configuration of the exclusive scheduler; an immutable value."""

    def __new__(cls, **fields: object) -> NeuronConfig: ...
