"""Random programs of runs: calls that block, streams, causes within and across steps, joined collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from tracedoc.play.run_program import CollectiveParts, Gathering, RunProgram
from tracedoc.step.program import TO_HOST, Call, Cause, Group, RankProgram
from tracedoc.timeline.collective_table import NONE

FULL = 60


def draw_run(seed: int) -> RunProgram:
    """Return a run of one to three ranks; one seed in five is played once instead of again and again.

    Of those, every second one is a lone step, as long as the host's range.
    """
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 4))
    periodic = seed % 5 != 4
    collectives = int(rng.integers(0, 6))
    framed = seed % 10 == 9
    programs = [_draw_rank(rng, collectives, periodic=periodic, framed=framed) for _ in range(ranks)]
    return join_ranks([with_transfers(rng, one) for one in programs])


class Drawn(NamedTuple):
    """The program of one rank, the transfers of its collectives, and when it begins."""

    program: RankProgram
    transfer_ns: np.ndarray
    offset_ns: int


def draw_ranks(seed: int) -> list[Drawn]:
    """Return the ranks of a run that is played again and again, before they are joined."""
    rng = np.random.default_rng(seed)
    collectives = int(rng.integers(1, 6))
    ranks = int(rng.integers(2, 4))
    programs = [_draw_rank(rng, collectives, periodic=True, framed=False) for _ in range(ranks)]
    return [with_transfers(rng, one) for one in programs]


def with_transfers(rng: np.random.Generator, program: RankProgram) -> Drawn:
    """Return a program with lengths of transfers for its collectives."""
    count = int((program.row >= 0).sum())
    return Drawn(program, rng.integers(10, FULL, count), int(rng.integers(0, 100)))


def with_streams(program: RankProgram, order: np.ndarray) -> RankProgram:
    """Return the program with its streams renumbered: stream ``s`` becomes ``order[s]``."""
    stream = order[program.stream].astype(np.uint8)
    place = np.lexsort((np.arange(stream.size), stream))
    number = np.empty(stream.size, dtype=np.int32)
    number[place] = np.arange(stream.size, dtype=np.int32)
    to_host = np.isin(program.cause_kind, TO_HOST)
    columns = ("point", "launch_lag", "gap", "dur", "delay", "began", "group", "event_part", "row")
    return replace(
        program,
        stream=stream[place],
        cause_from=number[program.cause_from],
        cause_to=np.where(to_host, program.cause_to, number[np.where(to_host, 0, program.cause_to)]),
        **{name: getattr(program, name)[place] for name in columns},
    )


def _draw_rank(rng: np.random.Generator, collectives: int, *, periodic: bool, framed: bool) -> RankProgram:
    events, points = int(rng.integers(20, 60)), int(rng.integers(30, 80))
    streams = int(rng.integers(1, 4))
    # Events in order of launch; each goes to one stream, collectives in the same order on the last one.
    comm = np.sort(rng.choice(events, min(collectives, events), replace=False))
    stream = rng.integers(0, streams, events)
    stream[comm] = streams
    launch = np.sort(rng.choice(points, events, replace=events > points))
    place = rng.permutation(events) if events == 0 else np.lexsort((np.arange(events), stream))
    number = np.empty(events, dtype=np.int64)
    number[place] = np.arange(events)  # in the order of launch: where each stands by stream
    blocks = rng.random(points) < 0.15
    after_return = np.concatenate(([False], blocks[:-1] & (rng.random(points - 1) < 0.7)))
    inside = np.flatnonzero(blocks[:-1] & ~after_return[1:])
    rejoins = [(i, int(rng.integers(i + 1, points))) for i in inside.tolist() if rng.random() < 0.7]
    kinds, sources, targets, lags, back = [], [], [], [], []
    for _ in range(int(rng.integers(0, 12))):
        a, b = np.sort(rng.choice(events, 2, replace=False))
        if stream[a] != stream[b]:
            kinds.append(Cause.CROSS)
            sources.append(number[a])
            targets.append(number[b])
            lags.append(int(rng.integers(0, FULL)))
            back.append(bool(periodic and rng.random() < 0.2))
    for point in np.flatnonzero(blocks).tolist():
        launched = np.flatnonzero(launch < point)
        if launched.size and rng.random() < 0.8:
            kinds.append(Cause.SYNC)
            sources.append(number[rng.choice(launched[-5:])])
            targets.append(point)
            lags.append(int(rng.integers(0, FULL)))
            back.append(False)
    ready, kind = np.full(points, NONE, dtype=np.int64), np.full(points, Call.LAUNCH, dtype=np.uint8)
    if blocks.any() and rng.random() < 0.5:
        loads = rng.choice(np.flatnonzero(blocks), 2)
        kind[loads] = Call.INPUT
        ready[loads[0]] = int(rng.integers(0, 5000))
    row = np.full(events, NONE, dtype=np.int32)
    row[number[comm]] = np.arange(comm.size)
    linked = rng.random(events) < 0.9
    rejoin_from = np.array([i for i, _ in rejoins], dtype=np.int32)
    rejoin_to = np.array([j for _, j in rejoins], dtype=np.int32)
    return RankProgram(
        step=0, step_ns=1, span_ns=1, start_ns=0, periodic=periodic, is_cpu=False, framed=framed,
        kind=kind,
        part=np.zeros(points, dtype=np.uint8),
        lag=rng.integers(0, FULL, points),
        after_return=after_return,
        blocks=blocks,
        own=np.where(blocks, rng.integers(0, FULL, points), 0),
        ready_lag=ready,
        held=np.zeros(points, dtype=np.int64),
        rejoin_from=rejoin_from,
        rejoin_to=rejoin_to,
        rejoin_lag=rng.integers(0, FULL, rejoin_from.size),
        point=np.where(linked, launch, NONE)[place].astype(np.int32),
        launch_lag=rng.integers(0, FULL, events),
        gap=rng.integers(-5, 10, events),
        dur=rng.integers(10, 3 * FULL, events),
        delay=np.zeros(events, dtype=np.int64),
        began=np.zeros(events, dtype=np.int64),
        stream=stream[place].astype(np.uint8),
        group=np.where(row >= 0, Group.COMMUNICATION, Group.MATRIX).astype(np.uint8),
        event_part=np.zeros(events, dtype=np.uint8),
        row=row,
        cause_kind=np.array(kinds, dtype=np.uint8),
        cause_from=np.array(sources, dtype=np.int32),
        cause_to=np.array(targets, dtype=np.int32),
        cause_lag=np.array(lags, dtype=np.int64),
        cause_back=np.array(back, dtype=bool),
    )  # fmt: skip


def join_ranks(ranks: Sequence[Drawn]) -> RunProgram:
    """Join the collectives of all ranks, the n-th with the n-th, so that nothing waits in a circle."""
    event, op, transfer = [], [], []
    base, common = 0, min(one.transfer_ns.size for one in ranks)
    for program, transfers, _ in ranks:
        mine = np.flatnonzero(program.row >= 0)
        joined = (program.row[mine] < common) & (len(ranks) > 1)
        event.append(mine + base)
        op.append(np.where(joined, program.row[mine], NONE))
        transfer.append(np.where(joined, transfers[program.row[mine]], program.dur[mine]))
        base += program.events
    size = sum(one.size for one in event)
    joins = CollectiveParts(
        event=np.concatenate(event).astype(np.intp),
        op=np.concatenate(op).astype(np.int64),
        transfer_ns=np.concatenate(transfer).astype(np.int64),
        nbytes=np.full(size, 1 << 20, dtype=np.int64),
        kind=np.zeros(size, dtype=np.int32),
        group=np.zeros(size, dtype=np.int32),
        gradients=np.zeros(size, dtype=bool),
        extra=np.zeros(size, dtype=bool),
        complete=np.ones(size, dtype=bool),
        block=np.full(size, NONE, dtype=np.int32),
        kinds=("all_reduce",),
        group_sizes=(len(ranks),),
    )
    offsets = np.array([one.offset_ns for one in ranks], dtype=np.int64)
    gathering = Gathering(len(ranks))
    for rank, one in enumerate(ranks):
        gathering.add(rank, one.program)
    return gathering.joined(joins, offsets)
