"""Join the collectives of all ranks' programs into operations, as the run's matching found them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import CollectiveParts, Gathering, RunProgram
from tracedoc.ranks.bandwidth import SizeCurve
from tracedoc.ranks.matching import Matching
from tracedoc.spans import Int64Array
from tracedoc.step.program import RankProgram
from tracedoc.timeline.collective_roles import is_extra
from tracedoc.timeline.collective_table import NONE, CollectiveTable, by_rank

SLACK_NS = 100_000
SLACK_SHARE = 0.1
"""The time from the last start to a part's end may differ this much from the shortest part; beyond, the
clocks are wrong, and the shortest part counts."""


def join_run(
    ranks: Sequence[int],
    programs: Iterable[RankProgram],
    tables: Sequence[CollectiveTable],
    gradients: Sequence[npt.NDArray[np.bool_]],
    roles: Sequence[npt.NDArray[np.uint8]],
    matching: Matching,
    links: Sequence[SizeCurve | None] = (),
    spare_cores: int | None = None,
) -> RunProgram:
    """Return the program of a run; the columns of each rank are in the order of ``ranks``.

    ``links`` are those of the matching's groups, ``spare_cores`` those of :class:`Layout`.

    Parts of a program that nothing is matched with wait for nobody: their whole length is transfer.
    """
    position = {rank: place for place, rank in enumerate(matching.ranks)}
    parts_of_rank, none = by_rank(matching.part_rank, len(position)), np.empty(0, dtype=np.intp)
    latest, known = matching.latest_start_ns, matching.has_latest_start
    length_of_part = matching.end_ns - matching.start_ns
    shortest = np.minimum.reduceat(length_of_part, matching.first[:-1]) if len(matching) else length_of_part
    gathering, base, offsets = Gathering(len(ranks)), 0, []
    columns: list[dict[str, npt.NDArray[Any]]] = []
    kinds: dict[str, int] = {}
    for rank, program, table, gradient, role in zip(ranks, programs, tables, gradients, roles, strict=True):
        gathering.add(rank, program)
        mine = np.flatnonzero(program.row >= 0)
        rows = program.row[mine]
        found = np.full(len(table), NONE, dtype=np.int64)
        length = np.full(len(table), NONE, dtype=np.int64)
        parts = parts_of_rank[position[rank]] if rank in position else none
        parts = parts[known[matching.operation[parts]]]
        at, operations = matching.part_row[parts], matching.operation[parts]
        found[at], length[at] = operations, matching.end_ns[parts] - latest[operations]
        joined = found[rows] >= 0
        op, moved = found[rows], program.dur[mine].astype(np.int64)
        group, complete = np.full(mine.size, NONE, dtype=np.int32), np.zeros(mine.size, dtype=bool)
        group[joined], complete[joined] = matching.group[op[joined]], matching.complete[op[joined]]
        moved[joined] = _moved(length[rows[joined]], shortest[op[joined]], is_cpu=program.is_cpu)
        names = [kinds.setdefault(one.op, len(kinds)) for one in table.kinds] or [0]
        blocks = np.full(program.events, NONE, dtype=np.int32)
        blocks[program.unit_event] = program.unit_block
        columns.append(
            {
                "event": mine + base,
                "op": op,
                "transfer_ns": moved,
                "nbytes": table.nbytes[rows],
                "kind": np.array(names, dtype=np.int32)[table.kind[rows]],
                "group": group,
                "gradients": gradient[rows] if gradient.size else np.zeros(rows.size, dtype=bool),
                "extra": is_extra(role[rows]) if role.size else np.zeros(rows.size, dtype=bool),
                "complete": complete,
                "block": blocks[mine],
            }
        )
        begins = np.array([program.start_ns], dtype=np.int64)
        offsets.append(int(matching.clock.to_common(rank, begins)[0]) if rank in position else int(begins[0]))
        base += program.events
    whole = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
    matched = whole["op"] >= 0
    whole["op"][matched] = np.unique(whole["op"][matched], return_inverse=True)[1]
    collectives = CollectiveParts(
        **whole,
        kinds=tuple(kinds),
        group_sizes=tuple(one.size for one in matching.groups),
        links=tuple(links),
        staged=matching.staged,
    )
    first = min(offsets, default=0)
    starts = np.array(offsets, dtype=np.int64) - first if matching.clock.aligned else np.zeros(len(offsets))
    return gathering.joined(collectives, starts.astype(np.int64), spare_cores)


def _moved(length_ns: Int64Array, shortest_ns: Int64Array, *, is_cpu: bool) -> Int64Array:
    """How long each part moves data, in nanoseconds: since the last start, or as long as the shortest part.

    Where clocks differ, lengths do not: who came last was there for the transfer only. Threads of gloo that
    share cores end when they get one: their times do differ.
    """
    doubtful = np.abs(length_ns - shortest_ns) > np.maximum(SLACK_NS, SLACK_SHARE * shortest_ns)
    return np.where(doubtful & (not is_cpu), shortest_ns, np.maximum(length_ns, 0))
