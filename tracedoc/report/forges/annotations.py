"""Write findings as workflow commands: GitHub Actions shows them as annotations of a run."""

from __future__ import annotations

from tracedoc.report.texts import one_line
from tracedoc.report.view import FindingView, View, budget_words, script_line

_LEVELS = {"critical": "error", "warning": "warning", "note": "notice"}


def render_annotations(view: View) -> str:
    """Return one line for each finding and each budget that is not met, and the answer as a last notice.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    lines = [_finding(item) for item in view.findings]
    for check in view.diagnosis.budgets:
        if check.outcome != "met":
            level = "error" if check.outcome == "broken" else "warning"
            lines.append(_command(level, {"title": "tracedoc budget"}, budget_words(check)))
    lines.append(_command("notice", {"title": "tracedoc"}, one_line(view.diagnosis.summary)))
    return "\n".join(lines) + "\n"


def _finding(item: FindingView) -> str:
    finding = item.finding
    properties = {"title": f"tracedoc: {one_line(finding.title)}"}
    if place := script_line(item):
        properties |= {"file": place[0], "line": str(place[1])}
    sentences = [one_line(finding.message)]
    sentences += [f"Gain: {item.gain}."] if item.gain else []
    sentences += [f"Fix: {one_line(fix.title)}." for fix in item.fixes[:1]]
    return _command(_LEVELS.get(finding.severity, "notice"), properties, " ".join(sentences))


def _command(level: str, properties: dict[str, str], message: str) -> str:
    """Return a command. Nothing in a text can end it and begin another one."""
    said = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{level} {said}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    for letter in "%\r\n" + more:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
