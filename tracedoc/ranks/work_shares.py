"""Compare the work of ranks: which do the same, which should, and who has more of it than the others."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.run_view import RunView
from tracedoc.values import once

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
        """Marks the ranks that do the same work as one in every step; itself only without sizes."""
        arithmetic, blocks, kernels = (_differences(values, place) for values in self.amount)
        sized = np.where(np.isnan(arithmetic), blocks, arithmetic) <= SAME_AMOUNT
        same = np.asarray((sized & (kernels <= SAME_KERNELS)).all(axis=1))
        same[place] = True
        return same


@once
def work_shares(run: RunView) -> Shares:
    """Return the work of all ranks in their common complete steps; without such steps there is none."""
    steps = run.common_steps
    kernels, blocks, flops, compute = (np.full((len(run.digests), len(steps)), np.nan) for _ in range(4))
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
