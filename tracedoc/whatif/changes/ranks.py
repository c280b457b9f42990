"""Changes that make ranks alike."""

from __future__ import annotations

import numpy as np

from tracedoc.replay.run_program import RunProgram
from tracedoc.spans import Int64Array
from tracedoc.whatif.changes.change import Ask, Change, NotApplicable, Parameter

EXCESS_NS = 100_000
EXCESS_SHARE = 0.5
"""One lag of the host counts as longer than elsewhere if it is by so much, and by this share."""


def even_rank(program: RunProgram, ask: Ask) -> RunProgram | NotApplicable:
    """Let one rank take no longer than its peers do at the median."""
    ranks = program.layout.ranks
    rank = int(ask.number("rank"))
    if rank not in ranks:
        return NotApplicable(f"rank {rank} was not captured")
    if len(ranks) < 2:
        return NotApplicable("one rank has no peers")
    return _evened(program, (ranks.index(rank),))


def even_ranks(program: RunProgram, ask: Ask) -> RunProgram | NotApplicable:
    """Let no rank take longer than its peers do at the median."""
    if len(program.layout.ranks) < 2:
        return NotApplicable("one rank has no peers")
    return _evened(program, tuple(range(len(program.layout.ranks))))


def share_work(program: RunProgram, ask: Ask) -> RunProgram | NotApplicable:
    """Give every rank the mean compute of all: what balanced stages or batches give."""
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


def _evened(program: RunProgram, positions: tuple[int, ...]) -> RunProgram:
    layout = program.layout
    dur, lag, own = program.dur.copy(), program.lag.copy(), program.own.copy()
    events, points = layout.event_base, layout.point_base
    sums = _work_by_part(program)
    for position in positions:
        others = [other for other in range(len(layout.ranks)) if other != position]
        mine = slice(int(events[position]), int(events[position + 1]))
        # Kernels jitter: what a rank computes too much of is the sum of a part, not each single one.
        usual = np.median(sums[others], axis=0)
        factor = np.minimum(usual / np.maximum(sums[position], 1.0), 1.0)
        factor[usual <= 0] = 1.0
        scale = np.where(layout.computes[mine], factor[layout.event_part[mine]], 1.0)
        dur[mine] = np.rint(dur[mine] * scale).astype(np.int64)
        here = slice(int(points[position]), int(points[position + 1]))
        for column in (lag, own):
            column[here] = _usual_host(column, layout.point_base, position, others)
    return program.edited(dur=dur, lag=lag, own=own)


def _work_by_part(program: RunProgram) -> np.ndarray:
    layout = program.layout
    parts = int(layout.event_part.max(initial=0)) + 1
    key = layout.event_rank * parts + layout.event_part
    work = np.where(layout.computes, program.dur, 0)
    sums = np.bincount(key, weights=work, minlength=len(layout.ranks) * parts)
    return sums.reshape(len(layout.ranks), parts)


def _usual_host(column: Int64Array, base: Int64Array, position: int, others: list[int]) -> Int64Array:
    """Return a rank's host times with those that are far longer than elsewhere as long as there.

    Ranks that make as many calls are compared call by call, others in all.
    """
    counts = np.diff(base)
    mine = column[base[position] : base[position + 1]]
    alike = [other for other in others if counts[other] == counts[position]]
    if alike:
        usual = np.median([column[base[one] : base[one + 1]] for one in alike], axis=0).astype(np.int64)
        excess = mine - usual > np.maximum(EXCESS_NS, EXCESS_SHARE * usual)
        return np.asarray(np.where(excess, usual, mine))
    usual_sum = float(np.median([column[base[one] : base[one + 1]].sum() for one in others]))
    factor = min(usual_sum / max(float(mine.sum()), 1.0), 1.0) if usual_sum else 1.0
    return np.asarray(np.rint(mine * factor), dtype=np.int64)


CHANGES = (
    Change(
        "even-rank",
        "one rank takes no longer than its peers, on the GPU and on the host",
        even_rank,
        (Parameter("rank", "the rank", None, 0, 1e6),),
    ),
    Change("even-ranks", "no rank takes longer than its peers, on the GPU and on the host", even_ranks),
    Change(
        "share-work",
        "every rank computes as much as the mean of all: balanced stages, or batches of equal work",
        share_work,
    ),
)
