"""Align the clocks of several hosts by the ends of symmetric collectives.

All ranks leave an all-reduce, reduce-scatter or all-gather at nearly the same time; what
remains of their difference over many operations is the clock offset. Where ranks only send and receive, the
ends of these have to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.errors import Limit
from tracedoc.spans import Int64Array
from tracedoc.timeline.collective_table import boundaries, by_rank
from tracedoc.units import format_ms

RESIDUAL_SHARE = 0.10
"""If ends still differ by more than this share of the mean wait, waits mean nothing."""

SETTLED_NS = 50_000
"""Ends this close are as good as simultaneous, whatever the waits are."""

SPREAD_NS = 100_000
"""The ends of one operation may differ by this much with one clock too: its kernels end one by one."""

DRIFT_OPERATIONS = 12
"""Fewer operations than this between two clocks give an offset, not a drift."""

DRIFT_PAYS = 0.75
"""A drift is accepted if it lowers the residual below this share of a fixed offset's."""

IntArray = npt.NDArray[np.intp]


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


class Clock(msgspec.Struct, frozen=True):
    """How the clocks of the ranks differ from the common one; a rank that is not listed keeps it.

    ``residual_ns`` is the median distance that remains between the ends of one operation on two clocks,
    ``None`` where nothing had to be compared; ``aligned`` is False where times of different ranks cannot be
    compared.
    """

    errors: Mapping[int, ClockError] = msgspec.field(default_factory=dict)
    residual_ns: int | None = None
    aligned: bool = True
    limits: tuple[Limit, ...] = ()

    def to_common(self, rank: int, times: Int64Array) -> Int64Array:
        """Return instants stamped by ``rank`` on the common clock."""
        error = self.errors.get(rank)
        return times if error is None else error.to_common(times)

    def to_own(self, rank: int, times: Int64Array) -> Int64Array:
        """Return instants of the common clock as ``rank`` would have stamped them."""
        error = self.errors.get(rank)
        return times if error is None else error.to_own(times)


class Ends(msgspec.Struct, frozen=True, eq=False):
    """Operations in which ranks wait for each other, one entry for each rank that took part.

    ``operation`` numbers the operations and is sorted; ``rank`` is a position in the list of ranks. Of
    ``symmetric`` ones all ranks leave together, which tells about clocks; the others only how long waits are.
    """

    operation: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    start_ns: Int64Array
    end_ns: Int64Array
    symmetric: npt.NDArray[np.bool_]

    def leaving_together(self) -> Ends:
        """Return the symmetric operations."""
        mine = self.symmetric
        return Ends(self.operation[mine], self.rank[mine], self.start_ns[mine], self.end_ns[mine], mine[mine])


def align_clocks(ranks: Sequence[int], hosts: Sequence[str], ends: Ends) -> Clock:
    """Return one clock error per host (per rank where hosts are unknown), from the ends of operations.

    Ranks of one named host share a clock and are not shifted. Unnamed ranks are shifted only where their
    ends demand it. With nothing to align by, ranks of one host or of unknown hosts are taken as they are;
    different named hosts are then not comparable.
    """
    named = {host for host in hosts if host}
    if len(ranks) < 2 or (len(named) == 1 and all(hosts)):
        return Clock()
    clocks = _numbered([host or f" rank {rank}" for rank, host in zip(ranks, hosts, strict=True)])
    if not ends.symmetric.any():
        if len(named) < 2:
            return Clock()
        if not ends.operation.size or not _connect_all(ends, clocks):
            return Clock(
                aligned=False, limits=(_not_aligned("there is no symmetric collective to align them by"),)
            )
    if len(named) < 2:
        residual, wait = _quality(ends, clocks, {})
        if residual <= max(RESIDUAL_SHARE * wait, SETTLED_NS):
            return Clock(residual_ns=residual)
    errors = _errors(ends, clocks)
    residual, wait = _quality(ends, clocks, errors)
    if residual > max(RESIDUAL_SHARE * wait, SPREAD_NS):
        reason = f"ends of one collective still differ by {format_ms(residual / 1e6)}"
        return Clock({}, residual, False, (_not_aligned(reason),))
    return Clock(
        {rank: errors[clock] for rank, clock in zip(ranks, clocks.tolist(), strict=True) if clock in errors},
        residual,
    )


def _numbered(names: Sequence[str]) -> npt.NDArray[np.int32]:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int32)


class _Distances(msgspec.Struct, frozen=True, eq=False):
    """How much later an operation ended on clock ``other`` than on clock ``first``, at ``time_ns`` of it."""

    first: npt.NDArray[np.int32]
    other: npt.NDArray[np.int32]
    time_ns: Int64Array
    distance_ns: Int64Array


def _distances(
    operation: npt.NDArray[np.int32], clock: npt.NDArray[np.int32], end_ns: Int64Array
) -> _Distances:
    """Return, for each operation, the distance of each clock's median end from that of its first clock."""
    order = np.lexsort((end_ns, clock, operation))
    edges = boundaries(operation[order], clock[order])
    middle = order[(edges[:-1] + edges[1:] - 1) // 2]
    del order, edges  # with many ranks, what is no longer needed is much
    starts = boundaries(operation[middle])
    first = np.repeat(starts[:-1], np.diff(starts))
    others = np.flatnonzero(first != np.arange(first.size))
    first, others = middle[first[others]], middle[others]
    del middle, starts
    later_ns = end_ns[others]
    return _Distances(clock[first], clock[others], later_ns, later_ns - end_ns[first])


def _errors(ends: Ends, clocks: npt.NDArray[np.int32]) -> dict[int, ClockError]:
    """Return the error of each clock against the first one of those it is connected with."""
    symmetric = ends.leaving_together()
    # Stages of a pipeline on hosts of their own share no symmetric operation: then a send and its receive,
    # which end together but for what is buffered, are the next best.
    ends = symmetric if _connect_all(symmetric, clocks) else ends
    found = _distances(ends.operation, clocks[ends.rank], ends.end_ns)
    order = np.lexsort((found.time_ns, found.other, found.first))
    first, other = found.first[order], found.other[order]
    time_ns, distance_ns = found.time_ns[order], found.distance_ns[order]
    edges = boundaries(first, other)
    fits: dict[int, list[tuple[int, int, ClockError]]] = defaultdict(list)
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        a, b = int(first[begin]), int(other[begin])
        fit = _fit(time_ns[begin:end], distance_ns[begin:end])
        fits[a].append((end - begin, b, fit))
        fits[b].append((end - begin, a, _reversed(fit)))
    errors: dict[int, ClockError] = {}
    for root in sorted(fits):
        if root in errors:
            continue
        errors[root] = ClockError(0)
        front = [root]
        while front:
            near = front.pop(0)
            for _, far, fit in sorted(fits[near], key=lambda entry: (-entry[0], entry[1])):
                if far not in errors:
                    errors[far] = _after(errors[near], fit)
                    front.append(far)
    return errors


def _connect_all(ends: Ends, clocks: npt.NDArray[np.int32]) -> bool:
    """Return whether operations lead from every clock to every other one."""
    found = _distances(ends.operation, clocks[ends.rank], ends.end_ns)
    reached, grown = {int(clocks[0])}, True
    pairs = set(zip(found.first.tolist(), found.other.tolist(), strict=True))
    while grown:
        near = {b for a, b in pairs if a in reached} | {a for a, b in pairs if b in reached}
        grown = not near <= reached
        reached |= near
    return len(reached) == np.unique(clocks).size


def _fit(time_ns: Int64Array, distance_ns: Int64Array) -> ClockError:
    """Return the median distance; with a steady drift where that explains the distances much better.

    The drift is the median slope between operations half the capture apart, which is robust to outliers.
    """
    offset = int(np.median(distance_ns - distance_ns[0])) + int(distance_ns[0])
    fixed = ClockError(offset)
    half = time_ns.size // 2
    if time_ns.size < DRIFT_OPERATIONS:
        return fixed
    spans = time_ns[-half:] - time_ns[:half]
    apart = spans > 0
    if not apart.any():
        return fixed
    rise = (distance_ns[-half:] - distance_ns[:half])[apart]
    rate = float(np.median(rise / spans[apart]))
    origin = int(time_ns[half])
    level = distance_ns - offset - rate * (time_ns - origin)
    drifting = ClockError(offset + round(float(np.median(level))), rate, origin)
    left = np.median(np.abs(level - np.median(level)))
    before = np.median(np.abs(distance_ns - offset))
    return drifting if left < DRIFT_PAYS * before else fixed


def _reversed(fit: ClockError) -> ClockError:
    """Return the error of the first clock against the other one."""
    origin = fit.origin_ns - fit.offset_ns if fit.rate else 0
    return ClockError(-fit.offset_ns, -fit.rate, origin)


def _after(near: ClockError, fit: ClockError) -> ClockError:
    """Return the error of a clock that is ``fit`` ahead of one that itself is ``near`` ahead."""
    if near.rate == 0.0 and fit.rate == 0.0:
        return ClockError(near.offset_ns + fit.offset_ns)
    origin = fit.origin_ns or near.origin_ns + fit.offset_ns
    there = origin - fit.offset_ns
    ahead = near.offset_ns + round(near.rate * (there - near.origin_ns)) if near.rate else near.offset_ns
    return ClockError(ahead + fit.offset_ns, near.rate + fit.rate, origin)


def _quality(
    ends: Ends, clocks: npt.NDArray[np.int32], errors: Mapping[int, ClockError]
) -> tuple[int, float]:
    """Return the median distance of ends between clocks, and the mean wait, once ``errors`` are removed.

    Waits of sends and receives count: those of a pipeline are the longest. Where there are no
    symmetric operations, distances are those of sends and receives: what is buffered lies in them too.
    """
    start_ns, end_ns, clock = ends.start_ns, ends.end_ns, clocks[ends.rank]
    if errors:
        start_ns, end_ns = start_ns.copy(), end_ns.copy()
        parts = by_rank(clock, int(clocks.max()) + 1)
        for number, error in errors.items():
            mine = parts[number]
            start_ns[mine], end_ns[mine] = error.to_common(start_ns[mine]), error.to_common(end_ns[mine])
    together = ends.symmetric if ends.symmetric.any() else np.ones(end_ns.size, dtype=bool)
    distance = _distances(ends.operation[together], clock[together], end_ns[together]).distance_ns
    residual = int(np.median(np.abs(distance))) if distance.size else 0
    edges = boundaries(ends.operation)
    latest = np.repeat(np.maximum.reduceat(start_ns, edges[:-1]), np.diff(edges))
    return residual, float(np.mean(latest - start_ns))


def _not_aligned(reason: str) -> Limit:
    return Limit(
        "clocks-not-aligned",
        f"the clocks of the hosts cannot be brought together: {reason}",
        "waiting is not separated from transfer",
    )
