"""Lay out who waits for whom as a table of ranks and steps, darker for longer waits."""

from __future__ import annotations

import msgspec

from tracedoc.tables import Waits
from tracedoc.units import format_ms, three_digits

WORDED_STEPS = 8
"""With more steps than this, cells are too narrow for numbers; those who do not see them still get words."""


class HeatCell(msgspec.Struct, frozen=True):
    """One rank in one step: what is shown, the whole sentence, and the wait in percent of the longest one."""

    number: str
    waits_for: str
    text: str
    level: int


class HeatRow(msgspec.Struct, frozen=True):
    """One rank; ``waited_for_by`` is how many ranks mostly wait for it in one of the steps."""

    rank: int
    cells: tuple[HeatCell, ...]
    waited_for_by: int


class HeatMap(msgspec.Struct, frozen=True):
    """The whole table. ``worded``: the numbers are shown in the cells. ``note`` says what is left out."""

    steps: tuple[int, ...]
    rows: tuple[HeatRow, ...]
    worded: bool
    unit: str
    note: str


def heat_map(waits: Waits | None) -> HeatMap | None:
    """Return the table; ``None`` where no waiting is known, or where its parts do not fit together."""
    if waits is None or not waits.ranks or not waits.steps:
        return None
    known = [ms for row in waits.wait_ms for ms in row if ms is not None]
    longest = max(known, default=0.0)
    if not 0 < longest < 1e12 or min(known) < 0:
        return None
    in_seconds = longest >= 999.5
    waiting: dict[int, set[int]] = {}
    for rank, culprits in zip(waits.ranks, waits.waited_for, strict=False):
        for culprit in culprits:
            if culprit is not None:
                waiting.setdefault(culprit, set()).add(rank)
    rows = tuple(
        HeatRow(
            rank,
            tuple(
                _cell(rank, step, ms, culprit, longest, in_seconds)
                for step, ms, culprit in zip(waits.steps, times, culprits, strict=False)
            ),
            len(waiting.get(rank, ())),
        )
        for rank, times, culprits in zip(waits.ranks, waits.wait_ms, waits.waited_for, strict=False)
    )
    left_out = [
        f"{count} more {noun} not shown"
        for count, noun in ((waits.left_out_ranks, "ranks are"), (waits.left_out_steps, "steps are"))
        if count
    ]
    return HeatMap(
        waits.steps, rows, len(waits.steps) <= WORDED_STEPS, "seconds" if in_seconds else "milliseconds",
        "; ".join(left_out),
    )  # fmt: skip


def waits_mostly_for(waits: Waits | None, step: int, *, least_ms: float) -> dict[int, int]:
    """Return for each rank that waits ``least_ms`` or more in a step the one that it mostly waits for."""
    if waits is None or step not in waits.steps:
        return {}
    column = waits.steps.index(step)
    found = {}
    for rank, times, culprits in zip(waits.ranks, waits.wait_ms, waits.waited_for, strict=False):
        ms, culprit = (cells[column] if column < len(cells) else None for cells in (times, culprits))
        if culprit is not None and ms is not None and ms >= least_ms:
            found[rank] = int(culprit)
    return found


def _cell(
    rank: int, step: int, ms: float | None, culprit: int | None, longest: float, in_seconds: bool
) -> HeatCell:
    if ms is None:
        return HeatCell("", "", f"rank {rank}, step {step}: not known", 0)
    whom = "" if culprit is None else f", mostly for rank {culprit}"
    number = three_digits(ms / 1000 if in_seconds else ms) if ms else "0"
    return HeatCell(
        number,
        "" if culprit is None else f"r{culprit}",
        f"rank {rank}, step {step}: waits {format_ms(ms)}{whom}",
        round(100 * ms / longest),
    )
