"""The numbers that the first line is made of."""

from __future__ import annotations

from tracedoc.diagnosis import Finding
from tracedoc.facts.catalog import FactDef
from tracedoc.facts.measure_run import Measurements
from tracedoc.units import format_ms


def number(measurements: Measurements, fact: FactDef) -> float | None:
    """Return the run's value of a fact, ``None`` where it is unknown or no number."""
    value = measurements.value(fact)
    return float(value) if isinstance(value, (int, float)) else None


def gain_ms(finding: Finding) -> float:
    """Return the likely gain of a fix, else its bound, in milliseconds; 0 where nothing is known of it."""
    return finding.gain.size_ms if finding.gain is not None else 0.0


def gain_words(finding: Finding) -> str:
    """Return that gain in words: ``about 11 ms`` where it is the likely one, ``up to 31 ms`` of a bound."""
    likely = finding.gain is not None and finding.gain.likely_ms is not None
    return f"{'about' if likely else 'up to'} {format_ms(gain_ms(finding))}"
