"""Join the collectives of all ranks' programs into operations, as the run's matching found them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.play.run_program import CollectiveParts, Gathering, RunProgram, Scenario
from tracedoc.play.scenarios import split_transfers
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array
from tracedoc.step.program import Cause, RankProgram
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.collective_roles import is_extra
from tracedoc.timeline.collective_table import NONE, by_rank
from tracedoc.trace.distinct import distinct
from tracedoc.trace.vocabulary import P2P_OPS

SLACK_NS = 100_000
SLACK_SHARE = 0.1
"""The time from the last start to a part's end may differ this much from the shortest part; beyond, the
clocks are wrong, and the shortest part counts."""


def join_run(run: RunView, digests: Sequence[RankDigest], step: int) -> RunProgram:
    """Return the program of a step of a run; the columns of each rank are in the order of ``digests``.

    Parts of a program that nothing is matched with wait for nobody: their whole length is transfer.
    """
    matching = run.matching
    position = {rank: place for place, rank in enumerate(matching.ranks)}
    parts_of_rank, none = by_rank(matching.part_rank, len(position)), np.empty(0, dtype=np.intp)
    latest, known = matching.latest_start_ns, matching.has_latest_start
    length_of_part = matching.end_ns - matching.start_ns
    shortest = np.minimum.reduceat(length_of_part, matching.first[:-1]) if len(matching) else length_of_part
    gathering, base, offsets = Gathering(len(digests)), 0, []
    columns: list[dict[str, npt.NDArray[Any]]] = []
    peers: list[Int64Array] = []
    ends: list[Int64Array] = []
    kinds: dict[str, int] = {}
    for digest in digests:
        rank, table, program = digest.rank, digest.collectives, program_of(digest, step)
        gathering.add(rank, program)
        mine = np.flatnonzero(program.row >= 0)
        rows = program.row[mine]
        found = np.full(len(table), NONE, dtype=np.int64)
        length = np.full(len(table), NONE, dtype=np.int64)
        parts = parts_of_rank[position[rank]] if rank in position else none
        parts = parts[known[matching.operation[parts]]]
        at, operations = matching.part_row[parts], matching.operation[parts]
        found[at], length[at] = operations, matching.end_ns[parts] - latest[operations]
        met = found[rows] >= 0
        op, moved = found[rows], program.dur[mine].astype(np.int64)
        none_of = np.zeros(mine.size, dtype=bool)
        group, complete = np.full(mine.size, NONE, dtype=np.int32), none_of.copy()
        group[met], complete[met] = matching.group[op[met]], matching.complete[op[met]]
        moved[met] = _moved(length[rows[met]], shortest[op[met]], is_cpu=program.is_cpu)
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
                "gradients": digest.gradients[rows] if digest.gradients.size else none_of,
                "extra": is_extra(digest.roles[rows]) if digest.roles.size else none_of,
                "complete": complete,
                "block": blocks[mine],
            }
        )
        unnamed = NONE - 1 - len(peers)
        of_kinds = [unnamed if one.peer is None else one.peer for one in table.kinds]
        between = [one.op in P2P_OPS for one in table.kinds]
        peers.append(
            np.where(between, of_kinds, NONE)[table.kind[rows]] if of_kinds else rows.astype(np.int64)
        )
        ended = table.end_ns[rows]
        ends.append(matching.clock.to_common(rank, ended) if rank in position else ended)
        begins = np.array([program.start_ns], dtype=np.int64)
        offsets.append(int(matching.clock.to_common(rank, begins)[0]) if rank in position else int(begins[0]))
        base += program.events
    whole: dict[str, Any] = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
    matched = whole["op"] >= 0
    whole["op"][matched] = np.unique(whole["op"][matched], return_inverse=True)[1]
    collectives = CollectiveParts(
        **whole,
        kinds=tuple(kinds),
        group_sizes=tuple(one.size for one in matching.groups),
        links=tuple(run.curves),
        staged=matching.staged,
    )
    collectives = replace(collectives, splits=tuple(split_transfers(collectives, one) for one in Scenario))
    first = min(offsets, default=0)
    starts = np.array(offsets, dtype=np.int64) - first if matching.clock.aligned else np.zeros(len(offsets))
    spare_cores = run.job.spare_cores([one.rank for one in digests])
    joined = gathering.joined(collectives, starts.astype(np.int64), spare_cores)
    if not matching.staged or not matching.clock.aligned:
        return joined
    return _answered(joined, np.concatenate(peers), np.concatenate(ends))


def program_of(digest: RankDigest, step: int) -> RankProgram:
    """The program of a rank's step, which it has."""
    return next(one for one in digest.programs if one.step == step).decoded()


def _moved(length_ns: Int64Array, shortest_ns: Int64Array, *, is_cpu: bool) -> Int64Array:
    """How long each part moves data, in nanoseconds: since the last start, or as long as the shortest part.

    Where clocks differ, lengths do not: who came last was there for the transfer only. Threads of gloo that
    share cores end when they get one: their times do differ.
    """
    doubtful = np.abs(length_ns - shortest_ns) > np.maximum(SLACK_NS, SLACK_SHARE * shortest_ns)
    return np.where(doubtful & (not is_cpu), shortest_ns, np.maximum(length_ns, 0))


WAITED = 1.5
"""A receive that takes so many times what the shortest send or receive of its size takes has waited."""


def _answered(program: RunProgram, peer: Int64Array, end_ns: Int64Array) -> RunProgram:
    """Return the program in which ranks that were not captured answer no sooner than they did.

    ``peer`` is the other rank of each part that is a send or receive, ``NONE`` of others, and a number of its
    own for each rank whose trace does not name it; ``end_ns`` is when each ended, on one clock. What came
    from such a rank, and was waited for, comes as long after the last message that was sent to it before, if
    need be in the step before: with that one earlier it may be, too.
    """
    layout, joins = program.layout, program.layout.joins
    lone = np.flatnonzero(~joins.complete & (peer != NONE))
    names = np.array(joins.kinds)[joins.kind[lone]]
    shortest: dict[int, int] = {}
    for size, length in zip(joins.nbytes[lone].tolist(), joins.transfer_ns[lone].tolist(), strict=True):
        shortest[size] = min(shortest.get(size, length), length)
    least = np.array([shortest[size] for size in joins.nbytes[lone].tolist()])
    received = (names != "send") & (joins.transfer_ns[lone] > WAITED * least)
    ties: list[tuple[int, int, int, bool]] = []
    for one in distinct(peer[lone[received]]).tolist():
        sent = lone[(names != "recv") & (peer[lone] == one)]
        sent = sent[np.argsort(end_ns[sent], kind="stable")]
        for part in lone[received & (peer[lone] == one)].tolist() if sent.size else ():
            event = int(joins.event[part])
            place = int(np.searchsorted(end_ns[sent], end_ns[part])) - 1
            lag = int(end_ns[part] - joins.transfer_ns[part] - end_ns[sent[place]])
            if place < 0:
                lag += layout.notes[int(layout.rank_of_event(event))].step_ns
            ties.append((int(joins.event[sent[place]]), event, lag - int(layout.delay[event]), place < 0))
    if not ties:
        return program
    source, target, lags, back = zip(*ties, strict=True)
    more: dict[str, npt.NDArray[Any]] = {
        "cause_kind": np.full(len(ties), Cause.ANSWER, dtype=np.uint8),
        "cause_from": np.array(source, dtype=np.int32),
        "cause_to": np.array(target, dtype=np.int32),
        "cause_lag": np.array(lags, dtype=np.int64),
        "cause_back": np.array(back),
    }
    columns = {name: np.concatenate((getattr(layout, name), one)) for name, one in more.items()}
    active = np.concatenate((program.active, np.ones(len(ties), dtype=bool)))
    return program.edited(layout=replace(layout, **columns), active=active)
