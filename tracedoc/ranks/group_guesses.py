"""Infer the process group of operations that do not name it, from causality.

gloo records no group. Of the groups that the traces list, it is the one in which no rank leaves an operation
before the last has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from tracedoc.ranks.clock_violations import SKEW_NS, VIOLATION_SHARE
from tracedoc.ranks.matching import RankCollectives
from tracedoc.timeline.collective_table import CollectiveTable
from tracedoc.trace.columns import ProcessGroup
from tracedoc.trace.vocabulary import SYMMETRIC_OPS

ENOUGH = 3
"""Fewer operations than this prove nothing."""


def with_guessed_groups(ranks: Sequence[RankCollectives]) -> list[RankCollectives]:
    """Return the ranks with the group filled in where exactly one listed group is possible.

    Times are compared as they are, so that ranks on hosts with different clocks keep their gaps.
    """
    ops = sorted({kind.op for rank in ranks for kind in rank.table.kinds if _is_open(kind.group, kind.op)})
    tables = {rank.rank: rank.table for rank in ranks}
    found: dict[str, dict[int, ProcessGroup]] = {}
    for op in ops:
        possible = [groups for groups in _candidates(ranks) if _can_be(op, groups, tables)]
        if len(possible) == 1:
            found[op] = possible[0]
    return [_filled(rank, found) for rank in ranks] if found else list(ranks)


def _is_open(group: tuple[int, ...], op: str) -> bool:
    return not group and op in SYMMETRIC_OPS


def _candidates(ranks: Sequence[RankCollectives]) -> list[dict[int, ProcessGroup]]:
    """Return, for each description that every rank lists once, the group of each rank."""
    by_description: dict[str, dict[int, ProcessGroup]] = {}
    repeated = set()
    for rank in ranks:
        for group in rank.groups:
            if rank.rank in by_description.setdefault(group.description, {}):
                repeated.add(group.description)
            by_description[group.description][rank.rank] = group
    return [
        groups
        for description, groups in by_description.items()
        if description not in repeated and len(groups) == len(ranks)
    ]


def _can_be(op: str, groups: dict[int, ProcessGroup], tables: dict[int, CollectiveTable]) -> bool:
    """Return whether the operations of one kind fit these groups, taken in order, without a violation."""
    wrong = count = 0
    for members in {group.ranks for group in groups.values()}:
        captured = [tables[rank] for rank in members if rank in tables]
        if len(captured) < 2:
            continue
        mine = [table.take(table.is_op(op)) for table in captured]
        if len({len(table) for table in mine}) > 1:
            return False
        latest = np.max([table.start_ns for table in mine], axis=0)
        earliest = np.min([table.end_ns for table in mine], axis=0)
        wrong += int((earliest + SKEW_NS < latest).sum())
        count += latest.size
    return count >= ENOUGH and wrong <= VIOLATION_SHARE * count


def _filled(rank: RankCollectives, found: dict[str, dict[int, ProcessGroup]]) -> RankCollectives:
    kinds = []
    for kind in rank.table.kinds:
        group = found[kind.op][rank.rank] if kind.op in found and not kind.group else None
        kinds.append(
            kind
            if group is None
            else replace(kind, group=group.ranks, group_name=group.name, group_size=group.size)
        )
    return replace(rank, table=rank.table.with_kinds(tuple(kinds)))
