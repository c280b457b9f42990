"""The numbers that the first line is made of."""

from __future__ import annotations

from tracedoc.diagnosis import Finding
from tracedoc.facts.measure_run import Measurements


def number(measurements: Measurements, fact: str) -> float | None:
    """Return the run's value of a fact, ``None`` where it is unknown or no number."""
    value = measurements.facts[fact].value
    return float(value) if isinstance(value, (int, float)) else None


def high_ms(finding: Finding) -> float:
    """Return the most that fixing a finding gives, in milliseconds; 0 where nothing is known of it."""
    return finding.gain.size_ms if finding.gain is not None else 0.0
