"""The tables of a diagnosis: what the host did, kernels, phases, collectives, and sharded units."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.ranks.matching import NO_OPERATION
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array
from tracedoc.step.kernel_times import NOT_KNOWN
from tracedoc.step.rank_digest import RankDigest
from tracedoc.tables import (
    AwayRow,
    CauseRow,
    CollectiveRow,
    HostDetail,
    KernelRow,
    PhaseRow,
    SyncRow,
    UnitRow,
)
from tracedoc.timeline.collective_table import NONE, CollectiveTable
from tracedoc.timeline.host import IDLE_WORK
from tracedoc.timeline.shards.shard_units import BACKWARD, NO_TIME, PHASES, UNKNOWN_SIZE, ShardCalls
from tracedoc.timeline.shards.times import UNKNOWN_DEPTH, CallTimes, UnitTable
from tracedoc.trace.distinct import is_among, median, medians_by_value, places_by_value
from tracedoc.trace.vocabulary import busbw_factor


def host_detail(digest: RankDigest) -> HostDetail | None:
    """The host's work while the device was idle, ``None`` where it is not known."""
    host = digest.host_work
    if host is None:
        return None
    idle = sorted(((ns, cause) for cause in IDLE_WORK if (ns := host.of(cause))), reverse=True)
    return HostDetail(
        causes=tuple(CauseRow(cause, ns / 1e6) for ns, cause in idle),
        syncs=tuple(
            SyncRow(
                s.operator, s.call, s.where, s.count, s.draining, s.blocked_ns / 1e6, s.idle_ns / 1e6, s.line
            )
            for s in host.syncs
        ),
        away=tuple(
            AwayRow(a.doing, a.where, a.count, a.longest_ns / 1e6, a.idle_ns / 1e6) for a in host.away
        ),
    )


def kernel_rows(digest: RankDigest) -> tuple[KernelRow, ...]:
    """The kernels of the analysed step by name."""
    kernels = digest.kernels
    rates = [
        [None if one == NOT_KNOWN else one for one in column.tolist()]
        for column in (kernels.tflops, kernels.gbps, kernels.lost_ms, kernels.lost_most_ms)
    ]
    return tuple(
        KernelRow(name, category.value, calls, time_ns / 1e6, *rated)
        for name, category, calls, time_ns, *rated in zip(
            kernels.names,
            kernels.categories,
            kernels.calls.tolist(),
            kernels.time_ns.tolist(),
            *rates,
            strict=True,
        )
    )


def phase_rows(digest: RankDigest) -> tuple[PhaseRow, ...]:
    """The phases of the analysed step in order."""
    return tuple(
        PhaseRow(
            p.phase.name.lower(),
            p.span_ns / 1e6,
            p.compute_ns / 1e6,
            p.comm_ns / 1e6,
            p.exposed_comm_ns / 1e6,
        )
        for p in digest.phases
    )


def collective_rows(run: RunView, digest: RankDigest) -> tuple[CollectiveRow, ...]:
    """One row per kind of collective in the analysed step of the rank that stands for the run.

    Of more than :data:`MAX_ROWS` those with most time.
    """
    step = digest.judged_step
    if step is None:
        return ()
    starts = digest.collectives.start_ns
    inside = np.flatnonzero((starts >= step.start_ns) & (starts < step.end_ns))
    table = digest.collectives.take(inside)
    arrivals = run.arrivals[digest.rank]
    last_arrival_ns = arrivals.last_arrival_ns(digest.collectives)[inside]
    matched = arrivals.complete[inside]
    kinds: dict[tuple[str, str, int | None, str], list[int]] = defaultdict(list)
    for row, number in enumerate(table.kind.tolist()):
        kind = table.kinds[number]
        kinds[kind.op, kind.group_name, kind.group_size or len(kind.group) or None, kind.dtype].append(row)
    rows = []
    for key, listed in kinds.items():
        places = np.array(listed)
        rows.append((_collective_row(key, table, last_arrival_ns, matched, places), inside[places]))
    rows.sort(key=lambda pair: -pair[0].time_ms)
    return tuple(_across_ranks(row, run, digest, places) for row, places in rows[:MAX_ROWS])


def _across_ranks(
    row: CollectiveRow, run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp]
) -> CollectiveRow:
    """The row completed with medians over all matched operations of its kind and group, in all steps."""
    matching = run.matching
    operations = run.operations[digest.rank][rows]
    operations = operations[operations != NO_OPERATION]
    if operations.size == 0:
        return row
    op, group = matching.op[operations[0]], int(matching.group[operations[0]])
    alike = np.flatnonzero((matching.op == op) & (matching.group == group))
    split = alike[matching.has_latest_start[alike]]
    last, counts = np.unique(matching.part_rank[matching.last_part[split]], return_counts=True)
    first = np.minimum.reduceat(matching.start_ns, matching.first[:-1])[alike]
    curve, sizes = run.curves[group], matching.nbytes[alike]
    sized = sizes[sizes != NONE]
    known = curve is not None and sized.size and row.busbw_gbps is not None
    return replace(
        row,
        expected_gbps=curve.expected_gbps(float(median(sized))) if curve and known else None,
        median_transfer_ms=float(median(matching.transfer_ns[alike])) / 1e6,
        arrival_spread_ms=float(median(matching.latest_start_ns[alike] - first)) / 1e6,
        matched_calls=int(alike.size),
        partial_calls=int((~matching.complete[alike]).sum()),
        last_arrivals={
            str(matching.ranks[rank]): count
            for rank, count in zip(last.tolist(), counts.tolist(), strict=True)
        },
    )


def _collective_row(
    key: tuple[str, str, int | None, str],
    table: CollectiveTable,
    last_arrival_ns: Int64Array,
    matched: np.ndarray,
    rows: np.ndarray,
) -> CollectiveRow:
    op, group, group_size, dtype = key
    sizes = np.sort(table.nbytes[rows][table.nbytes[rows] != NONE])
    all_matched, all_sized = bool(matched[rows].all()), sizes.size == rows.size
    transfer = int((table.end_ns[rows] - last_arrival_ns[rows]).sum())
    total = int(sizes.sum())
    lasted = int((table.end_ns[rows] - table.start_ns[rows]).sum())
    busbw = least_busbw = None
    if all_sized and group_size and total > 0:
        moved = total * busbw_factor(op, group_size)
        if not all_matched:
            least_busbw = moved / lasted if lasted > 0 else None
        elif transfer > 0:
            busbw = moved / transfer
    return CollectiveRow(
        op=op,
        group=group,
        group_size=group_size,
        dtype=dtype,
        calls_per_step=float(rows.size),
        bytes_median=int(sizes[sizes.size // 2]) if sizes.size else None,
        bytes_per_step=total if all_sized else None,
        time_ms=lasted / 1e6,
        exposed_ms=int(table.exposed_ns[rows].sum()) / 1e6,
        wait_ms=int((last_arrival_ns[rows] - table.start_ns[rows]).sum()) / 1e6 if all_matched else None,
        transfer_ms=transfer / 1e6 if all_matched else None,
        busbw_gbps=busbw,
        least_busbw_gbps=least_busbw,
    )


MAX_ROWS = 400
"""The tables of units and of collectives keep this many rows, those with most stall or time."""


def unit_rows(run: RunView) -> tuple[UnitRow, ...]:
    """A row for each unit and pass of the rank that stands for the run: medians over its whole steps.

    Rows come in the order of the forward pass, then of the backward pass. Of more than MAX_ROWS the ones
    with most stall stay.
    """
    digest = run.representative_digest
    if digest is None or digest.units is None:
        return ()
    whole = [step.index for step in digest.complete_steps] or [step.index for step in digest.steps]
    steps = np.array(whole, dtype=np.int64)
    gathers, reductions = (
        _places_by_row(calls, steps) for calls in (digest.units.units.gathers, digest.units.units.reductions)
    )
    rows = sorted(gathers.keys() | reductions.keys(), key=_in_order_of_passes)
    if len(rows) > MAX_ROWS:
        stall = _median_stalls(digest.units, steps)
        rows = sorted(sorted(rows, key=lambda row: -stall.get(row, 0.0))[:MAX_ROWS], key=_in_order_of_passes)
    none = np.empty(0, dtype=np.intp)
    return tuple(
        _unit_row(run, digest, row, gathers.get(row, none), reductions.get(row, none), len(whole))
        for row in rows
    )


def _row_of(calls: ShardCalls) -> Int64Array:
    """The row of the table for each call: unit and pass in one number."""
    return calls.unit.astype(np.int64) * len(PHASES) + calls.phase


def _in_order_of_passes(row: int) -> tuple[int, int]:
    """Sort the forward pass first; the backward pass goes from the last unit to the first."""
    unit, phase = divmod(row, len(PHASES))
    return phase, -unit if phase == BACKWARD else unit


def _places_by_row(calls: ShardCalls, steps: Int64Array) -> dict[int, npt.NDArray[np.intp]]:
    # Calls that fit no unit have the number -1.
    wanted = np.flatnonzero(is_among(calls.step, steps) & (calls.unit >= 0))
    return {row: wanted[places] for row, places in places_by_value(_row_of(calls)[wanted])}


def _median_stalls(table: UnitTable, steps: Int64Array) -> dict[int, float]:
    if table.gather_times is None:
        return {}
    calls, stall_ns = table.units.gathers, table.gather_times.stall_ns
    wanted = is_among(calls.step, steps) & (stall_ns != NO_TIME)
    rows, medians = medians_by_value(_row_of(calls)[wanted], stall_ns[wanted])
    return dict(zip(rows.tolist(), medians.tolist(), strict=True))


def _unit_row(
    run: RunView,
    digest: RankDigest,
    row: int,
    mine: npt.NDArray[np.intp],
    reduced: npt.NDArray[np.intp],
    steps: int,
) -> UnitRow:
    table = digest.units
    assert table is not None
    unit, phase = divmod(row, len(PHASES))
    units, gathers, times = table.units, table.units.gathers, table.gather_times
    latest = run.arrivals[digest.rank].of_all_ns[gathers.row[mine]]
    known = bool(mine.size) and bool((latest != NO_TIME).all())
    starts, ends = gathers.start_ns[mine], gathers.end_ns[mine]
    turn = np.clip(latest, starts, ends)
    sizes = gathers.nbytes[gathers.unit == unit]
    per_step = max(steps, 1)
    return UnitRow(
        name=units.names[unit],
        phase=PHASES[phase],
        nbytes=int(median(sizes)) if sizes.size and (sizes != UNKNOWN_SIZE).all() else None,
        gathers_per_step=mine.size / per_step,
        gather_ms=_median_ms(ends - starts),
        wait_ms=_median_ms(turn - starts) if known else None,
        transfer_ms=_median_ms(ends - turn) if known else None,
        launch_lag_ms=_timed(times, "lag_ns", mine),
        compute_beside_ms=_timed(times, "beside_ns", mine),
        stall_ms=_timed(times, "stall_ns", mine),
        units_ahead=_ahead(times, mine),
        reductions_per_step=reduced.size / per_step,
        reduction_ms=_median_ms(units.reductions.end_ns[reduced] - units.reductions.start_ns[reduced]),
        reduction_stall_ms=_timed(table.reduction_times, "stall_ns", reduced),
    )


def _timed(times: CallTimes | None, column: str, mine: npt.NDArray[np.intp]) -> float | None:
    if times is None:
        return None
    values: Int64Array = getattr(times, column)[mine]
    return _median_ms(values[values != NO_TIME])


def _ahead(times: CallTimes | None, mine: npt.NDArray[np.intp]) -> int | None:
    depth = times.depth[mine] if times is not None else np.empty(0, dtype=np.int16)
    depth = depth[depth != UNKNOWN_DEPTH]
    return int(median(depth)) if depth.size else None


def _median_ms(values: Int64Array) -> float | None:
    return float(median(values)) / 1e6 if values.size else None
