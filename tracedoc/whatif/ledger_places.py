"""Where in the step a cause is, and on which ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracedoc.play.path_walk import PARTS
from tracedoc.play.run_program import RunProgram
from tracedoc.whatif.removal import OverSteps, Removal

MOST_SHARE = 0.5
"""Ranks from which a cause takes less than this share of what it takes from the worst are not named."""


def ranks_of(programs: Sequence[RunProgram], removals: Sequence[OverSteps]) -> tuple[int, ...]:
    """The ranks from which a cause takes most, of the programs of all played steps."""
    ranks = programs[0].layout.ranks
    taken = np.zeros(len(ranks))
    for program, one in _each(programs, removals):
        layout = program.layout
        of_point = layout.rank_of_point(np.arange(layout.points))
        columns = [(one.dur, layout.event_rank)]
        columns += [(column, of_point) for column in (one.lag, one.own, one.ready)]
        for column, rank in columns:
            if column is not None:
                taken += np.bincount(rank, weights=np.maximum(column, 0), minlength=taken.size)
    worst = float(taken.max(initial=0.0))
    return tuple(rank for rank, ns in zip(ranks, taken.tolist(), strict=True) if ns >= MOST_SHARE * worst > 0)


def place_of(programs: Sequence[RunProgram], removals: Sequence[OverSteps]) -> str:
    """The part of the step from which a cause takes most, and what the host does there if a range says so."""
    taken = np.zeros(len(PARTS))
    label, longest = "", 0.0
    for program, one in _each(programs, removals):
        layout, joins = program.layout, program.layout.joins
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


def _each(
    programs: Sequence[RunProgram], removals: Sequence[OverSteps]
) -> Iterator[tuple[RunProgram, Removal]]:
    """Each program with each thing that goes from it."""
    for over in removals:
        for program, one in zip(programs, over.steps, strict=True):
            if one is not None:
                yield program, one


def _label(program: RunProgram, lag: np.ndarray) -> tuple[str, float]:
    """What the host does in the longest of some times that is named, and how long that is."""
    best, found = 0.0, ""
    for base, note in zip(program.layout.point_base.tolist(), program.layout.notes, strict=False):
        for at, label in zip(note.label_at.tolist(), note.labels, strict=True):
            if lag[base + at] > best:
                best, found = float(lag[base + at]), label
    return found, best
