"""Causes that overlap: what several give together, or in turn, and which one hides or shares a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf

from msgspec.structs import replace

from tracedoc.diagnosis import Finding
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import AWAITED, Judgement
from tracedoc.ledger import (
    CAUSE_WORDS,
    MOSTLY_SHARED,
    Ledger,
    LedgerCause,
    LedgerRow,
    Range,
    is_apart,
    is_mostly_shared,
)
from tracedoc.predicted import LEAST_SHARE
from tracedoc.whatif.ledger import alone_of, likely_of

MORE = 0.1
"""A limit behind another is told where mending both saves more than either by this share of what it costs."""

WAIT = "host.sync"

DELAYING = ("input", "host", "ranks")
"""Families of causes that make communication late."""


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


def same_time(
    cause: LedgerCause, ledger: Ledger, told: Mapping[str, list[str]], findings: Sequence[Finding]
) -> list[str]:
    """The rules that tell the cause whose mending saves most of what mending this one does; [] for none.

    Some of it is enough where one of the ``findings`` names the same function. ``told`` has the rules by the
    id of the cause. Messages that a wait makes late count with that cause: a
    wait before a pause and a gather is of both, one before copies and a late rank of neither. What a host, a
    loader or a rank does behind a wait is another thing to mend.
    """
    tellers = told.get(cause.shared_with, [])
    named = [one.rule_id for one in findings if cause.place.startswith("`") and cause.place in one.says]
    if same := [one for one in tellers if one in named]:
        return same
    if not is_mostly_shared(cause) or (cause.shared_with == WAIT and _family(cause) in DELAYING):
        return []
    saved_ms = sum(
        one.alone_ms[1]
        for one in ledger.causes
        if one.id == cause.shared_with or (one.shared_with == cause.id and _family(one) in AWAITED)
    )
    return tellers if saved_ms >= MOSTLY_SHARED * cause.alone_ms[1] else []


def _family(cause: LedgerCause) -> str:
    return cause.id.partition(".")[0]


def in_order(ledger: Ledger) -> list[LedgerCause]:
    """The causes, the largest first; a wait of the host behind what follows it, where both are one time."""
    shares = {one.id: one.share_ms for one in ledger.causes}

    def place(cause: LedgerCause) -> tuple[float, bool]:
        waits = _costs_what_follows(cause)
        return -shares[cause.shared_with if waits else cause.id], waits

    return sorted(ledger.causes, key=place)


def _costs_what_follows(cause: LedgerCause) -> bool:
    """True for a wait of the host that costs what the host, a loader or a rank does behind it."""
    return cause.id == WAIT and cause.shared_with.partition(".")[0] in DELAYING and is_mostly_shared(cause)


def waits_behind(findings: list[Finding], ledger: Ledger) -> list[Finding]:
    """The findings, a wait right behind what a rule tells of what follows it, where either saves the same.

    A warning stays before notes.
    """
    wait = next((one for one in ledger.causes if _costs_what_follows(one)), None)
    first = None if wait is None else next((one for one in findings if one.rule_id in wait.told_by), None)
    if wait is None or first is None:
        return findings
    least_ms = (first.size_ms or 0.0) - LEAST_SHARE * ledger.step_ms
    followed = {rule for one in ledger.causes if one.id == wait.shared_with for rule in one.told_by}
    followed -= {wait.shared_with}  # in plain words
    same = [
        one.rule_id in followed
        and (one.size_ms or 0.0) > least_ms
        and (first.severity == "note" or one.severity != "note")
        for one in findings
    ]
    place = max(same.index(True), findings.index(first)) if any(same) else findings.index(first)
    rest = [one for one in findings if one is not first]
    return [*rest[:place], first, *rest[place:]]


def costs_same_time(finding: Finding, other: Finding, ledger: Ledger) -> bool:
    """True where mending one of two findings saves most of what mending the other does."""
    shared, costs = finding.shared_ms, [one.size_ms for one in (finding, other) if one.size_ms is not None]
    if shared is None or len(costs) < 2 or other.rule_id not in ledger.told_by(finding.overlaps):
        return False
    return shared >= MOSTLY_SHARED * min(costs)


def saved_after(
    told: Sequence[str], causes: Sequence[LedgerCause], measurements: Measurements
) -> list[float]:
    """What mending each of some causes saves, in ms, after those that are told and those before it."""
    sets = list(accumulate(((one.id,) for one in causes), tuple.__add__, initial=tuple(told)))
    saved = likely_of(measurements.run, sets)
    return [ms - before for ms, before in zip(saved[1:], saved, strict=False)]


def mended_in_turn(
    judgement: Judgement, ledger: Ledger, measurements: Measurements
) -> tuple[Judgement, Ledger]:
    """The findings with what each saves after those before it, and the ledger with its rows.

    A cause is mended with the first finding that tells it; of two findings that hide each other with the one
    that comes first. Those that none tells follow, the largest first, as far as they are worth a row.
    """
    groups: list[LedgerRow] = []
    taken: set[str] = set()
    for finding in judgement.findings:
        told = [one for one in ledger.causes if finding.rule_id in one.told_by]
        rule = judgement.rules.get(finding.rule_id)
        most_ms = sum(one.share_ms for one in told) if rule is not None and rule.tells == "batch" else inf
        if finding.cost_ms is None or finding.cost_ms > most_ms:  # its fix mends more than its own causes
            continue
        if ids := tuple(one.id for one in told if one.id not in taken):
            taken |= {*ids}
            pair = (one for one in judgement.findings if hide_each_other(one, finding, ledger))
            place = _place(groups, next(pair, finding))
            if place is not None and not groups[place].hidden:
                groups[place] = replace(groups[place], causes=groups[place].causes + ids, hidden=finding.id)
            else:
                groups.append(LedgerRow(ids, 0.0, finding.id))
    groups += [
        LedgerRow((one.id,), 0.0)
        for one in ledger.causes
        if one.id not in taken and one.share_ms >= LEAST_SHARE * ledger.step_ms
    ]
    sets = list(accumulate((one.causes for one in groups), tuple.__add__))
    saved = likely_of(measurements.run, sets)
    first = judgement.findings[0] if judgement.findings else None
    if first is not None and groups[:1] and groups[0] == LedgerRow(groups[0].causes, 0.0, first.id):
        saved[0] = min(saved[0] if first.alone_ms is None else first.alone_ms, *saved)
    rows = tuple(
        replace(row, saves_ms=ms - before)
        for row, ms, before in zip(groups, saved, [0.0, *saved], strict=False)
        if row.finding or ms - before >= LEAST_SHARE * ledger.step_ms
    )
    findings = tuple(_in_turn(one, rows) for one in judgement.findings)
    return replace(judgement, findings=findings), replace(ledger, rows=rows)


def hide_each_other(first: Finding, second: Finding, ledger: Ledger) -> bool:
    """True for two findings of which each hides the other: mending one saves little, mending both more."""
    if first.together_ms is None or second.together_ms is None or first is second:
        return False
    mine, theirs = ledger.told_by(first.overlaps), ledger.told_by(second.overlaps)
    return second.rule_id in mine and first.rule_id in theirs


def _place(rows: Sequence[LedgerRow], finding: Finding) -> int | None:
    return next((place for place, row in enumerate(rows) if row.finding == finding.id), None)


def _in_turn(finding: Finding, rows: Sequence[LedgerRow]) -> Finding:
    """A finding with what its row saves; one that is hidden by that of another counts with it."""
    for row in rows:
        if row.hidden == finding.id:
            return replace(finding, cost_ms=None, together_ms=None)
        if row.finding == finding.id:
            together_ms = row.saves_ms if row.hidden else finding.together_ms
            return replace(finding, beyond_ms=row.saves_ms, together_ms=together_ms)
    return finding
