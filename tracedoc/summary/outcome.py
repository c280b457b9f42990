"""What the step becomes with the fixes: replayed where that was done, else its bound."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, Fix, RunInfo
from tracedoc.facts.measure_run import Measurements
from tracedoc.fixes import fitting_first
from tracedoc.predicted import PlanStep
from tracedoc.summary.figures import number
from tracedoc.topics.step.rank import compute_ms, step_ms
from tracedoc.units import format_ms, format_step_change
from tracedoc.whatif.combined import Times, combined_gain_ms


def outcome(
    measurements: Measurements,
    findings: Sequence[Finding],
    named: Sequence[Finding],
    times: Times,
    plan: Sequence[PlanStep],
    *,
    run: RunInfo,
    step: float,
) -> str:
    """Return what the step becomes with the fixes: replayed where that was done, else its bound.

    Fixes of other findings than the first stand for it only where they save as much as it does at most, and
    never those of a note of a CPU run, whose shares of time prove little.
    """
    least = named[0].gain.size_ms if named[0].gain is not None else 0.0
    if plan and not any(one.fix.startswith(f"{named[0].id}/") for one in plan):
        notes = {one.id for one in findings if one.severity == "note"}
        doubtful = measurements.is_cpu and all(one.fix.rpartition("/")[0] in notes for one in plan)
        plan = plan if step - plan[-1].step_ms[1] >= least and not doubtful else ()
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
        saved = 0.0 if first is None or first.predicted is None else first.predicted.gain_ms[1]
        if first is not None and first.predicted is not None and saved > (0.0 if one is named[0] else least):
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
    step, compute = number(measurements, step_ms), number(measurements, compute_ms)
    if step is None or compute is None:
        return together
    largest = max(finding.gain.size_ms for finding in findings if finding.gain is not None)
    return max(largest, min(together, step - compute))
