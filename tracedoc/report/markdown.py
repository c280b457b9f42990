"""Write a diagnosis as Markdown: a comment of a few lines for a pull request, with folded details."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec.structs import astuple

from tracedoc.diagnosis import SEVERITIES, BudgetCheck
from tracedoc.errors import Failures
from tracedoc.judge.fixes import framework_name
from tracedoc.report.texts import one_line
from tracedoc.report.view import FindingView, View, budget_words
from tracedoc.report.waterfall import Waterfall
from tracedoc.report.words import predicted_words
from tracedoc.units import format_ms, format_percent, format_step_change

MAX_CHARACTERS = 60_000
"""GitHub refuses comments of more than 65,536 characters."""

SHOWN_FINDINGS = 3
"""Findings that stand in the comment itself; the others are folded."""

SHOWN_CAUSES = 5
"""Causes in the comment's table; what more there is stands in its last row."""

SHOWN_FIXES = 2
"""Fixes of a finding that are printed, those that fit the job best."""

MARK = "<!-- tracedoc -->"
"""By this line a workflow finds its own comment again, and replaces it."""

# What Markdown, or a forge that shows it, would read as more than text. A name must stay a name.
_SPECIAL = re.compile(r"[\\`*_\[\]~|]")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "#": "&#35;"}
_ENTITY = re.compile("[&<>@#]")
_LINK = re.compile(r"(?i)(https?|ftp|mailto|www)([:.])")


def render_markdown(view: View) -> str:
    """Return the comment: the answer, the step, at most three findings, and everything else folded.

    It has at most :data:`MAX_CHARACTERS`; what does not fit is left out and counted.
    """
    failures = Failures()
    head = failures.contain("the answer", lambda: "\n".join(_head(view)), "")
    folds = failures.contain("the findings", lambda: list(_folds(view)), [])
    return comment(head, folds, [safe(limit.message) for limit in failures.limits])


def comment(head: str, folds: Iterable[str], notes: Iterable[str] = ()) -> str:
    """Return a comment of a head, parts that are folded, and notes; parts that do not fit are counted.

    A head that alone is too long is cut.
    """
    if len(head) > MAX_CHARACTERS // 2:
        head = f"{head[: MAX_CHARACTERS // 2]}\n\nThe rest does not fit in a comment."
    lines = [MARK, head, ""]
    room = MAX_CHARACTERS - sum(len(line) + 1 for line in lines) - 200
    left_out = 0
    for part in folds:
        if len(part) + 1 > room:
            left_out += 1
            continue
        lines.append(part)
        room -= len(part) + 1
    if left_out:
        lines.append(f"{left_out} more {'part does' if left_out == 1 else 'parts do'} not fit in a comment.")
    return "\n".join([*lines, *notes]).rstrip("\n") + "\n"


def safe(text: str) -> str:
    """Return a text as Markdown that reads as just that text: no markup, link, mention or issue number."""
    text = _ENTITY.sub(lambda match: _ENTITIES[match[0]], one_line(text))
    text = _SPECIAL.sub(lambda match: f"\\{match[0]}", text)
    return _LINK.sub(lambda match: f"{match[1]}{'&#58;' if match[2] == ':' else '&#46;'}", text)


def _head(view: View) -> Iterator[str]:
    diagnosis = view.diagnosis
    answer, dot, rest = one_line(diagnosis.summary).partition(". ")
    yield f"### {safe(answer)}{dot.strip()}"
    if rest:
        yield f"\n{safe(rest)}"
    if view.waterfall is not None and view.waterfall.lines:
        yield f"\n{_run(view)}."
        yield from _causes(view.waterfall)
    else:
        shares = ", ".join(f"{part.label} {format_percent(part.share)}" for part in view.segments)
        yield f"\n{_run(view)}" + (f". Step: {safe(shares)}." if shares else ".")
    if view.findings:
        yield ""
    for finding in view.findings[:SHOWN_FINDINGS]:
        yield f"{finding.number}. {_finding_line(finding)}"
    if diagnosis.budgets:
        yield f"\n{_budget_line(diagnosis.budgets)}"


def _causes(fall: Waterfall) -> Iterator[str]:
    """Yield a table of what costs the step, in at most :data:`SHOWN_CAUSES` rows and the ideal step."""
    today, *causes, ideal = fall.lines
    yield f"\n| What costs {safe(fall.of)} | {format_ms(today.ms)} | {today.percent} |"
    yield "|---|--:|--:|"
    shown = causes if len(causes) <= SHOWN_CAUSES else causes[: SHOWN_CAUSES - 1]
    for line in (*shown, ideal):
        note = f" ({line.note})" if line.note else ""
        yield f"| {safe(line.words + note)} | {format_ms(line.ms)} | {line.percent} |"
        if line is shown[-1] and (rest := causes[len(shown) :]):
            share = format_percent(sum(one.share for one in rest))
            yield f"| other causes | {format_ms(sum(one.ms for one in rest))} | {share} |"


def _run(view: View) -> str:
    """The run with its name, and when and with what it was captured."""
    return safe("; ".join(part for part in (view.name, view.run, view.throughput, view.about) if part))


def _finding_line(item: FindingView) -> str:
    finding = item.finding
    gain = f": {safe(item.gain)}" if item.gain else ""
    line = f"**{safe(finding.title)}** ({finding.severity}){gain}"
    if item.fixes:
        line += f". {safe(item.fixes[0].title)}"
        if predicted := item.fixes[0].predicted:
            line += f" ({safe(predicted_words(predicted))})"
    return line


def _budget_line(checks: tuple[BudgetCheck, ...]) -> str:
    met = sum(check.outcome == "met" for check in checks)
    missed = "".join(f"; **{safe(budget_words(check))}**" for check in checks if check.outcome != "met")
    return f"Budgets: {met} of {len(checks)} met{missed}."


def _folds(view: View) -> Iterator[str]:
    """Yield the folded parts, the most useful first: a comment that gets too long loses its end."""
    plan = view.diagnosis.plan
    if plan:
        yield fold(
            "Plan: each fix on top of those before it",
            *(
                f"{number}. {safe(one.title)}: {safe(format_step_change(one.replay_of_step_ms, one.step_ms))}"
                for number, one in enumerate(plan, 1)
            ),
            *map(safe, view.unplanned),
        )
    for item in view.findings:
        yield fold(f"{item.number}. {safe(item.finding.title)}", *_finding_details(item))
    if view.segments:
        rows = (
            f"| {safe(label)} | {format_ms(ms)} | {format_percent(share)} | {safe(note)} |"
            for _, label, ms, share, note in map(astuple, view.segments)
        )
        yield fold(
            f"Where the step goes ({safe(view.where)})",
            "| Part | Time | Share | Largest causes |\n|---|--:|--:|---|\n" + "\n".join(rows),
        )
    if view.diagnosis.budgets:
        yield fold("Budgets", "\n".join(f"- {safe(budget_words(check))}" for check in view.diagnosis.budgets))
    if view.limits:
        yield fold(
            "What this capture cannot show", "\n".join(f"- {safe(limit.text)}" for limit in view.limits)
        )


def _finding_details(item: FindingView) -> Iterator[str]:
    finding = item.finding
    severity = finding.severity if finding.severity in SEVERITIES else "note"
    yield f"{safe(finding.message)} ({severity}; {safe(item.place)}; `{finding.rule_id.replace('`', '')}`)"
    if finding.why:
        yield safe(finding.why)
    for fix in item.fixes[:SHOWN_FIXES]:
        name = framework_name(fix.framework)
        yield f"**{safe(fix.title)}**{f' ({safe(name)})' if name else ''}"
        if fix.advice:
            yield safe(fix.advice)
        if fix.change:
            yield _code(fix.change)
        if fix.risk and fix.risk != "none":
            yield f"Risk: {safe(fix.risk)}."
    if (others := len(item.fixes) - SHOWN_FIXES) > 0:
        yield f"{others} more: `tracedoc explain {finding.rule_id.replace('`', '')}`"


def fold(title: str, *paragraphs: str) -> str:
    """Return paragraphs that are shown once their title is clicked; all of it is Markdown already."""
    body = "\n\n".join(paragraphs)
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _code(text: str) -> str:
    """Return a block of code; its fence is longer than any row of backticks in it."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.strip(chr(10))}\n{fence}"
