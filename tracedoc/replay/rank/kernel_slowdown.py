"""Measure by how much compute is slower while a collective runs beside it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.replay.rank.gpu_events import RANK_OF_COMPUTE, DeviceEvents
from tracedoc.replay.rank.program import UNKNOWN_SHARE
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace.compact import narrowest
from tracedoc.trace.distinct import places_by_value

BESIDE, ALONE = 0.9, 0.1
"""Kernels that run beside communication for more than one share are compared with those below the other."""

FEWEST = 4
"""A name counts with at least this many kernels on both sides."""

SCATTER = 0.15
"""Kernels of one name whose lengths scatter by more than this share, from the tenth to the ninetieth
percentile, do different work, and are not compared."""

LARGEST = 0.6
"""More than this is not contention: kernels of one name differ for other reasons."""


def measure_contention(timeline: RankTimeline, device: DeviceEvents) -> float:
    """Return by which share compute kernels are longer beside communication; ``UNKNOWN_SHARE`` if unknown.

    Kernels of one name and one launch grid are compared; the median of the ratios counts, weighted by time.
    """
    trace, activity = timeline.trace, timeline.activity
    compute = np.flatnonzero((device.rank == RANK_OF_COMPUTE) & (device.stream == device.compute_stream))
    if activity is None or compute.size == 0 or not len(activity.comm):
        return UNKNOWN_SHARE
    rows = device.rows[compute]
    start, end = device.start_ns[compute], device.end_ns[compute]
    length = (end - start).astype(np.float64)
    share = activity.comm.covered_ns(start, end) / np.maximum(length, 1)
    kinds = len(trace.grids) + 1
    kind = trace.name[rows].astype(np.int64) * kinds + trace.grid[rows] + 1
    ratios, weights = [], []
    # In few bits, numbers are sorted by their digits.
    for _, mine in places_by_value(kind.astype(narrowest(0, len(trace.names) * kinds))):
        beside, alone = length[mine[share[mine] > BESIDE]], length[mine[share[mine] < ALONE]]
        if _alike(beside) and _alike(alone):
            ratios.append(_middle(beside) / max(_middle(alone), 1.0))
            weights.append(float(length[mine].sum()))
    if not ratios:
        return UNKNOWN_SHARE
    ranked = np.argsort(ratios)
    passed = np.cumsum(np.array(weights)[ranked])
    middle = float(np.array(ratios)[ranked][np.searchsorted(passed, passed[-1] / 2)])
    return min(max(middle - 1.0, 0.0), LARGEST)


def _middle(lengths: npt.NDArray[np.float64]) -> float:
    return float(np.sort(lengths)[lengths.size // 2])


def _alike(lengths: npt.NDArray[np.float64]) -> bool:
    if lengths.size < FEWEST:
        return False
    ordered = np.sort(lengths)
    tenth = lengths.size // 10
    return bool(ordered[-1 - tenth] - ordered[tenth] <= SCATTER * ordered[lengths.size // 2])
