"""Write findings as forges and CI systems read them: Markdown, SARIF, annotations, code quality, JUnit."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from msgspec.structs import astuple

from tracedoc.diagnosis import SEVERITIES, BudgetCheck
from tracedoc.errors import Failures
from tracedoc.judge.fixes import framework_name
from tracedoc.report.step_parts import Waterfall
from tracedoc.report.texts import one_line
from tracedoc.report.view import FindingView, View, budget_words, is_guard, script_line
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


_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS = {"critical": "error", "warning": "warning", "note": "note"}
_ANNOTATION_LEVELS = {"critical": "error", "warning": "warning", "note": "notice"}
_CODE_QUALITY_SEVERITIES = {"critical": "critical", "warning": "major", "note": "info"}
_JUNIT_FAILURES = frozenset({"critical", "warning"})

# XML 1.0 has no way to write these, not even escaped (https://www.w3.org/TR/xml/#charsets).
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def location(item: FindingView, view: View) -> tuple[str, int | None]:
    """The file and line of the script that the finding names, else the trace that shows it."""
    place = script_line(item)
    if place is not None:
        return place
    sources = {report.rank: report.source for report in view.diagnosis.ranks}
    worst = max(item.finding.evidence, key=lambda place: place.length_ns, default=None)
    ranks = (worst.rank,) if worst is not None else item.finding.ranks
    return next((sources[rank] for rank in ranks if rank in sources), "trace.json"), None


def _sentences(item: FindingView) -> str:
    """A finding in one line: its message, its gain, and its first fix."""
    sentences = [one_line(item.finding.message)]
    sentences += [f"{item.gain[0].upper()}{item.gain[1:]}."] if item.gain else []
    sentences += [f"Fix: {one_line(fix.title)}." for fix in item.fixes[:1]]
    return " ".join(sentences)


# -- SARIF, which code scanning shows beside the lines of a change


def render_sarif(view: View) -> str:
    """A SARIF log of one run: a rule for each rule that has a finding, a result for each finding.

    The format is that of OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
    """
    rules: dict[str, dict[str, Any]] = {}
    for finding in (item.finding for item in view.findings):
        rules.setdefault(
            finding.rule_id,
            {
                "id": finding.rule_id,
                "shortDescription": {"text": one_line(finding.title)},
                "fullDescription": {"text": one_line(finding.why) or one_line(finding.title)},
                "properties": {"tags": ["performance", finding.topic]},
            },
        )
    version = view.diagnosis.tool_version or "0"
    run = {
        "tool": {"driver": {"name": "tracedoc", "version": version, "rules": list(rules.values())}},
        "results": [_result(item, view, list(rules)) for item in view.findings],
        "properties": {"summary": one_line(view.diagnosis.summary)},
    }
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _result(item: FindingView, view: View, order: list[str]) -> dict[str, Any]:
    finding = item.finding
    file, line = location(item, view)
    place: dict[str, Any] = {"artifactLocation": {"uri": quote(file.replace("\\", "/"), safe="/:~")}}
    if line is not None:
        place["region"] = {"startLine": line}
    return {
        "ruleId": finding.rule_id,
        "ruleIndex": order.index(finding.rule_id),
        "level": _SARIF_LEVELS.get(finding.severity, "note"),
        "message": {"text": _sentences(item)},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"tracedocFinding/v1": finding.id},
        "properties": {"confidence": finding.confidence},
    }


# -- workflow commands, which GitHub Actions shows as annotations of a run


def render_annotations(view: View) -> str:
    """One line for each finding and each budget that is not met, and the answer as a last notice.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    lines = [_annotation(item) for item in view.findings]
    for check in view.diagnosis.budgets:
        if check.outcome != "met":
            level = "error" if check.outcome == "broken" else "warning"
            lines.append(_command(level, {"title": "tracedoc budget"}, budget_words(check)))
    lines.append(_command("notice", {"title": "tracedoc"}, one_line(view.diagnosis.summary)))
    return "\n".join(lines) + "\n"


def _annotation(item: FindingView) -> str:
    properties = {"title": f"tracedoc: {one_line(item.finding.title)}"}
    if place := script_line(item):
        properties |= {"file": place[0], "line": str(place[1])}
    return _command(_ANNOTATION_LEVELS.get(item.finding.severity, "notice"), properties, _sentences(item))


def _command(level: str, properties: dict[str, str], message: str) -> str:
    """A workflow command. Nothing in a text can end it and begin another one."""
    said = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{level} {said}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    for letter in "%\r\n" + more:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


# -- code quality, which GitLab shows beside a change


def render_code_quality(view: View) -> str:
    """A JSON list with an entry for each finding, at its line of the script, else at its trace.

    GitLab, "Code Quality report format": it needs a path and a line of each entry, so a trace has line 1.
    """
    entries = []
    for item in view.findings:
        finding = item.finding
        file, line = location(item, view)
        entries.append(
            {
                "description": one_line(f"{finding.title}: {finding.message}"),
                "check_name": finding.rule_id,
                "fingerprint": finding.id,
                "severity": _CODE_QUALITY_SEVERITIES.get(finding.severity, "info"),
                "location": {"path": file.replace("\\", "/"), "lines": {"begin": line or 1}},
            }
        )
    return json.dumps(entries, indent=2) + "\n"


# -- JUnit, which every CI system shows as tests


def render_junit(view: View) -> str:
    """A suite with a test for each rule, each finding that no rule names, and each budget, as XML.

    A critical finding, a warning, and a broken budget are failures; what could not be judged, and what a rule
    says of the capture, is skipped; a rule that failed itself is an error. A note passes, and stands in the
    test's output.
    """
    found = {item.finding.rule_id: item for item in view.findings}
    guards = {one.rule_id: one for one in view.diagnosis.findings if is_guard(one)}
    suite = ElementTree.Element("testsuite", name="tracedoc")
    for verdict in view.diagnosis.verdicts:
        case = _case(suite, "tracedoc.rules", verdict.rule_id)
        item = found.get(verdict.rule_id)
        if item is not None:
            _found(case, item)
        elif verdict.rule_id in guards:
            _child(case, "skipped", guards[verdict.rule_id].message)
        elif verdict.outcome == "error":
            _child(case, "error", verdict.reason)
        elif verdict.outcome in ("unknown", "not_applicable"):
            _child(case, "skipped", verdict.reason)
    judged = {verdict.rule_id for verdict in view.diagnosis.verdicts}
    for rule_id in (one for one in found if one not in judged):
        _found(_case(suite, "tracedoc.causes", rule_id), found[rule_id])
    for check in view.diagnosis.budgets:
        case = _case(suite, "tracedoc.budgets", check.text)
        if check.outcome != "met":
            _child(case, "failure" if check.outcome == "broken" else "skipped", budget_words(check))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"*/{tag}"))))
    suite.set("tests", str(len(suite)))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n"


def _found(case: ElementTree.Element, item: FindingView) -> None:
    finding = item.finding
    lines = [one_line(finding.message), item.place]
    lines += [item.gain] if item.gain else []
    for fix in item.fixes[:1]:
        lines += [f"fix: {one_line(fix.title)}", *filter(None, (one_line(fix.advice), fix.change))]
    text = "\n".join(lines)
    if finding.severity in _JUNIT_FAILURES:
        _child(case, "failure", finding.title, text).set("type", finding.severity)
    else:
        ElementTree.SubElement(case, "system-out").text = _xml(f"{finding.severity}: {text}")


def _case(suite: ElementTree.Element, class_name: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=class_name, name=_xml(one_line(name)))


def _child(case: ElementTree.Element, tag: str, message: str, text: str = "") -> ElementTree.Element:
    child = ElementTree.SubElement(case, tag, message=_xml(one_line(message)))
    child.text = _xml(text) or None
    return child


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)
