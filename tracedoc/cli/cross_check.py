"""Show a cross-check with HolisticTraceAnalysis as text."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracedoc.crosscheck.agreement import CrossCheck, RankCheck

NAMES = {
    "span_ms": "whole capture",
    "compute_ms": "compute",
    "non_compute_ms": "non-compute",
    "idle_ms": "idle",
    "overlap_frac": "overlap",
}


def check_text(check: CrossCheck, width: int) -> str:
    """Return the numbers of both tools for each rank, and why they differ."""
    intro = (
        f"tracedoc beside HolisticTraceAnalysis {check.hta_version}: each capture, from its first to its last"
        " GPU event. Non-compute is exposed communication plus exposed copies; overlap is the share of"
        " communication that runs beside compute."
    )
    lines = [fill(intro, width, break_on_hyphens=False)]
    for rank in check.ranks:
        lines += ["", *_rank(rank, width)]
    return "\n".join(lines) + "\n"


def _rank(check: RankCheck, width: int) -> Iterator[str]:
    from tracedoc.report.texts import one_line, plain

    yield plain(one_line(f"rank {check.rank}  {check.source}"))
    if check.ours is None or check.hta is None:
        yield fill(plain(one_line(check.error)), width, initial_indent="  ", subsequent_indent="  ")
        return
    yield f"  {'':14}{'tracedoc':>12}{'HTA':>12}{'difference':>14}"
    for part, name in NAMES.items():
        ours, theirs = getattr(check.ours, part), getattr(check.hta, part)
        if ours is None or theirs is None:
            continue
        change = theirs - ours if part in _different(check) else 0.0
        yield f"  {name:14}{_value(part, ours):>12}{_value(part, theirs):>12}{_change(part, change):>14}"
    for reason in check.reasons:
        parts = ", ".join(f"{NAMES[part]} {_change(part, by)}" for part, by in reason.changes.items())
        yield _item(plain(one_line(f"{reason.text}: {parts}")), width)
    if check.unexplained:
        parts = ", ".join(f"{NAMES[part]} {_change(part, by)}" for part, by in check.unexplained.items())
        yield _item(f"not explained by a known definition: {parts}", width)
    elif not check.reasons:
        yield "  The two agree."


def _different(check: RankCheck) -> set[str]:
    found = set(check.unexplained)
    for reason in check.reasons:
        found |= reason.changes.keys()
    return found


def _item(text: str, width: int) -> str:
    return fill(text, width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def _value(part: str, value: float) -> str:
    from tracedoc.units import format_ms, format_percent

    return format_percent(value) if part == "overlap_frac" else format_ms(value)


def _change(part: str, value: float) -> str:
    from tracedoc.units import format_ms

    if value == 0:
        return "same"
    sign = "+" if value > 0 else "-"
    if part == "overlap_frac":
        return f"{sign}{abs(100 * value):.2g} points"
    return f"{sign}{format_ms(abs(value))}"
