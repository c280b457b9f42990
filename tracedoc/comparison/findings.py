"""Which findings are gone, new, or still there, with what was predicted for those that are gone."""

from __future__ import annotations

import msgspec

from tracedoc.diagnosis import Diagnosis, Finding

STATES = ("fixed", "new", "persisting")


class FindingChange(msgspec.Struct, frozen=True):
    """One rule's finding on either side.

    ``predicted_ms`` is the gain that BASE named, from its least to its most, and ``likely_ms`` the likely one
    where it was replayed. A bound starts at 0.
    """

    rule_id: str
    title: str
    state: str
    base_message: str = ""
    head_message: str = ""
    predicted_ms: tuple[float, float] | None = None
    likely_ms: float | None = None


def finding_changes(base: Diagnosis, head: Diagnosis) -> tuple[FindingChange, ...]:
    """Return the findings of both sides, those about the capture left out: fixed, new, persisting.

    A rule that HEAD could not judge is not "fixed": it is left out.
    """
    before, after = _by_rule(base), _by_rule(head)
    judged = {
        verdict.rule_id
        for verdict in head.verdicts
        if verdict.outcome in ("pass", "not_applicable", "yielded")
    }
    found = []
    for rule_id, finding in before.items():
        other = after.get(rule_id)
        if other is None and rule_id not in judged:
            continue
        gain = finding.gain
        found.append(
            FindingChange(
                rule_id,
                finding.title,
                "fixed" if other is None else "persisting",
                finding.message,
                other.message if other is not None else "",
                (gain.low_ms, gain.high_ms) if gain is not None else None,
                gain.likely_ms if gain is not None else None,
            )
        )
    found += [
        FindingChange(rule_id, finding.title, "new", "", finding.message)
        for rule_id, finding in after.items()
        if rule_id not in before
    ]
    return tuple(sorted(found, key=lambda change: (STATES.index(change.state), -_most(change))))


def _by_rule(diagnosis: Diagnosis) -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    for finding in diagnosis.findings:
        if finding.topic != "capture":
            found.setdefault(finding.rule_id, finding)
    return found


def _most(change: FindingChange) -> float:
    return change.predicted_ms[1] if change.predicted_ms is not None else 0.0
