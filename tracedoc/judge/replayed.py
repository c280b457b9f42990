"""Replay the fixes of all findings: their predicted steps, the gains of findings, and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from tracedoc.diagnosis import Finding, Fix, Gain, RunInfo
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import Judgement
from tracedoc.judge.fixes import (
    LONGEST_PLAN,
    NOT_PLANNED,
    change_of_batch,
    changes_training,
    fitting_first,
    misfits,
    saves_nothing,
)
from tracedoc.judge.ledgered import causes_of
from tracedoc.judge.overlaps import costs_same_time
from tracedoc.judge.rule import Rule
from tracedoc.judge.wording import JUDGED_RANK
from tracedoc.ledger import SHARED_ABOVE, Ledger, Range
from tracedoc.play.run_replay import Refusal, RunReplay
from tracedoc.predicted import LEAST_SHARE, PlanStep, Predicted, ReplayReport, as_runs_differ
from tracedoc.topics.step.run import own_frac
from tracedoc.whatif.answer import after, as_predicted, on_more_ranks, replay_report
from tracedoc.whatif.changes.registry import CHANGES, Request, parse_request
from tracedoc.whatif.ledger import book_of
from tracedoc.whatif.predictions import Prediction, cooled_ms, predict, run_replay

SHARED = "share-work"
ALIKE = ("even-rank", "even-ranks", SHARED)
HELD_ON_CPUS = (*ALIKE, "cap-buckets")
"""Changes that make ranks alike, or messages larger."""


def with_predictions(
    judgement: Judgement, measurements: Measurements, ledger: Ledger, run: RunInfo
) -> tuple[Judgement, ReplayReport, tuple[PlanStep, ...]]:
    """The judgement with every fix that can be replayed predicted, how that was done, and the plan.

    The gain of a finding is then that of the fix that stands first, at most what its causes cost.
    """
    judgement = _as_of_the_job(judgement, ledger, measurements)
    replay = run_replay(measurements.run)
    report = replay_report(replay)
    if isinstance(replay, Refusal):
        return judgement, report, ()
    named = [_of_one_rank(one) for one in judgement.findings]
    requests = {str(one): one for one in _requests(named).values()}
    alone = _predictions(replay, [], requests, ledger)
    today = ledger.step_ms or replay.step_ms
    known = {text: as_predicted([requests[text]], one, today) for text, one in alone.items()}
    findings = []
    for finding in named:
        finding = _predicted(finding, known, measurements)
        rule = judgement.rules.get(finding.rule_id)
        late = _is_of_ranks(rule) and not measurements.is_cpu
        finding = _of_mean_step(finding, ledger) if late else finding
        findings.append(_priced(finding, rule, run, ledger))
    # Shares of time of a CPU run prove little: a note is not planned with.
    planned = [one for one in findings if not measurements.is_cpu or one.severity != "note"]
    plan = make_plan(replay, [_fitting(finding, run) for finding in planned], alone, ledger)
    told = as_planned(_after_plan(replay, findings, plan, ledger), plan, ledger)
    plan = plan if is_worth_it(plan, told, run) else ()
    report = replace(report, more_ranks=on_more_ranks(replay, today))
    return replace(judgement, findings=tuple(told)), report, plan


def _as_of_the_job(judgement: Judgement, ledger: Ledger, measurements: Measurements) -> Judgement:
    """The findings with gains that were played as sure as captured steps are of the job's, and CPU runs.

    What late ranks cost is known of all captured steps, with how far these tell of others.
    """
    findings, captured = [], (ledger.step_ms, own_frac(measurements.run))
    replays = book_of(measurements.run).replays
    for one in judgement.findings:
        if (gain := one.gain) is not None and gain.likely_ms is not None:
            low, likely, high = gain.low_ms, gain.likely_ms, gain.high_ms
            if measurements.is_cpu:
                of = (gain.mean_step_ms, (1.0, 1.0)) if gain.mean_step_ms else captured
                causes = [cause.id for cause in ledger.causes if one.rule_id in cause.told_by]
                cooled = cooled_ms(measurements.run, causes)
                low, likely, high = as_runs_differ((low, likely, high), *of, cooled)
            elif replays and not _is_of_ranks(judgement.rules.get(one.rule_id), one.rule_id):
                error = replays[0].mean_error_ms(likely)
                low, high = low - error, max(min(high + error, ledger.step_ms), high)
            one = replace(one, gain=replace(gain, low_ms=max(low, 0.0), high_ms=high))
        findings.append(one)
    return replace(judgement, findings=tuple(findings))


def _is_of_ranks(rule: Rule | None, cause: str = "") -> bool:
    """True for a rule about late ranks, or a finding without one about such a cause."""
    causes = rule.cause if rule is not None else (cause,)
    return bool(causes) and all(one.partition(".")[0] == "ranks" for one in causes)


def _of_mean_step(finding: Finding, ledger: Ledger) -> Finding:
    """A finding about late ranks, whose fixes bring them in time in all steps, of which one was replayed.

    Each fix saves its part of what the best one does, which is what the ranks cost the mean step. Work that
    is shared saves less: what one rank has less of the others have more.
    """
    gain = finding.gain
    if gain is None or gain.likely_ms is None:
        return finding
    shared = [fix for fix in finding.fixes if fix.replays.startswith(SHARED)]
    predicted = [fix.predicted for fix in finding.fixes if fix.predicted is not None and fix not in shared]
    best = max((one.gain_ms[1] for one in predicted), default=0.0)
    fixes = []
    for fix in finding.fixes:
        if fix.predicted is not None and fix not in shared:
            part = max(fix.predicted.gain_ms[1] / best, 0.0) if best > 0 else 1.0
            low, likely, high = (part * ms for ms in (gain.low_ms, gain.likely_ms, gain.high_ms))
            gain_ms = (low, likely, high)
            in_time = replace(fix.predicted, gain_ms=gain_ms, step_ms=after(gain_ms, ledger.step_ms))
            fix = replace(fix, predicted=in_time)
        fixes.append(fix)
    return replace(finding, fixes=tuple(fixes))


def _priced(finding: Finding, rule: Rule | None, run: RunInfo, ledger: Ledger) -> Finding:
    """The finding with the gain of the fix that stands first, where that was played and helps.

    At most it is what the causes cost; what they cost is not told where the fix gives more, as of a cause of
    which the rule tells a part, unless no other tells that cause. A larger batch is counted per unit of
    today's work, which the causes of a rule do not bound; of others it is not the gain.
    """
    first = next(iter(fitting_first(finding.fixes, run)), None)
    if first is None or first.predicted is None or saves_nothing(first):
        return finding
    if changes_training(first) and (rule is None or rule.tells == "time"):
        return finding
    low, likely, high = (max(ms, 0.0) for ms in first.predicted.gain_ms)
    more = False
    if not changes_training(first):
        high = max(high, finding.gain.high_ms if finding.gain is not None else 0.0)
        more = likely > SHARED_ABOVE * max(finding.cost_ms or 0.0, finding.alone_ms or 0.0)
        tells_all = any(one.told_by == (finding.rule_id,) for one in ledger.causes)
        more &= not (rule is not None and rule.part_of and tells_all)
    gain = Gain(low, high, "replay", first.predicted.assumptions, likely)
    if not more:
        return replace(finding, gain=gain)
    parts = [] if rule is None else [one for one in causes_of(rule, ledger) if one.id not in rule.cause]
    counted = parts[0].words if parts else ""
    return replace(finding, gain=gain, cost_ms=None, overlaps=counted, together_ms=None, shared_ms=None)


def _predictions(
    replay: RunReplay, after: Sequence[Request], requests: Mapping[str, Request], ledger: Ledger
) -> dict[str, Prediction]:
    """The prediction of each change on top of others, where it can be made.

    At best it leaves the ideal step, or what is likely: that step is ideal for this batch, and larger ones
    may take less for the same samples.
    """
    answers = predict(replay, [[*after, one] for one in requests.values()])
    found = zip(requests.items(), answers, strict=True)
    most = 1.0 - ledger.ideal_ms / ledger.step_ms if ledger.step_ms else 1.0
    predicted = {}
    for (text, request), answer in found:
        if isinstance(answer, Prediction):
            low, likely, high = answer.gain_ms
            if all(CHANGES[one.name].units == 1 for one in (*after, request)):
                high = min(high, max(likely, most * answer.of_ms))
            predicted[text] = replace(answer, gain_ms=(low, likely, high))
    return predicted


def _requests(findings: Sequence[Finding]) -> dict[tuple[str, int], Request]:
    """The change of each fix that has one, by finding and number of the fix."""
    return {
        (finding.id, number): parse_request(fix.replays)
        for finding in findings
        for number, fix in enumerate(finding.fixes)
        if fix.replays
    }


def _of_one_rank(finding: Finding) -> Finding:
    """A finding whose fixes of the rank that is judged are of that rank, or, of several, not replayed."""
    (rank,) = finding.ranks if len(finding.ranks) == 1 else ("",)
    return replace(
        finding,
        fixes=tuple(
            replace(one, replays=one.replays.replace(JUDGED_RANK, str(rank)) if rank != "" else "")
            if JUDGED_RANK in one.replays
            else one
            for one in finding.fixes
        ),
    )


def _predicted(finding: Finding, known: Mapping[str, Predicted], measurements: Measurements) -> Finding:
    """A finding with the prediction of each fix that was played."""
    fixes = list(finding.fixes)
    for (_, number), request in _requests([finding]).items():
        if (predicted := known.get(str(request))) is not None:
            fixes[number] = _with_prediction(finding, fixes[number], predicted, measurements)
    return replace(finding, fixes=tuple(fixes))


def _with_prediction(finding: Finding, fix: Fix, predicted: Predicted, measurements: Measurements) -> Fix:
    """The fix with its prediction, or as one that is not replayed.

    Ranks on CPUs slow each other down by chance; a bound over all steps knows that, the replay of one step
    does not; nor what gloo takes for a message of another size. So there the bound of what makes ranks alike,
    or messages larger, stands against a larger prediction: where it says what is saved at least, the
    prediction is brought within it, else there is none. Neither is replayed on top of other fixes.
    """
    bound = finding.gain
    unsure = measurements.is_cpu and predicted.change.split()[0] in HELD_ON_CPUS
    if not unsure or bound is None or predicted.gain_ms[1] <= bound.size_ms:
        return replace(fix, predicted=predicted)
    if bound.low_ms <= 0 and predicted.change.split()[0] in ALIKE:
        return replace(fix, replays="")
    return replace(fix, replays="", predicted=_within(predicted, bound))


def _within(predicted: Predicted, bound: Gain) -> Predicted:
    """A prediction whose gain is at most that of a bound, and as unsure."""
    low, likely, high = predicted.gain_ms
    gains = (min(low, bound.low_ms), min(likely, bound.size_ms), min(high, bound.high_ms))
    return replace(predicted, step_ms=after(gains, predicted.before_ms), gain_ms=gains)


def _fitting(finding: Finding, run: RunInfo) -> Finding:
    """The finding whose fixes are replayed only where none fits the job better."""
    distances = misfits(finding.fixes, run.strategy.name, run.frameworks)
    kept = fitting_first(finding.fixes, run)
    replayed = [far for far, fix in zip(distances, finding.fixes, strict=True) if fix.replays and fix in kept]
    fixes = tuple(
        fix if fix in kept and far == min(replayed, default=0) else replace(fix, replays="")
        for far, fix in zip(distances, finding.fixes, strict=True)
    )
    return replace(finding, fixes=fixes)


def make_plan(
    replay: RunReplay, findings: Sequence[Finding], alone: Mapping[str, Prediction], ledger: Ledger
) -> tuple[PlanStep, ...]:
    """The fixes in the order in which they pay, each replayed on top of those before it.

    ``alone`` are the predictions of all changes of these findings that can be made.

    Of the fixes of one finding, and of fixes that change the same, one is taken. The next is the one that
    saves most at the least after those before; the plan ends where none likely gives a hundredth of the step.
    """
    of_ms = ledger.step_ms or replay.step_ms
    candidates = {place: one for place, one in _requests(findings).items() if one.name not in NOT_PLANNED}
    titles = {(finding.id, n): fix.title for finding in findings for n, fix in enumerate(finding.fixes)}
    chosen: list[Request] = []
    plan: list[PlanStep] = []
    saved: Range = (0.0, 0.0, 0.0)
    while candidates and len(plan) < LONGEST_PLAN:
        distinct = {str(one): one for one in candidates.values()}
        found = (
            _predictions(replay, chosen, distinct, ledger)
            if chosen
            else {text: alone[text] for text in distinct if text in alone}
        )
        least = saved[1] + LEAST_SHARE * replay.step_ms
        worth = [text for text, one in found.items() if one.gain_ms[1] >= least]
        best = max(worth, key=lambda text: found[text].gain_ms[:2], default=None)
        if best is None:
            break
        place = next(place for place, one in candidates.items() if str(one) == best)
        gain_ms = found[best].saves(of_ms)
        plan.append(
            PlanStep(
                fix=f"{place[0]}/{place[1]}",
                title=titles[place],
                change=best,
                step_ms=after(gain_ms, of_ms),
                gain_ms=_beyond(gain_ms, saved),
                then_limited_by=found[best].limited_by,
                replay_of_step_ms=of_ms,
            )
        )
        chosen.append(distinct[best])
        saved = gain_ms
        candidates = {
            other: one
            for other, one in candidates.items()
            if other[0] != place[0] and one.name != distinct[best].name
        }
    return tuple(plan)


def _after_plan(
    replay: RunReplay, findings: Sequence[Finding], plan: Sequence[PlanStep], ledger: Ledger
) -> list[Finding]:
    """The findings whose fixes, not planned and without a use by themselves, have the step after the plan."""
    useless = {
        str(request): request
        for finding in findings
        for (_, number), request in _requests([finding]).items()
        if request.name in NOT_PLANNED and saves_nothing(finding.fixes[number])
    }
    chosen = [parse_request(one.change) for one in plan]
    of_ms = ledger.step_ms or replay.step_ms
    least = plan[-1].step_ms[1] - LEAST_SHARE * of_ms if plan else 0.0
    found = _predictions(replay, chosen, useless, ledger) if plan and useless else {}
    most = plan[-1].step_ms[1] if plan else 0.0
    steps = {text: after(one.saves(of_ms), of_ms) for text, one in found.items()}
    steps = {text: (low, likely, min(high, most)) for text, (low, likely, high) in steps.items()}
    steps = {text: step_ms for text, step_ms in steps.items() if step_ms[1] <= least}
    told = []
    for one in findings:
        fixes = list(one.fixes)
        for (_, number), request in _requests([one]).items() if steps else ():
            fixes[number] = replace(fixes[number], after_plan_ms=steps.get(str(request)))
        told.append(replace(one, fixes=tuple(fixes)))
    return told


def as_planned(findings: list[Finding], plan: Sequence[PlanStep], ledger: Ledger) -> list[Finding]:
    """The findings; of two that cost mostly the same time that first which the plan mends first.

    No note comes before what is none.
    """
    place = {one.fix.rpartition("/")[0]: number for number, one in enumerate(plan)}
    ordered = list(findings)
    for number, (first, then) in enumerate(pairwise(findings)):
        if (
            (first.severity == "note") == (then.severity == "note")
            and place.get(then.id, LONGEST_PLAN) < place.get(first.id, -1)
            and costs_same_time(first, then, ledger)
        ):
            ordered[number : number + 2] = then, first
    return ordered


def is_worth_it(plan: Sequence[PlanStep], findings: Sequence[Finding], run: RunInfo) -> bool:
    """Whether a plan mends the first finding, or saves as much without it, or half of what the batch does."""
    if not plan or not findings or any(one.fix.startswith(f"{findings[0].id}/") for one in plan):
        return True
    gain, batch = findings[0].gain, change_of_batch(findings[0], run)
    least = 0.0 if gain is None else gain.size_ms or gain.high_ms
    if batch is not None and batch.predicted is not None:
        least = min(least, batch.predicted.gain_ms[1] / 2)
    return plan[-1].replay_of_step_ms - plan[-1].step_ms[1] >= least


def _beyond(gain_ms: Range, saved: Range) -> Range:
    """The gain of a fix in ms beyond what those before it ``saved``, reading by reading."""
    low, likely, high = sorted(one - other for one, other in zip(gain_ms, saved, strict=True))
    return low, likely, high
