"""Say the answer in one line: the cause in its usual name, what it costs, and the step that its fix gives."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tracedoc.diagnosis import Finding, Fix, RunInfo
from tracedoc.errors import Limit
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import Judgement, warm_up_frac
from tracedoc.judge.fixes import FEWER_BITS, change_of_batch, changes_training, fitting_first, saves_nothing
from tracedoc.judge.without_warning import (
    compute_bound,
    cost_ms,
    cost_words,
    healthy,
    is_compute_bound,
    is_told,
    lost_compute,
    number,
    pair_words,
)
from tracedoc.ledger import INHERENT, PACED_BY_HOST, UNSPLIT, Ledger, Range
from tracedoc.predicted import LEAST_SHARE, SAME_SAMPLES, PlanStep, as_runs_differ
from tracedoc.step.rank_digest import RankDigest
from tracedoc.topics.capture.run import cuda_graph_launches, unprofiled_step_ms
from tracedoc.topics.host.run import queued_idle_ms
from tracedoc.topics.step.rank import step_ms
from tracedoc.topics.step.run import own_frac
from tracedoc.topics.straggler.rank import foreign_turns_ms
from tracedoc.units import format_ms, format_percent, format_ranges, format_step_change, lowered
from tracedoc.whatif.ledger import alone_of
from tracedoc.whatif.predictions import cooled_ms

NAMED_FINDINGS = 2
"""The line names this many findings; the report has the rest."""

NAMED_FIXES = 3
"""A plan of so many fixes is named whole."""

WORTH_NAMING = 0.05
"""A finding that only low confidence makes a note is named from this share of the step."""

MOSTLY_QUEUED = 0.30
"""With more idle time than this behind work that was launched, kernels are missing, and no cause is named."""


def summarise(
    measurements: Measurements,
    judgement: Judgement,
    *,
    run: RunInfo,
    limits: Sequence[Limit],
    ledger: Ledger | None = None,
    plan: Sequence[PlanStep] = (),
    rules_left_out: int = 0,
) -> str:
    """The first line of every report.

    ``rules_left_out`` are those that the user did not select: without them nothing is called healthy.
    Rules that ended in an error are named where no cause is.
    """
    findings = judgement.findings
    step = number(measurements, step_ms)
    if step is None:
        return f"No answer: {_why_nothing(measurements.run.digests)}."
    if ledger is not None and ledger.step_ms:
        step = ledger.step_ms
    if step == 0:
        return "No answer: what was recorded takes no time."
    if unreliable := _why_unreliable(measurements, limits, step, ledger):
        return f"No diagnosis: {unreliable}."
    caution = _caution(measurements)
    worth = [one for one in findings if (one.gain is not None or one.says) and one.severity != "note"]
    if not worth and caution and not measurements.is_cpu:
        large = [one for one in findings if one.bound_ms >= WORTH_NAMING * step]
        worth = [one for one in large if one.rule_id not in INHERENT]
    if worth:
        pairs = [one for one in worth if one.is_pair]
        told = [rule for one in pairs for rule in ledger.told_by(one.overlaps)] if ledger is not None else []
        named = [one for one in worth if one.told_ms is not None or one.rule_id not in told][:NAMED_FINDINGS]
        inside = all(one.topic == "compute" for one in named) and is_compute_bound(measurements, step)
        lost = lost_compute(ledger, step) if inside else ()
        apart = [one for one in named if not is_told(one, lost)]
        said = [_cause(measurements, one, step, None if one is apart[0] else apart[0]) for one in apart]
        if inside:
            said.insert(0, compute_bound(measurements, run, step, lost))
        of_batch = {one.id for one in judgement.rules.values() if one.tells == "batch"}
        small = next((one for one in findings if one.rule_id in of_batch), None)
        sentences = [
            *said,
            _inherent(findings, named, ledger, run, {one.title for one in plan}),
            outcome(
                measurements,
                findings,
                named,
                plan,
                run=run,
                ledger=ledger,
                step=step,
                small_batch=small,
            ),
        ]
    elif rules_left_out:
        judged = len(judgement.verdicts)
        which = f"{judged} of {judged + rules_left_out} rules judged"
        found = "no finding" if not findings else "only minor findings"
        sentences = [f"{which}: {found} in the {format_ms(step)} step."]
    else:
        sentences = [healthy(measurements, findings, run, step, ledger)]
    failed = [one.rule_id for one in judgement.verdicts if one.outcome == "error"]
    if failed and not worth:
        which = "rule" if len(failed) == 1 else "rules"
        sentences.append(f"The {which} {', '.join(failed)} failed and could not be judged.")
    return " ".join(one for one in (*sentences, caution) if one)


def host_profiled(measurements: Measurements, ledger: Ledger | None) -> tuple[Limit, ...]:
    """That the profiler slows the host, where GPUs wait for it and no step was timed without the profiler."""
    step = number(measurements, step_ms)
    if ledger is None or measurements.is_cpu or not step:
        return ()
    paced = sum(one.share_ms for one in ledger.causes if one.id in PACED_BY_HOST)
    timed = any(isinstance(unprofiled_step_ms(one), float) for one in measurements.run.job.ranks)
    if timed or paced < WORTH_NAMING * step:
        return ()
    effect = "part of what the host costs may be the profiler's; time a step without it"
    return (Limit("host-profiled", "no step is timed without the profiler, which slows the host", effect),)


def _caution(measurements: Measurements) -> str:
    """The reason for low confidence of the answer, in brackets; "" where it has not."""
    if measurements.confidence != "low":
        return ""
    if not measurements.steps:
        return "(Low confidence: no complete step was captured.)"
    return "(Low confidence: the capture is small or incomplete; the limits below say how.)"


def _why_unreliable(
    measurements: Measurements, limits: Sequence[Limit], step: float, ledger: Ledger | None
) -> str:
    """The reason not to trust the step's split, or "": kernels are missing, or it is no warm step."""
    queued = (number(measurements, queued_idle_ms) or 0.0) - (number(measurements, foreign_turns_ms) or 0.0)
    if any(limit.code == "lost-kernels" for limit in limits):
        return "kernels that were launched are missing from the trace, so what looks idle may not be"
    if warm_up := warm_up_frac(ledger, measurements):
        share = f"for {format_percent(warm_up)} of the {format_ms(step)} step"
        return f"{share} code is loaded or compiled for the first time; capture later steps"
    if queued > MOSTLY_QUEUED * step:
        share = format_percent(queued / step)
        graphs = number(measurements, cuda_graph_launches)
        why = (
            "kernels of CUDA graphs may be missing from the trace"
            if graphs
            else "the capture shows no reason"
        )
        return f"for {share} of the step work was queued and nothing ran; {why}"
    return ""


def _cause(measurements: Measurements, finding: Finding, step: float, before: Finding | None) -> str:
    """A finding in one sentence: its usual name, what it costs beyond those before it, and what shows it.

    Of another mean step than the one ``before`` it is a share.
    """
    costs, title = cost_words(finding), finding.title.partition(": ")[0]
    # Of a log of the whole run; ``None`` for captured steps.
    mean, other = (
        None if one is None or one.gain is None else one.gain.mean_step_ms for one in (finding, before)
    )
    if before is not None and mean != other:
        size = cost_ms(finding)
        costs = costs.replace(format_ms(size), f"{format_percent(size / (mean or step))} of a step")
    elif costs and before is None:
        costs += f" of the {format_ms(step)} step" if mean is None else f" of {format_ms(mean)} a step"
    if costs and finding.is_pair:
        costs += "; each hides the other"
    elif costs and before is not None and before.beyond_ms is not None and finding.beyond_ms is not None:
        costs = f"another {costs}" if finding.beyond_ms >= LEAST_SHARE * step else "the same time"
    name = title + pair_words(finding) + _place(measurements, finding) + (f" ({costs})" if costs else "")
    told = f"{name}: {finding.says}" if finding.says else name
    return f"{told}."


def _inherent(
    findings: Sequence[Finding],
    named: Sequence[Finding],
    ledger: Ledger | None,
    run: RunInfo,
    planned: Collection[str],
) -> str:
    """What the strategy itself costs, and its fix if it is not planned, where that is the most; else "".

    Nothing where it is named among the causes.
    """
    largest = ledger.causes[0] if ledger is not None and ledger.causes else None
    if largest is None or largest.id not in INHERENT or {one.rule_id for one in named} & {*largest.told_by}:
        return ""
    teller = next((one for one in findings if one.rule_id in largest.told_by), None)
    told_ms = largest.share_ms if teller is None else teller.told_ms or largest.share_ms
    fix = next(iter(fitting_first(teller.fixes, run)), None) if teller is not None else None
    mended = f": {lowered(fix.title)}{_step_with(fix)}" if fix and fix.title not in planned else ""
    return f"Another {format_ms(told_ms)} is {largest.words}, which equal stages have as well{mended}."


def _place(measurements: Measurements, finding: Finding) -> str:
    ranks = finding.ranks
    if len(measurements.run.digests) == 1 or not ranks or len(ranks) == len(measurements.ranks):
        return ""
    said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranges(ranks[:8])}"
    if said in finding.says:
        return ""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f" on {said}{more}"


def _why_nothing(digests: Sequence[RankDigest]) -> str:
    """The reason why there is no device time, from the limits of the traces."""
    limits = [limit for digest in digests for limit in digest.limits]
    for code in (
        "no-gpu-activity",
        "unknown-device",
        "lost-kernels",
        "lost-thread",
        "gpu-ended-early",
        "clock-went-back",
    ):
        for limit in limits:
            if limit.code == code:
                return limit.words
    if any(digest.cut for digest in digests):
        return "no step is known to be whole"
    return "no step and no device activity is in these traces"


# -- what the step becomes with the fixes


def outcome(
    measurements: Measurements,
    findings: Sequence[Finding],
    named: Sequence[Finding],
    plan: Sequence[PlanStep],
    *,
    run: RunInfo,
    ledger: Ledger | None,
    step: float,
    small_batch: Finding | None = None,
) -> str:
    """The step with the fixes, in words: the plan, else the first fix, else without the causes named.

    A fix that changes the batch is named beside one that does not, where it gives more: than the plan, or,
    where the first finding is ``small_batch``, of a batch that is too small, than its other fix alone. It is
    that of the first finding, else of this one.
    """
    first, of_batch = next(iter(fitting_first(named[0].fixes, run)), None), named[0] is small_batch
    batch = change_of_batch(named[0], run)
    or_batch = change_of_batch(small_batch, run) if batch is None and small_batch is not None else batch
    if plan:
        alone = first.predicted if first is not None and of_batch and not changes_training(first) else None
        than = plan[-1].step_ms[1] if alone is None else alone.step_ms[1]
        other = _or_batch(or_batch, than) or _after_plan(findings, step)
        return f"{_plan_words(plan, findings, step)}{other}."
    if first is not None and first.predicted is not None and not saves_nothing(first):
        after = first.predicted.step_ms
        same_work = SAME_SAMPLES if changes_training(first) else ""
        also = "" if changes_training(first) else _or_batch(or_batch, after[1])
        change = format_step_change(first.predicted.before_ms, after)
        precision = " (it changes the precision)" if first.replays.startswith(FEWER_BITS) else ""
        return f"{first.title}{precision}: {change}{same_work}{also}."
    if first is not None and batch is not None and batch.predicted is not None and first.predicted is None:
        change = format_step_change(batch.predicted.before_ms, batch.predicted.step_ms)
        if ledger is not None and any(one.id == UNSPLIT and one.told_by for one in ledger.causes):
            return f"{first.title}; if no peer is late, {lowered(batch.title)}: {change}{SAME_SAMPLES}."
        return f"{batch.title}: {change}{SAME_SAMPLES}; for what is left, {lowered(first.title)}."
    if first is not None and all(one.gain is None for one in named):
        return f"{first.title}: what that saves cannot be told from this run."
    return _without(measurements, named, ledger, step, first)


def _plan_words(plan: Sequence[PlanStep], findings: Sequence[Finding], step: float) -> str:
    change = format_step_change(step, plan[-1].step_ms)
    if len(plan) > NAMED_FIXES:
        return f"{plan[0].title}, and {len(plan) - 1} more fixes (the plan): {change}"
    if len(plan) > 1:
        return f"{', then '.join((plan[0].title, *(lowered(one.title) for one in plan[1:])))}: {change}"
    return f"{plan[0].title}{_number_of(plan[0].fix.rpartition('/')[0], findings)}: {change}"


def _or_batch(fix: Fix | None, other_step_ms: float) -> str:
    """The fix that changes the batch as an alternative, where it gives more; else ""."""
    if fix is None or fix.predicted is None:
        return ""
    if fix.predicted.step_ms[1] > other_step_ms - LEAST_SHARE * fix.predicted.before_ms:
        return ""
    return f"; or {lowered(fix.title)}{_step_with(fix)}"


def _step_with(fix: Fix) -> str:
    """The step with a fix, as far as it was played and helps: ": about 1.2 s (1.1 to 1.5)"."""
    if fix.predicted is None or not fix.predicted.helps:
        return ""
    after = _step_then(fix.predicted.step_ms, fix.predicted.before_ms)
    return f": {after}{SAME_SAMPLES if changes_training(fix) else ''}"


def _step_then(step_ms: Range, today_ms: float) -> str:
    """A predicted step with its range, in the unit of today's: "about 1.2 s (1.1 to 1.5)"."""
    return format_step_change(today_ms, step_ms).partition("-> ")[2]


def _after_plan(findings: Sequence[Finding], step: float) -> str:
    """The fix that helps only after the plan, with the step then; else ""."""
    for fix in (fix for one in findings for fix in one.fixes):
        if fix.after_plan_ms is not None:
            return f", then {lowered(fix.title)}: {_step_then(fix.after_plan_ms, step)}"
    return ""


def _without(
    measurements: Measurements, named: Sequence[Finding], ledger: Ledger | None, step: float, fix: Fix | None
) -> str:
    """The step without the causes of the first finding, as it is played, else its bound; "" for no change.

    It is told of the first ``fix``, which takes them away in part or in whole; not as what a fix gives that
    replays would tell, and cannot or do not.
    """
    finding, gain = named[0], named[0].gain
    causes = (
        () if ledger is None else tuple(one.id for one in ledger.causes if finding.rule_id in one.told_by)
    )
    saved = alone_of(measurements.run, causes) if causes and gain and gain.likely_ms is not None else None
    if ledger is not None and saved is not None and saved[1] > 0:
        of = ledger.step_ms
        run = measurements.run
        sure = as_runs_differ(saved, of, own_frac(run), cooled_ms(run, causes))
        low, likely, high = sure if measurements.is_cpu else saved
        change = format_step_change(of, (max(of - high, 0.0), max(of - likely, 0.0), max(of - low, 0.0)))
    elif gain is not None and gain.high_ms > 0:
        of = gain.mean_step_ms or step
        change = f"{format_ms(of)} -> {format_ms(max(of - gain.high_ms, 0.0))} at best"
    else:
        return ""
    if fix is not None and not saves_nothing(fix):
        if saved and fix.replays:
            return f"{fix.title} (without the cause {change})."
        return f"{fix.title}: {change}." if saved else f"{fix.title} ({change})."
    return f"Without {'it' if len(named) == 1 else 'the first'}: {change}."


def _number_of(finding_id: str, findings: Sequence[Finding]) -> str:
    """The number under which a finding is listed, in brackets; "" for the first."""
    listed = [one.id for one in findings if not (one.topic == "capture" and one.gain is None)]
    place = listed.index(finding_id) + 1 if finding_id in listed else 1
    return f" (finding {place})" if place > 1 else ""
