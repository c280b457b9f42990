"""What the ledger decides: which findings stand, their order, severity and gain, and what no rule tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import Finding, Gain, Verdict
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import (
    AWAITED,
    BETWEEN_RANKS,
    COVERED,
    TOO_SMALL,
    WARM_UP,
    WARNING_SHARE,
    WORTH_DOUBLING,
    Judgement,
    plain_finding,
    severity_by_ledger,
    warm_up_frac,
)
from tracedoc.judge.overlaps import (
    DELAYING,
    WAIT,
    alone_ms_of,
    in_order,
    same_time,
    saved_after,
    waits_behind,
    with_overlap,
)
from tracedoc.judge.rule import Rule
from tracedoc.judge.wording import before_full_stop
from tracedoc.ledger import (
    INHERENT,
    SHARED_ABOVE,
    UNSPLIT,
    WORTH,
    Ledger,
    LedgerCause,
    Range,
    is_mostly_shared,
)
from tracedoc.topics.step.rank import step_ms
from tracedoc.units import format_ms, format_percent
from tracedoc.whatif.larger_batch import larger_batch, per_step_causes
from tracedoc.whatif.ledger import play_together

ALIKE = 0.5
"""A cause without a known fix comes after one that has one, where that costs at least this share of it."""

WITHIN = ("link.slow",)
"""Causes that a rule about their whole family does not tell, though they bound its gain: they have a mend of
their own."""


class _Claim(msgspec.Struct, frozen=True):
    """A finding with what its causes cost the mean step in ms, before others are heard.

    Of its ``causes`` it has its ``own`` wholly. ``size_ms`` is its rule's own bound, ``conditions`` by how
    many comparisons it was told. ``saves`` is what mending saves where that is more than its causes cost, of
    which ``surely_ms`` decides, and ``unknown`` why that is not known.
    """

    finding: Finding
    rule: Rule
    causes: tuple[LedgerCause, ...]
    own: tuple[LedgerCause, ...]
    share_ms: float
    size_ms: float
    conditions: int
    saves: Range | None = None
    surely_ms: float = 0.0
    unknown: str = ""

    @property
    def order(self) -> tuple[bool, int, int, float, int, str]:
        """A log of the whole run speaks first, and causes before time.

        Of causes the costliest, of times the narrowest, and of those that name the same that which is less of
        it as a whole; then more conditions.
        """
        captured = not _beyond(self.rule)
        if self.rule.tells == "time":
            return captured, 1, len(self.causes), len(self.own), -self.conditions, self.finding.id
        return captured, 0, 0, -round(self.share_ms, 6), -self.conditions, self.finding.id


class _Priced(msgspec.Struct, frozen=True):
    """A finding that stands, with its causes and what they cost the mean step in ms.

    It is ``unknown`` if no rule tells it and no fix is known.
    """

    finding: Finding
    causes: tuple[LedgerCause, ...] = ()
    share_ms: float = 0.0
    conditions: int = 0
    unknown: bool = False

    @property
    def order(self) -> tuple[bool, float, float, int, str]:
        """By the cost as it is told, notes last; of those that hide each other, by their parts."""
        told_ms = self.finding.size_ms
        weight = (self.share_ms if told_ms is None else told_ms) * (ALIKE if self.unknown else 1.0)
        is_note = self.finding.severity == "note"
        return is_note, -round(weight, 6), -self.share_ms, -self.conditions, self.finding.id


def _named(names: Sequence[str], ledger: Ledger, but: Sequence[str] = WITHIN) -> tuple[LedgerCause, ...]:
    """The entries of the ledger that ids name, and families, ``but`` some that only their ids name."""
    return tuple(
        one
        for one in ledger.causes
        if one.id in names or (one.id not in but and any(one.id.startswith(f"{name}.") for name in names))
    )


def causes_of(rule: Rule, ledger: Ledger) -> tuple[LedgerCause, ...]:
    """The entries of the ledger that a rule names, in whole or in part."""
    return _named((*rule.cause, *rule.part_of), ledger)


def _beyond(rule: Rule) -> bool:
    """Whether a rule speaks of what is in no ledger: a log of the whole run."""
    return not rule.needs


class _Dropped(msgspec.Struct, frozen=True):
    """Why a finding does not stand: the outcome of its verdict, and the rules that tell its causes."""

    outcome: str
    reason: str
    tellers: tuple[str, ...] = ()


class _Hearing:
    """Hears findings one after the other: ``told`` are the rules that tell each entry by now."""

    def __init__(self, ledger: Ledger, measurements: Measurements) -> None:
        self._ledger, self._measurements = ledger, measurements
        self._left = {one.id: one.share_ms for one in ledger.causes}
        self._ranks: dict[str, set[int]] = {}
        self.told: dict[str, list[str]] = {}

    def _left_ms(self, claim: _Claim) -> dict[str, float]:
        """What of the entries of a finding nobody tells yet, in ms by id.

        Of ranks that are late each is told by itself.
        """
        left: dict[str, float] = {}
        for one in claim.causes:
            others = self._ranks.get(one.id)
            apart = claim.rule.scope == "rank" and others and others.isdisjoint(claim.finding.ranks)
            left[one.id] = one.share_ms if apart else self._left[one.id]
        return left

    def _take(self, claim: _Claim, left: Mapping[str, float]) -> float:
        """What a finding tells of its entries, in ms: the whole of its causes, a part of the others.

        The part is what its rule bounds, of the first that it names before the next; of all of them where
        that is a log's. An entry counts as told by a rule that has half of it.
        """
        rule = claim.rule
        gain = claim.finding.gain
        of = gain.mean_step_ms if _beyond(rule) and gain is not None else None
        size = claim.size_ms * (self._ledger.step_ms / of if of else 1.0)
        groups = [rule.cause + rule.part_of] if _beyond(rule) else [(name,) for name in rule.part_of]
        mine_ms = {} if _beyond(rule) else {one.id: left[one.id] for one in claim.own}
        for names in groups:
            named = _named(names, self._ledger) if claim.causes else ()
            rest = {one.id: left[one.id] for one in named if one.id not in mine_ms}
            whole = sum(rest.values())
            part = min(size / whole, 1.0) if whole > 0 else 0.0
            mine_ms |= {id: part * ms for id, ms in rest.items()}
            size -= part * whole
        for one in claim.causes:
            mine = mine_ms[one.id]
            self._left[one.id] = max(self._left[one.id] - mine, 0.0)
            if mine >= COVERED * one.share_ms:
                self.told.setdefault(one.id, []).append(claim.rule.id)
                if one.id.startswith("ranks.") and claim.rule.scope == "rank":
                    self._ranks.setdefault(one.id, set()).update(claim.finding.ranks)
        return sum(mine_ms.values())

    def heard(self, claim: _Claim) -> _Priced | _Dropped:
        """A finding after those that speak before it: as it stands, or why it does not."""
        rule, finding, ledger, measurements = claim.rule, claim.finding, self._ledger, self._measurements
        left, least = self._left_ms(claim), WORTH * ledger.step_ms
        if _beyond(rule):
            self._take(claim, left)
            return _Priced(finding, (), claim.size_ms, claim.conditions)
        if claim.unknown:
            return _Dropped("unknown", claim.unknown)
        alone = claim.saves or alone_ms_of(claim.causes, measurements)
        # Of causes either of which gives all, each has half of the share.
        if max(claim.share_ms, alone[0] if rule.cause else 0.0) < least:
            costs = f"{format_ms(claim.share_ms)} of the {format_ms(ledger.step_ms)} step"
            return _Dropped("pass", f"it costs {costs}, less than {format_percent(WORTH)}")
        if claim.saves and claim.surely_ms < WORTH_DOUBLING * ledger.step_ms:
            costs = f"{format_ms(claim.surely_ms)} of the {format_ms(ledger.step_ms)} step"
            return _Dropped("pass", f"twice the batch surely saves no more than {costs}")
        free = min(sum(left.values()), claim.share_ms)
        if claim.saves:
            free = claim.share_ms - sum(one.share_ms - left[one.id] for one in claim.causes)
        tellers = tuple(dict.fromkeys(rule for one in claim.causes for rule in self.told.get(one.id, ())))
        if delays := _delayed_by(claim, ledger):
            tellers = tuple(self.told.get(delays.id, (delays.id,)))
            return _Dropped("yielded", f"it is late because of the {delays.words}", tellers)
        own_ms = sum(one.share_ms for one in claim.own)
        if rule.cause and not claim.saves and own_ms < least and free < COVERED * claim.size_ms:
            return _Dropped("pass", f"other causes cost most of its {format_ms(claim.size_ms)}")
        if tellers and free < (1 - COVERED) * claim.share_ms:
            tell = "tells" if len(tellers) == 1 else "tell"
            told = f"{format_ms(claim.share_ms - free)} of its {format_ms(claim.share_ms)}"
            return _Dropped("yielded", f"{' and '.join(tellers)} {tell} {told}", tellers)
        mine = tuple(one for one in claim.causes if left[one.id] >= COVERED * one.share_ms)
        bounds = _named((*rule.cause, *rule.part_of), ledger, ())
        most_ms = alone[2] if bounds == claim.causes else alone_ms_of(bounds, measurements)[2]
        if mine != claim.causes and not claim.saves:
            alone = alone_ms_of(mine, measurements)
        share = self._take(claim, left)
        share = claim.saves[1] if claim.saves else share
        severity = severity_by_ledger(rule, mine, share, alone, finding.confidence, ledger, measurements)
        gain = _gain(claim, alone, max(most_ms, alone[2], 0.0), ledger, measurements)
        likely = gain.likely_ms if gain is not None else None
        if likely is None and share >= sum(one.share_ms for one in mine) > 0:
            likely = alone[1]
        kept = replace(finding, severity=severity, gain=gain, cost_ms=share, alone_ms=likely)
        alone_on = [one.ranks for one in mine if one.id.partition(".")[0] not in BETWEEN_RANKS]
        if rule.scope == "run" and mine and len(alone_on) == len(mine) and all(alone_on):
            kept = replace(kept, ranks=tuple(sorted(set().union(*alone_on))))
        kept = _on_every_rank(kept, mine, measurements)
        return _Priced(kept, () if claim.saves else mine, share, claim.conditions)


def concluded(
    judgement: Judgement, ledger: Ledger, measurements: Measurements, left_out: Sequence[Rule] = ()
) -> tuple[Judgement, Ledger]:
    """The findings as the ledger has them, and the ledger with the rules that tell each cause.

    A finding whose causes cost less than :data:`WORTH` of the step is dropped, and one gives way to others
    that tell most of its causes; severity, order and gain are those of its causes. A cause that no finding
    tells is one of its own, unless it is for a rule of ``left_out``, which the user did not choose, to tell.
    Findings of rules that name no cause follow those of their severity that do.

    Without a ledger findings stand as their rules bound them, but for those that are bounded to little.
    """
    if not ledger.step_ms:
        return _as_bounded(judgement, measurements), ledger
    hearing = _Hearing(ledger, measurements)
    claims, others = _claims(judgement, ledger, measurements)
    priced_alone = (one for one in claims if not (one.saves or one.unknown or _beyond(one.rule)))
    play_together(measurements.run, [[cause.id for cause in one.causes] for one in priced_alone])
    priced = [_Priced(one) for one in others]
    dropped: dict[str, _Dropped] = {}
    warm_up = warm_up_frac(ledger, measurements)
    unseen: tuple[str, ...] = BETWEEN_RANKS if measurements.run.left_out else ()
    unseen += AWAITED if any(one.id == UNSPLIT for one in ledger.causes) else ()
    for claim in sorted(claims, key=lambda one: one.order):
        heard: _Priced | _Dropped
        families = {one.id.partition(".")[0] for one in claim.causes}
        if warm_up and not set(claim.rule.cause) & {*WARM_UP}:
            heard = _Dropped("pass", f"{format_percent(warm_up)} of the step is warm-up, unlike later ones")
        elif families and families <= {*unseen} and claim.rule.gain is None:
            heard = _Dropped("unknown", "it may be waiting for peers, which this capture does not tell")
        else:
            heard = hearing.heard(claim)
        if isinstance(heard, _Dropped):
            dropped[claim.rule.id] = heard
        else:
            priced.append(heard)

    def told_plainly(cause: LedgerCause) -> _Priced:
        """A cause that no rule tells, as a finding of its own."""
        hearing.told[cause.id] = [cause.id]
        plain = plain_finding(cause, ledger, measurements, judgement)
        return _Priced(plain, (cause,), cause.share_ms, unknown=not plain.fixes)

    known = {*hearing.told, *(one.id for rule in left_out for one in causes_of(rule, ledger))}
    along: dict[str, list[LedgerCause]] = {}
    untold: list[LedgerCause] = []
    for cause in in_order(ledger):
        unsettled = warm_up or (cause.id.partition(".")[0] in unseen and cause.id != UNSPLIT)
        if cause.id in known or unsettled:
            continue
        # What saves little alone is told where its share makes it a warning, or what it costs after others.
        least = WORTH if cause.alone_ms[1] >= WORTH * ledger.step_ms else WARNING_SHARE
        # Of two either of which gives all, each has half of it.
        costs_ms = cause.alone_ms[0] if is_mostly_shared(cause) else 0.0
        if max(cause.share_ms, costs_ms) < least * ledger.step_ms:
            untold.append(cause)
        elif same := same_time(cause, ledger, hearing.told, [one.finding for one in priced]):
            hearing.told[cause.id] = same
            along.setdefault(same[0], []).append(cause)
        else:
            priced.append(told_plainly(cause))
    after_others = saved_after([*hearing.told], untold, measurements)
    priced += [
        told_plainly(cause)
        for cause, ms in zip(untold, after_others, strict=True)
        if ms >= WARNING_SHARE * ledger.step_ms
    ]
    verdicts = tuple(_as_dropped(one, dropped.get(one.rule_id)) for one in judgement.verdicts)
    causes = tuple(replace(one, told_by=tuple(hearing.told.get(one.id, ()))) for one in ledger.causes)
    priced = [_with_same_time(one, along.get(one.finding.rule_id, []), measurements) for one in priced]
    priced = [
        replace(one, finding=with_overlap(one.finding, one.causes, causes, measurements)) for one in priced
    ]
    priced.sort(key=lambda one: one.order)
    ordered = waits_behind([one.finding for one in priced], replace(ledger, causes=causes))
    findings = tuple(_in_place(one, dropped, judgement.rules) for one in ordered)
    return replace(judgement, findings=findings, verdicts=verdicts), replace(ledger, causes=causes)


def _as_bounded(judgement: Judgement, measurements: Measurements) -> Judgement:
    """The findings with bounds that are worth telling, as they are; times of a CPU run bound nothing."""
    step = measurements.value(step_ms)
    least_ms = WORTH * step if isinstance(step, float) and not measurements.is_cpu else 0.0
    dropped: dict[str, _Dropped] = {}
    for one in judgement.findings:
        rule = judgement.rules[one.rule_id]
        if rule.cause and rule.gain is None:
            dropped[rule.id] = _Dropped("unknown", "what it costs is known from a replay only")
        elif one.gain is not None and one.gain.size_ms < least_ms:
            size = f"{format_ms(one.gain.size_ms)} of the {format_ms(least_ms / WORTH)} step"
            dropped[rule.id] = _Dropped("pass", f"it costs at most {size}, less than {format_percent(WORTH)}")
    verdicts = tuple(_as_dropped(one, dropped.get(one.rule_id)) for one in judgement.verdicts)
    findings = tuple(
        replace(one, severity="note") if {*judgement.rules[one.rule_id].cause} & {*INHERENT} else one
        for one in judgement.findings
        if one.rule_id not in dropped
    )
    return replace(judgement, findings=findings, verdicts=verdicts)


def _delayed_by(claim: _Claim, ledger: Ledger) -> LedgerCause | None:
    """What makes the communication late whose time a finding tells.

    It costs the same time, and saves no less: where the host waits, what it calls afterwards is late.
    """
    largest = max(claim.causes, key=lambda one: one.share_ms, default=None)
    if largest is None or claim.rule.tells != "time" or not is_mostly_shared(largest):
        return None
    return next(
        (
            one
            for one in ledger.causes
            if one.id == largest.shared_with
            and largest.id.partition(".")[0] in AWAITED
            and one.id.partition(".")[0] in DELAYING
            and one.share_ms >= WORTH * ledger.step_ms
            and one.alone_ms[1] >= largest.alone_ms[1]
        ),
        None,
    )


def _with_same_time(priced: _Priced, along: Sequence[LedgerCause], measurements: Measurements) -> _Priced:
    """A finding that also tells causes of the same time: at most it saves what all of them give together.

    Likely as well, where that is more than the same; at least it is what its own causes give. A finding that
    tells parts of causes stays as it is bounded.
    """
    finding, gain = priced.finding, priced.finding.gain
    if not along or gain is None or gain.basis != "ledger":
        return priced
    _, likely, high = alone_ms_of((*priced.causes, *along), measurements)
    if likely <= SHARED_ABOVE * (finding.alone_ms or 0.0):
        likely = gain.size_ms
    else:
        finding = replace(finding, alone_ms=likely)
    gain = replace(gain, likely_ms=likely, high_ms=max(gain.high_ms, high))
    return replace(priced, finding=replace(finding, gain=gain))


def _on_every_rank(finding: Finding, causes: Sequence[LedgerCause], measurements: Measurements) -> Finding:
    """A finding seen on one rank whose causes all ranks share: the others wait while it is late.

    What one rank does more than the others is a cause of its own, and where it is these as well they cost
    little once all others are gone, as what follows a wait of the host does.
    """
    shared = all(
        not one.ranks
        and one.id.partition(".")[0] not in BETWEEN_RANKS
        and (one.last_ms >= COVERED * one.share_ms or one.shared_with == WAIT)
        for one in causes
    )
    if not shared or not causes or len(finding.ranks) != 1 or len(measurements.ranks) < 2:
        return finding
    (worst,) = finding.ranks
    worst_of_all = f"every rank; rank {worst} is the worst"
    says = before_full_stop(finding.says, worst_of_all) if finding.says else worst_of_all
    message = before_full_stop(finding.message, "the other ranks have the cause as well")
    return replace(finding, ranks=measurements.ranks, says=says, message=message)


def _claims(
    judgement: Judgement, ledger: Ledger, measurements: Measurements
) -> tuple[list[_Claim], list[Finding]]:
    """The findings that name causes, with what these cost, and the others."""
    conditions = {one.rule_id: len(one.comparisons) for one in judgement.verdicts}
    claims: list[_Claim] = []
    others: list[Finding] = []
    for finding in judgement.findings:
        rule = judgement.rules[finding.rule_id]
        if rule.severity or not (rule.cause or rule.part_of):
            others.append(finding)
            continue
        if rule.tells == "batch":
            rule = replace(rule, cause=per_step_causes(measurements.run, rule.cause))
        size = finding.bound_ms
        whole = _named(rule.cause, ledger)
        part = sum(one.share_ms for one in _named(rule.part_of, ledger))
        share = sum(one.share_ms for one in whole) + min(part, size)
        causes, told_by = causes_of(rule, ledger), conditions[rule.id]
        saves, unknown, surely_ms = None, "", 0.0
        if rule.tells == "batch" and (doubled := larger_batch(measurements.run, rule.cause)) is not None:
            saves = doubled.saves
            surely_ms = saves[0] if doubled.rate_is_known else saves[1]
        elif rule.tells == "batch":
            unknown = "what twice the batch saves is not predicted"
        if saves is not None and saves[0] < TOO_SMALL * ledger.step_ms:
            causes, whole, share = (), (), saves[1]
        elif saves is not None and saves[1] <= share:
            saves = None
        share = share if saves is None else saves[1]
        claims.append(_Claim(finding, rule, causes, whole, share, size, told_by, saves, surely_ms, unknown))
    return claims, others


def _as_dropped(verdict: Verdict, dropped: _Dropped | None) -> Verdict:
    """The verdict of a rule whose finding does not stand."""
    if dropped is None:
        return verdict
    instances = tuple(
        replace(one, outcome=dropped.outcome) if one.outcome == "finding" else one
        for one in verdict.instances
    )
    return replace(verdict, outcome=dropped.outcome, reason=dropped.reason, instances=instances)


def _in_place(finding: Finding, dropped: Mapping[str, _Dropped], rules: Mapping[str, Rule]) -> Finding:
    """A finding of a rule in preview, with the stable rules that gave way to it."""
    if finding.status == "stable":
        return finding
    behind = [name for name, one in dropped.items() if finding.rule_id in one.tellers]
    return replace(finding, in_place_of=tuple(one for one in behind if rules[one].status == "stable"))


def _gain(
    claim: _Claim, alone_ms: Range, most_ms: float, ledger: Ledger, measurements: Measurements
) -> Gain | None:
    """What the causes of a finding give; of a part of them its rule's bound.

    At most it is what all that it names gives, ``most_ms``, whoever tells that, and what can hide it. On CPUs
    a part is as its rule bounds it over all ranks: the analysed step is one of many that differ. Of a
    mean step that is shorter it is the same share.
    """
    gain = claim.finding.gain
    if not claim.rule.cause:
        if gain is None or (measurements.is_cpu and gain.mean_step_ms is not None):
            return gain
        if measurements.is_cpu:
            analysed = measurements.value(step_ms)
            if isinstance(analysed, float) and analysed > ledger.step_ms:
                gain = replace(gain, high_ms=gain.high_ms * ledger.step_ms / analysed)
            return gain
        bound = claim.rule.gain
        hides = measurements.facts.get((bound.behind if bound is not None else None) or "")
        hides_ms = hides.value if hides is not None and isinstance(hides.value, float) else most_ms
        return replace(gain, high_ms=min(gain.high_ms, most_ms, hides_ms))
    if claim.rule.part_of:
        most_ms = min(
            most_ms, max(alone_ms_of(_named(claim.rule.cause, ledger), measurements)[2], claim.size_ms)
        )
    low, likely, _ = alone_ms
    assumptions = () if gain is None else gain.assumptions
    return Gain(min(low, most_ms), most_ms, "ledger", assumptions, min(likely, most_ms))
