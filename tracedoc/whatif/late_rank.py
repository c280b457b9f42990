"""Bound what a rank that arrives in time would save: what the others wait for it."""

from __future__ import annotations

from tracedoc.diagnosis import Gain
from tracedoc.facts.measure_run import Measurements
from tracedoc.topics.host.run import core_wait_ms
from tracedoc.topics.straggler.run import straggler_cost_ms, straggler_least_ms, straggler_recurring_ms
from tracedoc.values import Unknown
from tracedoc.whatif.bounds import measured


def not_wait_for_rank(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a late rank costs, at most a replay without waiting for it.

    What all wait in most steps, while it is at what makes it late, is surely gained. In a CPU run the
    processes may share cores and then also wait by chance, which no change of one rank mends: there only
    what the late rank does longer in most steps counts, and what it waited for a core is not sure to be
    gained.
    """
    high, low = (
        measured(measurements, straggler_cost_ms, key),
        measured(measurements, straggler_least_ms, key),
    )
    if isinstance(high, Unknown):
        return high
    assumption = "this rank never comes later than the others"
    recurring = measured(measurements, straggler_recurring_ms, key)
    if measurements.is_cpu and not isinstance(recurring, Unknown) and recurring < high:
        high = recurring
        assumption = "what this rank does longer than the others in most steps is gone"
    least = 0.0 if isinstance(low, Unknown) else min(low, high)
    without_core = measured(measurements, core_wait_ms, key)
    if measurements.is_cpu and not isinstance(without_core, Unknown):
        least = max(least - without_core, 0.0)
    return Gain(least, high, "ceiling", (assumption,))
