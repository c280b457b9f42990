"""Write the findings as a report of code quality, which GitLab shows beside a change."""

from __future__ import annotations

import json

from tracedoc.report.forges.sarif import location
from tracedoc.report.texts import one_line
from tracedoc.report.view import View

_SEVERITIES = {"critical": "critical", "warning": "major", "note": "info"}


def render_code_quality(view: View) -> str:
    """Return a JSON list with an entry for each finding, at its line of the script, else at its trace.

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
                "severity": _SEVERITIES.get(finding.severity, "info"),
                "location": {"path": file.replace("\\", "/"), "lines": {"begin": line or 1}},
            }
        )
    return json.dumps(entries, indent=2) + "\n"
