"""What the charts of a report show: a step to draw, waits, transfers, calls of sharded units, memory."""

from __future__ import annotations

import msgspec


class Waits(msgspec.Struct, frozen=True):
    """Exposed waiting of each rank in each step, and for whom.

    ``wait_ms[i][j]`` is what ``ranks[i]`` waits for peers or in the pipeline in step ``steps[j]`` with no
    compute beside it, ``None`` where the rank has no such step or its peers are not known.
    ``waited_for[i][j]`` is the rank at the end of most of that waiting, ``None`` where no captured one is.
    ``left_out_ranks`` and ``left_out_steps`` more are not listed.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    wait_ms: tuple[tuple[float | None, ...], ...]
    waited_for: tuple[tuple[int | None, ...], ...]
    left_out_ranks: int = 0
    left_out_steps: int = 0


class TransferRow(msgspec.Struct, frozen=True):
    """The transfers of one operation, group size and message size, over all steps.

    Bus bandwidths are those of the slowest, the median and the fastest; ``expected_gbps`` is what that size
    should reach on the link, ``None`` where that is not known.
    """

    op: str
    ranks: int
    nbytes: int
    calls: int
    low_gbps: float
    gbps: float
    high_gbps: float
    expected_gbps: float | None = None


class ExpectedCurve(msgspec.Struct, frozen=True):
    """The bus bandwidth that a group of ``ranks`` should reach: ``peak * size / (size + half)``."""

    ranks: int
    peak_gbps: float
    half_bytes: float


class TransferSpeeds(msgspec.Struct, frozen=True):
    """How fast messages of each size travel, and how fast they should. ``left_out`` rows are not listed."""

    rows: tuple[TransferRow, ...]
    curves: tuple[ExpectedCurve, ...] = ()
    left_out: int = 0


class UnitCall(msgspec.Struct, frozen=True):
    """One gather or reduction of a sharded unit, in milliseconds from the beginning of the step.

    ``stall_start_ms`` to ``stall_end_ms`` is the gap of the compute stream that it ended, both ``None``
    without one.
    """

    unit: str
    kind: str  # "gather" | "reduction"
    phase: str
    start_ms: float
    end_ms: float
    stall_start_ms: float | None = None
    stall_end_ms: float | None = None


class UnitTimeline(msgspec.Struct, frozen=True):
    """The calls of all units in the analysed step of one rank, in order; ``left_out`` are not listed."""

    rank: int
    step: int
    span_ms: float
    calls: tuple[UnitCall, ...]
    left_out: int = 0


class MemoryCurve(msgspec.Struct, frozen=True):
    """The allocator's memory of one device over the capture, as peaks of equal stretches of time.

    Times are milliseconds since the rank's first event, sizes bytes: ``allocated`` in tensors, ``reserved``
    held by the allocator. ``device_bytes`` is what the device has, ``None`` where that is not recorded.
    """

    rank: int
    times_ms: tuple[float, ...]
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    device_bytes: int | None = None


Pairs = tuple[tuple[float, float], ...]
"""Beginnings and ends in milliseconds from the beginning of the picture."""


class PictureRow(msgspec.Struct, frozen=True):
    """One rank: its step from ``start_ms`` to ``end_ms``, and what it did, thinned to what an eye can tell.

    Keys of ``spans_ms``: "forward", "recompute", "backward", "optimizer" and "compute" (of no phase);
    "transfer", "wait", "pipeline" and "unsplit" of exposed communication; "copy" where exposed; "idle " and a
    cause; and "communication", hidden or not, which runs beside the others. ``named`` are the longest
    kernels, collectives and gaps: beginning, end, and the number of their name in the picture's ``names``.
    """

    rank: int
    start_ms: float
    end_ms: float
    spans_ms: dict[str, Pairs]
    named: tuple[tuple[float, float, int], ...] = ()


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
    names: tuple[str, ...] = ()
