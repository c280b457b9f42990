"""Compare the work of ranks: which do the same, which should, and who has more of it than the others."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.blame import STRAGGLING
from tracedoc.ranks.matching import NO_OPERATION
from tracedoc.ranks.run_view import RunView, once
from tracedoc.spans import Int64Array
from tracedoc.trace.distinct import is_among

Floats = npt.NDArray[np.float64]

SAME_AMOUNT = 0.01
"""Amounts of data or arithmetic that differ by no more than this are the same work."""

SAME_KERNELS = 0.02
"""Numbers of kernels that differ by no more than this are one program: a rank may log a little more."""

MEASURES = ("arithmetic", "thread blocks", "kernels")
"""Measures of a rank's work: recorded shapes, else sizes of grids; and the number of kernels."""

CPU_MEASURES = ("arithmetic", "thread blocks", "operators")


class Shares(msgspec.Struct, frozen=True, eq=False):
    """The work of all ranks in the steps that all of them captured whole, as arrays ``[rank, step]``.

    Ranks are in the order of ``RunView.digests``. ``amount[m]`` follows :data:`MEASURES`; NaN where not
    known. ``compute_ns`` is the compute of the step.
    """

    steps: tuple[int, ...]
    amount: tuple[Floats, Floats, Floats]
    compute_ns: Floats

    def alike(self, place: int) -> npt.NDArray[np.bool_]:
        """Return which ranks do the same work as one in every step; itself only where sizes are not known."""
        arithmetic, blocks, kernels = (_differences(values, place) for values in self.amount)
        sized = np.where(np.isnan(arithmetic), blocks, arithmetic) <= SAME_AMOUNT
        same = np.asarray((sized & (kernels <= SAME_KERNELS)).all(axis=1))
        same[place] = True
        return same


@once
def work_shares(run: RunView) -> Shares:
    """Return the work of all ranks in their common complete steps; without such steps there is none."""
    complete = [{step.index for step in digest.complete_steps} for digest in run.digests]
    steps = tuple(sorted(set.intersection(*complete))) if complete else ()
    kernels, blocks, flops, compute = (np.full((len(complete), len(steps)), np.nan) for _ in range(4))
    for place, digest in enumerate(run.digests):
        own = list(digest.steps)
        at = {step.index: number for number, step in enumerate(own)}
        chosen = [at[step] for step in steps]
        compute[place] = [own[number].budget.compute_ns for number in chosen]
        if digest.work is not None:
            kernels[place] = digest.work.kernels[chosen]
            blocks[place] = digest.work.blocks[chosen]
            flops[place] = digest.work.flops[chosen]
    return Shares(steps, (_known(flops), _known(blocks), _known(kernels)), compute)


def _known(values: Floats) -> Floats:
    """Return amounts with NaN in the steps in which a rank has none: it did not record them."""
    return np.where((values > 0).all(axis=0, keepdims=True), values, np.nan)


def _differences(values: Floats, place: int) -> Floats:
    return np.asarray(np.abs(values / values[place] - 1.0))


@once
def replicas(run: RunView) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the places of those that should have the same work; empty where not known.

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


MORE_WORK = 0.05
"""A rank has more work than its replicas from this share on."""

EXPLAINED = 0.5
"""Work accounts for longer compute where it exceeds that of the replicas by this share of the excess."""


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
        by_size = sized[place] / np.median(sized[others], axis=0)
        by_kernels = kernels[place] / np.median(kernels[others], axis=0)
        ratio[place] = np.fmax(np.fmax(by_size, by_kernels), 1.0)
        of_size = np.where(np.isnan(arithmetic[place]), 1, 0)
        measure[place] = np.where(np.nan_to_num(by_size) >= np.nan_to_num(by_kernels), of_size, 2)
        usual[place] = np.median(shares.compute_ns[others], axis=0)
    longer = shares.compute_ns - usual
    longer_share = np.divide(longer, usual, out=np.zeros(shape), where=usual > 0)
    explained = (ratio - 1.0 >= MORE_WORK) & (ratio - 1.0 >= EXPLAINED * longer_share)
    return Excess(ratio, measure, explained, longer)


def waits_by_excess(run: RunView, excess: Excess) -> Int64Array:
    """Return what each rank waits, with no compute beside it, for ranks that had more work: [rank, step].

    Only for ranks whose longer compute accounts for half or more of how late they came in that step.
    """
    matching, blame, shares = run.matching, run.blame, work_shares(run)
    place_of = {digest.rank: place for place, digest in enumerate(run.digests)}
    places = np.array([place_of[rank] for rank in matching.ranks] or [0], dtype=np.intp)
    chosen = is_among(matching.step, shares.steps) & is_among(blame.root_lateness, STRAGGLING)
    column = np.searchsorted(shares.steps, np.where(chosen, matching.step, shares.steps[0]))
    late = np.zeros(excess.ratio.shape, dtype=np.int64)
    own = np.flatnonzero(chosen & (blame.root == blame.last))
    np.add.at(late, (places[blame.root[own]], column[own]), blame.late_ns[own])
    counted = excess.explained & (excess.longer_ns >= EXPLAINED * late)
    blamed = chosen & counted[places[blame.root], column]
    parts = np.flatnonzero(blamed[matching.operation])
    waits = np.zeros(excess.ratio.shape, dtype=np.int64)
    operation = matching.operation[parts]
    np.add.at(waits, (places[matching.part_rank[parts]], column[operation]), blame.exposed_wait_ns[parts])
    for place, digest in enumerate(run.digests):  # waits in two groups at once count once
        most = [run.splits[digest.rank, step].wait_ns for step in shares.steps]
        waits[place] = np.minimum(waits[place], most)
    return waits
