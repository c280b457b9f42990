"""Read the table of sharded units: what each stall is made of, and a row for each unit and pass."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.diagnosis import UnitRow
from tracedoc.facts.digest import RankDigest
from tracedoc.facts.step_table import StepDigest
from tracedoc.facts.view import RunView, once
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.unit_times import UNKNOWN_DEPTH, CallTimes
from tracedoc.timeline.units import BACKWARD, FORWARD, NO_TIME, PHASES, UNKNOWN_SIZE, ShardCalls, Units
from tracedoc.trace.distinct import is_among

MAX_ROWS = 400
"""The table keeps this many rows, those with most stall."""


class StallParts(msgspec.Struct, frozen=True, eq=False):
    """The stalls of gathers whose gap begins in a window, each split exactly into four parts and a rest (ns).

    ``wait`` is what would be gone had the last rank come in time. ``bandwidth`` is by how much all that is
    transferred since the gather before takes longer than the compute since its use: no order can hide that.
    ``late`` could be hidden, but the host launched the gather too
    late for it; ``held`` was launched in time and started late all the same. ``first`` is all of the first
    gather of a step, which has nothing to hide behind. ``known`` tells whose arrivals are known.
    """

    phase: npt.NDArray[np.int8]
    start_ns: Int64Array
    end_ns: Int64Array
    stall: Int64Array
    wait: Int64Array
    bandwidth: Int64Array
    late: Int64Array
    held: Int64Array
    first: Int64Array
    known: npt.NDArray[np.bool_]

    @property
    def hideable(self) -> Int64Array:
        """The part that an earlier gather would hide behind the compute before it."""
        return self.late + self.held


def stall_parts(run: RunView, digest: RankDigest, step: StepDigest) -> StallParts | None:
    """Return the stalls of one rank in its judged step, ``None`` where units or times are not known."""
    return _all_parts(run).get((digest.rank, step.index))


@once  # many facts and rules ask for the same parts
def _all_parts(run: RunView) -> dict[tuple[int, int], StallParts | None]:
    return {(digest.rank, step.index): _stall_parts(run, digest, step) for digest, step in run.judged()}


def _stall_parts(run: RunView, digest: RankDigest, step: StepDigest) -> StallParts | None:
    table = digest.units
    if table is None or table.gather_times is None:
        return None
    calls, times = table.units.gathers, table.gather_times
    mine = (
        (times.stall_start_ns >= step.start_ns) & (times.stall_start_ns < step.end_ns) & (times.stall_ns > 0)
    )
    latest = latest_arrivals(run, digest, calls.row)
    known = latest != NO_TIME
    turn = np.clip(np.where(known, latest, calls.start_ns), calls.start_ns, calls.end_ns)
    # A wait that runs beside compute costs nothing by itself, but the gather ends later by as much.
    wait = np.minimum(turn - calls.start_ns, times.stall_ns)
    rest = times.stall_ns - wait
    begins_step = np.ones(len(calls), dtype=bool)
    begins_step[1:] = calls.step[1:] != calls.step[:-1]
    first = np.where(begins_step, rest, 0)
    transfer = calls.end_ns - turn
    moved = np.maximum(transfer, _transferred(run, digest).covered_ns(_ends_before(calls), calls.end_ns))
    bandwidth = np.where(begins_step, 0, np.clip(moved - times.beside_ns, 0, rest))
    hideable = rest - first - bandwidth
    late = np.clip(calls.launch_ns + transfer - times.stall_start_ns, 0, hideable)
    return StallParts(
        calls.phase[mine],
        times.stall_start_ns[mine],
        times.stall_end_ns[mine],
        times.stall_ns[mine],
        wait[mine],
        bandwidth[mine],
        late[mine],
        (hideable - late)[mine],
        first[mine],
        known[mine],
    )


def _transferred(run: RunView, digest: RankDigest) -> Spans:
    """Return the time in which any collective of a rank transfers, waiting for peers left out where known."""
    table = digest.collectives
    return Spans.of(run.arrivals[digest.rank].turn_ns(table), table.end_ns)


def _ends_before(calls: ShardCalls) -> Int64Array:
    """Return where the call before each one ends, at most its own end; the first call has its own start."""
    before = np.concatenate((calls.start_ns[:1], calls.end_ns[:-1]))
    return np.minimum(before, calls.end_ns)


def latest_arrivals(run: RunView, digest: RankDigest, rows: npt.NDArray[np.int32]) -> Int64Array:
    """Return when the last rank came to each of some collectives of a rank, on its clock, or ``NO_TIME``."""
    arrivals = run.arrivals[digest.rank]
    return np.where(arrivals.complete[rows], arrivals.latest_ns[rows], NO_TIME)


def hideable_stalls(run: RunView, digest: RankDigest, step: StepDigest) -> Spans:
    """Return the part of each stall that an earlier gather would hide, as the end of the stall."""
    parts = stall_parts(run, digest, step)
    return Spans.empty() if parts is None else _hideable(parts, np.ones(parts.stall.size, dtype=bool))


def hideable_backward_stalls(run: RunView, digest: RankDigest, step: StepDigest) -> Spans:
    """Return the same of the backward pass, recomputation included."""
    parts = stall_parts(run, digest, step)
    return Spans.empty() if parts is None else _hideable(parts, parts.phase != FORWARD)


def _hideable(parts: StallParts, wanted: npt.NDArray[np.bool_]) -> Spans:
    starts = np.maximum(parts.start_ns, parts.end_ns - parts.hideable)
    return Spans.of(starts[wanted], parts.end_ns[wanted])


def unit_rows(run: RunView) -> tuple[UnitRow, ...]:
    """Return a row for each unit and pass of the rank that stands for the run: medians over its whole steps.

    Rows come in the order of the forward pass, then of the backward pass. Of more than MAX_ROWS the ones
    with most stall stay.
    """
    digest = run.standing_digest
    if digest is None or digest.units is None:
        return ()
    table = digest.units
    whole = [step.index for step in digest.complete_steps] or [step.index for step in digest.steps]
    rows = []
    for phase in range(len(PHASES)):
        order = range(len(table.units.names))
        for unit in order if phase != BACKWARD else reversed(order):
            row = _unit_row(run, digest, unit, phase, whole)
            if row is not None:
                rows.append(row)
    if len(rows) <= MAX_ROWS:
        return tuple(rows)
    worst = sorted(range(len(rows)), key=lambda i: (-(rows[i].stall_ms or 0.0), i))[:MAX_ROWS]
    return tuple(rows[i] for i in sorted(worst))


def _unit_row(
    run: RunView, digest: RankDigest, unit: int, phase: int, steps: Iterable[int]
) -> UnitRow | None:
    table = digest.units
    assert table is not None
    units, listed = table.units, np.array(list(steps), dtype=np.int64)
    mine = np.flatnonzero(_of(units.gathers, unit, phase, listed))
    reduced = np.flatnonzero(_of(units.reductions, unit, phase, listed))
    if mine.size + reduced.size == 0:
        return None
    gathers, times = units.gathers, table.gather_times
    latest = latest_arrivals(run, digest, gathers.row[mine])
    known = bool(mine.size) and bool((latest != NO_TIME).all())
    starts, ends = gathers.start_ns[mine], gathers.end_ns[mine]
    turn = np.clip(latest, starts, ends)
    sizes = gathers.nbytes[gathers.unit == unit]
    per_step = max(listed.size, 1)
    return UnitRow(
        name=units.names[unit],
        phase=PHASES[phase],
        nbytes=int(np.median(sizes)) if sizes.size and (sizes != UNKNOWN_SIZE).all() else None,
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


def _of(calls: ShardCalls, unit: int, phase: int, steps: Int64Array) -> npt.NDArray[np.bool_]:
    return np.asarray((calls.unit == unit) & (calls.phase == phase) & is_among(calls.step, steps))


def _timed(times: CallTimes | None, column: str, mine: npt.NDArray[np.intp]) -> float | None:
    if times is None:
        return None
    values: Int64Array = getattr(times, column)[mine]
    return _median_ms(values[values != NO_TIME])


def _ahead(times: CallTimes | None, mine: npt.NDArray[np.intp]) -> int | None:
    depth = times.depth[mine] if times is not None else np.empty(0, dtype=np.int16)
    depth = depth[depth != UNKNOWN_DEPTH]
    return int(np.median(depth)) if depth.size else None


def _median_ms(values: Int64Array) -> float | None:
    return float(np.median(values)) / 1e6 if values.size else None


def unit_bytes(units: Units) -> npt.NDArray[np.float64]:
    """Return the gathered size of each unit, NaN where it is not recorded or the unit is never gathered."""
    return _per_unit(units, units.gathers.nbytes)


def unit_elements(units: Units) -> npt.NDArray[np.float64]:
    """Return the elements of each unit, padding included; NaN where they are not recorded."""
    return _per_unit(units, units.gathers.elements)


def _per_unit(units: Units, values: Int64Array) -> npt.NDArray[np.float64]:
    found = np.full(len(units.names), np.nan)
    for unit in range(len(units.names)):
        mine = values[units.gathers.unit == unit]
        if mine.size and (mine != UNKNOWN_SIZE).all():
            found[unit] = float(np.median(mine))
    return found
