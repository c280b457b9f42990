"""What a run is told in which nothing is worth a warning."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, RunInfo
from tracedoc.facts.measure_run import Measurements
from tracedoc.summary.figures import gain_ms, gain_words, number
from tracedoc.summary.losses import idle_on_cpu, in_pipeline, largest_loss, waits_for_peers
from tracedoc.topics.step.rank import compute_ms, exposed_comm_ms
from tracedoc.units import format_ms, format_percent

LITTLE_EXPOSED = 0.10
"""With more exposed communication than this a run is not called compute-bound."""

COMPUTE_BOUND = 0.80
"""With this share of compute in the step and no finding, compute is what the step is made of."""

NO_GAIN = 0.001
"""What saves less than this share of the step is named without a number."""


def healthy(measurements: Measurements, noted: Sequence[Finding], run: RunInfo, step: float) -> str:
    """Return what fills the step, the largest loss, and the largest finding that is only a note."""
    compute = number(measurements, compute_ms)
    if measurements.is_cpu:
        waits = waits_for_peers(measurements, step) + in_pipeline(measurements, step)
        return f"{_on_cpu(noted, step)}{idle_on_cpu(measurements, step)}{waits}"
    if compute is None:
        return f"No answer: how the {format_ms(step)} step splits is not in this capture."
    small = _minor(noted, step)
    share = format_percent(compute / step)
    if not is_compute_bound(measurements, step):
        _, what, length = largest_loss(measurements)
        waits = waits_for_peers(measurements, step) if "waits for" not in what else ""
        return (
            f"No single cause: compute fills {share} of the {format_ms(step)} step; the largest loss is "
            f"{what}, {format_ms(length)}.{waits}{small}"
        )
    return f"{compute_bound(measurements, run, step)}{small}"


def is_compute_bound(measurements: Measurements, step: float) -> bool:
    """Return whether compute fills the step and communication is hidden."""
    compute, exposed = number(measurements, compute_ms), number(measurements, exposed_comm_ms)
    return (
        compute is not None and compute >= COMPUTE_BOUND * step and (exposed or 0.0) <= LITTLE_EXPOSED * step
    )


def compute_bound(measurements: Measurements, run: RunInfo, step: float) -> str:
    """Return the sentence for a run that is compute-bound."""
    share = format_percent((number(measurements, compute_ms) or 0.0) / step)
    exposed = number(measurements, exposed_comm_ms)
    if (run.world_size or 1) > 1 and exposed is not None:
        return (
            f"Compute-bound: the GPUs are busy for {share} of the {format_ms(step)} step, and communication "
            f"is hidden (at most {format_percent(exposed / step)} to gain)."
        )
    return f"Compute-bound: {share} of the {format_ms(step)} step is compute."


def _minor(noted: Sequence[Finding], step: float) -> str:
    """Name the largest finding that is only a note; "" where none saves time."""
    first = max(noted, key=gain_ms, default=None)
    if first is None or gain_ms(first) <= 0:
        return ""
    return f" Minor: {_short_name(first)}, {gain_words(first)}."


def _short_name(finding: Finding) -> str:
    name = finding.title.partition(": ")[0]
    first = name.partition(" ")[0]
    return name[0].lower() + name[1:] if first[1:].islower() or len(first) == 1 else name


def _on_cpu(noted: Sequence[Finding], step: float) -> str:
    """Return what a CPU run without warnings says: shares of its time prove little about GPUs."""
    first = max((one for one in noted if one.topic != "capture"), key=gain_ms, default=None)
    if first is None:
        return f"CPU run: nothing found to change in the {format_ms(step)} step."
    named = f"CPU run, only minor findings: {_short_name(first)}"
    if gain_ms(first) < NO_GAIN * step:
        return f"{named}, in the {format_ms(step)} step."
    return f"{named}, {gain_words(first)} of the {format_ms(step)} step."
