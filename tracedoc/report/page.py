"""Write HTML: a page that needs no network and reads without its script, a cell of a notebook, a sheet."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from tracedoc.diagnosis import Diagnosis, FactRecord
from tracedoc.errors import Failures, failure
from tracedoc.judge.fixes import framework_name
from tracedoc.report.charts.bars import (
    bar,
    by_cause,
    columns_of,
    gain_bar,
    heat_map,
    range_of,
    rank_rows,
    steps_of_ranks,
)
from tracedoc.report.charts.detail_tables import (
    by_category,
    collective_table,
    grouped_values,
    host_tables,
    lost_words,
    phase_table,
    short_name,
    step_words,
    unchecked,
    unit_table,
)
from tracedoc.report.charts.drawing import draw
from tracedoc.report.charts.over_time import memory_chart, scatter, unit_chart
from tracedoc.report.clock import place_to_look
from tracedoc.report.sheet import Sheet
from tracedoc.report.step_parts import IN_TURN, WaterfallLine
from tracedoc.report.texts import one_line
from tracedoc.report.view import (
    FindingView,
    View,
    budget_words,
    build_view,
    holds_text,
    instances_text,
    side_text,
)
from tracedoc.report.words import FINDINGS_NOTE, predicted_words
from tracedoc.units import (
    format_bytes,
    format_ms,
    format_percent,
    format_quantity,
    format_ranges,
    format_step_change,
)

_TEMPLATES = Path(__file__).parent / "templates"
_BACKTICKS = re.compile(r"`([^`]+)`")
_QUANTITY = re.compile(r"(\d) (%|[num]?s\b|[KMGT]i?B\b|[GMk]B/s)")

MOST_STEPS_CARRIED = 20_000
"""Of all ranks together; each takes some 350 bytes."""

LIMITS_IN_CELL = 3
"""Limits that a cell of a notebook shows; the page has them all."""


PARTS_OF_PAGE = (
    ("timeline", "Picture", ("drawing",)),
    ("plan", "Plan", ("plan",)),
    ("budget", "Observed", ("bar",)),
    ("findings", "Findings", ("view",)),
    ("limits", "Limits", ("limits",)),
    ("waits", "Waits", ("heat",)),
    ("ranks", "Ranks", ("columns",)),
    ("steps", "Steps", ("steps",)),
    ("collectives", "Collectives", ("collectives", "transfers")),
    ("units", "Units", ("units", "unit_table")),
    ("memory", "Memory", ("memory",)),
    ("host", "Host", ("host",)),
    ("kernels", "Kernels", ("kernels",)),
    ("unchecked", "Could not check", ("unchecked",)),
    ("verdicts", "Verdicts", ("verdicts",)),
    ("facts", "Facts", ("facts",)),
)
"""What the page links to: id, title, and what has to be there of it."""


def render_html(view: View) -> str:
    """Return the page. All text is escaped; links lead only to https addresses."""
    diagnosis, failures = view.diagnosis, Failures()
    contain = failures.contain
    answer, rest = _sentences(one_line(diagnosis.summary))
    columns = contain("the table of ranks", lambda: columns_of(diagnosis.ranks), ())
    hosts = {report.host for report in diagnosis.ranks}
    devices = {report.device for report in diagnosis.ranks}
    parts = tuple(by_cause(view.segments, diagnosis.budget, diagnosis.run.device)) if diagnosis.budget else ()
    drawing = contain("the timeline", lambda: draw(diagnosis, view.findings), None)
    detail = diagnosis.detail
    shown: dict[str, Any] = {
        "view": view,
        "diagnosis": diagnosis,
        "answer": answer,
        "rest": rest,
        "parts": parts,
        "bar": bar("", parts, diagnosis.budget.step_ms) if diagnosis.budget else None,
        "columns": columns,
        "several_hosts": len(hosts) > 1,
        "several_devices": len(devices) > 1,
        "alike": ", ".join(
            next(iter(same)) for same in (devices, hosts) if len(same) == 1 and "" not in same
        ),
        "rank_rows": contain("the table of ranks", lambda: rank_rows(diagnosis.ranks, columns), ()),
        "limits": view.limits,
        "verdicts": diagnosis.verdicts,
        "steps": contain("the steps", lambda: steps_of_ranks(diagnosis), ()),
        "drawing": drawing,
        "place": contain("the place to look", lambda: place_to_look(view), ""),
        "plan": diagnosis.plan if len(diagnosis.plan) + len(view.unplanned) > 1 else (),
        "causes": contain("what costs the step", lambda: tuple(_causes(view)), ()),
        "data": _data(diagnosis),
        "script": _script()[0],
        "script_hash": _script()[1],
        "phases": contain("the phases", lambda: phase_table(detail.phases), None),
        "collectives": contain("the collectives", lambda: collective_table(detail.collectives), None),
        "host": contain("the host", lambda: host_tables(detail.host), ()),
        "heat": contain("who waits for whom", lambda: heat_map(detail.waits), None),
        "transfers": contain("the chart of transfers", lambda: scatter(detail.transfers), None),
        "memory": contain("the chart of memory", lambda: memory_chart(detail.memory, diagnosis.ranks), None),
        "units": contain("the chart of units", lambda: unit_chart(detail.unit_timeline), None),
        "kernels": contain("the kernels", lambda: by_category(detail.kernels), ()),
        "jitter": contain("the steps", lambda: step_words(diagnosis), ""),
        "unchecked": contain("what could not be checked", lambda: tuple(unchecked(diagnosis.verdicts)), ()),
        "facts": diagnosis.facts,
        "unit_table": contain("the table of units", lambda: unit_table(detail.units), None),
        "failed": failures.limits,
    }
    present = [(key, title) for key, title, names in PARTS_OF_PAGE if any(shown[name] for name in names)]
    return _template("report.html.j2").render(**shown, parts_of_page=present)


def notebook_html(diagnosis: Diagnosis) -> str:
    """HTML for a cell: no scripts, no styles but its own, every text escaped."""
    view = build_view(diagnosis)
    first, more = view.limits[:LIMITS_IN_CELL], view.limits[LIMITS_IN_CELL:]
    return _template("notebook.html.j2").render(view=view, limits=first, more=more)


def sheet_page(sheet: Sheet) -> str:
    """The page of a sheet, which requests nothing and runs no script; all text is escaped."""
    return _template("sheet.html.j2").render(sheet=sheet)


@cache
def _template(name: str) -> Template:
    """A template by the name of its file; it escapes every text and knows how to write quantities."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
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
        code=_code,
        budget=budget_words,
        predicted=predicted_words,
        unbroken=_unbroken,
        step_change=format_step_change,
        kernel=short_name,
        lost=lost_words,
        share=lambda ms, total: format_percent(ms / total) if total > 0 else "",
        fact=_fact_text,
        grouped=grouped_values,
    )
    environment.globals |= {
        "part": _part,
        "is_link": _is_link,
        "findings_note": FINDINGS_NOTE,
        "in_turn": IN_TURN,
        "gain_bar": gain_bar,
        "range_of": range_of,
    }
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


def _unbroken(text: str) -> str:
    """Return a text in which no line ends within an arrow, or between a number and its unit."""
    return _QUANTITY.sub("\\1\u00a0\\2", text).replace("->", "-\u2060>")


def _code(text: str) -> Markup:
    """A line in which what stands between backticks is code."""
    return Markup(_BACKTICKS.sub(r"<code>\1</code>", str(escape(_unbroken(one_line(text))))))


def _is_link(url: str) -> bool:
    return url.startswith("https://") and not any(character.isspace() for character in url)


def _causes(view: View) -> Iterator[tuple[WaterfallLine, FindingView | None]]:
    """Yield the lines of the waterfall, each with the finding that tells it where that stands first."""
    seen = set()
    for line in view.waterfall.lines if view.waterfall is not None else ():
        first = line.number and line.number not in seen
        seen.add(line.number)
        yield line, view.findings[line.number - 1] if first else None


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
    text = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(text), f"sha256-{digest}"


def _fact_text(record: FactRecord) -> str:
    if record.value is None:
        return f"unknown: {record.unknown}" if record.unknown else "unknown"
    return format_quantity(record.value, record.unit)
