"""Split each transfer into what its bytes take, what it takes whatever they are, and waiting it may hold."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.replay.rank.program import NONE
from tracedoc.replay.run_program import Joins, Reading
from tracedoc.spans import Int64Array

SPREAD = 4.0
FEWEST_SIZES = 3
"""Latency is fitted where at least three sizes spread fourfold; one size tells nothing of it."""

FIT_MARGIN = 0.3
"""A fitted latency is this share larger or smaller in the outer readings."""

HALF_RATE_BYTES = 4 * 2**20
"""A message of this size moves at half the rate of a large one, on the transports that hold it longest."""

USUAL_LATENCY_NS = 30_000
"""What a collective takes without bytes, on a usual link: some 20 to 50 us."""


class Split(msgspec.Struct, frozen=True, eq=False):
    """For each part of a run's collectives, in nanoseconds; one reading.

    ``fixed_ns`` stays whatever is changed about bytes and links: latency, and time that may be waiting for
    ranks that were not captured. The rest of the transfer is in proportion to the bytes.
    """

    fixed_ns: Int64Array
    latency_ns: Int64Array


def split_transfers(joins: Joins, reading: Reading) -> Split:
    """Return what of each transfer stays when its bytes become fewer, in one reading."""
    moved = _moved(joins, reading)
    latency = np.zeros(joins.event.size, dtype=np.float64)
    key = joins.kind.astype(np.int64) * 4096 + joins.group + 1
    for one in np.unique(key).tolist():
        mine = np.flatnonzero(key == one)
        latency[mine] = _latency(joins.nbytes[mine], moved[mine], reading)
    kept = np.minimum(latency, moved)
    fixed = joins.transfer_ns - moved + kept
    return Split(np.rint(fixed).astype(np.int64), np.rint(kept).astype(np.int64))


def _moved(joins: Joins, reading: Reading) -> npt.NDArray[np.float64]:
    """Return how much of each part is transfer; where peers are missing, part of it may be waiting.

    Then all of it is transfer in the fast reading, and only what the shortest of its size takes in the slow.
    """
    length = joins.transfer_ns.astype(np.float64)
    lone = np.flatnonzero((joins.op == NONE) | ~joins.complete)
    if lone.size == 0 or reading is Reading.FAST:
        return length
    least = length.copy()
    key = np.stack((joins.kind[lone].astype(np.int64), joins.nbytes[lone]))
    _, kind = np.unique(key, axis=1, return_inverse=True)
    kind = kind.ravel()
    shortest = np.full(int(kind.max()) + 1, np.inf)
    np.minimum.at(shortest, kind, length[lone])
    least[lone] = shortest[kind]
    return np.asarray(least if reading is Reading.SLOW else (length + least) / 2)


def _latency(nbytes: Int64Array, moved: npt.NDArray[np.float64], reading: Reading) -> npt.NDArray[np.float64]:
    known = nbytes > 0
    sizes = np.unique(nbytes[known])
    if sizes.size >= FEWEST_SIZES and sizes[-1] >= SPREAD * sizes[0]:
        typical = np.array([np.median(moved[nbytes == size]) for size in sizes])
        # Relative errors count alike for small and large messages.
        weights = 1.0 / np.maximum(typical, 1.0)
        slope, constant = np.polyfit(sizes.astype(np.float64), typical, 1, w=weights)
        if slope > 0:
            factor = {Reading.FAST: 1 - FIT_MARGIN, Reading.LIKELY: 1.0, Reading.SLOW: 1 + FIT_MARGIN}
            return np.full(nbytes.size, max(constant, 0.0) * factor[reading])
    if reading is Reading.FAST:
        return np.zeros(nbytes.size)
    share = np.where(known, HALF_RATE_BYTES / (HALF_RATE_BYTES + np.maximum(nbytes, 0)), 1.0)
    bound = share * moved
    return bound if reading is Reading.SLOW else np.minimum(bound / 2, USUAL_LATENCY_NS)
