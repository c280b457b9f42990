"""Read the table of sharded units: what each stall is made of, and a row for each unit and pass."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.shards.shard_units import NO_TIME, ShardCalls
from tracedoc.values import once


class StallParts(msgspec.Struct, frozen=True, eq=False):
    """The stalls of gathers whose gap begins in a window, each split exactly into four parts and a rest (ns).

    ``wait`` is what would be gone had the last rank come in time. ``bandwidth`` is by how much all that is
    transferred since the gather before takes longer than the compute since its use: no order can hide that.
    ``late`` could be hidden, but the host launched the gather too
    late for it; ``held`` was launched in time and started late all the same. ``first`` is all of the first
    gather of a step, which has nothing to hide behind. ``known``: those whose arrivals are known.
    ``call`` is the place of each among the rank's gathers.
    """

    call: npt.NDArray[np.intp]
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

    def hideable_spans(self, wanted: npt.NDArray[np.bool_] | None = None) -> Spans:
        """That part of all or of some stalls, as the end of each."""
        starts = np.maximum(self.start_ns, self.end_ns - self.hideable)
        chosen = slice(None) if wanted is None else wanted
        return Spans.of(starts[chosen], self.end_ns[chosen])


def stall_parts(run: RunView, digest: RankDigest, step: StepDigest) -> StallParts | None:
    """Return the stalls of one rank in its analysed step, ``None`` where units or times are not known."""
    return _all_parts(run).get((digest.rank, step.index))


@once  # several facts and rules need the same parts
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
    last_arrival_ns = np.clip(np.where(known, latest, calls.start_ns), calls.start_ns, calls.end_ns)
    # A wait that runs beside compute costs nothing by itself, but the gather ends later by as much.
    wait = np.minimum(last_arrival_ns - calls.start_ns, times.stall_ns)
    rest = times.stall_ns - wait
    begins_step = np.ones(len(calls), dtype=bool)
    begins_step[1:] = calls.step[1:] != calls.step[:-1]
    first = np.where(begins_step, rest, 0)
    transfer = calls.end_ns - last_arrival_ns
    moved = np.maximum(transfer, run.transfers(digest).covered_ns(_ends_before(calls), calls.end_ns))
    bandwidth = np.where(begins_step, 0, np.clip(moved - times.beside_ns, 0, rest))
    hideable = rest - first - bandwidth
    late = np.clip(calls.launch_ns + transfer - times.stall_start_ns, 0, hideable)
    return StallParts(
        np.flatnonzero(mine),
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


def _ends_before(calls: ShardCalls) -> Int64Array:
    """The end of the call before each one, at most its own end; the first call has its own start."""
    before = np.concatenate((calls.start_ns[:1], calls.end_ns[:-1]))
    return np.minimum(before, calls.end_ns)


def latest_arrivals(run: RunView, digest: RankDigest, rows: npt.NDArray[np.int32]) -> Int64Array:
    """When the last rank came to each of some collectives of a rank, on its clock, or ``NO_TIME``."""
    arrivals = run.arrivals[digest.rank]
    return np.where(arrivals.complete[rows], arrivals.latest_ns[rows], NO_TIME)
