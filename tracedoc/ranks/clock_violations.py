"""Drop matches that violate causality: no rank leaves a collective before its last rank has arrived."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.pairing import NOT_PAIRED, Entries, IntArray, pair_by_time
from tracedoc.timeline.collective_table import NONE, boundaries

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
    """Return for each operation whether a rank left before the last arrived, and whether that is known."""
    judged = pairs.symmetric[order[edges[:-1]]]
    if not judged.size:
        return judged, judged
    latest = np.maximum.reduceat(pairs.entries.start_ns[order], edges[:-1])
    earliest = np.minimum.reduceat(pairs.entries.end_ns[order], edges[:-1])
    return judged & (earliest + pairs.slack_ns < latest), judged


def _impossible_groups(pairs: Pairs, paired: IntArray, *, without_pairs: bool) -> npt.NDArray[np.bool_]:
    """Return for each group whether too many of its operations violate causality.

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
