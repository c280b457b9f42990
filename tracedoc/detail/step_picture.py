"""Lay one step of all ranks on one clock, as reports draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tracedoc.charts import Picture, PictureRow
from tracedoc.ranks.exposure import split_exposed
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.codec import decode
from tracedoc.step.drawn import MAX_DRAWN, RESOLUTION, thinned
from tracedoc.step.rank_digest import LANE_RANKS, RankDigest, StepDigest

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
    for (digest, step), sets in zip(found, drawn, strict=True):
        at = zero if aligned else _common(run, digest.rank, step.start_ns)
        rows.append(_row(run, digest, step, at, sets))
    return Picture(
        step=judged.index,
        span_ms=max(row.end_ms for row in rows),
        aligned=aligned,
        rows=tuple(rows),
        left_out=len(run.digests) - len(rows),
        closed_ms=gap_ns / 1e6,
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


def _row(
    run: RunView, digest: RankDigest, step: StepDigest, zero_ns: int, sets: Mapping[str, Spans]
) -> PictureRow:
    def in_ms(times: Int64Array) -> list[float]:
        common = run.matching.clock.to_common(digest.rank, times) - zero_ns
        return [round(ms, 4) for ms in (common / 1e6).tolist()]

    window = in_ms(np.array([step.start_ns, step.end_ns]))
    return PictureRow(
        rank=digest.rank,
        start_ms=window[0],
        end_ms=window[1],
        spans_ms={
            name: tuple(zip(in_ms(spans.starts), in_ms(spans.ends), strict=True))
            for name, spans in sets.items()
            if len(spans)
        },
    )
