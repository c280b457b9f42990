"""Predictions in words: ``54.9 -> about 31 ms (29 to 35)``."""

from __future__ import annotations

from tracedoc.predicted import PathPiece, Range
from tracedoc.units import format_ms, format_percent

RESOURCES = {
    "compute": "compute",
    "communication": "communication",
    "copy": "copies",
    "host": "host",
    "input": "input",
    "sync": "waiting for the GPU",
    "allocator": "memory allocation",
    "unexplained": "unexplained delays",
}
"""Resources of the critical path as reports name them."""

SECOND_MS = 1000.0


def step_change(step_ms: float, after_ms: Range) -> str:
    """Return how a step changes, in two digits with its range: ``54.9 -> about 31 ms (29 to 35)``.

    All numbers have one unit: seconds from one second on.
    """
    scale, unit = (1 / SECOND_MS, "s") if step_ms >= SECOND_MS else (1.0, "ms")
    low, likely, high = (rough(value * scale) for value in after_ms)
    before = three_digits(step_ms * scale)
    span = "" if low == likely == high else f" ({low} to {high})"
    return f"{before} -> about {likely} {unit}{span}"


def rough(value: float) -> str:
    """Return a number in two digits, three from 100 on, with no exponent."""
    size = abs(value)
    if size >= 9.95:
        return f"{value:.0f}"
    if size >= 0.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def three_digits(value: float) -> str:
    """Return a number in three digits, with no exponent."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def shares_of(path: dict[str, float]) -> str:
    """Return the shares of a critical path: ``compute 62 %, communication 30 %, host 8 %``."""
    shown = [(name, share) for name, share in path.items() if share >= 0.005]
    return ", ".join(f"{RESOURCES.get(name, name)} {format_percent(share)}" for name, share in shown)


def piece_words(piece: PathPiece, *, ranks: bool) -> str:
    """Return one kind of work on the path: ``18.3 ms  compute, rank 2: the backward pass``."""
    where = f", rank {piece.rank}" if ranks else ""
    what = f": {piece.what}" if piece.what else ""
    return f"{format_ms(piece.ms):>8}  {RESOURCES.get(piece.resource, piece.resource)}{where}{what}"
