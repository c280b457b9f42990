"""How far one clock is ahead of another: by a fixed time, with a steady drift, or as it wanders."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.trace.distinct import distinct, median, quantile

SETTLED_NS = 50_000
"""Ends this close are as good as simultaneous, whatever the waits are."""

MOSTLY = 0.9
"""So many ends lie within the uncertainty of the clocks."""

DRIFT_OPERATIONS = 12
"""Fewer operations than this between two clocks give an offset, not a drift."""

DRIFT_PAYS = 0.75
"""A drift is accepted if it lowers the residual below this share of a fixed offset's."""


FEWEST = 6
"""With fewer common instants a clock is not followed: they would explain themselves."""

STEEPEST = 0.5
"""A followed clock gains or loses at most this share of the time, so that no instants change their order."""

MOST_CLOCK_PIECES = 2000
"""A clock is followed in at most so many pieces."""


class ClockError(msgspec.Struct, frozen=True):
    """How far a clock is ahead of the common one: ``offset_ns`` at ``origin_ns``, ``rate`` more a second.

    ``rate`` has no unit (seconds a second); ``origin_ns`` is an instant of the clock itself.
    """

    offset_ns: int
    rate: float = 0.0
    origin_ns: int = 0

    def to_common(self, times: Int64Array) -> Int64Array:
        """Return instants of this clock as the common clock would have stamped them."""
        if self.rate == 0.0:
            return times - self.offset_ns
        drift = np.rint(self.rate * (times - self.origin_ns)).astype(np.int64)
        return np.asarray(times - self.offset_ns - drift)

    def to_own(self, times: Int64Array) -> Int64Array:
        """Return instants of the common clock as this clock would have stamped them."""
        if self.rate == 0.0:
            return times + self.offset_ns
        since = times + self.offset_ns - self.origin_ns
        return np.asarray(
            times + self.offset_ns + np.rint(self.rate / (1 - self.rate) * since).astype(np.int64)
        )


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


AnyError = ClockError | WanderingError


def fit_steady(time_ns: Int64Array, distance_ns: Int64Array) -> ClockError:
    """Return the median distance; with a steady drift where that explains the distances much better.

    The drift is the median slope between operations half the capture apart, which is robust to outliers.
    """
    offset = int(median(distance_ns - distance_ns[0])) + int(distance_ns[0])
    fixed = ClockError(offset)
    half = time_ns.size // 2
    if time_ns.size < DRIFT_OPERATIONS:
        return fixed
    spans = time_ns[-half:] - time_ns[:half]
    apart = spans > 0
    if not apart.any():
        return fixed
    rise = (distance_ns[-half:] - distance_ns[:half])[apart]
    rate = float(median(rise / spans[apart]))
    origin = int(time_ns[half])
    level = distance_ns - offset - rate * (time_ns - origin)
    drifting = ClockError(offset + round(float(median(level))), rate, origin)
    left = median(np.abs(level - median(level)))
    before = median(np.abs(distance_ns - offset))
    return drifting if left < DRIFT_PAYS * before else fixed


def reversed_error(fit: AnyError) -> AnyError:
    """Return the error of the first clock against the other one."""
    if isinstance(fit, WanderingError):
        return WanderingError(fit.at_ns - fit.ahead_ns, -fit.ahead_ns)
    origin = fit.origin_ns - fit.offset_ns if fit.rate else 0
    return ClockError(-fit.offset_ns, -fit.rate, origin)


def error_after(near: AnyError, fit: AnyError) -> AnyError:
    """Return the error of a clock that is ``fit`` ahead of one that itself is ``near`` ahead."""
    if isinstance(near, ClockError) and isinstance(fit, ClockError):
        return _both_steady(near, fit)
    known = [fit.at_ns] if isinstance(fit, WanderingError) else []
    known += [fit.to_own(near.at_ns)] if isinstance(near, WanderingError) else []
    at_ns = distinct(np.concatenate(known))
    return WanderingError(at_ns, at_ns - near.to_common(fit.to_common(at_ns)))


def _both_steady(near: ClockError, fit: ClockError) -> ClockError:
    if near.rate == 0.0 and fit.rate == 0.0:
        return ClockError(near.offset_ns + fit.offset_ns)
    origin = fit.origin_ns or near.origin_ns + fit.offset_ns
    there = origin - fit.offset_ns
    ahead = near.offset_ns + round(near.rate * (there - near.origin_ns)) if near.rate else near.offset_ns
    return ClockError(ahead + fit.offset_ns, near.rate + fit.rate, origin)


def best_fit(time_ns: Int64Array, distance_ns: Int64Array) -> tuple[AnyError, int]:
    """Return a followed clock where it explains the distances much better, and what most ends differ by."""
    steady = fit_steady(time_ns, distance_ns)
    left = np.abs(time_ns - distance_ns - steady.to_common(time_ns))
    doubt = max(int(quantile(left, MOSTLY)), SETTLED_NS)
    followed = follow(time_ns, distance_ns) if doubt > SETTLED_NS else None
    if followed is None:
        return steady, doubt
    missed = max(int(quantile(misses(time_ns, distance_ns), MOSTLY)), SETTLED_NS)
    return (followed, missed) if missed < DRIFT_PAYS * doubt else (steady, doubt)


def follow(time_ns: Int64Array, distance_ns: Int64Array) -> WanderingError | None:
    """Return the error that follows the distances of a clock at its own instants (in order of time).

    The medians of short pieces of the capture are followed, which are made longer until the clock gains or
    loses little from one to the next; ``None`` where that takes the whole capture, or there are few instants.
    """
    if time_ns.size < FEWEST:
        return None
    span = int(time_ns[-1] - time_ns[0])
    width = max(span // MOST_CLOCK_PIECES, 1)
    while width <= span:
        at_ns, ahead_ns = _medians(time_ns, distance_ns, (time_ns - time_ns[0]) // width)
        steps = np.diff(at_ns)
        if steps.size and (np.abs(np.diff(ahead_ns)) <= STEEPEST * steps).all():
            return WanderingError(at_ns, ahead_ns)
        width *= 2
    return None


def misses(time_ns: Int64Array, distance_ns: Int64Array) -> Int64Array:
    """The difference of each distance from what those before and after it let expect.

    Of instants that lie close together some are left out: what is expected is as far away as all but a tenth
    of them are from the one before.
    """
    gap = int(quantile(np.diff(time_ns), 0.9)) if time_ns.size > 1 else 1
    place = (time_ns - time_ns[0]) // max(gap // 2, 1)
    at_ns, ahead_ns = _medians(time_ns, distance_ns, place)
    if at_ns.size < 3:
        return np.asarray(np.abs(distance_ns - median(distance_ns)), dtype=np.int64)
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
