"""Say the answer in one sentence or two: how long a step is, what costs most, and what fixing it gives."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, RunInfo
from tracedoc.digest.rank_digest import RankDigest
from tracedoc.errors import Limit
from tracedoc.facts.measure_run import Measurements
from tracedoc.idle_causes import WORDS
from tracedoc.predicted import PlanStep
from tracedoc.units import format_ms, format_percent, format_step_change
from tracedoc.whatif.combined import Times, combined_gain_ms

NAMED_FINDINGS = 2
"""The sentence names this many findings; the report has the rest."""

_PROPER_NOUNS = ("Python",)
"""Titles that begin with one keep its capital in a sentence; "FSDP" and "PyTorch" show by themselves."""

CPU_IDLE_WORDS = {cause: words.on_cpu for cause, words in WORDS.items() if words.on_cpu}
"""What the first line says of a CPU step that is mostly idle for a reason that no rule judges."""

WAIT_WORTH_NAMING = 0.10
"""Waiting for peers is named from this share of the step on."""

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


def summarise(
    measurements: Measurements,
    findings: Sequence[Finding],
    times: Times,
    *,
    run: RunInfo,
    limits: Sequence[Limit],
    plan: Sequence[PlanStep] = (),
) -> str:
    """Return the first line of every report."""
    step = _number(measurements, "step_ms")
    if step is None:
        return f"No answer: {why_nothing(measurements.run.digests)}."
    if step == 0:
        return "No answer: what was recorded takes no time."
    head = _head(measurements, run, step)
    if unreliable := _why_unreliable(measurements, limits, step):
        return f"{head} No diagnosis: {unreliable}."
    gainful = [f for f in findings if f.gain is not None and f.status == "stable"]
    worth = [f for f in gainful if f.severity != "note"]
    if worth:
        return f"{head} {_causes(measurements, worth, times, plan)}"
    large = [f for f in gainful if f.gain is not None and f.gain.size_ms >= WORTH_NAMING * step]
    caution = "Confidence is low. " if measurements.confidence == "low" else ""
    if large and caution and not measurements.is_cpu:
        return f"{head} {caution}{_causes(measurements, large, times, plan)}"
    return f"{head} {caution}{_healthy(measurements, findings, run, step)}"


def _why_unreliable(measurements: Measurements, limits: Sequence[Limit], step: float) -> str:
    """Return why the step's split cannot be trusted, or "": kernels that ran are not in the trace."""
    queued = _number(measurements, "queued_idle_ms") or 0.0
    if any(limit.code == "lost-kernels" for limit in limits):
        return "kernels that were launched are missing from the trace, so what looks idle may not be"
    if queued > MOSTLY_QUEUED * step:
        share = format_percent(queued / step)
        return (
            f"for {share} of the step work was queued and nothing ran; kernels of CUDA graphs may be missing"
        )
    return ""


def _head(measurements: Measurements, run: RunInfo, step: float) -> str:
    ranks = run.world_size or len(run.ranks_seen)
    where = f"{ranks} CPU rank{'s' * (ranks > 1)}" if measurements.is_cpu else f"{ranks}x {run.device}"
    known = run.strategy.confidence != "low" and run.strategy.family != "single"
    # One pair of brackets: "(FSDP2, reshard after forward)".
    name = run.strategy.name.removesuffix(")").replace(" (", ", ")
    strategy = f" ({name})" if known else ""
    mfu = _number(measurements, "mfu_frac")
    utilisation = f", {format_percent(mfu)} MFU" if mfu is not None else ""
    representative = measurements.run.representative_digest
    if measurements.steps:
        length = f"{format_ms(step)}/step"
    elif representative is not None and representative.step_source == "none":
        length = f"{format_ms(step)} without visible steps"
    else:
        length = f"{format_ms(step)} of an incomplete step"
    return f"{length} on {where}{strategy}{utilisation}."


def _causes(
    measurements: Measurements, findings: Sequence[Finding], times: Times, plan: Sequence[PlanStep]
) -> str:
    named = findings[:NAMED_FINDINGS]
    parts = []
    for finding in named:
        assert finding.gain is not None
        length = format_ms(finding.gain.size_ms)
        parts.append(f"{length}: {_in_a_sentence(finding.title)}{_place(measurements, finding)}.")
    if plan and plan[0].replay_of_step_ms > 0:
        fixes = "the first fix" if len(plan) == 1 else f"the plan's {len(plan)} fixes"
        change = format_step_change(plan[0].replay_of_step_ms, plan[-1].step_ms)
        return f"{' '.join(parts)} With {fixes}: {change}."
    together = format_ms(_within_the_step(measurements, named, times))
    what = "it" if len(named) == 1 else "both"
    return f"{' '.join(parts)} Fixing {what}: up to {together} a step."


def _within_the_step(measurements: Measurements, findings: Sequence[Finding], times: Times) -> float:
    """Return the bound in ms for several fixes, at most the part of the named step that is not compute.

    Findings of one rank can hold longer steps than the one the sentence names. Never less than the largest.
    """
    together = combined_gain_ms(findings, times)
    step, compute = _number(measurements, "step_ms"), _number(measurements, "compute_ms")
    if step is None or compute is None:
        return together
    largest = max(finding.gain.size_ms for finding in findings if finding.gain is not None)
    return max(largest, min(together, step - compute))


def _in_a_sentence(title: str) -> str:
    first = title.partition(" ")[0]
    common = first == "A" or (first[1:].islower() and first not in _PROPER_NOUNS)
    return title[0].lower() + title[1:] if common else title


def _place(measurements: Measurements, finding: Finding) -> str:
    ranks = finding.ranks
    if len(measurements.run.digests) == 1 or not ranks or len(ranks) == len(measurements.ranks):
        return ""
    listed = ", ".join(str(rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f" (rank {listed}{more})" if len(ranks) == 1 else f" (ranks {listed}{more})"


def _healthy(measurements: Measurements, noted: Sequence[Finding], run: RunInfo, step: float) -> str:
    compute = _number(measurements, "compute_ms")
    exposed = _number(measurements, "exposed_comm_ms")
    waiting = _waiting(measurements, step)
    if measurements.is_cpu:
        return (
            f"{_on_cpu(noted)}{_idle_on_cpu(measurements, step)}{_in_pipeline(measurements, step)}{waiting}"
        )
    if compute is None:
        return "How its time splits cannot be told from this capture."
    small = _largest_finding(noted)
    if compute < COMPUTE_BOUND * step or (exposed or 0.0) > LITTLE_EXPOSED * step:
        what, length = _largest_rest(measurements)
        filled = f"Compute fills {format_percent(compute / step)} of the step; of the rest, {what} takes most"
        verdict = "" if any(f.topic != "capture" for f in noted) else ", and no rule finds fault with it"
        return f"{filled} ({format_ms(length)}){verdict}.{waiting}{small}"
    if (run.world_size or 1) > 1 and exposed is not None:
        share = format_percent(exposed / step)
        free = f"Compute-bound: free communication would give at most {share}."
        return f"{free} More GPUs are not your problem.{small}"
    return f"Compute-bound: {format_percent(compute / step)} of the step is compute.{small}"


def _largest_finding(noted: Sequence[Finding]) -> str:
    """Say what the largest finding gives that is a note or of a preview rule; "" where none gives time."""
    first = max(noted, key=_high_ms, default=None)
    if first is None or _high_ms(first) <= 0:
        return ""
    what = "note" if first.severity == "note" else "finding of a preview rule"
    return f" The largest {what} is worth up to {format_ms(_high_ms(first))} a step."


def _high_ms(finding: Finding) -> float:
    return finding.gain.size_ms if finding.gain is not None else 0.0


def _on_cpu(noted: Sequence[Finding]) -> str:
    """Return what a CPU trace without warnings says: shares of its time prove little about GPUs."""
    first = max((f for f in noted if f.status == "stable"), key=_high_ms, default=None)
    preview = next((f for f in noted if f.status != "stable" and f.topic != "capture"), None)
    rules, also = ("stable rule", f" A preview rule: {_with_gain(preview)}.") if preview else ("rule", "")
    if first is None or first.gain is None:
        return f"No {rules} finds a cause of lost time in this CPU trace.{also}"
    if preview is not None and preview.severity != "note":
        return f"A CPU trace, in which no stable rule finds more than a note: {_with_gain(first)}.{also}"
    return f"A CPU trace, with nothing above a note: {_with_gain(first)}.{also}"


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
    return f" For {format_ms(idle)} of the step {CPU_IDLE_WORDS[cause]}."


def _with_gain(finding: Finding) -> str:
    gain = f", up to {format_ms(_high_ms(finding))} a step" if _high_ms(finding) > 0 else ""
    return f"{_in_a_sentence(finding.title)}{gain}"


def _largest_rest(measurements: Measurements) -> tuple[str, float]:
    """Return the largest part of the step that is not compute, in words and ms."""
    digest = measurements.run.representative_digest
    step = digest.judged_step if digest is not None else None
    if digest is None or step is None:
        return "idle time", 0.0
    split = measurements.run.splits[digest.rank, step.index]
    parts = {f"idle time ({WORDS[cause].idle})": ns for cause, ns in step.idle_ns.items()}
    parts["waiting for peers"] = split.wait_ns
    parts["waiting in the pipeline"] = split.pipeline_wait_ns
    parts["communication with no compute beside it"] = split.transfer_ns + split.unsplit_ns
    parts["copies with no compute beside them"] = step.budget.exposed_copy_ns
    what = max(parts, key=lambda name: parts[name])
    return what, parts[what] / 1e6


def _waiting(measurements: Measurements, step: float) -> str:
    """Say whom the other ranks wait for, where that is a part of the step worth a sentence; else ""."""
    rank, wait_ms = _longest(measurements, "exposed_wait_ms")
    late = measurements.run.blame.waited_for(int(rank)) if wait_ms >= WAIT_WORTH_NAMING * step else None
    if late is None:
        return ""
    return f" Rank {rank} waits for peers {format_ms(wait_ms)} a step, most of it for rank {late}."


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
    """Return why there is no device time to judge, from the limits of the traces."""
    limits = [limit for digest in digests for limit in digest.limits]
    for code in ("no-gpu-activity", "unknown-device"):
        for limit in limits:
            if limit.code == code:
                return limit.words
    return "no step and no device activity is in these traces"


def _number(measurements: Measurements, fact: str) -> float | None:
    value = measurements.facts[fact].value
    return float(value) if isinstance(value, (int, float)) else None
