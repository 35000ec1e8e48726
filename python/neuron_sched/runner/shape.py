"""Compiled shapes: the key of a graph, its name in messages, and the error for a shape without a graph."""

from __future__ import annotations

Shape = tuple[str, int] | tuple[str, int, int]
"""Key of a compiled graph: `("prefill", tokens)`, or `("decode", rows, context)` with the context in tokens."""


class ShapeError(ValueError):
    """A batch for which no graph was compiled."""


def shape_name(shape: Shape) -> str:
    """Return the shape as text for reports and logs, such as `decode 8, context 4096`."""
    kind, size, *context = shape
    return f"{kind} {size}" + "".join(f", context {tokens}" for tokens in context)
