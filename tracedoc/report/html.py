"""Write a diagnosis as one HTML page: it needs no network, and reads without its script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from tracedoc.containment import Failures, failure
from tracedoc.diagnosis import BudgetParts, Diagnosis, FactRecord, RankReport, Scalar, StepBudget
from tracedoc.fixes import framework_name
from tracedoc.predicted import PlanStep, ReplayReport
from tracedoc.report.drawing import STATES, draw
from tracedoc.report.prediction_words import shares_of
from tracedoc.report.tables import collective_table, host_tables, phase_table
from tracedoc.report.texts import one_line
from tracedoc.report.view import (
    PARTS,
    Segment,
    View,
    budget_words,
    holds_text,
    instances_text,
    segments,
    side_text,
)
from tracedoc.units import (
    format_bytes,
    format_ms,
    format_percent,
    format_quantity,
    format_ranges,
    format_step_change,
)

MOST_STEPS = 48
"""Steps drawn for a rank; with more, the picture is hard to read."""


class _Box(msgspec.Struct, frozen=True):
    """A part of a bar; x and width in thousandths of the longest bar."""

    key: str
    x: float
    width: float


class _Bar(msgspec.Struct, frozen=True):
    label: str
    length: str
    boxes: tuple[_Box, ...]
    text: str


MOST_STEPS_CARRIED = 20_000
"""Of all ranks together; each takes some 350 bytes."""


class _RankRow(msgspec.Struct, frozen=True):
    report: RankReport
    place: str
    cells: tuple[str, ...]
    bar: _Bar


class _PlanRow(msgspec.Struct, frozen=True):
    """A fix of the plan: the step with it in percent of today's, its range beyond that, and both in words."""

    title: str
    now: str
    likely: float
    range: float
    change: str


class _RankSteps(msgspec.Struct, frozen=True):
    rank: int
    bars: tuple[_Bar, ...]
    left_out: int


def render_html(view: View) -> str:
    """Return the page. All text is escaped; links lead only to https addresses."""
    diagnosis, failures = view.diagnosis, Failures()
    contain = failures.contain
    answer, rest = _sentences(one_line(diagnosis.summary))
    columns = contain("the table of ranks", lambda: _columns(diagnosis.ranks), ())
    hosts = {report.host for report in diagnosis.ranks}
    devices = {report.device for report in diagnosis.ranks}
    parts = tuple(_by_cause(view.segments, diagnosis.budget)) if diagnosis.budget else ()
    drawing = contain(
        "the timeline", lambda: draw(diagnosis.detail.picture, diagnosis.ranks, view.findings), None
    )
    return _template().render(
        view=view,
        diagnosis=diagnosis,
        answer=answer,
        rest=rest,
        parts=parts,
        bar=_bar("", parts, diagnosis.budget.step_ms) if diagnosis.budget else None,
        columns=columns,
        several_hosts=len(hosts) > 1,
        several_devices=len(devices) > 1,
        alike=", ".join(next(iter(same)) for same in (devices, hosts) if len(same) == 1 and "" not in same),
        rank_rows=contain("the table of ranks", lambda: _rank_rows(diagnosis.ranks, columns), ()),
        steps=contain("the steps", lambda: _steps(view), ()),
        drawing=drawing,
        plan=contain("the plan", lambda: tuple(_plan(diagnosis.plan)), ()),
        path=contain("the critical path", lambda: _path(diagnosis.replay), ""),
        data=_data(diagnosis),
        script=_script()[0],
        script_hash=_script()[1],
        phases=contain("the phases", lambda: phase_table(diagnosis.detail.phases), None),
        collectives=contain("the collectives", lambda: collective_table(diagnosis.detail.collectives), None),
        host=contain("the host", lambda: host_tables(diagnosis.detail.host), ()),
        facts=[(name, record, _fact_text(record)) for name, record in diagnosis.facts.items()],
        is_link=_is_link,
        outcome_words={
            outcome: outcome.replace("_", " ") for outcome in {v.outcome for v in diagnosis.verdicts}
        },
        value_text=_value_text,
        failed=failures.limits,
    )


@cache
def _template() -> Template:
    return template("report.html.j2")


def template(name: str) -> Template:
    """Return a template by the name of its file; it escapes every text and knows how to write quantities."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        ms=format_ms,
        percent=format_percent,
        size=format_bytes,
        quantity=format_quantity,
        side=side_text,
        ranges=format_ranges,
        framework=framework_name,
        instances=instances_text,
        holds=holds_text,
        line=one_line,
        budget=budget_words,
    )
    environment.globals["part"] = _part
    return environment.get_template(name)


def _part(name: str, caller: Callable[[], str]) -> str:
    """Return a part of the page; one that fails costs the others nothing."""
    try:
        return caller()
    except Exception as error:
        return Markup('<p class="quiet">The part with {} could not be shown: {}</p>').format(
            name, failure(name, error)
        )


def _sentences(summary: str) -> tuple[str, str]:
    """Return the first sentence and the rest; a decimal point ends none."""
    first, dot, rest = summary.partition(". ")
    return (f"{first}.", rest) if dot else (summary, "")


def _is_link(url: str) -> bool:
    return url.startswith("https://") and not any(character.isspace() for character in url)


def _bar(label: str, parts: Iterable[Segment], longest_ms: float) -> _Bar:
    boxes, x, total, words = [], 0.0, 0.0, []
    for part in parts:
        width = 1000.0 * part.ms / longest_ms if longest_ms > 0 else 0.0
        boxes.append(_Box(part.key, round(x, 2), round(width, 2)))
        x += width
        total += part.ms
        words.append(f"{part.label} {format_ms(part.ms)} ({format_percent(part.share)})")
    return _Bar(label, format_ms(total), tuple(boxes), ", ".join(words))


def _plan(plan: Sequence[PlanStep]) -> Iterator[_PlanRow]:
    for one in plan:
        _, likely, high = (100.0 * ms / one.replay_of_step_ms for ms in one.step_ms)
        yield _PlanRow(
            one.title,
            format_ms(one.replay_of_step_ms),
            round(min(100.0, likely), 2),
            round(max(0.0, min(100.0, high) - likely), 2),
            format_step_change(one.replay_of_step_ms, one.step_ms),
        )


def _path(replay: ReplayReport | None) -> str:
    return shares_of(replay.path) if replay is not None and replay.state == "used" else ""


def _data(diagnosis: Diagnosis) -> Markup:
    """Return the diagnosis as JSON that ends no element: ``tracedoc report`` reads it from the page.

    That of very many steps is not carried: a page must open.
    """
    if sum(len(rank.steps) for rank in diagnosis.ranks) > MOST_STEPS_CARRIED:
        return Markup("")
    text = json.dumps(msgspec.to_builtins(diagnosis), ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@cache
def _script() -> tuple[Markup, str]:
    """Return the page's one script, and the hash by which its policy lets it run, and nothing else."""
    text = (Path(__file__).parent / "templates" / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(text), f"sha256-{digest}"


def _by_cause(parts: Sequence[Segment], budget: BudgetParts) -> Iterator[Segment]:
    """Yield the parts of a step, idle time by its cause: what a GPU waits for is no empty time."""
    for part in parts:
        if part.key != "idle":
            yield part
            continue
        causes = sorted(budget.idle_causes_ms.items(), key=lambda one: -one[1])
        rest = part.ms - sum(ms for _, ms in causes)
        for cause, ms in causes:
            key, words = STATES.get(f"idle {cause}", ("idle", cause))
            yield Segment(key, words, ms, ms / budget.step_ms)
        if rest > 1e-6 * budget.step_ms:
            yield Segment("idle", "idle", rest, rest / budget.step_ms)


def _columns(reports: tuple[RankReport, ...]) -> tuple[tuple[str, str, str], ...]:
    budgets = [report.budget for report in reports if report.budget]
    return tuple(part for part in PARTS if any(getattr(budget, part[2]) > 0 for budget in budgets))


def _rank_rows(
    reports: tuple[RankReport, ...], columns: tuple[tuple[str, str, str], ...]
) -> tuple[_RankRow, ...]:
    longest = max((report.budget.step_ms for report in reports if report.budget), default=0.0)
    decimals = 0 if longest >= 1000 else 1 if longest >= 100 else 2
    rows = []
    for report in reports:
        budget = report.budget
        if budget is None:
            rows.append(_RankRow(report, "", (), _Bar("", "", (), "")))
            continue
        step = budget.at.step if budget.at else None
        times = (budget.step_ms, *(getattr(budget, field) for _, _, field in columns))
        cells = tuple(f"{ms:.{decimals}f}" for ms in times)
        bar = _bar(f"rank {report.rank}", segments(budget), longest)
        rows.append(_RankRow(report, "capture" if step is None else str(step), cells, bar))
    return tuple(rows)


def _steps(view: View) -> tuple[_RankSteps, ...]:
    reports = [report for report in view.diagnosis.ranks if report.steps]
    at = view.diagnosis.budget.at if view.diagnosis.budget else None
    judged = at.rank if at else -1
    reports.sort(key=lambda report: (report.rank != judged, report.rank))
    longest = max((step.step_ms for report in reports for step in report.steps[:MOST_STEPS]), default=0.0)
    return tuple(
        _RankSteps(
            report.rank,
            tuple(_bar(_step_label(step), segments(step), longest) for step in report.steps[:MOST_STEPS]),
            max(0, len(report.steps) - MOST_STEPS),
        )
        for report in reports
    )


def _step_label(step: StepBudget) -> str:
    return f"step {step.index}" if step.complete else f"step {step.index} (cut off)"


def _fact_text(record: FactRecord) -> str:
    if record.value is None:
        return f"unknown: {record.unknown}" if record.unknown else "unknown"
    return format_quantity(record.value, record.unit)


def _value_text(value: Scalar | dict[str, str], unit: str) -> str:
    if isinstance(value, dict):
        return f"unknown: {value.get('unknown', '')}"
    return format_quantity(value, unit)
