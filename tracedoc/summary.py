"""Say the answer in one line: the cause in its usual name, what it costs, and the step that its fix gives."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, Fix, RunInfo
from tracedoc.digest.rank_digest import RankDigest
from tracedoc.errors import Limit
from tracedoc.facts.measure_run import Measurements
from tracedoc.fixes import fitting_first
from tracedoc.idle_causes import WORDS
from tracedoc.predicted import PlanStep
from tracedoc.units import format_ms, format_percent, format_ranges, format_step_change
from tracedoc.whatif.combined import Times, combined_gain_ms, repeats

NAMED_FINDINGS = 2
"""The line names this many findings; the report has the rest."""

CPU_IDLE_WORDS = {cause: words.on_cpu for cause, words in WORDS.items() if words.on_cpu}
"""What the first line says of a CPU step that is mostly idle for a reason that no rule looks for."""

WAIT_WORTH_NAMING = 0.10
"""Waiting for peers is named from this share of the step on."""

LOSS_WORTH_NAMING = 0.10
"""The largest part of the step that is not compute is named from this share of the step on."""

WORTH_NAMING = 0.05
"""A finding that only low confidence makes a note is named from this share of the step."""

IDLE_WORTH_NAMING = 0.50
"""In a CPU trace what the host does instead of running operators is named from this share of the step on."""

LITTLE_EXPOSED = 0.10
"""With more exposed communication than this a run is not called compute-bound."""

MOSTLY_QUEUED = 0.30
"""With more idle time than this behind work that was launched, kernels are missing, and no cause is named."""

COMPUTE_BOUND = 0.80
"""With this share of compute in the step and no finding, compute is what the step is made of."""

_LOSS_OF_TOPIC = {
    "communication": {"wait", "exposed"},
    "sharding": {"wait", "exposed", "launch"},
    "straggler": {"wait", "launch", "sync", "compile", "gc", "unknown", "input"},
    "pipeline": {"wait", "pipeline", "exposed"},
    "input": {"input"},
    "host": {"launch", "sync", "compile", "gc", "unknown", "profiler"},
    "memory": {"copy", "allocator"},
}
"""The losses that findings of a topic speak of."""

_LOSSES_OF_RULE = {
    "tiny-batch": {"launch"},
    "pageable-copies": {"copy"},
    "cpu-offload-transfer": {"copy", "sync", "unknown"},
    "rotating-straggler": {"wait"},
}
"""The same for rules that speak of something else than their topic does."""


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
    step = _number(measurements, "step_ms")
    if step is None:
        return f"No answer: {why_nothing(measurements.run.digests)}."
    if step == 0:
        return "No answer: what was recorded takes no time."
    if unreliable := _why_unreliable(measurements, limits, step):
        return f"No diagnosis: {unreliable}."
    caution = _caution(measurements)
    gainful = [one for one in findings if one.gain is not None and one.gain.size_ms > 0]
    worth = [one for one in gainful if one.severity != "note"]
    if not worth and caution and not measurements.is_cpu:
        worth = [one for one in gainful if _high_ms(one) >= WORTH_NAMING * step]
    if worth:
        named = _named(worth, times)
        said = [_cause(measurements, finding) for finding in named]
        if all(one.topic == "compute" for one in named) and _is_compute_bound(measurements, step):
            said.insert(0, _compute_bound(measurements, run, step))
        loss = _uncovered_loss(measurements, named, step)
        sentences = [*said, *loss, _outcome(measurements, findings, named, times, plan, run=run, step=step)]
    elif rules_left_out:
        all_rules = rules_judged + rules_left_out
        found = "no finding" if not findings else "only minor findings"
        sentences = [f"{rules_judged} of {all_rules} rules judged: {found} in the {format_ms(step)} step."]
    else:
        sentences = [_healthy(measurements, findings, run, step)]
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
    queued = _number(measurements, "queued_idle_ms") or 0.0
    if any(limit.code == "lost-kernels" for limit in limits):
        return "kernels that were launched are missing from the trace, so what looks idle may not be"
    if queued > MOSTLY_QUEUED * step:
        share = format_percent(queued / step)
        return (
            f"for {share} of the step work was queued and nothing ran; kernels of CUDA graphs may be missing "
            "from the trace"
        )
    return ""


# -- what costs time


def _cause(measurements: Measurements, finding: Finding) -> str:
    """Return a finding in one sentence: its usual name, and what it costs."""
    name, _, explained = finding.title.partition(": ")
    said = finding.says or (f"{explained}, " if explained else "") + f"up to {format_ms(_high_ms(finding))}"
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


def _outcome(
    measurements: Measurements,
    findings: Sequence[Finding],
    named: Sequence[Finding],
    times: Times,
    plan: Sequence[PlanStep],
    *,
    run: RunInfo,
    step: float,
) -> str:
    """Return what the step becomes with the fixes: replayed where that was done, else its bound."""
    if len(plan) > 1:
        change = format_step_change(step, plan[-1].step_ms)
        if len(plan) == 2:
            title, second = (one.title for one in plan)
            then = second[:1].lower() + second[1:] if second[1:2].islower() else second
            return f"{title}, then {then}: {change}."
        return f"All {len(plan)} fixes of the plan: {change}."
    if plan:
        finding = plan[0].fix.rpartition("/")[0]
        change = format_step_change(step, plan[0].step_ms)
        return f"{plan[0].title}{_number_of(finding, findings)}: {change}."
    for one in named:
        first: Fix | None = next(iter(fitting_first(one.fixes, run)), None)
        if first is not None and first.predicted is not None and first.predicted.gain_ms[1] > 0:
            change = format_step_change(step, first.predicted.step_ms)
            same_work = " for as many samples" if first.predicted.change.startswith("double-batch") else ""
            return f"{first.title}{_number_of(one.id, findings)}: {change}{same_work}."
    if len(named) == 1 and (gain := named[0].gain) is not None and gain.likely_ms is not None:
        of, what = (step, "") if gain.mean_step_ms is None else (gain.mean_step_ms, ", the mean step")
        after = (max(of - gain.high_ms, 0.0), max(of - gain.likely_ms, 0.0), of - gain.low_ms)
        return f"With the fix{what}: {format_step_change(of, after)}."
    if len(named) == 1 and (gain := named[0].gain) is not None and gain.low_ms > 0:
        return f"Fixing it: {_bounded_step(step, gain.size_ms, gain.low_ms)}."
    together = min(_within_the_step(measurements, named, times), step)
    what = "it" if len(named) == 1 else "both"
    return f"Fixing {what}: {_bounded_step(step, together)} at best."


def _bounded_step(step: float, gain: float, least: float = 0.0) -> str:
    """Return the step before and after a fix, as ``13 -> 3 ms``, or ``13 -> 3 to 6 ms`` with a least gain."""
    before, after = format_ms(step), format_ms(max(step - gain, 0.0))
    unit = before[before.index(" ") :]
    if not after.endswith(unit):
        return f"{before} -> {after}"
    most = format_ms(max(step - least, 0.0))
    span = (
        f"{after.removesuffix(unit)} to {most}" if least and most.endswith(unit) and most != after else after
    )
    return f"{before.removesuffix(unit)} -> {span}"


def _number_of(finding_id: str, findings: Sequence[Finding]) -> str:
    """Return the number under which a finding is listed, in brackets; "" for the first."""
    listed = [one.id for one in findings if not (one.topic == "capture" and one.gain is None)]
    place = listed.index(finding_id) + 1 if finding_id in listed else 1
    return f" (finding {place})" if place > 1 else ""


def _within_the_step(measurements: Measurements, findings: Sequence[Finding], times: Times) -> float:
    """Return the bound in ms for several fixes, at most the part of the named step that is not compute.

    Findings of one rank can hold longer steps than the one the line names. Never less than the largest.
    """
    together = combined_gain_ms(findings, times)
    step, compute = _number(measurements, "step_ms"), _number(measurements, "compute_ms")
    if step is None or compute is None:
        return together
    largest = max(finding.gain.size_ms for finding in findings if finding.gain is not None)
    return max(largest, min(together, step - compute))


def _uncovered_loss(measurements: Measurements, named: Sequence[Finding], step: float) -> list[str]:
    """Return the largest part of the step that is not compute, unless a named finding speaks of it."""
    kind, words, length = _largest_loss(measurements)
    if length < LOSS_WORTH_NAMING * step or any(kind in _losses_of(one) for one in named):
        return []
    return [f"Largest loss: {words}, {format_ms(length)} ({format_percent(length / step)})."]


def _losses_of(finding: Finding) -> set[str]:
    return _LOSSES_OF_RULE.get(finding.rule_id, _LOSS_OF_TOPIC.get(finding.topic, set()))


def _largest_loss(measurements: Measurements) -> tuple[str, str, float]:
    """Return the largest part of the step that is not compute: its kind, words for it, and ms."""
    digest = measurements.run.representative_digest
    step = digest.judged_step if digest is not None else None
    if digest is None or step is None:
        return "unknown", "idle time", 0.0
    split = measurements.run.splits[digest.rank, step.index]
    parts = {cause: (f"idle time ({WORDS[cause].idle})", ns) for cause, ns in step.idle_ns.items()}
    late = measurements.run.blame.waited_for(digest.rank)
    waiting = f"rank {digest.rank} waits for rank {late}" if late is not None else "waiting for peers"
    parts["wait"] = (waiting, split.wait_ns)
    parts["pipeline"] = ("waiting in the pipeline", split.pipeline_wait_ns)
    parts["exposed"] = ("exposed communication", split.transfer_ns + split.unsplit_ns)
    parts["copy"] = ("exposed copies", step.budget.exposed_copy_ns)
    kind = max(parts, key=lambda name: parts[name][1])
    return kind, parts[kind][0], parts[kind][1] / 1e6


# -- without a finding that is worth a warning


def _healthy(measurements: Measurements, noted: Sequence[Finding], run: RunInfo, step: float) -> str:
    compute = _number(measurements, "compute_ms")
    if measurements.is_cpu:
        waiting = _waiting(measurements, step) + _in_pipeline(measurements, step)
        return f"{_on_cpu(noted, step)}{_idle_on_cpu(measurements, step)}{waiting}"
    if compute is None:
        return f"No answer: how the {format_ms(step)} step splits is not in this capture."
    small = _minor(noted, step)
    share = format_percent(compute / step)
    if not _is_compute_bound(measurements, step):
        _, what, length = _largest_loss(measurements)
        waiting = _waiting(measurements, step) if "waits for" not in what else ""
        return (
            f"No single cause: compute fills {share} of the {format_ms(step)} step; the largest loss is "
            f"{what}, {format_ms(length)}.{waiting}{small}"
        )
    return f"{_compute_bound(measurements, run, step)}{small}"


def _is_compute_bound(measurements: Measurements, step: float) -> bool:
    compute, exposed = _number(measurements, "compute_ms"), _number(measurements, "exposed_comm_ms")
    return (
        compute is not None and compute >= COMPUTE_BOUND * step and (exposed or 0.0) <= LITTLE_EXPOSED * step
    )


def _compute_bound(measurements: Measurements, run: RunInfo, step: float) -> str:
    share = format_percent((_number(measurements, "compute_ms") or 0.0) / step)
    exposed = _number(measurements, "exposed_comm_ms")
    if (run.world_size or 1) > 1 and exposed is not None:
        return (
            f"Compute-bound: the GPUs are busy for {share} of the {format_ms(step)} step, and communication "
            f"is hidden (at most {format_percent(exposed / step)} to gain)."
        )
    return f"Compute-bound: {share} of the {format_ms(step)} step is compute."


def _minor(noted: Sequence[Finding], step: float) -> str:
    """Name the largest finding that is only a note; "" where none saves time."""
    first = max(noted, key=_high_ms, default=None)
    if first is None or _high_ms(first) <= 0:
        return ""
    return f" Minor: {_short_name(first)}, up to {format_ms(_high_ms(first))}."


def _short_name(finding: Finding) -> str:
    name = finding.title.partition(": ")[0]
    first = name.partition(" ")[0]
    return name[0].lower() + name[1:] if first[1:].islower() or len(first) == 1 else name


def _high_ms(finding: Finding) -> float:
    return finding.gain.size_ms if finding.gain is not None else 0.0


def _on_cpu(noted: Sequence[Finding], step: float) -> str:
    """Return what a CPU run without warnings says: shares of its time prove little about GPUs."""
    first = max((one for one in noted if one.topic != "capture"), key=_high_ms, default=None)
    if first is None:
        return f"CPU run: nothing found to change in the {format_ms(step)} step."
    return (
        f"CPU run, only minor findings: {_short_name(first)}, up to {format_ms(_high_ms(first))} of the "
        f"{format_ms(step)} step."
    )


def _idle_on_cpu(measurements: Measurements, step: float) -> str:
    """Say what the host does for most of a CPU step instead of running operators; "" where it runs them."""
    digest = measurements.run.representative_digest
    judged = digest.judged_step if digest is not None else None
    if judged is None or not judged.complete:
        return ""
    cause = max(CPU_IDLE_WORDS, key=lambda name: judged.idle_ns.get(name, 0))
    idle = judged.idle_ns.get(cause, 0) / 1e6
    if idle < IDLE_WORTH_NAMING * step:
        return ""
    return f" For {format_ms(idle)} of it {CPU_IDLE_WORDS[cause]}."


def _waiting(measurements: Measurements, step: float) -> str:
    """Say whom the other ranks wait for, where that is a part of the step worth a sentence; else ""."""
    rank, wait_ms = _longest(measurements, "exposed_wait_ms")
    late = measurements.run.blame.waited_for(int(rank)) if wait_ms >= WAIT_WORTH_NAMING * step else None
    if late is None:
        return ""
    return f" Rank {rank} waits {format_ms(wait_ms)} a step for its peers, mostly for rank {late}."


def _in_pipeline(measurements: Measurements, step: float) -> str:
    """Say how long the rank that waits longest for its pipeline neighbours does; "" where that is little."""
    rank, wait_ms = _longest(measurements, "pipeline_wait_ms")
    if wait_ms < WAIT_WORTH_NAMING * step:
        return ""
    return f" Rank {rank} waits {format_ms(wait_ms)} a step in the pipeline."


def _longest(measurements: Measurements, fact: str) -> tuple[str, float]:
    """Return the rank with the largest value of a fact in ms, and that; ("", 0.0) where none is known."""
    known = {
        rank: float(value)
        for rank, value in measurements.facts[fact].values.items()
        if isinstance(value, (int, float))
    }
    return max(known.items(), key=lambda item: item[1], default=("", 0.0))


def why_nothing(digests: Sequence[RankDigest]) -> str:
    """Return why there is no device time to look at, from the limits of the traces."""
    limits = [limit for digest in digests for limit in digest.limits]
    for code in ("no-gpu-activity", "unknown-device"):
        for limit in limits:
            if limit.code == code:
                return limit.words
    return "no step and no device activity is in these traces"


def _number(measurements: Measurements, fact: str) -> float | None:
    value = measurements.facts[fact].value
    return float(value) if isinstance(value, (int, float)) else None
