"""Facts about work that is shared unevenly between ranks that hold the same part of the model."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.code_places import most_work_place
from tracedoc.ranks.matching import NO_OPERATION
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.waiting import STRAGGLING
from tracedoc.topics.pipeline.balance import pass_ratios
from tracedoc.topics.straggler.work import CPU_MEASURES, MEASURES, Floats, work_shares
from tracedoc.trace.distinct import distinct, is_among, median, quantile
from tracedoc.values import Unknown, Value, once

MORE_WORK = 0.05
"""A rank has more work than its replicas from this share on."""

EXPLAINED = 0.5
"""Work accounts for longer compute where it exceeds that of the replicas by this share of the excess."""

NO_REPLICAS = Unknown("no ranks are known to reduce the same gradients: which should do equal work is open")


@run_fact(unit="ratio", needs=("kernels", "collectives", "multi_rank"))
def uneven_work_ratio(run: RunView) -> Value:
    """Work of the rank with most of it in a step, over the median of its replicas: the median over steps.

    By the measure that differs most: the arithmetic of matrix products where shapes were recorded, else the
    thread blocks of kernels whose grid follows the size of the data; and the number of kernels (CPU:
    operators). 1 where that is equal. In a pipeline the 90 % quantile of a micro-batch's time over the mean
    of its stage.
    """
    passes = pass_ratios(run)
    if passes.size:
        return float(quantile(passes, 0.9))
    excess = work_excess(run)
    return NO_REPLICAS if excess is None else float(median(excess.ratio.max(axis=0)))


@run_fact(unit="text", needs=("kernels", "collectives", "multi_rank"))
def uneven_work_measure(run: RunView) -> Value:
    """What :func:`uneven_work_ratio` counts in most steps: arithmetic, thread blocks, kernels, operators."""
    if pass_ratios(run).size:
        return "time"
    excess = work_excess(run)
    if excess is None:
        return NO_REPLICAS
    most = excess.ratio.argmax(axis=0)
    measures = excess.measure[most, np.arange(most.size)]
    words = CPU_MEASURES if run.digests[0].is_cpu else MEASURES
    return words[int(np.bincount(measures).argmax())]


@run_fact(unit="text", needs=("kernels", "collectives", "multi_rank"))
def uneven_work_code(run: RunView) -> Value:
    """The function that starts the kernels, or operators, which a rank has beyond its replicas, or "none".

    From the steps with stacks, one of which must show a rank with more of them in one function.
    """
    excess = work_excess(run)
    if excess is None:
        return "none"
    ranks = [digest.rank for digest in run.digests]
    uneven = np.flatnonzero(excess.explained.any(axis=1)).tolist()
    found = most_work_place(
        run,
        [
            (ranks[place], [ranks[other] for other in replicas(run)[place] if other != place])
            for place in uneven
        ],
    )
    return str(found or "none")


@run_fact(unit="count", needs=("kernels", "collectives", "multi_rank"))
def uneven_work_steps(run: RunView) -> Value:
    """Steps in which ranks wait for one with more work than its replicas, by 5 % or more.

    The work accounts for half or more of its longer compute, and that for half or more of its lateness. In a
    pipeline every pass of a rank through a micro-batch counts as one, where it takes 5 % more or less than
    the mean of its stage.
    """
    passes = pass_ratios(run)
    if passes.size:
        return int((np.abs(passes - 1.0) >= MORE_WORK).sum())
    excess = work_excess(run)
    return NO_REPLICAS if excess is None else _steps_with_waits(run, excess)


@run_fact(unit="count", needs=("kernels", "collectives", "multi_rank"))
def uneven_work_compared(run: RunView) -> Value:
    """Steps, in a pipeline passes through a micro-batch, over which :func:`uneven_work_steps` counts."""
    passes = pass_ratios(run)
    return int(passes.size) if passes.size else len(work_shares(run).steps)


@run_fact(unit="text", needs=("kernels", "collectives", "multi_rank"))
def uneven_work_of(run: RunView) -> Value:
    """What :func:`uneven_work_compared` counts, in words."""
    return "passes through micro-batches" if pass_ratios(run).size else "steps"


def uneven_ranks(run: RunView) -> frozenset[int]:
    """Return the ranks that had more work than their replicas in some step."""
    excess = work_excess(run)
    if excess is None:
        return frozenset()
    return frozenset(
        digest.rank for digest, one in zip(run.digests, excess.explained, strict=True) if one.any()
    )


@once
def replicas(run: RunView) -> tuple[tuple[int, ...], ...]:
    """The places of the ranks that should have the same work as each; empty where not known.

    Those with which it reduces most gradient bytes: they hold the same part of the model, and are given
    other samples. Pipeline stages differ by design, and are never compared.
    """
    place_of = {digest.rank: place for place, digest in enumerate(run.digests)}
    found: list[tuple[int, ...]] = []
    places: dict[int, tuple[int, ...]] = {}
    for digest in run.digests:
        operations = run.operations[digest.rank]
        rows = np.flatnonzero(digest.gradients & (operations != NO_OPERATION))
        groups = run.matching.group[operations[rows]]
        if rows.size == 0:
            found.append(())
            continue
        sizes = np.maximum(digest.collectives.nbytes[rows], 1).astype(np.float64)
        group = int(np.bincount(groups, weights=sizes).argmax())
        if group not in places:
            members = run.matching.groups[group].ranks
            places[group] = tuple(place_of[rank] for rank in members if rank in place_of)
        found.append(places[group])
    return tuple(found)


class Excess(msgspec.Struct, frozen=True, eq=False):
    """How much more each rank had to do than the median of its replicas, as arrays ``[rank, step]``.

    ``ratio`` is that of its work by the measure that differs most, 1 at least; ``measure`` indexes
    :data:`MEASURES`. ``explained``: the work is more by :data:`MORE_WORK`, and accounts for half
    or more of its longer compute, which ``longer_ns`` gives.
    """

    ratio: Floats
    measure: npt.NDArray[np.intp]
    explained: npt.NDArray[np.bool_]
    longer_ns: Floats


@once
def work_excess(run: RunView) -> Excess | None:
    """Compare each rank with its replicas; ``None`` where no two ranks are known to be replicas."""
    shares, groups = work_shares(run), replicas(run)
    if not shares.steps or not any(len(group) > 1 for group in groups):
        return None
    shape = shares.compute_ns.shape
    ratio, measure = np.ones(shape), np.zeros(shape, dtype=np.intp)
    usual = shares.compute_ns.copy()
    arithmetic, blocks, kernels = shares.amount
    sized = np.where(np.isnan(arithmetic), blocks, arithmetic)
    for place, group in enumerate(groups):
        others = [other for other in group if other != place]
        if not others:
            continue
        by_size = sized[place] / median(sized[others], axis=0)
        by_kernels = kernels[place] / median(kernels[others], axis=0)
        ratio[place] = np.fmax(np.fmax(by_size, by_kernels), 1.0)
        of_size = np.where(np.isnan(arithmetic[place]), 1, 0)
        measure[place] = np.where(np.nan_to_num(by_size) >= np.nan_to_num(by_kernels), of_size, 2)
        usual[place] = median(shares.compute_ns[others], axis=0)
    longer = shares.compute_ns - usual
    longer_share = np.divide(longer, usual, out=np.zeros(shape), where=usual > 0)
    explained = (ratio - 1.0 >= MORE_WORK) & (ratio - 1.0 >= EXPLAINED * longer_share)
    return Excess(ratio, measure, explained, longer)


def _steps_with_waits(run: RunView, excess: Excess) -> int:
    """In how many steps a rank waits, with no compute beside it, for one that had more work.

    Only for ranks whose longer compute accounts for half or more of how late they came in that step.
    """
    matching, blame, shares = run.matching, run.blame, work_shares(run)
    chosen = is_among(matching.step, shares.steps) & is_among(blame.root_lateness, STRAGGLING)
    column = np.searchsorted(shares.steps, np.where(chosen, matching.step, shares.steps[0]))
    late = np.zeros(excess.ratio.shape, dtype=np.int64)
    own = np.flatnonzero(chosen & (blame.root == blame.last))
    np.add.at(late, (blame.root[own], column[own]), blame.late_ns[own])
    counted = excess.explained & (excess.longer_ns >= EXPLAINED * late)
    blamed = chosen & counted[blame.root, column]
    waits = blamed[matching.operation] & (blame.exposed_wait_ns > 0)
    return distinct(matching.step[matching.operation[waits]]).size
