"""Changes that make ranks alike, and that add ranks: longer rings, more peers to wait for."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import log2
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.program import Codes, Lags, narrow
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.trace.vocabulary import busbw_factor
from tracedoc.whatif.changes.change import NotApplicable, Parameter, as_change, of_scenario

EXCESS_NS = 100_000
EXCESS_SHARE = 0.5
EXCESS_OF_WORK = 0.1
"""One lag of the host counts as longer than elsewhere if it is by so much, and by this share: on CPUs, where
it holds the work itself, by the second one."""

AT_ONCE = 20_000
"""So many times are compared at once."""


@as_change(Parameter("rank", "the rank", None, 0, 1e6))
def even_rank(program: RunProgram, rank: float) -> RunProgram:
    """One rank takes no longer than its peers, on the GPU and on the host."""
    ranks = program.layout.ranks
    if rank not in ranks:
        raise NotApplicable(f"rank {rank:g} was not captured")
    if len(ranks) < 2:
        raise NotApplicable("one rank has no peers")
    return evened(program, (ranks.index(int(rank)),))


@as_change()
def even_ranks(program: RunProgram) -> RunProgram:
    """No rank takes longer than its peers, on the GPU and on the host."""
    if len(program.layout.ranks) < 2:
        raise NotApplicable("one rank has no peers")
    return evened(program, tuple(range(len(program.layout.ranks))))


@as_change()
def share_work(program: RunProgram) -> RunProgram:
    """Every rank computes as much as the mean of all: balanced stages, or batches of equal work."""
    layout = program.layout
    count = len(layout.ranks)
    if count < 2:
        raise NotApplicable("one rank has no peers")
    work = np.where(layout.computes, program.dur, 0)
    sums = np.bincount(layout.event_rank, weights=work, minlength=count)
    if not (sums > 0).all():
        raise NotApplicable("a rank computes nothing")
    factor = (sums.mean() / sums)[layout.event_rank]
    dur = np.where(layout.computes, np.rint(program.dur * factor).astype(np.int64), program.dur)
    return program.edited(dur=dur)


def evened(
    program: RunProgram, positions: tuple[int, ...], peers: tuple[int, ...] | None = None
) -> RunProgram:
    """Return the program in which the ranks at some positions take no longer than the others' median.

    ``peers`` are the positions of the ranks that are compared: all of them, if none are given.
    """
    layout = program.layout
    dur, computes = program.dur.copy(), layout.computes
    events = layout.event_base
    compared = np.array(range(len(layout.ranks)) if peers is None else peers, dtype=np.intp)
    sums = _sums_by_part(np.where(computes, dur, 0), layout.event_part, events)
    for position in positions:
        others = compared[compared != position]
        mine = slice(int(events[position]), int(events[position + 1]))
        # Kernels jitter: what a rank computes too much of is the sum of a part, not each single one.
        usual = median(sums[others], axis=0)
        factor = np.minimum(usual / np.maximum(sums[position], 1.0), 1.0)
        factor[usual <= 0] = 1.0
        scale = np.where(computes[mine], factor[layout.event_part[mine]], 1.0)
        dur[mine] = np.rint(dur[mine] * scale).astype(np.int64)
    share = EXCESS_OF_WORK if layout.is_cpu else EXCESS_SHARE
    # On CPUs the lags are the work: what a rank is longer at in one part of the step is taken from that part.
    part = layout.part if layout.is_cpu else np.zeros_like(layout.part)
    columns = program.lag, program.own
    lag, own = (
        usual_host(column, part, layout.point_base, positions, compared, share=share) for column in columns
    )
    return program.edited(dur=dur, lag=lag, own=own)


def _sums_by_part(values: Lags, part: Codes, base: Int64Array) -> npt.NDArray[np.float64]:
    """Return the sum of the values of each rank (a row) in each part of the step."""
    parts = int(part.max(initial=0)) + 1
    ranks = (slice(begin, end) for begin, end in pairwise(base.tolist()))
    return np.stack([np.bincount(part[one], weights=values[one], minlength=parts) for one in ranks])


def usual_host(
    column: Lags,
    part: Codes,
    base: Int64Array,
    positions: tuple[int, ...],
    compared: npt.NDArray[np.intp],
    *,
    share: float = EXCESS_SHARE,
) -> Lags:
    """Return host times, those of some ranks no longer than elsewhere.

    Ranks that make as many calls are compared call by call: what is far longer than on the median of the
    others is as long as there. Others are compared in each part of the step.
    """
    found: Lags = column.copy()
    counts = np.diff(base)
    totals = _sums_by_part(column, part, base)
    chosen = np.array(positions)
    for count in distinct(counts[chosen]).tolist():
        alike = compared[counts[compared] == count]
        mine = is_among(alike, chosen)
        if alike.size > 1:
            for first in range(0, count, width := max(1, AT_ONCE // alike.size)):
                at = base[alike][:, None] + np.arange(first, min(first + width, count))
                times = column[at]
                usual = _median_of_others(times)
                excess = times - usual > np.maximum(EXCESS_NS, share * usual)
                found[at[mine]] = np.where(excess, usual, times)[mine]
            continue
        position = int(alike[0])
        usual_sums = median(totals[compared[compared != position]], axis=0)
        factor = np.minimum(usual_sums / np.maximum(totals[position], 1.0), 1.0)
        if not usual_sums.any():
            continue
        own = slice(int(base[position]), int(base[position + 1]))
        found[own] = np.rint(column[own] * factor[part[own]])
    return found


def _median_of_others(times: Lags) -> Lags:
    """Return for each entry the median of the other rows of its column."""
    others = times.shape[0] - 1
    low, high = (others - 1) // 2, others // 2
    ordered = np.partition(times, sorted({low, low + 1, high, high + 1} & set(range(others + 1))), axis=0)

    def nth(place: int) -> npt.NDArray[np.float64]:
        # Without its own entry, all that comes after it moves up by one.
        moved = np.where(times <= ordered[place], ordered[place + 1], ordered[place])
        return np.asarray(moved, dtype=np.float64)

    return np.asarray((nth(low) + nth(high)) / 2, dtype=np.int64)


POINT_TO_POINT = ("send", "recv")


@as_change(
    Parameter("by", "the factor", 2.0, 1.0, 64.0),
    assuming="the added ranks have the same kind of link and are as even as today's",
)
def more_ranks(program: RunProgram, by: float) -> RunProgram:
    """The job has this many times as many ranks, each with the work of today's.

    Bytes cross the link as often as the operation needs with so many ranks (nccl-tests' bus bandwidth).
    Latency grows as in a tree in the fast scenario, as in a ring in the slow one. By how much ranks differ
    from their median stays in the fast scenario; in the slow one it grows like the expected largest of so
    many normal deviates: the last of more ranks comes later.
    """
    joins = program.layout.joins
    sizes = {joins.group_sizes[group] for group in set(joins.group.tolist()) if group >= 0} - {1}
    if not sizes:
        raise NotApplicable("the step has no collective of several ranks whose group is known")
    if len(sizes) > 1 or max(sizes) < len(program.layout.ranks):
        raise NotApplicable("the ranks are split in several ways, of which any could grow")
    if any(joins.kinds[kind] in POINT_TO_POINT for kind in set(joins.kind.tolist())):
        raise NotApplicable("a pipeline can grow in stages or in copies of itself")
    now = sizes.pop()
    then = round(now * by)
    scenario, split = program.scenario, program.split
    tree, ring = log2(then) / log2(now), (then - 1) / (now - 1)
    longer = of_scenario(scenario, tree, (tree * ring) ** 0.5, ring)
    latency = np.minimum(split.latency_ns, program.transfer)
    waiting = np.minimum(np.maximum(split.fixed_ns - split.latency_ns, 0), program.transfer - latency)
    crossings = np.array(
        [busbw_factor(kind, then) / busbw_factor(kind, now) for kind in joins.kinds] or [1.0]
    )[joins.kind]
    moved = program.transfer - latency - waiting
    transfer = np.rint(latency * longer + waiting + moved * crossings).astype(np.int64)
    latest = latest_of(then) / latest_of(now)
    later = of_scenario(scenario, 1.0, (1 + latest) / 2, latest)
    return _with_later_ranks(program, later).edited(transfer=transfer)


@cache
def latest_of(ranks: int) -> float:
    """Return the expected largest of so many standard normal deviates (Blom's approximation, 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _with_later_ranks(program: RunProgram, factor: float) -> RunProgram:
    """Return the program in which what ranks take beyond their peers is multiplied."""
    count = len(program.layout.ranks)
    if factor == 1.0 or count < 2:
        return program
    even = evened(program, tuple(range(count)))
    return program.edited(
        lag=_later(program.lag, even.lag, factor),
        own=_later(program.own, even.own, factor),
        dur=_later(program.dur, even.dur, factor),
    )


def _later(column: Lags, usual: Lags, factor: float) -> Lags:
    """Return times of which what is beyond the usual is multiplied."""
    later = np.empty(column.size, dtype=np.int64)
    for begin in range(0, column.size, AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        later[some] = np.rint(usual[some] + factor * (column[some].astype(np.int64) - usual[some]))
    return narrow(later)
