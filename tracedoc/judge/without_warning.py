"""What is said where nothing is worth a warning: what fills the step, who waits, and the largest note."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding, RunInfo
from tracedoc.facts.catalog import Fact
from tracedoc.facts.measure_run import Measurements
from tracedoc.idle_causes import WORDS
from tracedoc.judge.ledgered import INHERENT
from tracedoc.topics.communication.run import exposed_wait_ms, pipeline_wait_ms
from tracedoc.topics.step.rank import compute_ms, exposed_comm_ms
from tracedoc.units import format_ms, format_percent

CPU_IDLE_WORDS = {cause: words.on_cpu for cause, words in WORDS.items() if words.on_cpu}
"""What the first line says of a CPU step that is mostly idle for a reason that no rule looks for."""

WAIT_WORTH_NAMING = 0.10
"""Waiting for peers is named from this share of the step on."""

IDLE_WORTH_NAMING = 0.50
"""In a CPU trace what the host does instead of running operators is named from this share of the step on."""

LITTLE_EXPOSED = 0.10
"""With more exposed communication than this a run is not called compute-bound."""

COMPUTE_BOUND = 0.80
"""With this share of compute in the step and no finding, compute is what the step is made of."""

MINOR = 0.05
"""What saves less than this share of the step is minor."""

NO_GAIN = 0.001
"""What saves less than this share of the step is not named."""


def number(measurements: Measurements, fact: Fact) -> float | None:
    """Return the run's value of a fact, ``None`` where it is unknown or no number."""
    value = measurements.value(fact)
    return float(value) if isinstance(value, (int, float)) else None


def gain_ms(finding: Finding) -> float:
    """The likely gain of a fix, else its bound, in milliseconds; 0 where nothing is known of it."""
    return finding.gain.size_ms if finding.gain is not None else 0.0


def gain_words(finding: Finding) -> str:
    """That gain in words: ``about 11 ms`` where it is the likely one, ``up to 31 ms`` of a bound."""
    likely = finding.gain is not None and finding.gain.likely_ms is not None
    return f"{'about' if likely else 'up to'} {format_ms(gain_ms(finding))}"


def waits_for_peers(measurements: Measurements, step: float) -> str:
    """A sentence about the rank that others wait for, where that is a part of the step worth one; else ""."""
    rank, wait_ms = _longest(measurements, exposed_wait_ms)
    late = measurements.run.blame.waited_for(int(rank)) if wait_ms >= WAIT_WORTH_NAMING * step else None
    if late is None:
        return ""
    return f" Rank {rank} waits {format_ms(wait_ms)} a step for its peers, mostly for rank {late}."


def in_pipeline(measurements: Measurements, step: float) -> str:
    """A sentence about the rank that waits longest for its pipeline neighbours; "" where that is little."""
    rank, wait_ms = _longest(measurements, pipeline_wait_ms)
    if wait_ms < WAIT_WORTH_NAMING * step:
        return ""
    return f" Rank {rank} waits {format_ms(wait_ms)} a step in the pipeline."


def _longest(measurements: Measurements, fact: Fact) -> tuple[str, float]:
    """Return the rank with the largest value of a fact in ms, and that; ("", 0.0) where none is known."""
    known = {
        rank: float(value)
        for rank, value in measurements.facts[fact.name].values.items()
        if isinstance(value, (int, float))
    }
    return max(known.items(), key=lambda item: item[1], default=("", 0.0))


def idle_on_cpu(measurements: Measurements, step: float) -> str:
    """The commonest idle cause of a CPU step as a sentence; "" where the host runs operators."""
    digest = measurements.run.representative_digest
    judged = digest.judged_step if digest is not None else None
    if judged is None or not judged.complete:
        return ""
    cause = max(CPU_IDLE_WORDS, key=lambda name: judged.idle_ns.get(name, 0))
    idle = judged.idle_ns.get(cause, 0) / 1e6
    if idle < IDLE_WORTH_NAMING * step:
        return ""
    return f" For {format_ms(idle)} of it {CPU_IDLE_WORDS[cause]}."


def healthy(measurements: Measurements, noted: Sequence[Finding], run: RunInfo, step: float) -> str:
    """What fills the step of a run without warnings, the largest loss, and the largest finding of a note."""
    compute = number(measurements, compute_ms)
    if measurements.is_cpu:
        waits = waits_for_peers(measurements, step) + in_pipeline(measurements, step)
        return f"{_on_cpu(noted, step)}{idle_on_cpu(measurements, step)}{waits}"
    if compute is None:
        return f"No answer: how the {format_ms(step)} step splits is not in this capture."
    small = _minor(noted, step)
    share = format_percent(compute / step)
    if not is_compute_bound(measurements, step):
        waits = waits_for_peers(measurements, step) + in_pipeline(measurements, step)
        return f"No single cause: compute fills {share} of the {format_ms(step)} step.{waits}{small}"
    return f"{compute_bound(measurements, run, step)}{small}"


def is_compute_bound(measurements: Measurements, step: float) -> bool:
    """True if compute fills the step and communication is hidden."""
    compute, exposed = number(measurements, compute_ms), number(measurements, exposed_comm_ms)
    return (
        compute is not None and compute >= COMPUTE_BOUND * step and (exposed or 0.0) <= LITTLE_EXPOSED * step
    )


def compute_bound(measurements: Measurements, run: RunInfo, step: float) -> str:
    """The sentence for a run that is compute-bound."""
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
    first = max((one for one in noted if one.rule_id not in INHERENT), key=gain_ms, default=None)
    if first is None or gain_ms(first) <= 0:
        return ""
    return f" Minor: {_short_name(first)}, {gain_words(first)}."


def _short_name(finding: Finding) -> str:
    name = finding.title.partition(": ")[0]
    first = name.partition(" ")[0]
    return name[0].lower() + name[1:] if first[1:].islower() or len(first) == 1 else name


def _on_cpu(noted: Sequence[Finding], step: float) -> str:
    """The words for a CPU run without warnings: shares of its time prove little about GPUs."""
    first = next((one for one in noted if one.topic != "capture" and gain_ms(one) >= NO_GAIN * step), None)
    if first is None:
        return f"CPU run: nothing found to change in the {format_ms(step)} step."
    of = step if first.gain is None or first.gain.mean_step_ms is None else first.gain.mean_step_ms
    minor = " only minor findings:" if gain_ms(first) < MINOR * of else ""
    return f"CPU run:{minor} {_short_name(first)}, {gain_words(first)} of the {format_ms(of)} step."
