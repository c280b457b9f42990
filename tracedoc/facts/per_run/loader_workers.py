"""How many loader workers a rank has cores for."""

from __future__ import annotations

from collections import Counter

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.values import Value

MOST_WORKERS = 8
"""So many workers of a rank are suggested at most, and where its cores are not known."""


@run_fact("suggested_loader_workers", unit="count", scope="rank")
def suggested_loader_workers(run: RunView) -> dict[str, Value]:
    """Workers for which a rank has cores: its share of those that it may use, less one for training itself.

    Ranks of a host that name the same cores share them evenly. From 1 to 8; 8 without a manifest.
    """
    by_rank = {one.rank: one for one in run.job.ranks} if run.job is not None else {}
    sharing = Counter((one.host, one.affinity) for one in by_rank.values())

    def workers(rank: int) -> int:
        one = by_rank.get(rank)
        if one is None or one.cores is None:
            return MOST_WORKERS
        return min(max(one.cores // sharing[one.host, one.affinity] - 1, 1), MOST_WORKERS)

    return {str(digest.rank): workers(digest.rank) for digest in run.digests}
