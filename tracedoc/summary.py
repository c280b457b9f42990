"""Say the answer in one sentence or two: how long a step is, what costs most, and what fixing it gives."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, RunInfo
from tracedoc.facts.catalog import Unknown
from tracedoc.facts.measure import Measurements
from tracedoc.spans import Spans
from tracedoc.units import format_ms, format_percent

NAMED_FINDINGS = 2
"""The sentence names this many findings; the report has the rest."""

COMPUTE_BOUND = 0.80
"""With this share of compute in the step and no finding, compute is what the step is made of."""


def summarise(measurements: Measurements, findings: Sequence[Finding], run: RunInfo) -> str:
    """Return the first line of every report."""
    step = _number(measurements, "step_ms")
    if step is None:
        return f"No step can be judged: {_why_no_step(measurements)}."
    worth = [f for f in findings if f.gain is not None and f.severity != "note"]
    head = _head(measurements, run, step)
    if worth:
        return f"{head} {_causes(measurements, worth)}"
    noted = [f for f in findings if f.gain is not None]
    return f"{head} {_healthy(measurements, noted, run, step)}"


def _head(measurements: Measurements, run: RunInfo, step: float) -> str:
    ranks = run.world_size or len(run.ranks_seen)
    where = f"{ranks}x {run.device}"
    known = run.strategy.name not in ("not recognised", "single process")
    strategy = f" ({run.strategy.name})" if known else ""
    mfu = _number(measurements, "mfu_frac")
    utilisation = f", {format_percent(mfu)} MFU" if mfu is not None else ""
    unit = "step" if measurements.steps else "captured part of a step"
    return f"{format_ms(step)}/{unit} on {where}{strategy}{utilisation}."


def _causes(measurements: Measurements, findings: Sequence[Finding]) -> str:
    named = findings[:NAMED_FINDINGS]
    parts = []
    for finding in named:
        assert finding.gain is not None
        title = finding.title[0].lower() + finding.title[1:] if finding.title[1:2].islower() else finding.title
        parts.append(f"{format_ms(finding.gain.high_ms)}: {title}{_place(measurements, finding)}.")
    together = format_ms(combined_gain_ms(measurements, named))
    what = "it" if len(named) == 1 else "both"
    return f"{' '.join(parts)} Fixing {what}: up to {together} a step."


def _place(measurements: Measurements, finding: Finding) -> str:
    ranks = finding.ranks
    if len(measurements.run.digests) == 1 or not ranks or len(ranks) == len(measurements.ranks):
        return ""
    listed = ", ".join(str(rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f" (rank {listed}{more})" if len(ranks) == 1 else f" (ranks {listed}{more})"


def combined_gain_ms(measurements: Measurements, findings: Sequence[Finding]) -> float:
    """Return a bound in ms for several fixes together.

    Gains over the same time are not added: the bound is the sum of the gains, but at most the union of
    their evidence on any one rank, and at least the largest single gain.
    """
    gains = [finding.gain.high_ms for finding in findings if finding.gain is not None]
    largest, total = max(gains, default=0.0), sum(gains)
    ranks = {evidence.rank for finding in findings for evidence in finding.evidence}
    covered = max(
        (
            Spans.from_pairs(
                (e.start_ns, e.end_ns) for finding in findings for e in finding.evidence if e.rank == rank
            ).total_ns
            / 1e6
            for rank in ranks
        ),
        default=total,
    )
    return max(largest, min(total, covered))


def _healthy(measurements: Measurements, noted: Sequence[Finding], run: RunInfo, step: float) -> str:
    compute = _number(measurements, "compute_ms")
    exposed = _number(measurements, "exposed_comm_ms")
    if measurements.is_cpu:
        return "No cause of lost time stands out in this CPU trace."
    if compute is None:
        return "How its time splits cannot be told from this capture."
    small = f" Small things: up to {format_ms(max(f.gain.high_ms for f in noted if f.gain))} a step." if noted else ""
    if compute < COMPUTE_BOUND * step:
        rest = f"Compute fills {format_percent(compute / step)} of the step, and no rule names what takes the rest."
        return rest + small
    if (run.world_size or 1) > 1 and exposed is not None:
        share = format_percent(exposed / step)
        return f"Compute-bound: free communication would give at most {share}. More GPUs are not your problem.{small}"
    return f"Compute-bound: {format_percent(compute / step)} of the step is compute.{small}"


def _why_no_step(measurements: Measurements) -> str:
    value = measurements.facts["step_ms"].value
    return value.reason if isinstance(value, Unknown) else "no rank was measured"


def _number(measurements: Measurements, fact: str) -> float | None:
    value = measurements.facts[fact].value
    return float(value) if isinstance(value, (int, float)) else None
