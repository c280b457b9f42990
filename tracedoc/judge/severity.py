"""How severe a finding is, by what the ledger says of its causes."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import SEVERITIES
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.rule import Rule
from tracedoc.ledger import INHERENT, WORTH, Ledger, LedgerCause, Range
from tracedoc.topics.host.rank import recompiling_steps

CRITICAL_SHARE = 0.15
WARNING_SHARE = 0.05
"""A finding is critical or a warning from this share of the step on."""

COVERED = 0.5
"""A finding gives way where others tell at least this share of what its causes cost, and a cause is told
where findings stand for at least this share of it."""

UNSURE = "low"
"""The confidence of a ledger whose replay misses the step: what no rule tells is then a note at most."""

BY_DEFAULT = ("compute.fusion", "compute.small_kernels", "compute.padding")
"""Causes that every script has which is not compiled, or packs no samples: what is mostly for them is a level
less severe."""

TOO_SMALL = 0.25
"""Where twice the batch saves less than this share of the step, more than half of it grows with the batch:
it is told as a note then, beside what costs the step."""

WORTH_DOUBLING = 0.075
"""A small batch is told where twice of it surely saves this share of the step, of which 15 % is then the same
for any batch: with less, larger ones have it as well."""

WARM_UP = ("host.first_calls", "host.compile")
"""Causes that a job pays once."""

MOSTLY_WARM_UP = 0.5
"""Of a step that is warm-up for more than this share nothing else is told: later ones are not like it."""

_WORST_BY_CONFIDENCE = {"high": "critical", "medium": "warning", "low": "note"}


def severity_by_share(share: float, confidence: str) -> str:
    """The severity of what costs a share of the step, 0 to 1, as far as confidence allows."""
    by_share = "critical" if share >= CRITICAL_SHARE else "warning" if share >= WARNING_SHARE else "note"
    return max(by_share, _WORST_BY_CONFIDENCE[confidence], key=SEVERITIES.index)


def severity_by_ledger(
    rule: Rule | None,
    causes: Sequence[LedgerCause],
    share_ms: float,
    alone_ms: Range,
    confidence: str,
    ledger: Ledger,
    measurements: Measurements,
) -> str:
    """By the lower end of what mending saves alone, or the share of the step where a partner hides that.

    Of such a pair the one that saves more alone weighs its share, for both: mending both gives both, and the
    other one saves nothing before. The middle between the lower end and what is likely makes a warning at
    most.
    """
    if causes and all(one.id in INHERENT for one in causes):
        return "note"
    weight = alone_ms[0]
    if rule is not None and rule.part_of:
        weight = min(share_ms, weight)
    if any(_leads_pair(one, ledger) for one in causes):
        weight = max(share_ms, weight)
    confidence = UNSURE if rule is None and ledger.confidence == UNSURE else confidence
    middle = (weight + min(share_ms, alone_ms[1])) / 2
    likely = severity_by_share(middle / ledger.step_ms, confidence)
    least = severity_by_share(weight / ledger.step_ms, confidence)
    severity = min(least, max(likely, "warning", key=SEVERITIES.index), key=SEVERITIES.index)
    by_default = sum(one.share_ms for one in causes if one.id in BY_DEFAULT)
    if by_default and by_default >= COVERED * sum(one.share_ms for one in causes):
        severity = SEVERITIES[min(SEVERITIES.index(severity) + 1, SEVERITIES.index("note"))]
    if rule is not None and rule.tells == "batch" and alone_ms[0] < TOO_SMALL * ledger.step_ms:
        severity = "note"
    return "note" if measurements.is_cpu and (rule is None or rule.on_cpu == "capped") else severity


def _leads_pair(cause: LedgerCause, ledger: Ledger) -> bool:
    """True for a cause that hides another, or is hidden by it, and saves more alone than that one."""
    least = WORTH * ledger.step_ms
    return any(
        (one.id == cause.partner or (one.partner == cause.id and one.share_ms >= least))
        and one.id not in INHERENT
        and (one.alone_ms[1], one.share_ms) <= (cause.alone_ms[1], cause.share_ms)
        for one in ledger.causes
    )


def warm_up_frac(ledger: Ledger | None, measurements: Measurements) -> float:
    """The share of the step in which code is loaded or compiled, where that is most of it; else 0.

    It is 0 for a job that compiles again in step after step: that is no warm-up.
    """
    again = measurements.value(recompiling_steps)
    if ledger is None or not ledger.step_ms or (isinstance(again, int) and again > 1):
        return 0.0
    share = sum(one.share_ms for one in ledger.causes if one.id in WARM_UP) / ledger.step_ms
    return share if share > MOSTLY_WARM_UP else 0.0
