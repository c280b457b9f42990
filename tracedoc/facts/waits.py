"""Lay out who waits for whom, by rank and step."""

from __future__ import annotations

import numpy as np

from tracedoc.charts import Waits
from tracedoc.ranks.blame import Lateness
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array

MOST_RANKS = 64
"""Ranks listed: those that are waited for longest, then those with the lowest numbers."""

MOST_STEPS = 24
"""Steps listed, the first ones that were captured whole."""


def wait_table(run: RunView) -> Waits | None:
    """Return the exposed waiting of ranks in steps; ``None`` where no rank is known to wait.

    Of steps that were not captured whole only those are listed that are analysed.
    """
    listed = sorted(
        {step.index for digest in run.digests for step in digest.complete_steps}
        or {step.index for _, step in run.judged()}
    )
    steps = listed[:MOST_STEPS]
    caused = _caused_ns(run)
    chosen = sorted(range(len(run.digests)), key=lambda place: (-int(caused[place].sum()), place))
    places = sorted(chosen[:MOST_RANKS])
    column = {step: number for number, step in enumerate(steps)}
    wait: list[tuple[float | None, ...]] = []
    waited_for: list[tuple[int | None, ...]] = []
    for place in places:
        rank = run.digests[place].rank
        times = tuple(_wait_ms(run, rank, step) for step in steps)
        culprits = _culprits(run, place, column)
        wait.append(times)
        waited_for.append(tuple(culprit if ms else None for ms, culprit in zip(times, culprits, strict=True)))
    if not any(ms for row in wait for ms in row):
        return None
    return Waits(
        ranks=tuple(run.digests[place].rank for place in places),
        steps=tuple(steps),
        wait_ms=tuple(wait),
        waited_for=tuple(waited_for),
        left_out_ranks=len(run.digests) - len(places),
        left_out_steps=len(listed) - len(steps),
    )


def _wait_ms(run: RunView, rank: int, step: int) -> float | None:
    split = run.splits.get((rank, step))
    if split is None:
        return None
    waits = split.wait_ns + split.pipeline_wait_ns
    return None if not waits and split.unsplit_ns else round(waits / 1e6, 4)


def _caused_ns(run: RunView) -> Int64Array:
    """Return the exposed waiting that each rank caused in the others, in the order of the digests."""
    found = np.zeros(len(run.digests), dtype=np.int64)
    by_rank = dict(zip(run.matching.ranks, run.blame.exposed_cost_ns().tolist(), strict=True))
    for place, digest in enumerate(run.digests):
        found[place] = by_rank.get(digest.rank, 0)
    return found


def _culprits(run: RunView, place: int, column: dict[int, int]) -> list[int | None]:
    """Return for each listed step the rank at the end of most of one rank's waiting."""
    matching, blame = run.matching, run.blame
    rank = run.digests[place].rank
    if rank not in matching.ranks or not column:
        return [None] * len(column)
    position = matching.ranks.index(rank)
    mine = np.flatnonzero(matching.part_rank == position)
    operation = matching.operation[mine]
    waits = blame.exposed_wait_ns[mine]
    blamed = (blame.root[operation] != position) & (blame.lateness[operation] != Lateness.NONE) & (waits > 0)
    columns = np.array([column.get(step, -1) for step in matching.step[operation].tolist()], dtype=np.intp)
    blamed &= columns >= 0
    total = np.zeros((len(column), len(matching.ranks)), dtype=np.int64)
    np.add.at(total, (columns[blamed], blame.root[operation[blamed]]), waits[blamed])
    longest = total.argmax(axis=1)
    return [matching.ranks[at] if total[row, at] > 0 else None for row, at in enumerate(longest.tolist())]
