"""What the charts of a diagnosis show: who waits for whom, transfers, calls of sharded units, and memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracedoc.charts import (
    ExpectedCurve,
    MemoryCurve,
    TransferRow,
    TransferSpeeds,
    UnitCall,
    UnitTimeline,
    Waits,
)
from tracedoc.ranks.bandwidth import SizeCurve, transfers
from tracedoc.ranks.blame import Lateness
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array
from tracedoc.step.rank_digest import StepDigest
from tracedoc.timeline.shards.shard_units import NO_TIME, PHASES, ShardCalls
from tracedoc.timeline.shards.times import CallTimes

MOST_RANKS = 64
"""Ranks listed: those that are waited for longest, then those with the lowest numbers."""

LISTED_STEPS = 24
"""Steps listed, the first ones that were captured whole."""


def wait_table(run: RunView) -> Waits | None:
    """The exposed waiting of ranks in steps; ``None`` where no rank is known to wait.

    Of steps that were not captured whole only those are listed that are analysed.
    """
    listed = sorted(
        {step.index for digest in run.digests for step in digest.complete_steps}
        or {step.index for _, step in run.judged()}
    )
    steps = listed[:LISTED_STEPS]
    caused = _caused_ns(run)
    chosen = sorted(range(len(run.digests)), key=lambda place: (-int(caused[place].sum()), place))
    places = sorted(chosen[:MOST_RANKS])
    column = {step: number for number, step in enumerate(steps)}
    wait: list[tuple[float | None, ...]] = []
    waited_for: list[tuple[int | None, ...]] = []
    for place in places:
        rank = run.digests[place].rank
        times = tuple(_wait_ms(run, rank, step) for step in steps)
        culprits = _culprits(run, place, column)
        wait.append(times)
        waited_for.append(tuple(culprit if ms else None for ms, culprit in zip(times, culprits, strict=True)))
    if not any(ms for row in wait for ms in row):
        return None
    return Waits(
        ranks=tuple(run.digests[place].rank for place in places),
        steps=tuple(steps),
        wait_ms=tuple(wait),
        waited_for=tuple(waited_for),
        left_out_ranks=len(run.digests) - len(places),
        left_out_steps=len(listed) - len(steps),
    )


def _wait_ms(run: RunView, rank: int, step: int) -> float | None:
    split = run.splits.get((rank, step))
    if split is None:
        return None
    waits = split.wait_ns + split.pipeline_wait_ns
    return None if not waits and split.unsplit_ns else round(waits / 1e6, 4)


def _caused_ns(run: RunView) -> Int64Array:
    """The exposed waiting that each rank caused in the others, in the order of the digests."""
    found = np.zeros(len(run.digests), dtype=np.int64)
    by_rank = dict(zip(run.matching.ranks, run.blame.exposed_cost_ns().tolist(), strict=True))
    for place, digest in enumerate(run.digests):
        found[place] = by_rank.get(digest.rank, 0)
    return found


def _culprits(run: RunView, place: int, column: dict[int, int]) -> list[int | None]:
    """The rank at the end of most of one rank's waiting, for each listed step."""
    matching, blame = run.matching, run.blame
    rank = run.digests[place].rank
    if rank not in matching.ranks or not column:
        return [None] * len(column)
    position = matching.ranks.index(rank)
    mine = np.flatnonzero(matching.part_rank == position)
    operation = matching.operation[mine]
    waits = blame.exposed_wait_ns[mine]
    blamed = (blame.root[operation] != position) & (blame.lateness[operation] != Lateness.NONE) & (waits > 0)
    columns = np.array([column.get(step, -1) for step in matching.step[operation].tolist()], dtype=np.intp)
    blamed &= columns >= 0
    total = np.zeros((len(column), len(matching.ranks)), dtype=np.int64)
    np.add.at(total, (columns[blamed], blame.root[operation[blamed]]), waits[blamed])
    longest = total.argmax(axis=1)
    return [matching.ranks[at] if total[row, at] > 0 else None for row, at in enumerate(longest.tolist())]


LISTED_ROWS = 160
"""Rows listed, those that move most bytes."""

MOST_CURVES = 4


def transfer_table(run: RunView) -> TransferSpeeds | None:
    """The known transfers by operation, group size and message size; ``None`` without any."""
    found = transfers(run.matching, run.curves)
    if not found.operation.size:
        return None
    matching = run.matching
    sizes = np.array([group.size for group in matching.groups], dtype=np.int64)
    group = matching.group[found.operation]
    keys = np.stack([matching.op[found.operation], sizes[group], found.nbytes], axis=1)
    kinds, inverse = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    pieces = np.split(order, np.cumsum(np.bincount(inverse.ravel()))[:-1])
    rows = []
    for (op, ranks, nbytes), piece in zip(kinds.tolist(), pieces, strict=True):
        gbps, expected = found.gbps[piece], found.expected_gbps[piece]
        known = expected[~np.isnan(expected)]
        rows.append(
            TransferRow(
                op=matching.ops[op],
                ranks=ranks,
                nbytes=nbytes,
                calls=int(piece.size),
                low_gbps=float(gbps.min()),
                gbps=float(np.median(gbps)),
                high_gbps=float(gbps.max()),
                expected_gbps=float(np.median(known)) if known.size else None,
            )
        )
    largest = sorted(rows, key=lambda row: -row.calls * row.nbytes)[:LISTED_ROWS]
    shown = {int(number) for number in np.unique(group)}
    curves = {
        (matching.groups[number].size, curve.peak_gbps): _sampled(matching.groups[number].size, curve)
        for number, curve in enumerate(run.curves)
        if number in shown and curve is not None and curve.peak_gbps is not None
    }
    return TransferSpeeds(
        rows=tuple(sorted(largest, key=lambda row: (row.op, row.ranks, row.nbytes))),
        curves=tuple(curves.values())[:MOST_CURVES],
        left_out=len(rows) - len(largest),
    )


def _sampled(ranks: int, curve: SizeCurve) -> ExpectedCurve:
    assert curve.peak_gbps is not None
    return ExpectedCurve(ranks, curve.peak_gbps, max(curve.table_half_bytes, curve.half_bytes))


MOST_CALLS = 300
"""Calls listed, those that take longest with their stall."""


def unit_timeline(run: RunView) -> UnitTimeline | None:
    """The gathers and reductions of the analysed step of the rank that stands for the run.

    ``None`` where it has no sharded units, or none of their calls fits a unit.
    """
    digest = run.representative_digest
    step = digest.judged_step if digest is not None else None
    if digest is None or step is None or digest.units is None:
        return None
    table, names = digest.units, digest.units.units.names
    calls = [
        *_calls("gather", table.units.gathers, table.gather_times, names, step),
        *_calls("reduction", table.units.reductions, table.reduction_times, names, step),
    ]
    if not calls:
        return None
    longest = sorted(
        calls, key=lambda call: -(call.end_ms - min(call.start_ms, call.stall_start_ms or call.start_ms))
    )
    kept = sorted(longest[:MOST_CALLS], key=lambda call: call.start_ms)
    return UnitTimeline(
        rank=digest.rank,
        step=step.index,
        span_ms=(step.end_ns - step.start_ns) / 1e6,
        calls=tuple(kept),
        left_out=len(calls) - len(kept),
    )


def _calls(
    kind: str, calls: ShardCalls, times: CallTimes | None, names: tuple[str, ...], step: StepDigest
) -> Iterator[UnitCall]:
    """Yield the calls that run within the step; a prefetch may have been launched in the one before."""
    inside = np.flatnonzero(
        (calls.end_ns > step.start_ns) & (calls.start_ns < step.end_ns) & (calls.unit >= 0)
    )

    def since(instant_ns: int) -> float:
        return round((instant_ns - step.start_ns) / 1e6, 4)

    for place in inside.tolist():
        stall: tuple[float | None, float | None] = (None, None)
        if times is not None and times.stall_ns[place] not in (0, NO_TIME):
            stall = since(int(times.stall_start_ns[place])), since(int(times.stall_end_ns[place]))
        yield UnitCall(
            names[calls.unit[place]],
            kind,
            PHASES[calls.phase[place]],
            since(max(int(calls.start_ns[place]), step.start_ns)),
            since(min(int(calls.end_ns[place]), step.end_ns)),
            *stall,
        )


def memory_curve(run: RunView) -> MemoryCurve | None:
    """The memory of the rank that holds most of it at once; ``None`` where no rank recorded it."""
    found = [(digest, digest.memory) for digest in run.digests if digest.memory is not None]
    if not found:
        return None
    digest, memory = max(found, key=lambda pair: (int(pair[1].reserved.max()), -pair[0].rank))
    return MemoryCurve(
        rank=digest.rank,
        times_ms=tuple(round(ns / 1e6, 3) for ns in (memory.at_ns - digest.start_ns).tolist()),
        allocated=tuple(memory.allocated.tolist()),
        reserved=tuple(memory.reserved.tolist()),
        device_bytes=memory.device_bytes,
    )
