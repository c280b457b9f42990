"""Find which entries of several ranks' sequences are one operation, and drop pairs that violate causality."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.timeline.collective_table import NONE, boundaries

IntArray = npt.NDArray[np.intp]

NOT_PAIRED = -1


class Entries(msgspec.Struct, frozen=True, eq=False):
    """Operations of several ranks within groups, one entry for each rank's part, as columns.

    They are sorted by ``group``, ``rank`` (a position in the list of ranks) and time. ``op`` distinguishes
    operations, ``size`` is their bytes (``NONE`` where unknown or free to differ), ``seq``, ``step`` and
    ``nbytes`` are ``NONE`` where unknown; ``row`` is that of the rank's table.
    """

    group: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    op: npt.NDArray[np.int32]
    size: Int64Array
    seq: Int64Array
    step: npt.NDArray[np.int32]
    start_ns: Int64Array
    end_ns: Int64Array
    row: npt.NDArray[np.int32]
    nbytes: Int64Array

    def __len__(self) -> int:
        return int(self.group.size)


def pair_entries(entries: Entries) -> tuple[IntArray, int]:
    """Operation numbers by sequence number or order, and the number of those on which the ranks disagree."""
    paired = np.full(len(entries), NOT_PAIRED, dtype=np.intp)
    numbered = in_numbered_groups(entries)
    rows = np.flatnonzero(numbered)
    found, disagreeing = pair_by_number(entries, rows)
    paired[rows] = found
    total = int(paired.max(initial=-1)) + 1
    # Before the first step it is not known where the sequences of two ranks begin.
    ordered = ~numbered & ((entries.step != NONE) | bool((entries.step == NONE).all()))
    rows = np.flatnonzero(ordered)
    found = pair_by_order(entries, rows)
    paired[rows] = np.where(found == NOT_PAIRED, NOT_PAIRED, found + total)
    wrong = boundaries(entries.group[disagreeing], entries.seq[disagreeing]).size - 1
    return without_lone(paired), wrong


def count_uneven(entries: Entries, paired: IntArray, symmetric: npt.NDArray[np.bool_]) -> int:
    """The number of symmetric operations that have parts of different sizes."""
    order, edges = by_operation(np.where(symmetric & (entries.size != NONE), paired, NOT_PAIRED))
    return int(_differs(entries.size[order], edges).sum())


def pair_by_number(entries: Entries, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return an operation number for each of ``rows`` by its sequence number within the group.

    Operations that share a number (coalesced ones) are distinguished by their order. The second result are
    the rows whose ranks disagree on what the operation is: they stay unpaired.
    """
    order = np.lexsort((rows, entries.rank[rows], entries.seq[rows], entries.group[rows]))
    place = rows[order]
    occurrence = _position_in_run(entries.group[place], entries.seq[place], entries.rank[place])
    again = np.lexsort((entries.rank[place], occurrence, entries.seq[place], entries.group[place]))
    order, place, occurrence = order[again], place[again], occurrence[again]
    edges = boundaries(entries.group[place], entries.seq[place], occurrence)
    number = np.repeat(np.arange(edges.size - 1), np.diff(edges))
    disagree = _differs(entries.op[place], edges)[number]
    paired = np.full(rows.size, NOT_PAIRED, dtype=np.intp)
    paired[order[~disagree]] = number[~disagree]
    return paired, place[disagree]


def pair_by_order(entries: Entries, rows: IntArray) -> IntArray:
    """Return an operation number for each of ``rows`` by its place among those alike in its group and step.

    Threads that run operations beside each other may begin two of different sizes in either order. Only steps
    in which all ranks that show any show the same operations of the same sizes are paired; the other rows get
    ``NOT_PAIRED``.
    """
    order, edges = _by_place_in_step(entries, rows)
    place, counts = rows[order], np.diff(edges)
    heads = place[edges[:-1]]
    segments = boundaries(entries.group[heads], entries.step[heads])
    most = np.maximum.reduceat(counts, segments[:-1]) if counts.size else counts
    good = counts == np.repeat(most, np.diff(segments))
    whole = np.minimum.reduceat(good, segments[:-1]) if good.size else good
    kept = np.repeat(np.repeat(whole, np.diff(segments)), counts)
    number = np.repeat(np.arange(counts.size), counts)
    paired = np.full(rows.size, NOT_PAIRED, dtype=np.intp)
    paired[order[kept]] = number[kept]
    return paired


def _by_place_in_step(entries: Entries, rows: IntArray) -> tuple[IntArray, IntArray]:
    """The order of ``rows`` by group, step, kind, size, place among those and rank; where each place begins.

    Apart from its only user, since the columns that it takes are much where ranks are many.
    """
    keys = (entries.group, entries.step, entries.op, entries.size, entries.rank)
    order = np.lexsort(tuple(column[rows] for column in reversed(keys)))
    *alike, rank = (column[rows[order]] for column in keys)
    position = _position_in_run(*alike, rank)
    again = np.lexsort((position, *reversed(alike)))  # of one place the ranks stay in order
    return order[again], boundaries(*(column[again] for column in alike), position[again])


def pair_by_time(entries: Entries, rows: IntArray, slack_ns: int) -> IntArray:
    """Return an operation number for each of ``rows`` of one group by when it ended; times are comparable.

    No rank leaves an operation before the last has arrived, and all leave together. So the operations of two
    ranks that end nearest to each other, are alike and overlap in time are one. What has no such partner
    becomes an operation of its own. ``rows`` is sorted by rank and time.
    """
    paired = np.full(rows.size, NOT_PAIRED, dtype=np.intp)
    edges = boundaries(entries.rank[rows])
    parts = sorted(
        (np.arange(a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)),
        key=lambda part: -part.size,
    )
    if not parts:
        return paired
    # What was found so far: the place of one entry of each operation, in order of its end.
    known = parts[0][np.argsort(entries.end_ns[rows[parts[0]]], kind="stable")]
    paired[known] = np.arange(known.size)
    total = known.size
    for part in parts[1:]:
        partner = _nearest_partners(entries, rows[part], rows[known], slack_ns)
        found = partner != NOT_PAIRED
        paired[part[found]] = paired[known[partner[found]]]
        lone = part[~found]
        paired[lone] = np.arange(total, total + lone.size)
        total += lone.size
        known = np.concatenate((known, lone))
        known = known[np.argsort(entries.end_ns[rows[known]], kind="stable")]
    return paired


def _nearest_partners(entries: Entries, mine: IntArray, known: IntArray, slack_ns: int) -> IntArray:
    """The position in ``known`` of the partner of each of ``mine``, ``NOT_PAIRED`` without one."""
    ends, theirs = entries.end_ns[mine], entries.end_ns[known]
    forward = _nearest(theirs, ends)
    ordered = np.argsort(ends, kind="stable")
    backward = ordered[_nearest(ends[ordered], theirs)]
    partner = known[forward]
    sizes_agree = (
        (entries.size[mine] == entries.size[partner])
        | (entries.size[mine] == NONE)
        | (entries.size[partner] == NONE)
    )
    fits = (
        (backward[forward] == np.arange(mine.size))
        & (entries.op[mine] == entries.op[partner])
        & sizes_agree
        & (entries.start_ns[mine] <= entries.end_ns[partner] + slack_ns)
        & (entries.start_ns[partner] <= entries.end_ns[mine] + slack_ns)
    )
    return np.where(fits, forward, NOT_PAIRED)


def _nearest(ordered: Int64Array, wanted: Int64Array) -> IntArray:
    """Return the position in ``ordered`` of the value nearest to each of ``wanted``."""
    after = np.clip(np.searchsorted(ordered, wanted), 0, ordered.size - 1)
    before = np.maximum(after - 1, 0)
    nearer = np.abs(ordered[before] - wanted) <= np.abs(ordered[after] - wanted)
    return np.where(nearer, before, after)


def _position_in_run(*columns: npt.NDArray[np.generic]) -> IntArray:
    edges = boundaries(*columns)
    return np.asarray(np.arange(columns[0].size) - np.repeat(edges[:-1], np.diff(edges)), dtype=np.intp)


def _differs(values: npt.NDArray[np.generic], edges: IntArray) -> npt.NDArray[np.bool_]:
    """Whether the values of each run differ."""
    if edges.size < 2:
        return np.zeros(0, dtype=bool)
    return np.asarray(np.minimum.reduceat(values, edges[:-1]) != np.maximum.reduceat(values, edges[:-1]))


VIOLATION_SHARE = 0.10
"""If more operations than this "end" on a rank before all ranks have started, they were matched wrongly or
the clocks disagree."""

SKEW_NS = 20_000
"""Timestamps of the devices of one host may differ by so much."""


class Pairs(msgspec.Struct, frozen=True, eq=False):
    """Entries on the common clock; ``symmetric``: whether the operation of each is, ``slack_ns`` how
    far times of different ranks may be off."""

    entries: Entries
    symmetric: npt.NDArray[np.bool_]
    slack_ns: int


def drop_violations(pairs: Pairs, paired: IntArray, listed: npt.NDArray[np.bool_]) -> IntArray:
    """Return operation numbers without violations: where order fails, operations are matched by their ends.

    ``listed``: whether the trace names the members of each group. A group that was guessed, and whose
    operations violate causality, stays unmatched.
    """
    entries = pairs.entries
    trusted = (listed | ~_impossible_groups(pairs, paired, without_pairs=True))[entries.group]
    paired = np.where(trusted, paired, NOT_PAIRED)
    paired = _by_time_where_order_fails(pairs, paired, trusted)
    wrong = _impossible_groups(pairs, paired, without_pairs=False)
    return np.where(wrong[entries.group], NOT_PAIRED, paired)


def in_numbered_groups(entries: Entries) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries of groups in which every operation has its sequence number.

    The two ranks of a send count in different groups, so its number says nothing.
    """
    missing = np.zeros(int(entries.group.max(initial=-1)) + 1, dtype=bool)
    missing[entries.group[entries.seq == NONE]] = True
    return ~missing[entries.group]


def without_lone(paired: IntArray) -> IntArray:
    """Return the numbers without those that a single entry has."""
    counts = np.bincount(paired[paired != NOT_PAIRED], minlength=1)
    return np.where((paired != NOT_PAIRED) & (counts[paired] > 1), paired, NOT_PAIRED)


def by_operation(paired: IntArray) -> tuple[IntArray, IntArray]:
    """Return the paired entries ordered by operation (and as they were within it), and where each begins."""
    chosen = np.flatnonzero(paired != NOT_PAIRED)
    order = chosen[np.argsort(paired[chosen], kind="stable")]
    return order, boundaries(paired[order])


def _impossible(
    pairs: Pairs, order: IntArray, edges: IntArray
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether a rank left each operation before the last arrived, and whether that is known."""
    judged = pairs.symmetric[order[edges[:-1]]]
    if not judged.size:
        return judged, judged
    latest = np.maximum.reduceat(pairs.entries.start_ns[order], edges[:-1])
    earliest = np.minimum.reduceat(pairs.entries.end_ns[order], edges[:-1])
    return judged & (earliest + pairs.slack_ns < latest), judged


def _impossible_groups(pairs: Pairs, paired: IntArray, *, without_pairs: bool) -> npt.NDArray[np.bool_]:
    """Whether too many operations of each group violate causality.

    ``without_pairs`` is the answer for a group that has no pair.
    """
    order, edges = by_operation(paired)
    wrong, judged = _impossible(pairs, order, edges)
    group = pairs.entries.group[order[edges[:-1]]]
    size = int(pairs.entries.group.max(initial=-1)) + 1
    count = np.bincount(group, minlength=size)
    bad = np.bincount(group, weights=wrong, minlength=size) > VIOLATION_SHARE * np.bincount(
        group, weights=judged, minlength=size
    )
    return np.asarray(np.where(count == 0, without_pairs, bad))


def _by_time_where_order_fails(pairs: Pairs, paired: IntArray, among: npt.NDArray[np.bool_]) -> IntArray:
    """Return the numbers with those steps matched by their ends whose order differs or is impossible."""
    entries = pairs.entries
    by_order = ~in_numbered_groups(entries) & among
    failing = by_order & (paired == NOT_PAIRED)
    order, edges = by_operation(paired)
    if order.size:
        wrong, judged = _impossible(pairs, order, edges)
        heads = order[edges[:-1]]
        by_step = np.lexsort((entries.step[heads], entries.group[heads]))
        segments = boundaries(entries.group[heads[by_step]], entries.step[heads[by_step]])
        share = np.add.reduceat(wrong[by_step].astype(np.int64), segments[:-1])
        count = np.add.reduceat(judged[by_step].astype(np.int64), segments[:-1])
        bad = np.empty(heads.size, dtype=bool)
        bad[by_step] = np.repeat(share > VIOLATION_SHARE * count, np.diff(segments))
        failing[order[np.repeat(bad, np.diff(edges))]] = True
        failing &= by_order
    rows = np.flatnonzero(failing)
    if rows.size == 0:
        return paired
    paired = np.where(failing, NOT_PAIRED, paired)
    rows = rows[np.lexsort((rows, entries.rank[rows], entries.step[rows], entries.group[rows]))]
    segments = boundaries(entries.group[rows], entries.step[rows])
    total = int(paired.max(initial=-1)) + 1
    for begin, end in zip(segments[:-1].tolist(), segments[1:].tolist(), strict=True):
        part = rows[begin:end]
        found = pair_by_time(entries, part, pairs.slack_ns)
        paired[part] = found + total
        total += int(found.max()) + 1
    return without_lone(paired)
