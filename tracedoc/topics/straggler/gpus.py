"""Facts of the run about GPUs that are slower than their peers at the same work, or slowed down."""

from __future__ import annotations

from collections.abc import Callable

from tracedoc.facts.catalog import manifest_fact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.slowness import Slowness, slowness_by_rank
from tracedoc.run.job import RankJob
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value


def _of_ranks(run: RunView, measure: Callable[[Slowness], Value]) -> dict[str, Value]:
    return {
        str(rank): found if isinstance(found, Unknown) else measure(found)
        for rank, found in slowness_by_rank(run).items()
    }


@run_fact(unit="ratio", scope="rank", needs=("gpu", "kernels", "multi_rank"))
def gemm_slowdown_ratio(run: RunView) -> dict[str, Value]:
    """How many times as long as its peers this GPU takes for the same matrix products.

    Dense products by kernel name and launch grid, in calls with no communication beside them: the 10 %
    quantile over the median of the peers', and of that the median over kinds. Peers are the ranks that do the
    same work in every step (:data:`SAME_AMOUNT`), because a grid does not show the depth of a product. Kinds
    that mix shapes, or that three ranks (both of two) do not share, are left out; three kinds are needed.
    """
    return _of_ranks(run, lambda found: found.ratio)


@run_fact(unit="ratio", scope="rank", needs=("gpu", "kernels", "multi_rank"))
def gemm_slowdown_low_ratio(run: RunView) -> dict[str, Value]:
    """Lower quartile over kinds of the ratio in :func:`gemm_slowdown_ratio`: a slow GPU is slow in most."""
    return _of_ranks(run, lambda found: found.low_ratio)


@run_fact(unit="count", scope="rank", needs=("gpu", "kernels", "multi_rank"))
def gemm_kinds_compared(run: RunView) -> dict[str, Value]:
    """Kinds of matrix products that :func:`gemm_slowdown_ratio` compares."""
    return _of_ranks(run, lambda found: found.kinds)


@run_fact(unit="count", scope="rank", needs=("gpu", "kernels", "multi_rank"))
def gemm_peers_compared(run: RunView) -> dict[str, Value]:
    """Other ranks with the same work in every step, with which :func:`gemm_slowdown_ratio` compares."""
    return _of_ranks(run, lambda found: found.peers)


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
