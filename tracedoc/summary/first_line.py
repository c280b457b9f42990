"""Say the answer in one line: the cause in its usual name, what it costs, and the step that its fix gives."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, RunInfo
from tracedoc.errors import Limit
from tracedoc.facts.measure_run import Measurements
from tracedoc.predicted import PlanStep
from tracedoc.step.rank_digest import RankDigest
from tracedoc.summary.figures import gain_ms, gain_words, number
from tracedoc.summary.losses import uncovered_loss
from tracedoc.summary.outcome import outcome
from tracedoc.summary.without_warning import compute_bound, healthy, is_compute_bound
from tracedoc.units import format_ms, format_percent, format_ranges
from tracedoc.whatif.combined import Times, repeats

NAMED_FINDINGS = 2
"""The line names this many findings; the report has the rest."""

WORTH_NAMING = 0.05
"""A finding that only low confidence makes a note is named from this share of the step."""

MOSTLY_QUEUED = 0.30
"""With more idle time than this behind work that was launched, kernels are missing, and no cause is named."""


def summarise(
    measurements: Measurements,
    findings: Sequence[Finding],
    times: Times,
    *,
    run: RunInfo,
    limits: Sequence[Limit],
    plan: Sequence[PlanStep] = (),
    rules_left_out: int = 0,
    rules_judged: int = 0,
    rules_failed: Sequence[str] = (),
) -> str:
    """Return the first line of every report.

    ``rules_left_out`` are those that the user did not select: without them nothing is called healthy.
    ``rules_failed`` are the ids of rules that ended in an error; they are named where no cause is.
    """
    step = number(measurements, "step_ms")
    if step is None:
        return f"No answer: {_why_nothing(measurements.run.digests)}."
    if step == 0:
        return "No answer: what was recorded takes no time."
    if unreliable := _why_unreliable(measurements, limits, step):
        return f"No diagnosis: {unreliable}."
    caution = _caution(measurements)
    gainful = [one for one in findings if one.gain is not None and one.gain.size_ms > 0]
    worth = [one for one in gainful if one.severity != "note"]
    if not worth and caution and not measurements.is_cpu:
        worth = [one for one in gainful if gain_ms(one) >= WORTH_NAMING * step]
    if worth:
        named = _named(worth, times)
        said = [_cause(measurements, finding) for finding in named]
        if all(one.topic == "compute" for one in named) and is_compute_bound(measurements, step):
            said.insert(0, compute_bound(measurements, run, step))
        loss = uncovered_loss(measurements, named, step)
        sentences = [*said, *loss, outcome(measurements, findings, named, times, plan, run=run, step=step)]
    elif rules_left_out:
        all_rules = rules_judged + rules_left_out
        found = "no finding" if not findings else "only minor findings"
        sentences = [f"{rules_judged} of {all_rules} rules judged: {found} in the {format_ms(step)} step."]
    else:
        sentences = [healthy(measurements, findings, run, step)]
    if rules_failed and not worth:
        which = "rule" if len(rules_failed) == 1 else "rules"
        sentences.append(f"The {which} {', '.join(rules_failed)} failed and could not be judged.")
    return " ".join([*sentences, *([caution] if caution else [])])


def _named(findings: Sequence[Finding], times: Times) -> list[Finding]:
    """Return the findings that the line names; none that repeats another one."""
    named: list[Finding] = []
    for finding in findings:
        if len(named) < NAMED_FINDINGS and not any(repeats(finding, one, times) for one in named):
            named.append(finding)
    return named


def _caution(measurements: Measurements) -> str:
    """Return why the answer has low confidence, in brackets; "" where it has not."""
    if measurements.confidence != "low":
        return ""
    if not measurements.steps:
        return "(Low confidence: no complete step was captured.)"
    return "(Low confidence: the capture is small or incomplete; the limits below say how.)"


def _why_unreliable(measurements: Measurements, limits: Sequence[Limit], step: float) -> str:
    """Return why the step's split cannot be trusted, or "": kernels that ran are not in the trace."""
    queued = (number(measurements, "queued_idle_ms") or 0.0) - (
        number(measurements, "foreign_turns_ms") or 0.0
    )
    if any(limit.code == "lost-kernels" for limit in limits):
        return "kernels that were launched are missing from the trace, so what looks idle may not be"
    if queued > MOSTLY_QUEUED * step:
        share = format_percent(queued / step)
        return (
            f"for {share} of the step work was queued and nothing ran; kernels of CUDA graphs may be missing "
            "from the trace"
        )
    return ""


def _cause(measurements: Measurements, finding: Finding) -> str:
    """Return a finding in one sentence: its usual name, and what it costs."""
    name, _, explained = finding.title.partition(": ")
    said = finding.says or (f"{explained}, " if explained else "") + gain_words(finding)
    return f"{name}: {said}{_place(measurements, finding)}."


def _place(measurements: Measurements, finding: Finding) -> str:
    ranks = finding.ranks
    if len(measurements.run.digests) == 1 or not ranks or len(ranks) == len(measurements.ranks):
        return ""
    said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranges(ranks[:8])}"
    if said in finding.says:
        return ""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f" ({said}{more})"


def _why_nothing(digests: Sequence[RankDigest]) -> str:
    """Return why there is no device time to look at, from the limits of the traces."""
    limits = [limit for digest in digests for limit in digest.limits]
    for code in ("no-gpu-activity", "unknown-device"):
        for limit in limits:
            if limit.code == code:
                return limit.words
    return "no step and no device activity is in these traces"
