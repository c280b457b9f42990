"""Show a comparison as text, as Markdown for a pull request, or as a waterfall."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

from tracedoc.report.markdown import comment, fold, safe
from tracedoc.report.texts import one_line, plain
from tracedoc.units import format_ms, format_percent, format_quantity

if TYPE_CHECKING:
    from tracedoc.comparison.compare import RunComparison
    from tracedoc.comparison.findings import FindingChange

_LEAST_PART = 0.002
"""Parts below this share of both steps are left out of the text; the JSON has them all."""

Rows = list[tuple[str, str, str, str, str]]


def first_line(found: RunComparison) -> str:
    """Return the answer in one sentence or two."""
    fall = found.waterfall
    if found.scaling is not None:
        scaling = found.scaling
        lost = _largest(found, longer=True)
        reason = f" Most is lost to {lost}." if lost else ""
        return (
            f"{format_percent(scaling.efficiency)} efficiency from {scaling.base_gpus} to"
            f" {scaling.head_gpus} GPUs ({scaling.kind} scaling): {scaling.speed_up:.3g} times as fast,"
            f" ideally {scaling.head_gpus / scaling.base_gpus:.3g}.{reason}"
        )
    assert found.verdict is not None
    word = found.verdict.word
    times = f"{format_ms(fall.ideal_ms)} -> {format_ms(fall.measured_ms)} a step"
    if word == "inconclusive":
        needed = found.verdict.steps_needed
        more = f" About {needed} steps on each side would decide." if needed else ""
        return f"Inconclusive: {times}; {found.verdict.why}.{more}"
    if word == "unchanged":
        return f"Unchanged: {times}, within noise."
    cause = _largest(found, longer=word == "regressed")
    return f"{word.capitalize()}: {times}{f', mostly {cause}' if cause else ''}."


def comparison_text(found: RunComparison, width: int) -> str:
    """Return the comparison as text."""
    columns = width or 100
    lines = [fill(plain(first_line(found)), columns)]
    noise = _noise(found)
    if noise:
        lines.append(fill(noise, columns))
    lines += ["", *_aligned(_parts(found))]
    for title, items in _lists(found):
        lines += ["", title]
        lines += [
            fill(plain(one_line(item)), columns, initial_indent="-  ", subsequent_indent="   ")
            for item in items
        ]
    return "\n".join(lines) + "\n"


def comparison_markdown(found: RunComparison) -> str:
    """Return the comparison as a comment: the answer, the table of changes, and everything else folded.

    Names from the runs read as just that text.
    """
    lines = [f"### {safe(first_line(found))}", ""]
    noise = _noise(found)
    if noise:
        lines += [safe(noise), ""]
    head, *rows = _parts(found)
    lines += [f"| {' | '.join(head)} |", "|---|--:|--:|--:|---|"]
    lines += [f"| {' | '.join(safe(cell) for cell in row)} |" for row in rows]
    lines += ["", _counts(found)]
    folds = (fold(title, "\n".join(f"- {safe(item)}" for item in items)) for title, items in _lists(found))
    return comment("\n".join(lines).rstrip("\n"), folds)


def waterfall_drawing(found: RunComparison, file_format: str) -> bytes:
    """Return the waterfall of a comparison as "png", "svg" or "pdf"; small parts are one."""
    from tracedoc.report.waterfall_figure import render_waterfall

    fall = found.waterfall
    least = _LEAST_PART * max(fall.ideal_ms, fall.measured_ms)
    shown = [(one_line(part.label), part.change_ms) for part in fall.parts if abs(part.change_ms) >= least]
    small = sum(part.change_ms for part in fall.parts if abs(part.change_ms) < least)
    changes = [*shown, ("smaller parts", small)] if small else shown
    sides = ("ideal step", "HEAD") if found.scaling is not None else ("BASE", "HEAD")
    title = plain(first_line(found))
    return render_waterfall(
        file_format, title, (sides[0], fall.ideal_ms), changes, (sides[1], fall.measured_ms)
    )


def _counts(found: RunComparison) -> str:
    """Return how many findings are fixed, new and still there."""
    words = {"fixed": "fixed", "new": "new", "persisting": "still there"}
    counts = {state: sum(one.state == state for one in found.findings) for state in words}
    said = ", ".join(f"{count} {words[state]}" for state, count in counts.items() if count)
    return f"Findings: {said}." if said else ""


def _noise(found: RunComparison) -> str:
    steps = found.steps
    if steps is None or found.scaling is not None:
        return ""
    text = (
        f"Steps: {steps.base_steps} and {steps.head_steps} compared, {_change(steps.change_frac)} (95 %:"
        f" {_change(steps.low_frac)} to {_change(steps.high_frac)}); two captures of one job"
        f" may differ by {format_percent(steps.noise_frac)}."
    )
    if steps.base_unprofiled_ms and steps.head_unprofiled_ms:
        text += (
            f" Without the profiler: {format_ms(steps.base_unprofiled_ms)} ->"
            f" {format_ms(steps.head_unprofiled_ms)}."
        )
    return text


def _parts(found: RunComparison) -> Rows:
    fall = found.waterfall
    ideal = "ideal" if found.scaling is not None else "BASE"
    rows: Rows = [("Part of the step", ideal, "HEAD", "change", "")]
    least = _LEAST_PART * max(fall.ideal_ms, fall.measured_ms)
    small = 0.0
    for part in fall.parts:
        if max(abs(part.ideal_ms), abs(part.measured_ms), abs(part.change_ms)) < least:
            small += part.change_ms
            continue
        ideal_ms, measured_ms = format_ms(part.ideal_ms), format_ms(part.measured_ms)
        if part.key == "slower-kernels":
            ideal_ms = measured_ms = ""  # their time is in the next row
        rows.append((part.label, ideal_ms, measured_ms, _signed(part.change_ms), one_line(part.evidence)))
    if small:
        rows.append(("smaller parts", "", "", _signed(small), ""))
    total = fall.measured_ms - fall.ideal_ms
    rows.append(("step", format_ms(fall.ideal_ms), format_ms(fall.measured_ms), _signed(total), ""))
    return rows


def _lists(found: RunComparison) -> Iterator[tuple[str, list[str]]]:
    """Yield titles with what stands below them, without those that would be empty."""
    fixed = [one for one in found.findings if one.state == "fixed"]
    if fixed:
        yield "Fixed", [_fixed(one, found) for one in fixed]
    new = [f"{one.title} [{one.rule_id}]: {one.head_message}" for one in found.findings if one.state == "new"]
    if new:
        yield "New", new
    still = [f"{one.title} [{one.rule_id}]" for one in found.findings if one.state == "persisting"]
    if still:
        yield "Still there", still
    if found.kernels:
        yield (
            "Kernels that changed most",
            [
                f"{one.name[:80]}: {one.base_calls} -> {one.head_calls} calls,"
                f" {format_ms(one.base_ms)} -> {format_ms(one.head_ms)}"
                for one in found.kernels
            ],
        )
    if found.facts:
        yield (
            "Counts and sizes that differ",
            [
                f"{one.name}: {format_quantity(one.base, one.unit)} -> {format_quantity(one.head, one.unit)}"
                for one in found.facts
            ],
        )
    if found.settings:
        yield "Settings that differ", [f"{one.name}: {one.base} -> {one.head}" for one in found.settings]
    if found.limits:
        yield "Limits", [f"{one.message}; {one.effect}  [{one.code}]" for one in found.limits]


def _fixed(one: FindingChange, found: RunComparison) -> str:
    text = f"{one.title} [{one.rule_id}]"
    if one.predicted_ms is None:
        return text
    low, high = one.predicted_ms
    predicted = f"up to {format_ms(high)}" if low <= 0 else f"{format_ms(low)} to {format_ms(high)}"
    if one.likely_ms is not None and one.likely_ms > 0:
        likely = format_ms(one.likely_ms)
        predicted = f"about {likely}" + (f" ({predicted})" if format_ms(low) != format_ms(high) else "")
    realised = found.realised_ms
    became = f"{format_ms(abs(realised))} {'shorter' if realised >= 0 else 'longer'}"
    return f"{text}: predicted {predicted}; the whole step became {became}"


def _largest(found: RunComparison, *, longer: bool) -> str:
    """Return the part that changed most in the direction of the step, with its change."""
    sign = 1 if longer else -1
    parts = [part for part in found.waterfall.parts if sign * part.change_ms > 0]
    if not parts:
        return ""
    part = max(parts, key=lambda one: abs(one.change_ms))
    return f"{part.label} ({_signed(part.change_ms)})"


def _aligned(rows: Rows) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for row in rows:
        numbers = "  ".join(f"{row[column]:>{widths[column]}}" for column in range(1, 4))
        lines.append(plain(f"{row[0]:{widths[0]}}  {numbers}  {row[4]}").rstrip())
    return lines


def _signed(ms: float) -> str:
    return f"{'+' if ms > 0 else '-' if ms < 0 else ''}{format_ms(abs(ms))}"


def _change(share: float) -> str:
    return f"{100 * share:+.3g} %"
