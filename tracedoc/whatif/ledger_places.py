"""Where in the step a cause is, and on which ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracedoc.play.path_walk import PARTS
from tracedoc.play.run_program import RunProgram
from tracedoc.ranks.run_view import RunView
from tracedoc.topics.host.run import host_code, script_code
from tracedoc.whatif.removal import Removal

MOST_SHARE = 0.5
"""Ranks from which a cause takes less than this share of what it takes from the worst are not named."""


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


def code_of(run: RunView, cause: str) -> str:
    """The function of the script in which a cause is on the representative rank, "" where none is known."""
    digest = run.representative_digest
    if cause != "host.pause" or digest is None:
        return ""
    code = str((script_code if digest.is_cpu else host_code)(run)[str(digest.rank)])
    return "" if code == "none" else code


def place_of(program: RunProgram, removals: Sequence[Removal]) -> str:
    """The part of the step from which a cause takes most, and what the host does there if a range says so."""
    layout, joins = program.layout, program.layout.joins
    taken = np.zeros(len(PARTS))
    label, longest = "", 0.0
    for one in removals:
        columns = [(one.dur, layout.event_part), (one.transfer, layout.event_part[joins.event])]
        columns += [(column, layout.part) for column in (one.lag, one.own)]
        for column, parts in columns:
            if column is not None:
                taken += np.bincount(parts, weights=np.maximum(column, 0), minlength=taken.size)[: taken.size]
        if one.lag is not None:
            found, ns = _label(program, one.lag)
            label, longest = (found, ns) if ns > longest else (label, longest)
    part = PARTS[int(taken.argmax())] if taken.any() else ""
    return f"{part}: {label}" if part and label else part or label


def _label(program: RunProgram, lag: np.ndarray) -> tuple[str, float]:
    """What the host does in the longest of some times that is named, and how long that is."""
    best, found = 0.0, ""
    for base, note in zip(program.layout.point_base.tolist(), program.layout.notes, strict=False):
        for at, label in zip(note.label_at.tolist(), note.labels, strict=True):
            if lag[base + at] > best:
                best, found = float(lag[base + at]), label
    return found, best
