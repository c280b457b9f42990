"""What every bound on a gain stands on: measured numbers, and the host's own work."""

from __future__ import annotations

from tracedoc.diagnosis import Gain
from tracedoc.facts.catalog import Fact
from tracedoc.facts.measure_run import Measurements
from tracedoc.topics.step.rank import comm_ms, compute_ms, exposed_comm_ms, host_floor_ms, step_ms
from tracedoc.values import Unknown


def measured(measurements: Measurements, fact: Fact, key: str | None) -> float | Unknown:
    """A fact as a number, for one rank or for the run."""
    value = measurements.value(fact, key)
    if isinstance(value, Unknown):
        return value
    return float(value) if isinstance(value, (int, float)) else Unknown(f"{fact.name} is not a number")


def within_host_work(
    measurements: Measurements, key: str | None, high: float, *, saved_host_ms: float = 0.0
) -> tuple[float, tuple[str, ...]]:
    """Limit a gain to the step minus the host's own work, to which the fix gives back ``saved_host_ms``.

    On a CPU the host's work is the compute itself, which other bounds hold already.
    """
    if measurements.is_cpu:
        return high, ()
    step, floor = measured(measurements, step_ms, key), measured(measurements, host_floor_ms, key)
    if isinstance(step, Unknown) or isinstance(floor, Unknown):
        return high, ("the host's own work is not known and may keep the step longer",)
    return max(min(high, step - floor + saved_host_ms), 0.0), ()


def at_most(
    measurements: Measurements, key: str | None, fact: Fact, assuming: str, *, host_stays: bool = False
) -> Gain | Unknown:
    """Bound a gain by a fact and, where the fix leaves the host its own work, by what that work leaves."""
    high = measured(measurements, fact, key)
    if isinstance(high, Unknown):
        return high
    high = max(high, 0.0)
    if not host_stays:
        return Gain(0.0, high, "ceiling", (assuming,))
    high, assumptions = within_host_work(measurements, key, high)
    return Gain(0.0, high, "ceiling", (assuming, *assumptions))


def hidden_by_compute(
    measurements: Measurements,
    key: str | None,
    exposed: float,
    assumption: str,
    *,
    beside_ms: float = 0.0,
) -> Gain | Unknown:
    """Bound what hiding ``exposed`` ms of communication gives.

    At most the compute that runs with no communication beside it, and ``beside_ms`` of communication that
    other communication may hide, for nothing else can; and at most the step minus the host's own work.
    """
    compute = measured(measurements, compute_ms, key)
    comm = measured(measurements, comm_ms, key)
    all_exposed = measured(measurements, exposed_comm_ms, key)
    if isinstance(compute, Unknown) or isinstance(comm, Unknown) or isinstance(all_exposed, Unknown):
        return Unknown("the budget of the step is not known")
    room = max(round(compute - (comm - all_exposed), 6), 0.0)  # whole nanoseconds
    high, assumptions = within_host_work(measurements, key, min(exposed, room + beside_ms))
    return Gain(0.0, high, "ceiling", (assumption, *assumptions))
