"""Bring back findings that yielded to sharper ones which save far less than they."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from tracedoc.diagnosis import Finding
from tracedoc.rules.engine import Judgement, Yielded, worst_first

NEAR = 1 / 3
"""A sharper finding speaks for the same time where it saves at least this share of what the other does."""

NEAR_A_BOUND = 1 / 10
"""The same where the other was not replayed: its bound may be far above what it saves."""


def with_lost_causes(judgement: Judgement, predicted: Callable[[Finding], Finding]) -> Judgement:
    """Return the judgement with findings that yielded to others which save far less.

    Notes stay away: what they save is small, or not sure. ``predicted`` gives a finding its gain by replay,
    and is asked where the bound alone would bring a finding back. Findings without a gain have no say in
    this, on either side. The gains of ``judgement.findings`` are those that they end with.
    """
    gains = {one.rule_id: one.gain.size_ms for one in judgement.findings if one.gain is not None}
    # A replay makes a gain smaller than its bound, hardly ever larger.
    back = [one for one in judgement.yielded if _is_lost(one.finding, one, gains, NEAR)]
    back = [replace(one, finding=predicted(one.finding)) for one in back]
    back = [one for one in back if _is_lost(one.finding, one, gains, _near(one.finding))]
    if not back:
        return judgement
    restored = {one.verdict.rule_id: one.verdict for one in back}
    return replace(
        judgement,
        findings=tuple(sorted([*judgement.findings, *(one.finding for one in back)], key=worst_first)),
        verdicts=tuple(restored.get(one.rule_id, one) for one in judgement.verdicts),
        times={**judgement.times, **{one.finding.id: one.times for one in back}},
        yielded=tuple(one for one in judgement.yielded if one.verdict.rule_id not in restored),
    )


def _near(finding: Finding) -> float:
    return NEAR if finding.gain is not None and finding.gain.basis == "replay" else NEAR_A_BOUND


def _is_lost(finding: Finding, of: Yielded, gains: Mapping[str, float], near: float) -> bool:
    if finding.severity == "note" or finding.gain is None or any(one not in gains for one in of.to):
        return False
    return max((gains[one] for one in of.to), default=0.0) < near * finding.gain.size_ms
