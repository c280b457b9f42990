"""Follow a clock that neither keeps its distance nor drifts steadily, from one common instant to the next."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array

FEWEST = 6
"""With fewer common instants a clock is not followed: they would explain themselves."""

STEEPEST = 0.5
"""A followed clock gains or loses at most this share of the time, so that no instants change their order."""

FINEST = 2000
"""A clock is followed in at most so many pieces."""


class WanderingError(msgspec.Struct, frozen=True, eq=False):
    """How far a clock is ahead of the common one: ``ahead_ns`` at ``at_ns`` (its own instants, increasing).

    Between two instants it is interpolated; before the first and after the last it stays as it is there.
    """

    at_ns: Int64Array
    ahead_ns: Int64Array

    def to_common(self, times: Int64Array) -> Int64Array:
        """Return instants of this clock as the common clock would have stamped them."""
        return np.asarray(times - self._between(times, self.at_ns))

    def to_own(self, times: Int64Array) -> Int64Array:
        """Return instants of the common clock as this clock would have stamped them."""
        return np.asarray(times + self._between(times, self.at_ns - self.ahead_ns))

    def _between(self, times: Int64Array, at_ns: Int64Array) -> Int64Array:
        # Relative to the first instant: a float has no room for nanoseconds since 1970.
        base, level = at_ns[0], self.ahead_ns[0]
        ahead = np.interp(
            (times - base).astype(np.float64),
            (at_ns - base).astype(np.float64),
            (self.ahead_ns - level).astype(np.float64),
        )
        return np.asarray(np.rint(ahead).astype(np.int64) + level)


def follow(time_ns: Int64Array, distance_ns: Int64Array) -> WanderingError | None:
    """Return the error that follows the distances of a clock at its own instants (in order of time).

    The medians of short pieces of the capture are followed, which are made longer until the clock gains or
    loses little from one to the next; ``None`` where that takes the whole capture, or there are few instants.
    """
    if time_ns.size < FEWEST:
        return None
    span = int(time_ns[-1] - time_ns[0])
    width = max(span // FINEST, 1)
    while width <= span:
        at_ns, ahead_ns = _medians(time_ns, distance_ns, (time_ns - time_ns[0]) // width)
        steps = np.diff(at_ns)
        if steps.size and (np.abs(np.diff(ahead_ns)) <= STEEPEST * steps).all():
            return WanderingError(at_ns, ahead_ns)
        width *= 2
    return None


def misses(time_ns: Int64Array, distance_ns: Int64Array) -> Int64Array:
    """Return by how much each distance differs from what those before and after it let expect.

    Of instants that lie close together some are left out: what is expected is as far away as all but a tenth
    of them are from the one before.
    """
    gap = int(np.quantile(np.diff(time_ns), 0.9)) if time_ns.size > 1 else 1
    place = (time_ns - time_ns[0]) // max(gap // 2, 1)
    at_ns, ahead_ns = _medians(time_ns, distance_ns, place)
    if at_ns.size < 3:
        return np.asarray(np.abs(distance_ns - np.median(distance_ns)), dtype=np.int64)
    share = (at_ns[1:-1] - at_ns[:-2]) / (at_ns[2:] - at_ns[:-2])
    expected = ahead_ns[:-2] + share * (ahead_ns[2:] - ahead_ns[:-2])
    return np.asarray(np.abs(ahead_ns[1:-1] - np.rint(expected).astype(np.int64)))


def _medians(
    time_ns: Int64Array, distance_ns: Int64Array, piece: npt.NDArray[np.int64]
) -> tuple[Int64Array, Int64Array]:
    """Return the middle instant and the median distance of each piece."""
    edges = np.concatenate(([0], np.flatnonzero(np.diff(piece)) + 1, [piece.size]))
    middle = (edges[:-1] + edges[1:] - 1) // 2
    at_ns = time_ns[middle]
    order = np.lexsort((distance_ns, piece))
    later = np.concatenate(([True], np.diff(at_ns) > 0))
    return at_ns[later], distance_ns[order[middle]][later]
