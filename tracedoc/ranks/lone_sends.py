"""Tell waiting from transfer in sends and receives whose other end was not captured.

A transfer of the same size between two stages that were captured takes as long as this one: what lasts longer
is waiting for the neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tracedoc.ranks.groups import pipeline_pairs
from tracedoc.ranks.matching import NO_OPERATION, Matching, RankCollectives
from tracedoc.spans import Int64Array
from tracedoc.timeline.collective_table import NO_TIME


def lone_arrivals(
    matching: Matching, ranks: Sequence[RankCollectives], operations: Mapping[int, np.ndarray]
) -> dict[int, Int64Array]:
    """Return by rank when the neighbour that was not captured came to each row, on the rank's own clock.

    ``NO_TIME`` where the row is no such send or receive, or no transfer of its size was seen.
    """
    captured = {rank.rank for rank in ranks}
    between = pipeline_pairs(matching.groups)
    pairs = {group.ranks for group, stages in zip(matching.groups, between, strict=True) if stages}
    missing = {pair for pair in pairs if not captured.issuperset(pair)}
    if not missing:
        return {}
    usual = _usual_transfers(matching, np.array(between, dtype=bool))
    found: dict[int, Int64Array] = {}
    for rank in ranks:
        table = rank.table
        lone = [
            (rank.rank, kind.peer) in missing or (kind.peer, rank.rank) in missing for kind in table.kinds
        ]
        rows = np.flatnonzero(np.array(lone or [False])[table.kind] & (operations[rank.rank] == NO_OPERATION))
        latest = np.full(len(table), NO_TIME)
        for row in rows.tolist():
            transfer = usual.get(int(table.nbytes[row]))
            if transfer is not None:
                latest[row] = table.end_ns[row] - transfer
        found[rank.rank] = latest
    return found


def _usual_transfers(matching: Matching, between: np.ndarray) -> dict[int, int]:
    """Return how long sends between captured stages take from when both were there, by their size."""
    chosen = between[matching.group] & matching.has_latest_start & matching.complete
    taken = matching.latest_end_ns[chosen] - matching.latest_start_ns[chosen]
    sizes = matching.nbytes[chosen]
    return {int(size): int(np.median(taken[sizes == size])) for size in np.unique(sizes).tolist()}
