"""The largest part of the step that is not compute, and who waits for whom, in words."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.diagnosis import Finding
from tracedoc.facts.catalog import FactDef
from tracedoc.facts.measure_run import Measurements
from tracedoc.idle_causes import WORDS
from tracedoc.topics.communication.run import exposed_wait_ms, pipeline_wait_ms
from tracedoc.units import format_ms, format_percent

CPU_IDLE_WORDS = {cause: words.on_cpu for cause, words in WORDS.items() if words.on_cpu}
"""What the first line says of a CPU step that is mostly idle for a reason that no rule looks for."""

WAIT_WORTH_NAMING = 0.10
"""Waiting for peers is named from this share of the step on."""

LOSS_WORTH_NAMING = 0.10
"""The largest part of the step that is not compute is named from this share of the step on."""

IDLE_WORTH_NAMING = 0.50
"""In a CPU trace what the host does instead of running operators is named from this share of the step on."""

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


def uncovered_loss(measurements: Measurements, named: Sequence[Finding], step: float) -> list[str]:
    """Return the largest part of the step that is not compute, unless a named finding speaks of it."""
    kind, words, length = largest_loss(measurements)
    if length < LOSS_WORTH_NAMING * step or any(kind in _losses_of(one) for one in named):
        return []
    return [f"Largest loss: {words}, {format_ms(length)} ({format_percent(length / step)})."]


def _losses_of(finding: Finding) -> set[str]:
    return _LOSSES_OF_RULE.get(finding.rule_id, _LOSS_OF_TOPIC.get(finding.topic, set()))


def largest_loss(measurements: Measurements) -> tuple[str, str, float]:
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


def waits_for_peers(measurements: Measurements, step: float) -> str:
    """Say whom the other ranks wait for, where that is a part of the step worth a sentence; else ""."""
    rank, wait_ms = _longest(measurements, exposed_wait_ms)
    late = measurements.run.blame.waited_for(int(rank)) if wait_ms >= WAIT_WORTH_NAMING * step else None
    if late is None:
        return ""
    return f" Rank {rank} waits {format_ms(wait_ms)} a step for its peers, mostly for rank {late}."


def in_pipeline(measurements: Measurements, step: float) -> str:
    """Say how long the rank that waits longest for its pipeline neighbours does; "" where that is little."""
    rank, wait_ms = _longest(measurements, pipeline_wait_ms)
    if wait_ms < WAIT_WORTH_NAMING * step:
        return ""
    return f" Rank {rank} waits {format_ms(wait_ms)} a step in the pipeline."


def _longest(measurements: Measurements, fact: FactDef) -> tuple[str, float]:
    """Return the rank with the largest value of a fact in ms, and that; ("", 0.0) where none is known."""
    known = {
        rank: float(value)
        for rank, value in measurements.facts[fact.name].values.items()
        if isinstance(value, (int, float))
    }
    return max(known.items(), key=lambda item: item[1], default=("", 0.0))


def idle_on_cpu(measurements: Measurements, step: float) -> str:
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
