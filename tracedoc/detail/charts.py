"""What the charts of a diagnosis show: waits, transfers, sharded units, memory, and one step of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tracedoc.ranks.bandwidth import SizeCurve, transfers
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.waiting import Lateness, split_exposed
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.codec import decode
from tracedoc.step.drawn import MAX_DRAWN, RESOLUTION, NamedStretches, thinned
from tracedoc.step.rank_digest import LANE_RANKS, RankDigest, StepDigest
from tracedoc.tables import (
    ExpectedCurve,
    MemoryCurve,
    Picture,
    PictureRow,
    TransferRow,
    TransferSpeeds,
    UnitCall,
    UnitTimeline,
    Waits,
)
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.shards.shard_units import NO_TIME, PHASES, ShardCalls
from tracedoc.timeline.shards.times import CallTimes
from tracedoc.trace.distinct import median
from tracedoc.units import format_bytes

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
                gbps=float(median(gbps)),
                high_gbps=float(gbps.max()),
                expected_gbps=float(median(known)) if known.size else None,
            )
        )
    largest = sorted(rows, key=lambda row: -row.calls * row.nbytes)[:LISTED_ROWS]
    shown = set(group.tolist())
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


MOST_INTERVALS = 10_000
"""Intervals of a picture; gaps are closed until it has no more."""

COARSEST = 32
"""No gap is closed that is longer than the step divided by this; then it has some more intervals."""

FAR_APART = 2.0
"""Ranks that begin a step further apart than so many steps have clocks that cannot be compared."""


def step_picture(run: RunView) -> Picture | None:
    """The analysed step as all ranks spent it, on the common clock; ``None`` without one."""
    representative = run.representative_digest
    judged = representative.judged_step if representative is not None else None
    if judged is None:
        return None
    found = [
        (digest, step)
        for digest in run.digests[:LANE_RANKS]
        if digest.drawn and (step := _same_step(digest, judged)) is not None
    ]
    if not found:
        return None
    clock = run.matching.clock
    begins = np.array([_common(run, digest.rank, step.start_ns) for digest, step in found])
    longest = max(step.end_ns - step.start_ns for _, step in found)
    aligned = clock.aligned and int(begins.max() - begins.min()) <= FAR_APART * longest
    zero = int(begins.min())
    drawn, gap_ns = _thinned([_sets(run, digest, step) for digest, step in found], longest)
    rows = []
    names: dict[str, int] = {}
    for (digest, step), sets in zip(found, drawn, strict=True):
        at = zero if aligned else _common(run, digest.rank, step.start_ns)
        rows.append(_row(run, digest, step, at, sets, names))
    return Picture(
        step=judged.index,
        span_ms=max(row.end_ms for row in rows),
        aligned=aligned,
        rows=tuple(rows),
        left_out=len(run.digests) - len(rows),
        closed_ms=gap_ns / 1e6,
        names=tuple(names),
    )


def _thinned(ranks: Sequence[Mapping[str, Spans]], longest_ns: int) -> tuple[list[dict[str, Spans]], int]:
    """The sets of all ranks with short gaps closed, and the longest of these gaps, in ns."""
    gap = max(1, longest_ns // RESOLUTION)
    while True:
        drawn = [{name: thinned(spans, gap, MAX_DRAWN) for name, spans in sets.items()} for sets in ranks]
        total = sum(len(spans) for sets in drawn for spans in sets.values())
        if total <= MOST_INTERVALS or 2 * gap > longest_ns // COARSEST:
            return drawn, gap
        gap *= 2


def _same_step(digest: RankDigest, judged: StepDigest) -> StepDigest | None:
    return next((step for step in digest.steps if step.index == judged.index), None)


def _common(run: RunView, rank: int, instant_ns: int) -> int:
    return int(run.matching.clock.to_common(rank, np.array([instant_ns]))[0])


def _sets(run: RunView, digest: RankDigest, step: StepDigest) -> dict[str, Spans]:
    """A rank's sets of time in a step; copies only where nothing else is drawn."""
    start, end = step.start_ns, step.end_ns
    sets = {name: decode(data, Spans).clip(start, end) for name, data in digest.drawn.items()}
    exposed = digest.exposed_comm.clip(start, end)
    split = split_exposed(exposed, digest.collectives, run.arrivals[digest.rank])
    sets |= {
        "transfer": split.transfer,
        "wait": split.wait,
        "pipeline": split.pipeline_wait,
        "unsplit": split.unsplit,
    }
    beside = exposed
    for name, spans in sets.items():
        if name in ("forward", "recompute", "backward", "optimizer", "compute"):
            beside = beside | spans
    if "copy" in sets:
        sets["copy"] = sets["copy"] - beside
    return sets


NAMED_COLLECTIVES = 40
"""Collectives of a rank's step that have a name in the picture, the longest ones."""


def _named(digest: RankDigest, step: StepDigest) -> Iterator[tuple[int, int, str]]:
    """Yield the beginning, end and name of the longest kernels, gaps and collectives of a rank's step."""
    if digest.named:
        found = decode(digest.named, NamedStretches)
        inside = (found.start_ns >= step.start_ns) & (found.start_ns < step.end_ns)
        for row in np.flatnonzero(inside).tolist():
            yield int(found.start_ns[row]), int(found.end_ns[row]), found.names[int(found.name[row])]
    table = digest.collectives
    mine = np.flatnonzero((table.end_ns > step.start_ns) & (table.start_ns < step.end_ns))
    longest = mine[np.argsort(table.start_ns[mine] - table.end_ns[mine], kind="stable")[:NAMED_COLLECTIVES]]
    for row in np.sort(longest).tolist():
        kind, nbytes = table.kinds[int(table.kind[row])], int(table.nbytes[row])
        size = f" of {format_bytes(nbytes)}" if nbytes != NONE else ""
        ranks = kind.group_size or len(kind.group)
        group = f", {ranks} ranks" if ranks else ""
        yield int(table.start_ns[row]), int(table.end_ns[row]), f"{kind.op.replace('_', '-')}{size}{group}"


def _row(
    run: RunView,
    digest: RankDigest,
    step: StepDigest,
    zero_ns: int,
    sets: Mapping[str, Spans],
    names: dict[str, int],
) -> PictureRow:
    def in_ms(times: Int64Array) -> list[float]:
        common = run.matching.clock.to_common(digest.rank, times) - zero_ns
        return [round(ms, 4) for ms in (common / 1e6).tolist()]

    window = in_ms(np.array([step.start_ns, step.end_ns]))
    named = list(_named(digest, step))
    starts, ends = (np.array([one[place] for one in named], dtype=np.int64) for place in (0, 1))
    numbers = [names.setdefault(name, len(names)) for _, _, name in named]
    return PictureRow(
        rank=digest.rank,
        start_ms=window[0],
        end_ms=window[1],
        spans_ms={
            name: tuple(zip(in_ms(spans.starts), in_ms(spans.ends), strict=True))
            for name, spans in sets.items()
            if len(spans)
        },
        named=tuple(zip(in_ms(starts), in_ms(ends), numbers, strict=True)),
    )
