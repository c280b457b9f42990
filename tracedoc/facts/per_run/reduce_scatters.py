"""Facts about reduce-scatters of sharded gradients: what waits for them that need not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.sharded_units import NOT_SHARDED, NOT_TIMED
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.shard_stalls import latest_arrivals, stall_parts
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_table import NO_TIME
from tracedoc.timeline.shards.shard_units import FORWARD, Units
from tracedoc.timeline.shards.times import CallTimes
from tracedoc.trace.distinct import distinct
from tracedoc.values import Unknown

NEVER = int(np.iinfo(np.int64).max)


@run_fact(
    "gather_behind_reduce_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives", "launches"),
    interval="compute waits for a gather that stood behind a reduce-scatter",
)
def gather_behind_reduce_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What the median step would save if no gather stood behind a reduce-scatter of its own stream.

    Of each stall of :func:`gather_stall_ms` at most as long as reduce-scatters ran on the gather's stream
    between its launch and its start, and at most what the gather alone could have hidden behind the compute
    before it; waiting for late ranks is left out. Operations of one NCCL communicator follow each other on
    one stream. Of each backward pass at most the time in which nothing is transferred: where the link is
    always busy, another order saves nothing.
    """
    parts = stall_parts(run, digest, step)
    if parts is None or digest.units is None or digest.units.gather_times is None:
        return NOT_SHARDED if digest.units is None else NOT_TIMED
    table, units = digest.collectives, digest.units.units
    rows = units.gathers.row[parts.call]
    streams, arrived = table.stream, run.arrivals[digest.rank].last_arrival_ns(table)
    alone = np.maximum(
        table.end_ns[rows] - arrived[rows] - digest.units.gather_times.beside_ns[parts.call], 0
    )
    behind = np.zeros(rows.size, dtype=np.int64)
    for stream in distinct(streams[rows]).tolist():
        reductions = units.reductions.row[streams[units.reductions.row] == stream]
        running = Spans.of(arrived[reductions], table.end_ns[reductions])
        mine = (streams[rows] == stream) & (table.launch_ns[rows] != NO_TIME)
        behind[mine] = running.covered_ns(table.launch_ns[rows[mine]], table.start_ns[rows[mine]])
    saved = np.clip(np.minimum(parts.stall - parts.first - parts.wait - alone, behind), 0, None)
    return _as_the_link_allows(run, digest, step, parts.end_ns - saved, parts.end_ns)


@run_fact(
    "reduction_stall_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives", "launches"),
    interval="compute waits for a gradient reduce-scatter",
)
def reduction_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Idle time of the compute stream in the median step that the end of a gradient reduce-scatter ends.

    At the end of a backward pass the optimizer has to wait. Within it nothing needs the reduced gradients.
    """
    if digest.units is None or digest.units.reduction_times is None:
        return NOT_SHARDED if digest.units is None else NOT_TIMED
    chosen, times = _stalling(digest.units.reduction_times, step), digest.units.reduction_times
    return Spans.of(times.stall_end_ns[chosen] - times.stall_ns[chosen], times.stall_end_ns[chosen])


@run_fact(
    "reduce_buffer_stall_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives", "launches"),
    interval="the backward pass waits for a reduce-scatter before it goes on",
)
def reduce_buffer_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What the median step would save if its backward passes never waited for a reduce-scatter.

    The stalls of :func:`reduction_stall_ms` after which the same pass reduces further gradients; waiting for
    late ranks is left out. Of each pass at most the time in which nothing is transferred: where the link is
    always busy, nothing is saved.
    """
    if digest.units is None or digest.units.reduction_times is None:
        return NOT_SHARDED if digest.units is None else NOT_TIMED
    units, times = digest.units.units, digest.units.reduction_times
    chosen = _stalling(times, step)
    ends, reductions, forward = times.stall_end_ns[chosen], _reductions(units, step), _forward(units)
    latest = latest_arrivals(run, digest, units.reductions.row[chosen])
    starts = np.maximum(ends - times.stall_ns[chosen], latest)
    within = _next(reductions, ends) < _next(forward, ends)
    return _as_the_link_allows(run, digest, step, starts[within], ends[within])


def _as_the_link_allows(
    run: RunView, digest: RankDigest, step: StepDigest, starts: Int64Array, ends: Int64Array
) -> Spans:
    """Return time that waits for transfers, of each backward pass the first as long as its link is idle.

    A pass lasts from the start of its first reduction to the end of its last one.
    """
    found = Spans.empty()
    kept = ends > starts
    if digest.units is None or not kept.any():
        return found
    starts, ends = starts[kept], ends[kept]
    units, table = digest.units.units, digest.collectives
    reductions, forward = _reductions(units, step), _forward(units)
    last = table.end_ns[units.reductions.row]
    moving = run.transfers(digest)
    number, of_pass = np.searchsorted(forward, ends), np.searchsorted(forward, reductions)
    of_end = np.searchsorted(forward, units.reductions.start_ns)
    for one in distinct(number).tolist():
        mine = number == one
        begin = int(reductions[of_pass == one].min(initial=int(starts[mine].min())))
        end = int(last[of_end == one].max(initial=int(ends[mine].max())))
        unused = end - begin - int(moving.covered_ns([begin], [end])[0])
        found = found | Spans.of(starts[mine], ends[mine]).first_ns(unused)
    return found


def _stalling(times: CallTimes, step: StepDigest) -> npt.NDArray[np.intp]:
    """Return the calls whose stall begins in a step."""
    inside = (times.stall_start_ns >= step.start_ns) & (times.stall_start_ns < step.end_ns)
    return np.flatnonzero(inside & (times.stall_ns > 0))


def _reductions(units: Units, step: StepDigest) -> Int64Array:
    """Return the starts of a step's reductions, in order."""
    starts = units.reductions.start_ns
    return np.sort(starts[(starts >= step.start_ns) & (starts < step.end_ns)])


def _forward(units: Units) -> Int64Array:
    """Return the starts of gathers for forward passes, in order: each ends the backward pass before it."""
    return np.sort(units.gathers.start_ns[units.gathers.phase == FORWARD])


def _next(times: Int64Array, after: Int64Array) -> Int64Array:
    """Return the first of sorted ``times`` at or after each instant, or NEVER."""
    return np.append(times, NEVER)[np.searchsorted(times, after)]
