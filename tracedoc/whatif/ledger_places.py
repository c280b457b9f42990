"""Where in the step a cause is, and on which ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracedoc.play.path_walk import PARTS
from tracedoc.play.run_program import RunProgram
from tracedoc.step.program import Call
from tracedoc.whatif.removal import Removal

MOST_SHARE = 0.5
"""A place that is named has this share of what a cause takes, and a rank of what the worst one has."""


def ranks_of(program: RunProgram, removals: Sequence[Removal]) -> tuple[int, ...]:
    """The ranks from which a cause takes most."""
    layout = program.layout
    taken = np.zeros(len(layout.ranks))
    of_event = layout.event_rank
    of_point = layout.rank_of_point(np.arange(layout.points))
    for one in removals:
        for column, ranks in (
            (one.dur, of_event),
            (one.lag, of_point),
            (one.own, of_point),
            (one.ready, of_point),
        ):
            if column is not None:
                taken += np.bincount(ranks, weights=np.maximum(column, 0), minlength=taken.size)
    worst = float(taken.max(initial=0.0))
    return tuple(
        rank for rank, ns in zip(layout.ranks, taken.tolist(), strict=True) if ns >= MOST_SHARE * worst > 0
    )


def place_of(program: RunProgram, removals: Sequence[Removal]) -> str:
    """Where a cause takes most of its time: in one stretch of the host, else in a part of the step; or ""."""
    layout, of_part = program.layout, program.layout.joins.event
    of_event, of_point = layout.event_rank, layout.rank_of_point(np.arange(layout.points))
    taken = np.zeros(len(layout.ranks) * len(PARTS))
    at, longest = 0, 0
    for one in removals:
        columns = [(one.dur, of_event, layout.event_part)]
        columns += [(one.transfer, of_event[of_part], layout.event_part[of_part])]
        columns += [(column, of_point, layout.part) for column in (one.lag, one.own)]
        for column, ranks, parts in columns:
            if column is not None:
                of_rank = ranks.astype(np.int64) * len(PARTS) + parts
                taken += np.bincount(of_rank, weights=np.maximum(column, 0), minlength=taken.size)
        if one.lag is not None and one.lag.max(initial=0) > longest:
            at, longest = int(one.lag.argmax()), int(one.lag.max())
    by_rank = taken.reshape(-1, len(PARTS))
    if longest >= MOST_SHARE * by_rank[of_point[at]].sum() > 0:
        return _stretch(program, at)
    of_parts = by_rank.sum(axis=0)
    return PARTS[int(of_parts.argmax())] if of_parts.max() >= MOST_SHARE * of_parts.sum() > 0 else ""


def _stretch(program: RunProgram, at: int) -> str:
    """Where the host is before a point, and what it does there if a range says so."""
    layout = program.layout
    rank = int(layout.rank_of_point(np.array([at]))[0])
    base, note = int(layout.point_base[rank]), layout.notes[rank]
    part = PARTS[int(layout.part[at])]
    first = at == base or layout.part[at - 1] != layout.part[at] or layout.kind[at - 1] == Call.RANGE
    part = f"before {part}" if part and first else part
    label = dict(zip(note.label_at.tolist(), note.labels, strict=True)).get(at - base, "")
    return f"{part}: {label}" if part and label else part or label
