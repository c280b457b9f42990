"""The rows of the tables of a diagnosis: collectives, sharded units, kernels, phases, and the host."""

from __future__ import annotations

import msgspec


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
