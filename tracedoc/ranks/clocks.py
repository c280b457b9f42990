"""Align the clocks of several hosts by the ends of symmetric collectives.

All ranks leave an all-reduce, reduce-scatter or all-gather at nearly the same time; what
remains of their difference over many operations is the clock offset. Where ranks only send and receive, the
ends of these have to do.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.errors import Limit
from tracedoc.ranks.clock_errors import (
    DRIFT_PAYS,
    FEWEST,
    MOSTLY,
    SETTLED_NS,
    AnyError,
    ClockError,
    WanderingError,
    best_fit,
    error_after,
    fit_steady,
    misses,
    reversed_error,
)
from tracedoc.spans import Int64Array
from tracedoc.timeline.collective_table import boundaries, by_rank
from tracedoc.trace.distinct import distinct, median, quantile
from tracedoc.units import format_ms

RESIDUAL_SHARE = 0.10
"""Where ranks only send and receive: if ends still differ by more than this share of the mean wait, waits
mean nothing, for what is buffered lies in these ends too."""

HARDLY_MATTERS = 0.01
"""Clocks of unnamed hosts that differ by less than this share of the mean wait are left as they are."""

SPREAD_NS = 100_000
"""The ends of one operation may differ by this much with one clock too: its kernels end one by one."""

SHIFTED = 10
"""Ranks of one host have clocks of their own where ends differ this many times as much as that scatters."""

FEW = 4
"""Fewer operations may be apart by the same time because they are not the same."""

TELLING = 3
"""An operation that lasts this many times the uncertainty of the clocks shows who came last."""


class Clock(msgspec.Struct, frozen=True):
    """How the clocks of the ranks differ from the common one; a rank that is not listed keeps it.

    ``residual_ns`` is the median distance that remains between the ends of one operation on two clocks,
    ``None`` where nothing had to be compared; ``uncertainty_ns`` is what nine in ten stay below, 0 with one
    clock. ``aligned`` is False where times of different ranks cannot be compared.
    """

    errors: Mapping[int, AnyError] = msgspec.field(default_factory=dict)
    residual_ns: int | None = None
    uncertainty_ns: int = 0
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

    Ranks of one named host share a clock and are not shifted, unless their ends show that they do not.
    Unnamed ranks are shifted only where their ends demand it. With nothing to align by, ranks of one host or
    of unknown hosts are taken as they are; different named hosts are then not comparable.
    """
    named = {host for host in hosts if host}
    if len(ranks) < 2:
        return Clock()
    clocks = _numbered([host or f" rank {rank}" for rank, host in zip(ranks, hosts, strict=True)])
    clocks = _with_own_clocks(ends, clocks)
    if not clocks.any():
        return Clock()
    if not ends.symmetric.any():
        return _aligned_by_sends(ranks, ends, clocks, several=len(named) > 1)
    if len(named) < 2:
        left = _residuals(ends, clocks, {})
        little = HARDLY_MATTERS * left.mean_wait_ns
        if left.residual_ns <= max(little, SETTLED_NS) and left.uncertainty_ns <= max(little, SPREAD_NS):
            return Clock({}, left.residual_ns, left.uncertainty_ns)
    errors: dict[int, AnyError] = dict(_errors(ends, clocks))
    left = _residuals(ends, clocks, errors)
    if left.uncertainty_ns > SETTLED_NS:
        followed = _errors(ends, clocks, wandering=True)
        missed = _residuals(ends, clocks, followed)
        if missed.residual_ns + missed.uncertainty_ns < DRIFT_PAYS * (left.residual_ns + left.uncertainty_ns):
            errors, left = followed, missed
    longest = int((ends.end_ns - ends.start_ns).max(initial=0))
    if left.uncertainty_ns > SPREAD_NS and TELLING * left.uncertainty_ns > longest:
        reason = f"ends of one collective still differ by {format_ms(left.uncertainty_ns / 1e6)}"
        return Clock({}, left.residual_ns, left.uncertainty_ns, False, (_not_aligned(reason),))
    return _clock(ranks, clocks, errors, left)


def uncertainty_by_group(ends: Ends, group: npt.NDArray[np.int32], count: int, clock: Clock) -> Int64Array:
    """The uncertainty, in ns, of when the ranks of each of ``count`` groups came to an operation.

    ``group`` is that of each part; parts are those that the clock was aligned by. A clock that wanders is
    known better between ranks that meet often than between those that meet once a step. Of a group that
    meets too seldom to tell, it is that of the clock.
    """
    found = np.full(count, clock.uncertainty_ns, dtype=np.int64)
    if not any(isinstance(error, WanderingError) for error in clock.errors.values()):
        return found
    for part in distinct(group[ends.symmetric]).tolist():
        mine = np.flatnonzero((group == part) & ends.symmetric)
        between = _distances(ends.operation[mine], ends.rank[mine], ends.end_ns[mine])
        if between.distance_ns.size >= FEWEST:
            found[part] = int(quantile(_missed(between), MOSTLY))
    return found


def _aligned_by_sends(
    ranks: Sequence[int], ends: Ends, clocks: npt.NDArray[np.int32], *, several: bool
) -> Clock:
    """Return the clock where ranks only send and receive: what is buffered lies in these ends too."""
    if several and (not ends.operation.size or not _connect_all(ends, clocks)):
        return Clock(
            aligned=False, limits=(_not_aligned("there is no symmetric collective to align them by"),)
        )
    if not several:
        return Clock()
    errors = _errors(ends, clocks)
    left = _residuals(ends, clocks, errors)
    if left.residual_ns > max(RESIDUAL_SHARE * left.mean_wait_ns, SPREAD_NS):
        reason = f"ends of one collective still differ by {format_ms(left.residual_ns / 1e6)}"
        return Clock({}, left.residual_ns, left.uncertainty_ns, False, (_not_aligned(reason),))
    return _clock(ranks, clocks, errors, left)


def _clock(
    ranks: Sequence[int],
    clocks: npt.NDArray[np.int32],
    errors: Mapping[int, AnyError],
    left: _Residuals,
) -> Clock:
    of_rank = {
        rank: errors[clock] for rank, clock in zip(ranks, clocks.tolist(), strict=True) if clock in errors
    }
    return Clock(of_rank, left.residual_ns, left.uncertainty_ns)


def _with_own_clocks(ends: Ends, clocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the clock of each rank, with those of a host taken apart whose ends differ by a fixed time.

    Recorded by several machines of one name, or moved afterwards: on one clock ends scatter, and none is
    always the same time, far above that scatter, from another.
    """
    together = ends.leaving_together()
    found = _distances(
        together.operation, np.arange(clocks.size, dtype=np.int32)[together.rank], together.end_ns
    )
    same = clocks[found.first] == clocks[found.other]
    if not same.any():
        return clocks
    first, other, distance_ns = found.first[same], found.other[same], found.distance_ns[same]
    order = np.lexsort((other, first))
    edges = boundaries(first[order], other[order])
    apart: set[int] = set()
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        pair = distance_ns[order[begin:end]]
        level = int(median(pair))
        scatter = int(median(np.abs(pair - level)))
        if abs(level) > max(SPREAD_NS, SHIFTED * scatter) and pair.size >= FEW:
            apart.add(int(clocks[first[order[begin]]]))
    if not apart:
        return clocks
    names = [
        f"{clock} {place}" if clock in apart else str(clock) for place, clock in enumerate(clocks.tolist())
    ]
    return _numbered(names)


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


def _errors(ends: Ends, clocks: npt.NDArray[np.int32], *, wandering: bool = False) -> dict[int, AnyError]:
    """Return the error of each clock against the first one of those it is connected with.

    With ``wandering`` clocks are followed from operation to operation where there are enough of them.
    """
    symmetric = ends.leaving_together()
    # Stages of a pipeline on hosts of their own share no symmetric operation: then a send and its receive,
    # which end together but for what is buffered, are the next best.
    ends = symmetric if _connect_all(symmetric, clocks) else ends
    found = _distances(ends.operation, clocks[ends.rank], ends.end_ns)
    order = np.lexsort((found.time_ns, found.other, found.first))
    first, other = found.first[order], found.other[order]
    time_ns, distance_ns = found.time_ns[order], found.distance_ns[order]
    edges = boundaries(first, other)
    fits: dict[int, list[tuple[int, int, int, AnyError]]] = defaultdict(list)
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        a, b = int(first[begin]), int(other[begin])
        pair = time_ns[begin:end], distance_ns[begin:end]
        fit, doubt = best_fit(*pair) if wandering else (fit_steady(*pair), SETTLED_NS)
        fits[a].append((doubt, begin - end, b, fit))
        fits[b].append((doubt, begin - end, a, reversed_error(fit)))
    errors: dict[int, AnyError] = {}
    for root in sorted(fits):
        if root not in errors:
            _spread(root, fits, errors)
    return errors


def _spread(
    root: int,
    fits: Mapping[int, list[tuple[int, int, int, AnyError]]],
    errors: dict[int, AnyError],
) -> None:
    """Add the errors of all clocks that pairs lead to from ``root``: by the surest pairs, few of them."""
    errors[root] = ClockError(0)
    count = itertools.count()  # no two entries compare their fits
    front = [(doubt, 1, size, far, next(count), root, fit) for doubt, size, far, fit in fits[root]]
    heapq.heapify(front)
    while front:
        _, hops, _, far, _, near, fit = heapq.heappop(front)
        if far in errors:
            continue
        errors[far] = error_after(errors[near], fit)
        for doubt, size, other, onward in fits[far]:
            if other not in errors:
                heapq.heappush(front, (doubt, hops + 1, size, other, next(count), far, onward))


def _connect_all(ends: Ends, clocks: npt.NDArray[np.int32]) -> bool:
    """Whether operations lead from every clock to every other one."""
    found = _distances(ends.operation, clocks[ends.rank], ends.end_ns)
    reached, grown = {int(clocks[0])}, True
    pairs = set(zip(found.first.tolist(), found.other.tolist(), strict=True))
    while grown:
        near = {b for a, b in pairs if a in reached} | {a for a, b in pairs if b in reached}
        grown = not near <= reached
        reached |= near
    return len(reached) == distinct(clocks).size


class _Residuals(msgspec.Struct, frozen=True):
    """What errors leave: the median distance of ends and what most stay below; and the mean wait."""

    residual_ns: int
    uncertainty_ns: int
    mean_wait_ns: float


def _residuals(ends: Ends, clocks: npt.NDArray[np.int32], errors: Mapping[int, AnyError]) -> _Residuals:
    """What is left of the differences between clocks once ``errors`` are removed.

    Waits of sends and receives count: those of a pipeline are the longest. Where there are no
    symmetric operations, distances are those of sends and receives: what is buffered lies in them too.
    A clock that was followed from end to end leaves no distance there; what counts is how far each end is
    from what those around it let expect.
    """
    start_ns, end_ns, clock = ends.start_ns, ends.end_ns, clocks[ends.rank]
    wandering = any(isinstance(error, WanderingError) for error in errors.values())
    if errors:
        start_ns, end_ns = start_ns.copy(), end_ns.copy()
        parts = by_rank(clock, int(clocks.max()) + 1)
        for number, error in errors.items():
            mine = parts[number]
            start_ns[mine] = error.to_common(start_ns[mine])
            end_ns[mine] = error.to_common(end_ns[mine])
    together = ends.symmetric if ends.symmetric.any() else np.ones(end_ns.size, dtype=bool)
    own_ends = ends.end_ns if wandering else end_ns
    found = _distances(ends.operation[together], clock[together], own_ends[together])
    distance = _missed(found) if wandering else np.abs(found.distance_ns)
    edges = boundaries(ends.operation)
    latest = np.repeat(np.maximum.reduceat(start_ns, edges[:-1]), np.diff(edges))
    if not distance.size:
        return _Residuals(0, 0, float(np.mean(latest - start_ns)))
    return _Residuals(
        int(median(distance)), int(quantile(distance, MOSTLY)), float(np.mean(latest - start_ns))
    )


def _missed(found: _Distances) -> Int64Array:
    """How far the distances of each pair of clocks are from what those around them let expect."""
    order = np.lexsort((found.time_ns, found.other, found.first))
    edges = boundaries(found.first[order], found.other[order])
    missed = [
        misses(found.time_ns[order[begin:end]], found.distance_ns[order[begin:end]])
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    return np.concatenate(missed)


def _not_aligned(reason: str) -> Limit:
    return Limit(
        "clocks-not-aligned",
        f"the clocks of the hosts cannot be brought together: {reason}",
        "waiting is not separated from transfer",
    )
