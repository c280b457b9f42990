"""Facts of the run about what waits for gathers and reduce-scatters of sharded units, and why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import digest_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.shard_stalls import StallParts, latest_arrivals, stall_parts
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_table import NO_TIME
from tracedoc.timeline.shards.shard_units import FORWARD, Units
from tracedoc.timeline.shards.times import CallTimes, UnitTable
from tracedoc.topics.sharding.rank import NOT_SHARDED, NOT_TIMED
from tracedoc.trace.distinct import distinct
from tracedoc.values import Unknown, Value, needed


@digest_fact(unit="ms", needs=("kernels", "collectives", "launches"))
def gather_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Idle time of the compute stream in the median step that the end of a parameter gather ends.

    A gap counts from where the stream has nothing to run and the kernel after it is launched, and if that
    kernel starts within 20 us after the gather (or its copy-out) ends. Time in which the host was late with
    that kernel is not in it, nor is compute on other streams.
    """
    return _stall_ms(run, digest, step, lambda parts: parts.stall)


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives", "launches"),
    interval="compute waits for a gather that could have come earlier",
)
def hideable_gather_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What earlier gathers would hide of the stalls of :func:`gather_stall_ms`.

    The stalls minus what late peers cause, and minus the time by which the transfers since the gather before
    exceed the compute since its use. The first gather of a step has nothing to hide behind.
    """
    return needed(_parts(run, digest, step)).hideable_spans()


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives", "launches"),
    interval="compute of the backward pass waits for a gather that could have come earlier",
)
def hideable_backward_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """The part of :func:`hideable_gather_stall_ms` in the backward pass."""
    parts = needed(_parts(run, digest, step))
    return parts.hideable_spans(parts.phase != FORWARD)


@digest_fact(unit="ms", needs=("kernels", "collectives", "launches"))
def gather_stall_wait_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """The part of the stalls that would be gone had the last rank come in time.

    A gather that waits beside compute and then transfers without any belongs here too. 0 where the arrivals
    of the peers are unknown.
    """
    return _stall_ms(run, digest, step, lambda parts: parts.wait)


CAUSES = (
    "not prefetched",
    "launched too late",
    "peers late",
    "bandwidth",
    "bandwidth or peers late",
    "first",
)
"""Why gathers stall."""


@digest_fact(unit="text", needs=("kernels", "collectives", "launches"), values=CAUSES)
def gather_stall_cause(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """The largest cause of the stalls.

    One of "not prefetched" (launched in time, but it starts when the compute before has ended),
    "launched too late", "peers late", "bandwidth", "bandwidth or peers late" (where not all arrivals of the
    peers are known) and "first" (of the step).
    """
    parts = needed(_parts(run, digest, step))
    totals = {
        "not prefetched": int(parts.held.sum()),
        "launched too late": int(parts.late.sum()),
        "peers late": int(parts.wait.sum()),
        "bandwidth" if parts.known.all() else "bandwidth or peers late": int(parts.bandwidth.sum()),
        "first": int(parts.first.sum()),
    }
    largest = max(totals, key=lambda cause: totals[cause])
    return largest if totals[largest] > 0 else Unknown("no gather stalls the compute stream")


def _stall_ms(
    run: RunView, digest: RankDigest, step: StepDigest, part: Callable[[StallParts], npt.NDArray[np.int64]]
) -> Value:
    return int(part(needed(_parts(run, digest, step))).sum()) / 1e6


def _parts(run: RunView, digest: RankDigest, step: StepDigest) -> StallParts | Unknown:
    needed(table_of(digest))
    return stall_parts(run, digest, step) or NOT_TIMED


def table_of(digest: RankDigest) -> UnitTable | Unknown:
    """The units that a rank shards, with the times of their calls."""
    return digest.units or NOT_SHARDED


# -- bandwidth


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives", "launches"),
    interval="compute waits for a gather whose transfer takes longer than the compute beside it",
)
def gather_bandwidth_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """The part of the stalls by which transfers take longer than the compute they could hide behind.

    The end of each gap. All transfers since the gather before count, reduce-scatters too, because they share
    the link.
    """
    parts = needed(_parts(run, digest, step))
    return Spans.of(parts.end_ns - parts.bandwidth, parts.end_ns)


# -- reduce-scatters


NEVER = int(np.iinfo(np.int64).max)


@digest_fact(
    unit="ms",
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
    parts, table = needed(_parts(run, digest, step)), digest.collectives
    units, times = needed(table_of(digest)).units, needed(table_of(digest)).gather_times
    if times is None:
        return NOT_TIMED
    rows = units.gathers.row[parts.call]
    streams, arrived = table.stream, run.arrivals[digest.rank].last_arrival_ns(table)
    alone = np.maximum(table.end_ns[rows] - arrived[rows] - times.beside_ns[parts.call], 0)
    behind = np.zeros(rows.size, dtype=np.int64)
    for stream in distinct(streams[rows]).tolist():
        reductions = units.reductions.row[streams[units.reductions.row] == stream]
        running = Spans.of(arrived[reductions], table.end_ns[reductions])
        mine = (streams[rows] == stream) & (table.launch_ns[rows] != NO_TIME)
        behind[mine] = running.covered_ns(table.launch_ns[rows[mine]], table.start_ns[rows[mine]])
    saved = np.clip(np.minimum(parts.stall - parts.first - parts.wait - alone, behind), 0, None)
    return _as_the_link_allows(run, digest, step, parts.end_ns - saved, parts.end_ns)


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
    latest = latest_arrivals(run, digest, units.reductions.row[chosen])
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
