"""Lay out times as bars, and who waits for whom as a table of ranks and steps, darker for longer waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tracedoc.diagnosis import BUDGET_PARTS, BudgetParts, Diagnosis, Gain, RankReport, StepBudget
from tracedoc.predicted import Predicted
from tracedoc.report.charts.over_time import TimeScale
from tracedoc.report.step_parts import Segment, segments
from tracedoc.report.words import states_of
from tracedoc.tables import Waits
from tracedoc.units import format_ms, format_percent, three_digits


class Box(msgspec.Struct, frozen=True):
    """A stretch of a bar, from ``x`` for ``width`` in thousandths of the longest one.

    ``key`` is the class of its colour.
    """

    key: str
    x: float
    width: float
    words: str = ""


class Bar(msgspec.Struct, frozen=True):
    """A bar with its label, its length in words, and its parts in words for those who do not see it."""

    label: str
    length: str
    boxes: tuple[Box, ...]
    text: str


class RangeBar(msgspec.Struct, frozen=True):
    """A time in percent of today's step: its low end, solid, and the range from there to its high end."""

    solid: float
    range: float


def bar(label: str, parts: Iterable[Segment], longest_ms: float) -> Bar:
    """Return the parts one after the other; an empty bar where ``longest_ms`` is not positive."""
    scale, boxes, x, total, words = TimeScale(longest_ms), [], 0.0, 0.0, []
    for part in parts:
        width = scale.thousandths(part.ms)
        boxes.append(Box(part.key, round(x, 1), round(width, 1)))
        x += width
        total += part.ms
        words.append(f"{part.label} {format_ms(part.ms)} ({format_percent(part.share)})")
    return Bar(label, format_ms(total), tuple(boxes), ", ".join(words))


def by_cause(parts: Sequence[Segment], budget: BudgetParts, device: str | None) -> Iterator[Segment]:
    """Yield the parts of a step, idle time by its cause: what a GPU waits for is no empty time."""
    for part in parts:
        if part.key != "idle":
            yield part
            continue
        causes = sorted(budget.idle_causes_ms.items(), key=lambda one: -one[1])
        rest = part.ms - sum(ms for _, ms in causes)
        for cause, ms in causes:
            key, words = states_of(device).get(f"idle {cause}", ("idle", cause))
            yield Segment(key, words, ms, ms / budget.step_ms)
        if rest > 1e-6 * budget.step_ms:
            yield Segment("idle", "idle", rest, rest / budget.step_ms)


def gain_bar(gain: Gain | None, step_ms: float, fix: Predicted | None = None) -> RangeBar | None:
    """What is saved of the step, by a fix that was played if there is one; ``None`` for nothing.

    A gain of the mean step is a part of that.
    """
    if fix is not None and fix.helps:
        return range_of(fix.before_ms, fix.gain_ms[0], fix.gain_ms[2])
    if gain is None or gain.high_ms <= 0 or step_ms <= 0:
        return None
    return range_of(gain.mean_step_ms or step_ms, gain.low_ms, gain.high_ms)


def range_of(step_ms: float, low_ms: float, high_ms: float) -> RangeBar:
    """From one time to another, in percent of a step."""
    low, high = (min(100.0, max(0.0, TimeScale(step_ms).percent(ms))) for ms in (low_ms, high_ms))
    return RangeBar(round(low, 2), round(max(0.0, high - low), 2))


DRAWN_STEPS = 48
"""Steps drawn for a rank; with more, the picture is hard to read."""


class RankRow(msgspec.Struct, frozen=True):
    """A rank with its median step: which one it is, its times in the order of the columns, and the bar."""

    report: RankReport
    place: str
    cells: tuple[str, ...]
    bar: Bar


class RankSteps(msgspec.Struct, frozen=True):
    """The first steps of a rank as bars; ``left_out`` later ones are not drawn."""

    rank: int
    bars: tuple[Bar, ...]
    left_out: int


def columns_of(reports: tuple[RankReport, ...]) -> tuple[tuple[str, str, str], ...]:
    """Return the parts of a budget that are not empty on every rank: key, label, field."""
    budgets = [report.budget for report in reports if report.budget]
    return tuple(part for part in BUDGET_PARTS if any(getattr(budget, part[2]) > 0 for budget in budgets))


def rank_rows(
    reports: tuple[RankReport, ...], columns: tuple[tuple[str, str, str], ...]
) -> tuple[RankRow, ...]:
    """Return a row for each rank; all bars have one scale."""
    longest = max((report.budget.step_ms for report in reports if report.budget), default=0.0)
    decimals = 0 if longest >= 1000 else 1 if longest >= 100 else 2
    rows = []
    for report in reports:
        budget = report.budget
        if budget is None:
            rows.append(RankRow(report, "", (), Bar("", "", (), "")))
            continue
        step = budget.at.step if budget.at else None
        times = (budget.step_ms, *(getattr(budget, field) for _, _, field in columns))
        cells = tuple(f"{ms:.{decimals}f}" for ms in times)
        drawn = bar(f"rank {report.rank}", by_cause(segments(budget), budget, report.device), longest)
        rows.append(RankRow(report, "capture" if step is None else str(step), cells, drawn))
    return tuple(rows)


def steps_of_ranks(diagnosis: Diagnosis) -> tuple[RankSteps, ...]:
    """Return the steps of each rank, first of the one that stands for the run; all bars have one scale."""
    reports = [report for report in diagnosis.ranks if report.steps]
    at = diagnosis.budget.at if diagnosis.budget else None
    judged = at.rank if at else -1
    reports.sort(key=lambda report: (report.rank != judged, report.rank))
    longest = max((step.step_ms for report in reports for step in report.steps[:DRAWN_STEPS]), default=0.0)
    return tuple(
        RankSteps(
            report.rank,
            tuple(
                bar(_step_label(step), by_cause(segments(step), step, report.device), longest)
                for step in report.steps[:DRAWN_STEPS]
            ),
            max(0, len(report.steps) - DRAWN_STEPS),
        )
        for report in reports
    )


def _step_label(step: StepBudget) -> str:
    return f"step {step.index}" if step.complete else f"step {step.index} (cut off)"


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
