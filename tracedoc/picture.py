"""One step of all ranks on one clock, as intervals to draw."""

from __future__ import annotations

import msgspec

Pairs = tuple[tuple[float, float], ...]
"""Beginnings and ends in milliseconds from the beginning of the picture."""


class PictureRow(msgspec.Struct, frozen=True):
    """One rank: its step from ``start_ms`` to ``end_ms``, and what it did, thinned to what an eye can tell.

    Keys of ``spans_ms``: "forward", "recompute", "backward", "optimizer" and "compute" (of no phase);
    "transfer", "wait", "pipeline" and "unsplit" of exposed communication; "copy" where exposed; "idle " and a
    cause; and "communication", hidden or not, which runs beside the others.
    """

    rank: int
    start_ms: float
    end_ms: float
    spans_ms: dict[str, Pairs]


class PathStretch(msgspec.Struct, frozen=True):
    """A stretch of the critical path: what ``rank`` did from ``start_ms`` to ``end_ms``.

    ``resource`` is "compute", "communication", "copy", "host", "input", "sync" or "allocator", ``what`` the
    longest that it was, as far as the capture names it.
    """

    rank: int
    resource: str
    start_ms: float
    end_ms: float
    what: str = ""


class Picture(msgspec.Struct, frozen=True):
    """A step as all drawn ranks spent it.

    Where ``aligned`` is False the clocks could not be compared, and each rank begins at 0. ``left_out`` ranks
    are not drawn. Gaps of at most ``closed_ms`` between intervals of one kind are closed. ``path`` is the
    critical path in order of time, empty where the step was not replayed.
    """

    step: int
    span_ms: float
    aligned: bool
    rows: tuple[PictureRow, ...]
    left_out: int = 0
    closed_ms: float = 0.0
    path: tuple[PathStretch, ...] = ()
