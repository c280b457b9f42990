"""Facts about GPUs that run the same matrix products slower than their peers."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import manifest_fact, ranks_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.step.rank_digest import RankDigest
from tracedoc.step.work import MIN_CALLS, GemmTable
from tracedoc.topics.pipeline.stages import pipeline
from tracedoc.topics.straggler.work import SAME_KERNELS, Floats, work_shares
from tracedoc.trace.distinct import median, quantile
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value, needed, once

LEAST_KINDS = 3
"""A ratio over fewer kinds of kernels may be that of one shape or of one choice of the library."""

LEAST_RANKS = 3
"""So many ranks must run a kind, unless only two ranks do the same work: then both."""

ONE_SHAPE = 1.15
"""A kind whose median is this many times its 10 % quantile mixes shapes: a grid does not show the depth."""

MOSTLY_ALONE = 0.5
"""Where fewer of the calls run without communication, those that do may be others on each rank."""


@ranks_fact(unit="ratio", needs=("gpu", "kernels", "multi_rank"))
def gemm_slowdown_ratio(run: RunView, digest: RankDigest) -> Value:
    """How many times as long as its peers this GPU takes for the same matrix products.

    Dense products by kernel name and launch grid, in calls with no communication beside them: the 10 %
    quantile over the median of the peers', and of that the median over kinds. Peers are the ranks that do the
    same work in every step (:data:`SAME_AMOUNT`), because a grid does not show the depth of a product; for a
    rank that is alone in its stage of a pipeline, the stages that call most kinds equally often. Kinds
    that mix shapes, or that three ranks (both of two) do not share, are left out; three kinds are needed.
    """
    return needed(slowness_by_rank(run)[digest.rank]).ratio


@ranks_fact(unit="ratio", needs=("gpu", "kernels", "multi_rank"))
def gemm_slowdown_low_ratio(run: RunView, digest: RankDigest) -> Value:
    """Lower quartile over kinds of the ratio in :func:`gemm_slowdown_ratio`: a slow GPU is slow in most."""
    return needed(slowness_by_rank(run)[digest.rank]).low_ratio


@ranks_fact(unit="count", needs=("gpu", "kernels", "multi_rank"))
def gemm_kinds_compared(run: RunView, digest: RankDigest) -> Value:
    """Kinds of matrix products that :func:`gemm_slowdown_ratio` compares."""
    return needed(slowness_by_rank(run)[digest.rank]).kinds


@ranks_fact(unit="count", needs=("gpu", "kernels", "multi_rank"))
def gemm_peers_compared(run: RunView, digest: RankDigest) -> Value:
    """Other ranks with the same work in every step, with which :func:`gemm_slowdown_ratio` compares."""
    return needed(slowness_by_rank(run)[digest.rank]).peers


class Slowness(msgspec.Struct, frozen=True):
    """How many times as long as its peers a rank takes for the same products: median and lower quartile.

    ``compute_ratio`` is that of all compute of a step.
    """

    ratio: float
    low_ratio: float
    compute_ratio: float
    kinds: int
    peers: int


@once
def slowness_by_rank(run: RunView) -> dict[int, Slowness | Unknown]:
    """Compare each rank's matrix products with those of the ranks that do the same work in every step."""
    times = _times(run)
    return {digest.rank: _slowness(run, place, times) for place, digest in enumerate(run.digests)}


def _slowness(run: RunView, place: int, times: Floats) -> Slowness | Unknown:
    shares = work_shares(run)
    if not shares.steps:
        return Unknown("no complete step was captured on all ranks")
    alike = _alike(run, place)
    others = alike[alike != place]
    if others.size == 0:
        return Unknown("no other rank is known to do the same work in every step")
    ranks_of_kind = (~np.isnan(times[alike])).sum(axis=0)
    enough = ranks_of_kind >= min(LEAST_RANKS, alike.size)
    kinds = np.flatnonzero(enough & ~np.isnan(times[place]))
    if kinds.size < LEAST_KINDS:
        return Unknown(
            f"{kinds.size} kinds of matrix products can be compared over ranks, {LEAST_KINDS} are needed"
        )
    ratios = times[place, kinds] / np.nanmedian(times[np.ix_(others, kinds)], axis=0)
    compute = shares.compute_ns[place] / np.maximum(median(shares.compute_ns[others], axis=0), 1.0)
    return Slowness(
        ratio=float(median(ratios)),
        low_ratio=float(quantile(ratios, 0.25)),
        compute_ratio=float(median(compute)),
        kinds=int(kinds.size),
        peers=int(others.size),
    )


def _alike(run: RunView, place: int) -> npt.NDArray[np.intp]:
    """The ranks that do the same work in every step; for a rank alone in its stage, stages of like layers."""
    alike, stages = np.flatnonzero(work_shares(run).alike(place)), pipeline(run)
    if alike.size > 1 or stages is None:
        return alike
    alone = [stage[0] for stage in stages.stages if len(stage) == 1]
    return np.array([one for one in alone if one == place or _like_layers(run, one, place)], dtype=np.intp)


def _like_layers(run: RunView, one: int, other: int) -> bool:
    """Whether two ranks call most kinds of their matrix products equally often."""
    first, second = run.digests[one].gemms, run.digests[other].gemms
    if first is None or second is None:
        return False
    kinds, mine, theirs = np.intersect1d(first.keys, second.keys, return_indices=True)
    same = np.abs(first.calls[mine] / second.calls[theirs] - 1.0) <= SAME_KERNELS
    return bool(kinds.size and same.sum() > max(len(first), len(second)) / 2)


def _times(run: RunView) -> Floats:
    """The 10 % quantile of each kind's calls without communication: [rank, kind], NaN if unfit or 0.

    In a pipeline receives lie beside the passes, and wait: there calls beside them do as well.
    """
    passes = pipeline(run) is not None
    tables = [digest.gemms for digest in run.digests]
    keys = {key for table in tables if table is not None for key in table.keys.tolist()}
    kinds = np.array(sorted(keys), dtype=np.uint64)
    times = np.full((len(tables), kinds.size), np.nan)
    for place, table in enumerate(tables):
        if table is not None and len(table):
            column = np.searchsorted(kinds, table.keys)
            beside = table.gridded & (table.beside >= MIN_CALLS)
            times[place, column] = np.where(beside & passes, table.beside_p10_ns, np.nan)
            fit = _fit(table)
            times[place, column[fit]] = table.alone_p10_ns[fit]
    return np.where(times > 0, times, np.nan)


def _fit(table: GemmTable) -> np.ndarray:
    """Marks the kinds that are of one shape, and run mostly without communication beside them."""
    fit = table.gridded & (table.alone >= np.maximum(MIN_CALLS, MOSTLY_ALONE * table.calls))
    return np.asarray(fit & (table.alone_median_ns <= ONE_SHAPE * table.alone_p10_ns))


# -- lowered clocks


@manifest_fact(unit="text")
def gpu_throttled_by(rank: RankJob) -> Value:
    """Why the GPU's clocks were lowered during the capture, with the share of samples, or "nothing".

    Sampled from NVML ten times a second. A power cap is ordinary under full load.
    """
    if not rank.clocks_sampled:
        return Unknown("the GPU's clocks were not sampled (pynvml is not installed)")
    worst = sorted(rank.throttled.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{reason} {format_percent(share)}" for reason, share in worst) or "nothing"


SLOWDOWNS = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"}
)
"""Reasons for lower clocks that are no ordinary ones: heat, and power that the machine could not give."""


@manifest_fact(unit="fraction")
def gpu_slowed_frac(rank: RankJob) -> Value:
    """Share of the capture's samples in which heat or a power brake lowered the GPU's clocks.

    The largest share of one reason, of samples taken ten times a second; a power cap, which is ordinary under
    full load, is none of them.
    """
    if not rank.clocks_sampled:
        return Unknown("the GPU's clocks were not sampled (pynvml is not installed)")
    return max((share for reason, share in rank.throttled.items() if reason in SLOWDOWNS), default=0.0)
