"""Causes that overlap: what several give together, and which one hides a finding or costs the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tracedoc.diagnosis import Finding
from tracedoc.facts.measure_run import Measurements
from tracedoc.ledger import CAUSE_WORDS, Ledger, LedgerCause, Range, is_apart
from tracedoc.whatif.ledger import alone_of

MOSTLY_SHARED = 0.8
"""A cause is told by what tells another, where that saves at least this share of what mending it saves."""

MORE = 0.1
"""A limit behind another is told where mending both saves more than either by this share of what it costs."""


def alone_ms_of(causes: Sequence[LedgerCause], measurements: Measurements) -> Range:
    """How much shorter the step is without these causes together: low, likely and high, in ms."""
    if len(causes) == 1:
        return causes[0].alone_ms
    found = alone_of(measurements.run, tuple(one.id for one in causes)) if causes else None
    return found or (0.0, 0.0, 0.0)


def with_overlap(
    finding: Finding,
    causes: Sequence[LedgerCause],
    entries: Sequence[LedgerCause],
    measurements: Measurements,
) -> Finding:
    """A finding with the cause that hides the largest of its ``causes``, or costs the same time as that.

    ``entries`` are all causes, with the rules that tell them: mending two findings is mending all that these
    tell.
    """
    largest = max(causes, key=lambda one: one.share_ms, default=None)
    other = "" if largest is None else largest.partner or largest.shared_with
    mine = {one.id for one in causes} | {one.id for one in entries if finding.rule_id in one.told_by}
    if largest is None or not other or other in mine:
        return finding
    if not largest.partner and not is_apart(largest.share_ms, largest.alone_ms[1]):
        return finding
    words = CAUSE_WORDS.get(other, other)
    tellers = {rule for one in entries if one.id == other for rule in one.told_by}
    theirs = {other, *(one.id for one in entries if tellers & {*one.told_by})} - mine
    alone, beside, both = (
        (alone_of(measurements.run, tuple(sorted(ids))) or (0.0, 0.0, 0.0))[1]
        for ids in (mine, theirs, mine | theirs)
    )
    if not largest.partner:
        shared_ms = min(max(alone + beside - both, 0.0), finding.size_ms or 0.0)
        return replace(finding, overlaps=words, shared_ms=shared_ms) if shared_ms else finding
    if both - max(alone, beside) < MORE * largest.share_ms:
        return finding
    return replace(finding, overlaps=words, together_ms=both)


def same_time(cause: LedgerCause, told: Mapping[str, list[str]]) -> list[str]:
    """The rules that tell the cause whose mending saves most of what mending this one does; [] for none.

    ``told`` has the rules by the id of the cause.
    """
    return told.get(cause.shared_with, []) if is_mostly_shared(cause) else []


def is_mostly_shared(cause: LedgerCause) -> bool:
    """True where mending another cause saves most of what mending this one does.

    Of time that two causes share each has half as its part, which is so much less than what it saves alone.
    """
    shared_ms = 2 * (cause.alone_ms[1] - cause.share_ms)
    return shared_ms >= MOSTLY_SHARED * cause.alone_ms[1] > 0


def tells(finding: Finding, words: str, ledger: Ledger | None) -> bool:
    """True for a finding that tells the cause of some words."""
    causes = ledger.causes if ledger is not None else ()
    return any(one.words == words and finding.rule_id in one.told_by for one in causes)


def costs_same_time(finding: Finding, other: Finding, ledger: Ledger) -> bool:
    """True where mending one of two findings saves most of what mending the other does."""
    shared, costs = finding.shared_ms, [one.size_ms for one in (finding, other) if one.size_ms is not None]
    if shared is None or len(costs) < 2 or not tells(other, finding.overlaps, ledger):
        return False
    return shared >= MOSTLY_SHARED * min(costs)
