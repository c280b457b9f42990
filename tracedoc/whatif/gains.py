"""Bound what a fix could give back per step, by what physics allows. All are ceilings: low is 0."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tracedoc.diagnosis import Gain
from tracedoc.facts.measure_run import Measurements
from tracedoc.values import Unknown
from tracedoc.whatif.bounds import hidden_by_compute, measured, within_host_work
from tracedoc.whatif.gradients import GRADIENT_GAINS
from tracedoc.whatif.sharding import SHARDING_GAINS
from tracedoc.whatif.straggler import not_wait_for_any_rank, not_wait_for_rank, share_work_evenly

GainEstimator = Callable[[Measurements, str | None], Gain | Unknown]


def hide_exposed_communication(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what hiding exposed communication behind compute gives.

    At most the exposed communication less known waiting; at most the compute that runs with no communication
    beside it, for nothing else can hide it; and at most the step minus the host's own work, which stays.
    """
    exposed = measured(measurements, "exposed_comm_excluding_wait_ms", key)
    if isinstance(exposed, Unknown):
        return exposed
    return hidden_by_compute(measurements, key, exposed, "the transfer hides behind compute completely")


def hide_small_collectives(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what merging latency-bound collectives gives: their exposed time."""
    exposed = measured(measurements, "latency_bound_exposed_ms", key)
    if isinstance(exposed, Unknown):
        return exposed
    high, assumptions = within_host_work(measurements, key, exposed)
    return Gain(0.0, high, "ceiling", ("merged collectives take no time of their own", *assumptions))


def launch_in_time(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a faster host gives: the idle time that the pace of its launches explains."""
    return _idle_gain(measurements, key, "launch_pace_idle_ms", "the host launches every kernel in time")


def avoid_syncs(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a host that never waits for the GPU gives.

    It is ahead by the time it was blocked for, and what it is ahead can fill the idle time after the waits
    and late launches behind them, no more.
    """
    idle = measured(measurements, "sync_idle_ms", key)
    blocked = measured(measurements, "sync_blocked_ms", key)
    late = measured(measurements, "late_launch_idle_ms", key)
    if isinstance(idle, Unknown):
        return idle
    if isinstance(blocked, Unknown) or isinstance(late, Unknown):
        high = idle
    else:
        high = max(min(blocked, idle + late), idle)
    return Gain(0.0, high, "ceiling", ("the host never waits, and stays ahead of the GPU",))


def return_sooner(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a host that is never away for long gives: the idle time in those gaps."""
    return _idle_gain(measurements, key, "host_away_idle_ms", "the host does this beside a busy GPU")


def use_tensor_cores(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what tensor cores give: all of the time of the fp32 matrix kernels, and what the host leaves."""
    plain = measured(measurements, "plain_matrix_ms", key)
    if isinstance(plain, Unknown):
        return plain
    high, assumptions = within_host_work(measurements, key, plain)
    return Gain(0.0, high, "ceiling", ("on tensor cores these kernels take no time", *assumptions))


def fuse_optimizer(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what an optimizer with few launches gives: the idle time while it launches."""
    return _idle_gain(
        measurements, key, "optimizer_idle_ms", "the optimizer's launches take no time; its arithmetic stays"
    )


def fuse_short_kernels(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what fusing short kernels gives: the idle time after them."""
    return _idle_gain(measurements, key, "short_kernel_idle_ms", "no gap is left after a short kernel")


def feed_input(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a faster loader gives: the idle time while it is waited for."""
    return _idle_gain(measurements, key, "input_idle_ms", "a batch is always ready")


def keep_allocations(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a steady allocator gives: the idle time during its calls."""
    return _idle_gain(
        measurements, key, "allocator_idle_ms", "device memory is never allocated or freed in a step"
    )


def pin_memory(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what pinned memory gives: the time that pageable copies cost the GPU."""
    return _idle_gain(
        measurements, key, "pageable_stall_ms", "copies from pinned memory overlap with compute"
    )


def fill_the_step(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what twice the batch gives per unit of today's work: half of the time without compute.

    That time (launches, latency, waiting) is paid once a step, so twice the work pays it half as often.
    """
    step, compute = measured(measurements, "step_ms", key), measured(measurements, "compute_ms", key)
    if isinstance(step, Unknown) or isinstance(compute, Unknown):
        return Unknown("the budget of the step is not known")
    assumptions = (
        "the batch doubles and the time without compute stays as it is",
        "counted per unit of today's work",
    )
    return Gain(0.0, max(step - compute, 0.0) / 2, "ceiling", assumptions)


def stop_collections(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what collecting garbage elsewhere gives: what collections cost the logged steps on average.

    Where that is more than half of a logged step, the captured one holds collections as well: then at most
    what is not compute in it.
    """
    gain = _idle_gain(measurements, key, "gc_cost_ms", "no garbage is collected within a step")
    logged, step = measured(measurements, "logged_step_ms", key), measured(measurements, "step_ms", key)
    compute = measured(measurements, "compute_ms", key)
    if isinstance(gain, Unknown) or isinstance(logged, Unknown) or gain.high_ms <= logged / 2:
        return gain
    if isinstance(step, Unknown) or isinstance(compute, Unknown):
        return gain
    return replace(gain, high_ms=min(gain.high_ms, max(step - compute, 0.0)))


def even_steps(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what steps of one length give: the excess of the long ones, spread over all."""
    return _idle_gain(measurements, key, "step_outlier_cost_ms", "every step takes as long as the median one")


def _idle_gain(measurements: Measurements, key: str | None, fact: str, assumption: str) -> Gain | Unknown:
    high = measured(measurements, fact, key)
    if isinstance(high, Unknown):
        return high
    return Gain(0.0, max(high, 0.0), "ceiling", (assumption,))


GAINS: dict[str, GainEstimator] = {
    "hide-exposed-communication": hide_exposed_communication,
    "hide-small-collectives": hide_small_collectives,
    "launch-in-time": launch_in_time,
    "avoid-syncs": avoid_syncs,
    "return-sooner": return_sooner,
    "use-tensor-cores": use_tensor_cores,
    "fuse-optimizer": fuse_optimizer,
    "fuse-short-kernels": fuse_short_kernels,
    "feed-input": feed_input,
    "keep-allocations": keep_allocations,
    "pin-memory": pin_memory,
    "fill-the-step": fill_the_step,
    **SHARDING_GAINS,
    **GRADIENT_GAINS,
    "stop-collections": stop_collections,
    "even-steps": even_steps,
    "not-wait-for-rank": not_wait_for_rank,
    "not-wait-for-any-rank": not_wait_for_any_rank,
    "share-work-evenly": share_work_evenly,
}
"""Estimators by the names that rules use. The key is a rank, ``None`` for the run."""
