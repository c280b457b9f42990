"""Join the collectives of all ranks' programs into operations, as the run's matching found them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import CollectiveParts, Gathering, RunProgram
from tracedoc.ranks.bandwidth import SizeCurve
from tracedoc.ranks.matching import Matching
from tracedoc.step.program import RankProgram
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
    matching: Matching,
    links: Sequence[SizeCurve | None] = (),
) -> RunProgram:
    """Return the program of a run; the columns of each rank are in the order of ``ranks``.

    ``links`` are those of the matching's groups.

    Parts of a program that nothing is matched with wait for nobody: their whole length is transfer.
    """
    position = {rank: place for place, rank in enumerate(matching.ranks)}
    parts_of_rank, none = by_rank(matching.part_rank, len(position)), np.empty(0, dtype=np.intp)
    latest, known = matching.latest_start_ns, matching.has_latest_start
    operation = matching.operation
    length_of_part = matching.end_ns - matching.start_ns
    shortest = np.minimum.reduceat(length_of_part, matching.first[:-1]) if len(matching) else length_of_part
    gathering, base, offsets = Gathering(len(ranks)), 0, []
    event, op, transfer, nbytes, kind, group, reduces, complete, block = ([] for _ in range(9))
    kinds: dict[str, int] = {}
    for rank, program, table, gradient in zip(ranks, programs, tables, gradients, strict=True):
        gathering.add(rank, program)
        mine = np.flatnonzero(program.row >= 0)
        rows = program.row[mine]
        found = np.full(len(table), NONE, dtype=np.int64)
        length = np.full(len(table), NONE, dtype=np.int64)
        parts = parts_of_rank[position[rank]] if rank in position else none
        parts = parts[known[operation[parts]]]
        at = matching.part_row[parts]
        found[at], length[at] = operation[parts], matching.end_ns[parts] - latest[operation[parts]]
        operations = np.maximum(found[rows], 0)
        usual = shortest[operations] if len(matching) else program.dur[mine]
        # Where clocks differ, lengths do not: who came last was there for the transfer only.
        doubtful = np.abs(length[rows] - usual) > np.maximum(SLACK_NS, SLACK_SHARE * usual)
        # Threads of gloo that share cores end when they get one: their times do differ.
        doubtful &= not program.is_cpu
        moved = np.where(doubtful, usual, np.maximum(length[rows], 0))
        moved = np.where(found[rows] >= 0, moved, program.dur[mine])
        names = [kinds.setdefault(one.op, len(kinds)) for one in table.kinds] or [0]
        event.append(mine + base)
        op.append(found[rows])
        transfer.append(moved)
        nbytes.append(table.nbytes[rows])
        kind.append(np.array(names, dtype=np.int32)[table.kind[rows]])
        group.append(np.where(found[rows] >= 0, matching.group[found[rows]] if len(matching) else NONE, NONE))
        reduces.append(gradient[rows] if gradient.size else np.zeros(rows.size, dtype=bool))
        complete.append((found[rows] >= 0) & (matching.complete[found[rows]] if len(matching) else False))
        blocks = np.full(program.events, NONE, dtype=np.int32)
        blocks[program.unit_event] = program.unit_block
        block.append(blocks[mine])
        begins = np.array([program.start_ns], dtype=np.int64)
        offsets.append(int(matching.clock.to_common(rank, begins)[0]) if rank in position else int(begins[0]))
        base += program.events
    all_ops = np.concatenate(op)
    dense = np.unique(all_ops[all_ops >= 0], return_inverse=True)[1]
    numbered = np.full(all_ops.size, NONE, dtype=np.int64)
    numbered[all_ops >= 0] = dense
    joins = CollectiveParts(
        event=np.concatenate(event).astype(np.intp),
        op=numbered,
        transfer_ns=np.concatenate(transfer).astype(np.int64),
        nbytes=np.concatenate(nbytes),
        kind=np.concatenate(kind),
        group=np.concatenate(group).astype(np.int32),
        gradients=np.concatenate(reduces),
        complete=np.concatenate(complete),
        block=np.concatenate(block),
        kinds=tuple(kinds),
        group_sizes=tuple(one.size for one in matching.groups),
        links=tuple(links),
    )
    first = min(offsets, default=0)
    starts = np.array(offsets, dtype=np.int64) - first if matching.clock.aligned else np.zeros(len(offsets))
    return gathering.joined(joins, starts.astype(np.int64))
