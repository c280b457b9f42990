"""Facts of the run about sharded units: their messages, and what waits for gathers and reduce-scatters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import digest_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_table import NO_TIME
from tracedoc.timeline.shards.shard_units import FORWARD, Units
from tracedoc.timeline.shards.times import CallTimes, UnitTable
from tracedoc.topics.communication.run import latency_bound_bytes
from tracedoc.topics.links.run import leaves_node
from tracedoc.topics.sharding.rank import NOT_SHARDED, NOT_TIMED
from tracedoc.trace.distinct import distinct
from tracedoc.values import Unknown, Value, needed


def table_of(digest: RankDigest) -> UnitTable | Unknown:
    """The units that a rank shards, with the times of their calls."""
    return digest.units or NOT_SHARDED


# -- reduce-scatters


NEVER = int(np.iinfo(np.int64).max)


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives", "launches"),
    interval="compute waits for a gather that stood behind a reduce-scatter",
)
def gather_behind_reduce_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What the median step would save if no gather stood behind a reduce-scatter of its own stream.

    Of each gap of the compute stream that a gather ends at most as long as reduce-scatters ran on the
    gather's stream between its launch and its start, and at most what the gather alone could have hidden
    behind the compute before it; waiting for late ranks is left out. Operations of one NCCL communicator
    follow each other on one stream. Of each backward pass at most the time in which nothing is transferred:
    where the link is always busy, another order saves nothing.
    """
    units, times = needed(table_of(digest)).units, needed(table_of(digest)).gather_times
    if times is None:
        return NOT_TIMED
    table, calls = digest.collectives, _stalling(times, step)
    rows, ends, stall = units.gathers.row[calls], times.stall_end_ns[calls], times.stall_ns[calls]
    streams, arrived = table.stream, run.arrivals[digest.rank].last_arrival_ns(table)
    wait = arrived[rows] - table.start_ns[rows]
    alone = np.maximum(table.end_ns[rows] - arrived[rows] - times.beside_ns[calls], 0)
    behind = np.zeros(rows.size, dtype=np.int64)
    for stream in distinct(streams[rows]).tolist():
        reductions = units.reductions.row[streams[units.reductions.row] == stream]
        running = Spans.of(arrived[reductions], table.end_ns[reductions])
        mine = (streams[rows] == stream) & (table.launch_ns[rows] != NO_TIME)
        behind[mine] = running.covered_ns(table.launch_ns[rows[mine]], table.start_ns[rows[mine]])
    saved = np.clip(np.minimum(stall - wait - alone, behind), 0, None)
    return _as_the_link_allows(run, digest, step, ends - saved, ends)


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives", "launches"),
    interval="the backward pass waits for a reduce-scatter before it goes on",
)
def reduce_buffer_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What the median step would save if its backward passes never waited for a reduce-scatter.

    Idle time of the compute stream that the end of a gradient reduce-scatter ends, before the same pass
    reduces further gradients; waiting for late ranks is left out. Of each pass at most the time in which
    nothing is transferred: where the link is always busy, nothing is saved.
    """
    units, times = needed(table_of(digest)).units, needed(table_of(digest)).reduction_times
    if times is None:
        return NOT_TIMED
    chosen = _stalling(times, step)
    ends, reductions, forward = times.stall_end_ns[chosen], _reductions(units, step), _forward(units)
    latest = run.arrivals[digest.rank].of_all_ns[units.reductions.row[chosen]]
    starts = np.maximum(ends - times.stall_ns[chosen], latest)
    within = _next(reductions, ends) < _next(forward, ends)
    return _as_the_link_allows(run, digest, step, starts[within], ends[within])


def _as_the_link_allows(
    run: RunView, digest: RankDigest, step: StepDigest, starts: Int64Array, ends: Int64Array
) -> Spans:
    """Time that waits for transfers, of each backward pass the first as long as its link is idle.

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
    """The calls whose stall begins in a step."""
    inside = (times.stall_start_ns >= step.start_ns) & (times.stall_start_ns < step.end_ns)
    return np.flatnonzero(inside & (times.stall_ns > 0))


def _reductions(units: Units, step: StepDigest) -> Int64Array:
    """The starts of a step's reductions, in order."""
    starts = units.reductions.start_ns
    return np.sort(starts[(starts >= step.start_ns) & (starts < step.end_ns)])


def _forward(units: Units) -> Int64Array:
    """The starts of gathers for forward passes, in order: each ends the backward pass before it."""
    return np.sort(units.gathers.start_ns[units.gathers.phase == FORWARD])


def _next(times: Int64Array, after: Int64Array) -> Int64Array:
    """The first of sorted ``times`` at or after each instant, or NEVER."""
    return np.append(times, NEVER)[np.searchsorted(times, after)]


@digest_fact(unit="fraction", needs=("collectives",))
def latency_bound_gathers_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Share of the median step's parameter gathers that are too small to use the link.

    Latency-bound is as in :func:`latency_bound_frac`; gathers without a size are left out.
    """
    calls = needed(table_of(digest)).units.gathers
    limit = needed(latency_bound_bytes(run, digest))
    mine = (calls.step == step.index) & (calls.nbytes > 0)
    small = calls.nbytes[mine] < limit[calls.row[mine]]
    return float(small.mean()) if small.size else Unknown("the gathers carry no sizes")


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives"),
    interval="gather or reduce-scatter with no compute beside it",
)
def sharded_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in gathers and reduce-scatters of units, less known waiting."""
    needed(table_of(digest))
    return run.exposed_transfer(digest, step, _rows(digest))


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives"),
    interval="gather of the backward pass with no compute beside it",
)
def regather_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in gathers of the backward pass, less known waiting."""
    calls = needed(table_of(digest)).units.gathers
    return run.exposed_transfer(digest, step, calls.row[calls.phase != FORWARD])


def _rows(digest: RankDigest) -> npt.NDArray[np.bool_]:
    """A mask of the rank's collectives that move sharded parameters or their gradients."""
    mine = np.zeros(len(digest.collectives), dtype=np.bool_)
    if digest.units is not None:
        mine[digest.units.units.gathers.row] = True
        mine[digest.units.units.reductions.row] = True
    return mine


# -- nodes


@digest_fact(unit="bool", needs=("collectives",))
def gathers_leave_node(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Whether parameters are gathered over several nodes, though GPUs inside a node have a faster link.

    By the group that gathers most bytes. A node is a host: NVLink and xGMI end there, but for racks whose
    NVLink spans hosts (GB200, GB300) and boards that differ in it (GH200), for which this is unknown. False
    where a host has one rank of the group only, and where GPUs are joined by PCIe.
    """
    return leaves_node(run, digest, needed(table_of(digest)).units.gathers.row)
