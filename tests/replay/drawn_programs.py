"""Random programs of runs: calls that block, streams, causes within and across steps, joined collectives."""

from __future__ import annotations

import numpy as np

from tracedoc.replay.rank.program import NONE, Call, Cause, Group, RankProgram
from tracedoc.replay.run_program import Joins, RunProgram, join_programs

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
    return _join(rng, programs)


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
    ready = np.full(points, NONE, dtype=np.int64)
    if blocks.any() and rng.random() < 0.5:
        ready[rng.choice(np.flatnonzero(blocks))] = int(rng.integers(0, 5000))
    row = np.full(events, NONE, dtype=np.int32)
    row[number[comm]] = np.arange(comm.size)
    linked = rng.random(events) < 0.9
    rejoin_from = np.array([i for i, _ in rejoins], dtype=np.int32)
    rejoin_to = np.array([j for _, j in rejoins], dtype=np.int32)
    return RankProgram(
        step=0, step_ns=1, span_ns=1, start_ns=0, periodic=periodic, is_cpu=False, framed=framed,
        kind=np.full(points, Call.LAUNCH, dtype=np.uint8),
        part=np.zeros(points, dtype=np.uint8),
        lag=rng.integers(0, FULL, points),
        after_return=after_return,
        blocks=blocks,
        own=np.where(blocks, rng.integers(0, FULL, points), 0),
        ready_lag=ready,
        rejoin_from=rejoin_from,
        rejoin_to=rejoin_to,
        rejoin_lag=rng.integers(0, FULL, rejoin_from.size),
        point=np.where(linked, launch, NONE)[place].astype(np.int32),
        launch_lag=rng.integers(0, FULL, events),
        gap=rng.integers(-5, 10, events),
        dur=rng.integers(10, 3 * FULL, events),
        delay=np.zeros(events, dtype=np.int64),
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


def _join(rng: np.random.Generator, programs: list[RankProgram]) -> RunProgram:
    """Join the collectives of all ranks, the n-th with the n-th, so that nothing waits in a circle."""
    event, op, transfer = [], [], []
    base, common = 0, min(int((one.row >= 0).sum()) for one in programs)
    for one in programs:
        mine = np.flatnonzero(one.row >= 0)
        joined = (one.row[mine] < common) & (len(programs) > 1)
        event.append(mine + base)
        op.append(np.where(joined, one.row[mine], NONE))
        transfer.append(np.where(joined, rng.integers(10, FULL, mine.size), one.dur[mine]))
        base += one.events
    size = sum(one.size for one in event)
    joins = Joins(
        event=np.concatenate(event).astype(np.intp),
        op=np.concatenate(op).astype(np.int64),
        transfer_ns=np.concatenate(transfer).astype(np.int64),
        nbytes=np.full(size, 1 << 20, dtype=np.int64),
        kind=np.zeros(size, dtype=np.int32),
        group=np.zeros(size, dtype=np.int32),
        gradients=np.zeros(size, dtype=bool),
        complete=np.ones(size, dtype=bool),
        kinds=("all_reduce",),
        group_sizes=(len(programs),),
    )
    offsets = rng.integers(0, 100, len(programs)).astype(np.int64)
    return join_programs(range(len(programs)), programs, joins, offsets)
