"""Write the findings as SARIF 2.1.0, which code scanning shows beside the lines of a change."""

from __future__ import annotations

import json
from typing import Any

from tracedoc.diagnosis import Evidence
from tracedoc.report.texts import one_line
from tracedoc.report.view import FindingView, View, script_line

_LEVELS = {"critical": "error", "warning": "warning", "note": "note"}

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render_sarif(view: View) -> str:
    """Return a SARIF log of one run: a rule for each rule that has a finding, a result for each finding.

    The format is that of OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
    """
    rules: dict[str, dict[str, Any]] = {}
    for item in view.findings:
        finding = item.finding
        rules.setdefault(
            finding.rule_id,
            {
                "id": finding.rule_id,
                "shortDescription": {"text": one_line(finding.title)},
                "fullDescription": {"text": one_line(finding.why) or one_line(finding.title)},
                "properties": {"tags": ["performance", finding.topic]},
            },
        )
    order = list(rules)
    driver = {
        "name": "tracedoc",
        "version": view.diagnosis.tool_version or "0",
        "rules": list(rules.values()),
    }
    results = [_result(item, view, order) for item in view.findings]
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "results": results,
                "properties": {"summary": one_line(view.diagnosis.summary)},
            }
        ],
    }
    return json.dumps(log, indent=2) + "\n"


def _result(item: FindingView, view: View, order: list[str]) -> dict[str, Any]:
    finding = item.finding
    sentences = [one_line(finding.message)]
    if item.gain:
        sentences.append(f"Gain: {item.gain}.")
    if item.fixes:
        sentences.append(f"Fix: {one_line(item.fixes[0].title)}.")
    return {
        "ruleId": finding.rule_id,
        "ruleIndex": order.index(finding.rule_id),
        "level": _LEVELS.get(finding.severity, "note"),
        "message": {"text": " ".join(sentences)},
        "locations": [_location(item, view)],
        "partialFingerprints": {"tracedocFinding/v1": finding.id},
        "properties": {"confidence": finding.confidence},
    }


def _location(item: FindingView, view: View) -> dict[str, Any]:
    file, line = location(item, view)
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(file)}}
    return {"physicalLocation": place | ({"region": {"startLine": line}} if line is not None else {})}


def location(item: FindingView, view: View) -> tuple[str, int | None]:
    """Return the file and line of the script that the finding names, else the trace that shows it."""
    place = script_line(item)
    if place is not None:
        return place
    sources = {report.rank: report.source for report in view.diagnosis.ranks}
    worst = max(item.finding.evidence, key=_length, default=None)
    ranks = (worst.rank,) if worst is not None else item.finding.ranks
    return next((sources[rank] for rank in ranks if rank in sources), "trace.json"), None


def _length(place: Evidence) -> int:
    return place.end_ns - place.start_ns


def _uri(path: str) -> str:
    from urllib.parse import quote

    return quote(path.replace("\\", "/"), safe="/:~")
