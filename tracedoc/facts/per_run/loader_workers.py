"""How many loader workers a rank has cores for, and how fast they would make batches."""

from __future__ import annotations

from collections import Counter

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.loader import LOADERS
from tracedoc.facts.per_run.settings import by_rank
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.step.rank_digest import RankDigest
from tracedoc.values import Unknown, Value

MOST_WORKERS = 8
"""So many workers of a rank are suggested at most, and where its cores are not known."""

LEAST_BUSY = 1 / MOST_WORKERS
"""Of a thread that is busy less, more than the most workers would be suggested."""


@run_fact("training_thread_busy_frac", unit="fraction", scope="rank")
def training_thread_busy_frac(run: RunView) -> dict[str, Value]:
    """Share of the captured steps in which the rank's training thread ran, or was ready to run.

    From the Linux scheduler (schedstat): (ran + waited for a core) / length of the steps. In the rest the
    thread slept: for a device, a disk, a lock, or another process.
    """
    return by_rank(run, _busy)


def _busy(rank: RankJob) -> Value:
    thread = rank.training_thread
    busy_us = thread.get("ran_us", 0) + thread.get("waited_us", 0)
    steps = thread.get("steps", 0)
    if steps <= 0 or busy_us <= 0 or rank.during is None or rank.during.median_ms <= 0:
        return Unknown("the manifest has no times of the training thread")
    return min(busy_us / 1000 / (steps * rank.during.median_ms), 1.0)


@run_fact("suggested_loader_workers", unit="count", scope="rank")
def suggested_loader_workers(run: RunView) -> dict[str, Value]:
    """Workers for which a rank has cores: its share of those that it may use, less one for training itself.

    Ranks of a host that name the same cores share them evenly. Samples that the training thread makes while
    it sleeps most of the time (``training_thread_busy_frac``) need no core of their own: then as many workers
    share one. From 1 to 8; 8 without a manifest.
    """
    return dict(_workers(run))


def _workers(run: RunView) -> dict[str, int]:
    by_rank = {one.rank: one for one in run.job.ranks} if run.job is not None else {}
    sharing = Counter((one.host, one.affinity) for one in by_rank.values())

    def workers(digest: RankDigest) -> int:
        one = by_rank.get(digest.rank)
        if one is None or one.cores is None:
            return MOST_WORKERS
        busy = _busy(one) if digest.facts.get("loader_kind") == LOADERS["single_process"] else 1.0
        free = max(one.cores // sharing[one.host, one.affinity] - 1, 1)
        share = 1.0 if isinstance(busy, Unknown) else max(float(busy), LEAST_BUSY)
        return min(int(free / share), MOST_WORKERS)

    return {str(digest.rank): workers(digest) for digest in run.digests}


@run_fact("suggested_loader_interval_frac", unit="fraction", scope="rank")
def suggested_loader_interval_frac(run: RunView) -> dict[str, Value]:
    """Time between two batches with the suggested workers, as a share of today's.

    The workers of today / ``suggested_loader_workers``, where the training thread counts as one worker; at
    most 1. Unknown where the workers of today are not known.
    """
    suggested = _workers(run)

    def pace(digest: RankDigest) -> Value:
        kind = digest.facts.get("loader_kind")
        if kind is None or isinstance(kind, Unknown):
            return kind or Unknown("the capture has no operators of the host")
        rank = run.job.rank(digest.rank) if run.job is not None else None
        today = 1 if kind != LOADERS["workers"] else rank.loader.workers if rank is not None else None
        if not today:
            return Unknown("the manifest has no DataLoader")
        return min(today / suggested[str(digest.rank)], 1.0)

    return {str(digest.rank): pace(digest) for digest in run.digests}
