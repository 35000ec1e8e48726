"""Cost models: the duration of a step, constant or by padded size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

from neuron_sched._native import Cost as NativeCost
from neuron_sched.simulate.profile import load_profile

Milliseconds: TypeAlias = int | float | str | Decimal
"""A time in milliseconds, at least 0. A float is read as the shortest decimal that represents it."""


@dataclass(frozen=True)
class ConstantCost:
    """Constant step times: a prefill takes `prefill_ms` milliseconds, a decode step `decode_ms`."""

    prefill_ms: Milliseconds
    decode_ms: Milliseconds

    def __post_init__(self) -> None:
        self.native()

    def native(self) -> NativeCost:
        """Return the cost model of the native module."""
        return NativeCost.constant(self.prefill_ms, self.decode_ms)


@dataclass(frozen=True)
class TableCost:
    """Step times in milliseconds by padded size: `prefill` by padded tokens, `decode` by padded rows.

    Between two sizes, the time is interpolated linearly. Above the last size, it is extrapolated on the line through
    the last two, but never below 0. Below the first size, it equals the first time.
    """

    prefill: Mapping[int, Milliseconds]
    decode: Mapping[int, Milliseconds]

    def __post_init__(self) -> None:
        self.native()

    def native(self) -> NativeCost:
        """Return the cost model of the native module."""
        return NativeCost.table(self.prefill, self.decode)

    @classmethod
    def load(cls, name: str) -> TableCost:
        """Load the shipped profile of that name (one of `profiles()`), or the TOML file at that path.

        Raise `ValueError` if neither exists, or if the file is not a valid profile.
        """
        prefill, decode = load_profile(name)
        try:
            return cls(prefill, decode)
        except ValueError as error:
            raise ValueError("\n".join(f"cost: {name}: {fault}" for fault in str(error).splitlines())) from None


Cost: TypeAlias = ConstantCost | TableCost


def cost_of(text: str) -> Cost:
    """Return the cost model for `text`: `prefill_ms=100,decode_ms=25`, or a profile as in `TableCost.load`.

    Raise `ValueError` if `text` is neither.
    """
    if text.strip() and "=" not in text:
        return TableCost.load(text)
    pairs = [part.partition("=") for part in text.split(",")]
    times = {name.strip(): value.strip() for name, _, value in pairs}
    if len(pairs) != 2 or set(times) != {"prefill_ms", "decode_ms"}:
        raise ValueError(f"cost: {text!r}: expected prefill_ms=N,decode_ms=N, or the name or file of a profile")
    return ConstantCost(times["prefill_ms"], times["decode_ms"])
