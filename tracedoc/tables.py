"""What the charts and tables of a diagnosis show: a step to draw, waits, transfers, calls; and rows."""

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


class CollectiveRow(msgspec.Struct, frozen=True):
    """One kind of collective in the analysed step, over all its calls.

    Where waiting is not known apart from transfer, ``least_busbw_gbps`` is what the link gives at least.
    """

    op: str
    group: str
    group_size: int | None
    dtype: str
    calls_per_step: float
    bytes_median: int | None
    bytes_per_step: int | None
    time_ms: float
    exposed_ms: float
    wait_ms: float | None
    transfer_ms: float | None
    busbw_gbps: float | None
    expected_gbps: float | None = None  # what the median size should reach on this link
    median_transfer_ms: float | None = None  # of one operation, over all steps
    arrival_spread_ms: float | None = None  # first to last rank, median over all steps
    matched_calls: int = 0  # operations matched with other ranks, in all steps
    partial_calls: int = 0  # of these, those of which a rank was not captured
    last_arrivals: dict[str, int] = msgspec.field(default_factory=dict)  # how often each rank came last
    least_busbw_gbps: float | None = None


class UnitRow(msgspec.Struct, frozen=True):
    """One sharded unit in one pass ("forward", "backward", "recompute"): medians over the steps.

    ``nbytes`` is the gathered size. ``launch_lag_ms`` is how long after the end of the compute before it
    the gather was launched, negative if in time; ``compute_beside_ms`` the compute that its transfer could
    hide behind; ``stall_ms`` the compute stream's idle time that its end ended; ``units_ahead`` how many
    units ahead it started. ``None`` where the capture does not tell.
    """

    name: str
    phase: str
    nbytes: int | None
    gathers_per_step: float
    gather_ms: float | None
    wait_ms: float | None
    transfer_ms: float | None
    launch_lag_ms: float | None
    compute_beside_ms: float | None
    stall_ms: float | None
    units_ahead: int | None
    reductions_per_step: float
    reduction_ms: float | None
    reduction_stall_ms: float | None


class KernelRow(msgspec.Struct, frozen=True):
    """The kernels of one name in the analysed step.

    Of those whose work is known ``tflops`` and ``gbps`` are the rates, and ``lost_ms`` is what they take
    beyond what their work takes at what the device reaches in practice, at the least; ``lost_most_ms`` at the
    most, as far as that is known of the device. ``None`` where it is not known.
    """

    name: str
    category: str
    calls: int
    time_ms: float
    tflops: float | None = None
    gbps: float | None = None
    lost_ms: float | None = None
    lost_most_ms: float | None = None


class PhaseRow(msgspec.Struct, frozen=True):
    """One phase of the analysed step: what it computed, communicated, and left exposed.

    ``span_ms`` is how much of the step it takes; over all phases that is the step. Work counts for the
    phase that launched it, whenever it runs.
    """

    phase: str  # "forward" | "recompute" | "backward" | "optimizer" | "other"
    span_ms: float
    compute_ms: float
    comm_ms: float
    exposed_comm_ms: float


class CauseRow(msgspec.Struct, frozen=True):
    """Idle time of the analysed step by what the host did meanwhile; the rows add up to the idle time."""

    cause: str
    idle_ms: float


class SyncRow(msgspec.Struct, frozen=True):
    """The host's waits for the GPU in the analysed step that one operator asked for in one place.

    ``draining`` of the ``count`` waits left the GPU idle, for ``idle_ms`` in all. ``line`` is the Python
    function around them, "" without stacks.
    """

    operator: str
    call: str
    where: str
    count: int
    draining: int
    blocked_ms: float
    idle_ms: float
    line: str = ""


class AwayRow(msgspec.Struct, frozen=True):
    """Long gaps of the analysed step in which the host launched nothing, by what it did instead and where."""

    doing: str
    where: str
    count: int
    longest_ms: float
    idle_ms: float


class HostDetail(msgspec.Struct, frozen=True):
    """What the host of the rank that stands for the run did while its device was idle."""

    causes: tuple[CauseRow, ...] = ()
    syncs: tuple[SyncRow, ...] = ()
    away: tuple[AwayRow, ...] = ()
