"""Bound what a fix could give back per step, by what physics allows. All are ceilings: low is 0."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tracedoc.diagnosis import Gain
from tracedoc.facts.measure_run import Measurements
from tracedoc.topics.communication.run import comm_split, exposed_comm_excluding_wait_ms
from tracedoc.topics.host.rank import late_launch_idle_ms, sync_idle_ms, warm_up_idle_ms
from tracedoc.topics.host.run import core_wait_ms, sync_blocked_ms
from tracedoc.topics.input.rank import input_idle_ms
from tracedoc.topics.step.rank import non_compute_ms
from tracedoc.topics.step.run import gc_cost_ms, logged_step_ms
from tracedoc.topics.straggler.run import straggler_cost_ms, straggler_least_ms
from tracedoc.topics.straggler.shared_cores import straggler_recurring_ms
from tracedoc.values import Unknown
from tracedoc.whatif.balanced_stages import balance_stages
from tracedoc.whatif.bounds import at_most, hidden_by_compute, measured, within_host_work
from tracedoc.whatif.earlier_reduction import GRADIENT_GAINS
from tracedoc.whatif.sharding import SHARDING_GAINS

GainEstimator = Callable[[Measurements, str | None], Gain | Unknown]


def hide_exposed_communication(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what hiding exposed communication behind compute, or sending less, gives.

    At most the exposed communication less known waiting, and at most the step minus the host's own work,
    which stays. Where some of it may be waiting, at most the compute that runs with no communication beside
    it: fewer bytes do not shorten waiting.
    """
    exposed = measured(measurements, exposed_comm_excluding_wait_ms, key)
    if isinstance(exposed, Unknown):
        return exposed
    if measurements.value(comm_split) != "transfer":
        return hidden_by_compute(measurements, key, exposed, "the transfer hides behind compute completely")
    high, assumptions = within_host_work(measurements, key, exposed)
    return Gain(0.0, high, "ceiling", ("what compute cannot hide is not sent", *assumptions))


def avoid_syncs(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a host that never waits for the GPU gives.

    It is ahead by the time it was blocked for, and what it is ahead can fill the idle time after the waits,
    late launches behind them, and the time in which the loader makes the next batch, no more.
    """
    idle = measured(measurements, sync_idle_ms, key)
    blocked = measured(measurements, sync_blocked_ms, key)
    late = measured(measurements, late_launch_idle_ms, key)
    if isinstance(idle, Unknown):
        return idle
    loading = measured(measurements, input_idle_ms, key)
    if isinstance(blocked, Unknown) or isinstance(late, Unknown):
        high = idle
    else:
        fillable = idle + late + (0.0 if isinstance(loading, Unknown) else loading)
        high = max(min(blocked, fillable), idle)
    return Gain(0.0, high, "ceiling", ("the host never waits, and stays ahead of the GPU",))


def fill_the_step(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what twice the batch gives per unit of today's work: half of the time without compute.

    That time (launches, latency, waiting) is paid once a step, so twice the work pays it half as often; what
    loads and compiles code is paid once a job.
    """
    rest = measured(measurements, non_compute_ms, key)
    if isinstance(rest, Unknown):
        return Unknown("the budget of the step is not known")
    once = measured(measurements, warm_up_idle_ms, key)
    rest = max(rest - (0.0 if isinstance(once, Unknown) else once), 0.0)
    assumptions = (
        "the batch doubles and the time without compute stays as it is",
        "counted per unit of today's work",
    )
    return Gain(0.0, rest / 2, "ceiling", assumptions)


def stop_collections(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what collecting garbage elsewhere gives: what collections cost the logged steps on average.

    Where that is more than half of a logged step, the captured one holds collections as well: then at most
    what is not compute in it.
    """
    gain = at_most(measurements, key, gc_cost_ms, "no garbage is collected within a step")
    logged, rest = (
        measured(measurements, logged_step_ms, key),
        measured(measurements, non_compute_ms, key),
    )
    if isinstance(gain, Unknown) or isinstance(logged, Unknown) or gain.high_ms <= logged / 2:
        return gain
    return gain if isinstance(rest, Unknown) else replace(gain, high_ms=min(gain.high_ms, rest))


def remove_straggler_wait(measurements: Measurements, key: str | None) -> Gain | Unknown:
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


GAINS: dict[str, GainEstimator] = {
    "hide-exposed-communication": hide_exposed_communication,
    "avoid-syncs": avoid_syncs,
    "fill-the-step": fill_the_step,
    **SHARDING_GAINS,
    **GRADIENT_GAINS,
    "stop-collections": stop_collections,
    "remove-straggler-wait": remove_straggler_wait,
    "balance-stages": balance_stages,
    "not-wait-for-rank": remove_straggler_wait,  # its former name, which rules of other packs may use
}
"""Estimators by the names that rules use, of gains that no fact alone bounds. The key is a rank, ``None`` for
the run."""
