"""What is said where nothing is worth a warning: what fills the step, and what costs most of it."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, RunInfo
from tracedoc.facts.catalog import Fact
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.fixes import fitting_first
from tracedoc.ledger import INHERENT, WORTH, Ledger, LedgerCause
from tracedoc.topics.compute.rank import reached_frac, reached_most_frac
from tracedoc.topics.step.rank import compute_ms, exposed_comm_ms
from tracedoc.units import format_between, format_ms, format_percent, format_step_change, lowered

LITTLE_EXPOSED = 0.10
"""With more exposed communication than this a run is not called compute-bound."""

COMPUTE_BOUND = 0.80
"""With this share of compute in the step and no finding, compute is what the step is made of."""

CPU_WORTH_NAMING = 0.05
"""In a CPU run, whose processes share cores, what costs less than this share of the step is not named."""

NAMED_COSTS = 2
"""So many causes are named where none is worth a warning."""


def number(measurements: Measurements, fact: Fact) -> float | None:
    """The run's value of a fact, ``None`` where it is unknown or no number."""
    value = measurements.value(fact)
    return float(value) if isinstance(value, (int, float)) else None


def cost_words(finding: Finding) -> str:
    """What a finding costs the step: ``11 ms``, ``up to 31 ms`` of a bound; "" where that is not known."""
    if finding.told_ms is not None:
        return format_ms(finding.told_ms)
    if finding.gain is None or finding.bound_ms <= 0:
        return ""
    return f"{'up to' if finding.gain.likely_ms is None else 'about'} {format_ms(finding.bound_ms)}"


def healthy(
    measurements: Measurements, noted: Sequence[Finding], run: RunInfo, step: float, ledger: Ledger | None
) -> str:
    """What fills the step of a run without warnings, and what costs most of it."""
    compute = number(measurements, compute_ms)
    if measurements.is_cpu:
        costs = _costs(noted, run, step, CPU_WORTH_NAMING)
        if not costs:
            return f"CPU run: nothing found to change in the {format_ms(step)} step."
        mended = ""
        if ledger is not None and ledger.step_ms:
            mended = f": at most {format_percent(1 - ledger.ideal_ms / ledger.step_ms)} of the step could go"
        return f"CPU run (times are indicative){mended}. {costs}"
    if compute is None:
        return f"No answer: how the {format_ms(step)} step splits is not in this capture."
    if is_compute_bound(measurements, step):
        lost = lost_compute(ledger, step)
        costs = _costs(noted, run, step, WORTH, told=lost)
        return compute_bound(measurements, run, step, lost) + (f" {costs}" if costs else "")
    costs = _costs(noted, run, step, WORTH)
    fills = f"Compute fills {format_percent(compute / step)} of the {format_ms(step)} step"
    if costs:
        return f"{fills}. {costs}"
    if ledger is not None and ledger.step_ms:
        words = {one.id: one.words for one in ledger.causes}
        large = [one for one in ledger.rows if one.saves_ms >= WORTH * step and one.causes]
        said = "".join(f"; {words[one.causes[0]]}: {format_ms(one.saves_ms)}" for one in large)
        return f"{fills}{said}; no {'other ' if said else ''}cause costs {format_percent(WORTH)} of it."
    exposed = number(measurements, exposed_comm_ms) or 0.0
    beside = f", exposed communication {format_percent(exposed / step)}" if exposed >= WORTH * step else ""
    return f"{fills}{beside}; no cause is known."


def _costs(
    noted: Sequence[Finding],
    run: RunInfo,
    step: float,
    least: float,
    told: Sequence[LedgerCause] = (),
) -> str:
    """The largest findings, from ``least`` of the step on, and the first fix; "" without any.

    Those whose causes are ``told`` before are left out, but not the fix of the first.
    """
    sized = [(cost_ms(one), one) for one in noted if one.rule_id not in INHERENT]
    large = sorted((one for one in sized if one[0] >= least * step), key=lambda one: -one[0])[:NAMED_COSTS]
    if not large:
        return ""
    apart = [(ms, one) for ms, one in large if not is_told(one, told)]
    ofs = [f" of the {format_ms(step)} step", *[""] * len(apart)]
    parts = [
        f"{_short_name(one)}{pair_words(one)}: {format_ms(ms)}{of}"
        for (ms, one), of in zip(apart, ofs, strict=False)
    ]
    said = "; ".join(parts)
    said = f"{said[0].upper()}{said[1:]}." if said else ""
    first, fix = large[0][1], _first_fix(large[0][1], run, least)
    return " ".join(one for one in ((fix, said) if is_told(first, told) else (said, fix)) if one)


def pair_words(finding: Finding) -> str:
    """The cause that a finding hides, and that hides it, beside its own name; else ""."""
    return f" and {finding.overlaps}" if finding.is_pair else ""


def _first_fix(finding: Finding, run: RunInfo, least: float) -> str:
    """The first fix of a finding with the step that it gives, where that is worth it; else ""."""
    fix = next(iter(fitting_first(finding.fixes, run)), None)
    if fix is None or fix.predicted is None:
        return ""
    if fix.predicted.gain_ms[1] < least * fix.predicted.before_ms:
        return ""
    return f"{fix.title}: {format_step_change(fix.predicted.before_ms, fix.predicted.step_ms)}."


def cost_ms(finding: Finding) -> float:
    """What a finding costs the step, in ms, as reports tell it; else what its rule bounds."""
    return finding.bound_ms if finding.told_ms is None else finding.told_ms


def is_compute_bound(measurements: Measurements, step: float) -> bool:
    """True if compute fills the step and communication is hidden."""
    compute, exposed = number(measurements, compute_ms), number(measurements, exposed_comm_ms)
    return (
        compute is not None and compute >= COMPUTE_BOUND * step and (exposed or 0.0) <= LITTLE_EXPOSED * step
    )


def lost_compute(ledger: Ledger | None, step: float) -> tuple[LedgerCause, ...]:
    """The causes inside compute that cost most, those from :data:`WORTH` of the step on."""
    causes = ledger.causes if ledger is not None else ()
    inside = [one for one in causes if one.id.startswith("compute.") and one.share_ms >= WORTH * step]
    return tuple(inside[:NAMED_COSTS])


def is_told(finding: Finding, told: Sequence[LedgerCause]) -> bool:
    """True if a finding costs no more than those of some causes that it tells."""
    mine = [one.share_ms for one in told if finding.rule_id in (one.id, *one.told_by)]
    cost = finding.bound_ms if finding.cost_ms is None else finding.cost_ms
    return bool(mine) and cost <= sum(mine) * (1 + WORTH)


def compute_bound(
    measurements: Measurements, run: RunInfo, step: float, lost: Sequence[LedgerCause] = ()
) -> str:
    """The sentence for a run that is compute-bound, with what of its compute is ``lost``, and to what."""
    compute = number(measurements, compute_ms) or 0.0
    share = format_percent(compute / step)
    exposed = number(measurements, exposed_comm_ms)
    least, most = number(measurements, reached_frac), number(measurements, reached_most_frac)
    rate = ""
    if least is not None and most is not None:
        rate = f" at {format_between(least, most, format_percent)} of what this GPU reaches"
    if lost and compute:
        alone = (run.world_size or 1) == 1 or exposed is None or exposed >= WORTH * step
        hidden = "" if alone else ", communication is hidden"
        parts = [f"{format_percent(min(one.share_ms / compute, 1.0))}" for one in lost]
        parts[0] += " of the compute is lost"
        said = ", ".join(f"{part} to {one.words}" for part, one in zip(parts, lost, strict=True))
        return f"Compute-bound{rate} ({format_ms(compute)} of the {format_ms(step)} step{hidden}): {said}."
    if (run.world_size or 1) > 1 and exposed is not None:
        return (
            f"Compute-bound{rate}: the GPUs are busy for {share} of the {format_ms(step)} step, and "
            f"communication is hidden (at most {format_percent(exposed / step)} to gain)."
        )
    return f"Compute-bound{rate}: {share} of the {format_ms(step)} step is compute."


def _short_name(finding: Finding) -> str:
    """The usual name of a finding's cause within a sentence."""
    return lowered(finding.title.partition(": ")[0])
