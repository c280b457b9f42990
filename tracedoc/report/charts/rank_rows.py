"""Lay out the ranks with their median steps, and the steps of each, as rows with bars."""

from __future__ import annotations

import msgspec

from tracedoc.diagnosis import Diagnosis, RankReport, StepBudget
from tracedoc.report.charts.bars import Bar, bar, by_cause
from tracedoc.report.view import PARTS, segments

MOST_STEPS = 48
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
    return tuple(part for part in PARTS if any(getattr(budget, part[2]) > 0 for budget in budgets))


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
        drawn = bar(f"rank {report.rank}", by_cause(segments(budget), budget), longest)
        rows.append(RankRow(report, "capture" if step is None else str(step), cells, drawn))
    return tuple(rows)


def steps_of_ranks(diagnosis: Diagnosis) -> tuple[RankSteps, ...]:
    """Return the steps of each rank, first of the one that stands for the run; all bars have one scale."""
    reports = [report for report in diagnosis.ranks if report.steps]
    at = diagnosis.budget.at if diagnosis.budget else None
    judged = at.rank if at else -1
    reports.sort(key=lambda report: (report.rank != judged, report.rank))
    longest = max((step.step_ms for report in reports for step in report.steps[:MOST_STEPS]), default=0.0)
    return tuple(
        RankSteps(
            report.rank,
            tuple(
                bar(_step_label(step), by_cause(segments(step), step), longest)
                for step in report.steps[:MOST_STEPS]
            ),
            max(0, len(report.steps) - MOST_STEPS),
        )
        for report in reports
    )


def _step_label(step: StepBudget) -> str:
    return f"step {step.index}" if step.complete else f"step {step.index} (cut off)"
