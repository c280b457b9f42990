"""Changes that make ranks alike."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.program import Codes, Lags
from tracedoc.trace.distinct import distinct
from tracedoc.whatif.changes.change import Arguments, NotApplicable, Parameter, as_change

EXCESS_NS = 100_000
EXCESS_SHARE = 0.5
EXCESS_OF_WORK = 0.1
"""One lag of the host counts as longer than elsewhere if it is by so much, and by this share: on CPUs, where
it holds the work itself, by the second one."""

AT_ONCE = 20_000
"""So many times are compared at once."""


@as_change(Parameter("rank", "the rank", None, 0, 1e6))
def even_rank(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """One rank takes no longer than its peers, on the GPU and on the host."""
    ranks = program.layout.ranks
    rank = int(arguments.number("rank"))
    if rank not in ranks:
        return NotApplicable(f"rank {rank} was not captured")
    if len(ranks) < 2:
        return NotApplicable("one rank has no peers")
    return evened(program, (ranks.index(rank),))


@as_change()
def even_ranks(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """No rank takes longer than its peers, on the GPU and on the host."""
    if len(program.layout.ranks) < 2:
        return NotApplicable("one rank has no peers")
    return evened(program, tuple(range(len(program.layout.ranks))))


@as_change()
def share_work(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Every rank computes as much as the mean of all: balanced stages, or batches of equal work."""
    layout = program.layout
    count = len(layout.ranks)
    if count < 2:
        return NotApplicable("one rank has no peers")
    work = np.where(layout.computes, program.dur, 0)
    sums = np.bincount(layout.event_rank, weights=work, minlength=count)
    if not (sums > 0).all():
        return NotApplicable("a rank computes nothing")
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
        usual = np.median(sums[others], axis=0)
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
        mine = np.isin(alike, chosen)
        if alike.size > 1:
            for first in range(0, count, width := max(1, AT_ONCE // alike.size)):
                at = base[alike][:, None] + np.arange(first, min(first + width, count))
                times = column[at]
                usual = _median_of_others(times)
                excess = times - usual > np.maximum(EXCESS_NS, share * usual)
                found[at[mine]] = np.where(excess, usual, times)[mine]
            continue
        position = int(alike[0])
        usual_sums = np.median(totals[compared[compared != position]], axis=0)
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
