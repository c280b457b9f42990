"""Lay one step of all ranks on one clock, as reports draw it."""

from __future__ import annotations

import numpy as np

from tracedoc.digest.codec import decode
from tracedoc.digest.drawn import thinned
from tracedoc.digest.rank_digest import LANE_RANKS, RankDigest, StepDigest
from tracedoc.picture import Picture, PictureRow
from tracedoc.ranks.exposure import split_exposed
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array, Spans

MOST_INTERVALS = 24_000
"""Intervals of a picture; with more ranks, each is drawn less finely."""

KINDS = 8
"""About so many kinds of intervals a rank has."""

FAR_APART = 2.0
"""Ranks that begin a step further apart than so many steps have clocks that cannot be compared."""


def step_picture(run: RunView) -> Picture | None:
    """Return the analysed step as all ranks spent it, on the common clock; ``None`` without one."""
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
    gap = max(1, longest * len(found) * KINDS // MOST_INTERVALS)
    rows = []
    for digest, step in found:
        at = zero if aligned else _common(run, digest.rank, step.start_ns)
        rows.append(_row(run, digest, step, at, gap))
    return Picture(
        step=judged.index,
        span_ms=max(row.end_ms for row in rows),
        aligned=aligned,
        rows=tuple(rows),
        left_out=len(run.digests) - len(rows),
    )


def _same_step(digest: RankDigest, judged: StepDigest) -> StepDigest | None:
    return next((step for step in digest.steps if step.index == judged.index), None)


def _common(run: RunView, rank: int, instant_ns: int) -> int:
    return int(run.matching.clock.to_common(rank, np.array([instant_ns]))[0])


def _row(run: RunView, digest: RankDigest, step: StepDigest, zero_ns: int, gap_ns: int) -> PictureRow:
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
    most = max(1, MOST_INTERVALS // (KINDS * min(LANE_RANKS, len(run.digests))))

    def in_ms(times: Int64Array) -> list[float]:
        common = run.matching.clock.to_common(digest.rank, times) - zero_ns
        return [round(ms, 4) for ms in (common / 1e6).tolist()]

    drawn = {name: thinned(spans, gap_ns, most) for name, spans in sets.items()}
    window = in_ms(np.array([start, end]))
    return PictureRow(
        rank=digest.rank,
        start_ms=window[0],
        end_ms=window[1],
        spans_ms={
            name: tuple(zip(in_ms(spans.starts), in_ms(spans.ends), strict=True))
            for name, spans in drawn.items()
            if len(spans)
        },
    )
