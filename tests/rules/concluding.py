"""Judgements and ledgers by hand, to conclude from: of a step of 100 ms, so that ms are per cent of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tracedoc.diagnosis import Comparison, Finding, Fix, Gain, Verdict
from tracedoc.facts.catalog import NEEDS, Fact, Measurement
from tracedoc.facts.measure_run import Availability, Measurements
from tracedoc.judge.findings import Judgement
from tracedoc.judge.ledgered import concluded
from tracedoc.judge.rule import AtMost, Rule
from tracedoc.ledger import Ledger, LedgerCause, Range
from tracedoc.predicted import Predicted
from tracedoc.ranks.run_view import build_run_view


def measured(*, is_cpu: bool = False, confidence: str = "high", step_ms: float = 100.0) -> Measurements:
    available = {need: Availability("present") for need in NEEDS}
    length = Fact("step_ms", "ms", "run", frozenset(), "run", lambda view: step_ms)
    facts = {"step_ms": Measurement(length, step_ms, {})}
    return Measurements(facts, available, confidence, is_cpu, (0, 1, 2, 3), (3, 4), build_run_view((), None))


def rule(rule_id: str, **changes: object) -> Rule:
    fields: dict[str, object] = {
        "id": rule_id,
        "title": rule_id,
        "topic": "communication",
        "status": "stable",
        "since": "1.0",
        "scope": "run",
        "needs": frozenset({"kernels"}),
        "when": "a > 1",
        "message": "It is so.",
        "why": "Physics.",
        "gain": AtMost("comm_ms", "all of it hides"),
    }
    return Rule(**(fields | changes))  # type: ignore[arg-type]


def finding(rule_id: str, bound_ms: float, *fixes: Fix, severity: str = "note") -> Finding:
    return Finding(
        id=rule_id,
        rule_id=rule_id,
        severity=severity,
        confidence="high",
        title=rule_id,
        message="It is so.",
        why="Physics.",
        topic="communication",
        ranks=(0, 1, 2, 3),
        steps=(3, 4),
        evidence=(),
        gain=Gain(0.0, bound_ms, "ceiling", ("all of it goes",)),
        fixes=fixes,
    )


def fix(title: str, gain_ms: Range | None, framework: str = "any", replays: str = "faster-link") -> Fix:
    if gain_ms is None:
        return Fix(framework, title, "", "none")
    low, likely, high = gain_ms
    step_ms = (100 - high, 100 - likely, 100 - low)
    predicted = Predicted(replays, step_ms, gain_ms, "compute", "high", ("played",))
    return Fix(framework, title, "", "none", replays=replays, predicted=predicted)


def cause(cause_id: str, share_ms: float, alone_ms: Range | None = None, **changes: object) -> LedgerCause:
    alone = (share_ms, share_ms, share_ms) if alone_ms is None else alone_ms
    return LedgerCause(cause_id, share_ms, alone, share_ms, **changes)  # type: ignore[arg-type]


def conclude(
    causes: Sequence[LedgerCause],
    *pairs: tuple[Rule, Finding],
    of: Measurements | None = None,
    left_out: Sequence[Rule] = (),
    comparisons: Mapping[str, tuple[Comparison, ...]] = MappingProxyType({}),
) -> tuple[Judgement, Ledger]:
    ideal = 100.0 - sum(one.share_ms for one in causes)
    ledger = Ledger(100.0, ideal, 0.0, tuple(causes), (3, 4), "high")
    judgement = Judgement(
        tuple(found for _, found in pairs),
        tuple(Verdict(one.id, "finding", comparisons.get(one.id, ())) for one, _ in pairs),
        rules={one.id: one for one, _ in pairs},
    )
    return concluded(judgement, ledger, of or measured(), left_out)


def severities(judgement: Judgement) -> list[tuple[str, str]]:
    return [(one.rule_id, one.severity) for one in judgement.findings]
