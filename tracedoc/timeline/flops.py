"""Count the floating-point operations of operators from the shapes of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tracedoc.trace.metadata import element_count

Dims = Sequence[object]


def _extents(dims: Dims, position: int) -> Dims:
    value = dims[position] if position < len(dims) else ()
    return value if isinstance(value, (list, tuple)) else ()


def extents_of(dims: Dims, position: int, length: int) -> tuple[int, ...] | None:
    """Return the extents of the argument at ``position``, ``None`` unless it has ``length`` of them."""
    extents = tuple(element_count(extent) for extent in _extents(dims, position))
    known = tuple(extent for extent in extents if extent is not None)
    return known if len(known) == len(extents) == length else None


def _product(left: int, right: int, rank: int) -> Callable[[Dims], float | None]:
    """Return a counter for a matrix product of the arguments at ``left`` and ``right``: 2 B M N K."""

    def count(dims: Dims) -> float | None:
        a, b = extents_of(dims, left, rank), extents_of(dims, right, rank)
        if a is None or b is None or a[-1] != b[-2]:
            return None
        return 2.0 * prod(a) * b[-1]

    return count


def _attention(factor: float, *, first: int = 0) -> Callable[[Dims], float | None]:
    """Return a counter for attention over query and key of shape [B, H, S, D]: 4 B H S T D x factor.

    ``first`` is the position of the query among the arguments; the key follows it.
    """

    def count(dims: Dims) -> float | None:
        query, key = extents_of(dims, first, 4), extents_of(dims, first + 1, 4)
        if query is None or key is None:
            return None
        return factor * 4.0 * query[0] * query[1] * query[2] * key[2] * query[3]

    return count


COUNTERS: dict[str, Callable[[Dims], float | None]] = {
    "aten::mm": _product(0, 1, 2),
    "aten::bmm": _product(0, 1, 3),
    "aten::addmm": _product(1, 2, 2),
    "aten::baddbmm": _product(1, 2, 3),
    "aten::_scaled_mm": _product(0, 1, 2),
    "aten::_scaled_dot_product_flash_attention": _attention(1.0),
    "aten::_scaled_dot_product_efficient_attention": _attention(1.0),
    "aten::_scaled_dot_product_cudnn_attention": _attention(1.0),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(2.5, first=1),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(2.5, first=1),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(2.5, first=1),
}
"""What one call of an operator costs in floating-point operations, from its input shapes.

Only operators that launch the kernels themselves: ``aten::linear`` and ``aten::matmul`` contain these.
"""
