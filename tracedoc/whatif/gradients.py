"""Bound what a better reduction of gradients gives: fewer calls, earlier ones, and no repeated ones."""

from __future__ import annotations

from tracedoc.diagnosis import Gain
from tracedoc.facts.measure_run import Measurements
from tracedoc.values import Unknown
from tracedoc.whatif.bounds import measured, within_host_work


def merge_buckets(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what larger buckets give: the latency of the calls that disappear, where nothing hides it."""
    return _at_most(
        measurements, key, "bucket_saving_ms", "the merged buckets overlap as well as the small ones"
    )


def reduce_in_backward(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what reducing beside backward gives: the late reduction, at most backward's compute."""
    late = measured(measurements, "late_reduction_ms", key)
    compute = measured(measurements, "backward_compute_ms", key)
    if isinstance(late, Unknown):
        return late
    hidden = late if isinstance(compute, Unknown) else min(late, compute)
    high, assumptions = within_host_work(measurements, key, hidden)
    return Gain(0.0, high, "ceiling", ("all but the last bucket hide behind the backward pass", *assumptions))


def reduce_once(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what one reduction a step gives: the exposed time of the others.

    On CPU the reductions also take cores from the compute beside them, which no trace shows.
    """
    assumption = "only the last micro-batch reduces"
    if measurements.is_cpu:
        assumption += "; cores that reductions take from compute come on top"
    return _at_most(measurements, key, "repeated_reduction_ms", assumption)


def full_link_rate(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a link at its rate gives: the exposed transfer, less what it takes at the expected rate."""
    exposed = measured(measurements, "exposed_transfer_ms", key)
    efficiency = measured(measurements, "link_efficiency_frac", key)
    if isinstance(exposed, Unknown):
        return exposed
    if isinstance(efficiency, Unknown):
        return efficiency
    high, assumptions = within_host_work(measurements, key, exposed * max(1.0 - efficiency, 0.0))
    return Gain(0.0, high, "ceiling", ("transfers reach what their size should on this link", *assumptions))


def _at_most(measurements: Measurements, key: str | None, fact: str, assumption: str) -> Gain | Unknown:
    most = measured(measurements, fact, key)
    if isinstance(most, Unknown):
        return most
    high, assumptions = within_host_work(measurements, key, max(most, 0.0))
    return Gain(0.0, high, "ceiling", (assumption, *assumptions))


GRADIENT_GAINS = {
    "merge-buckets": merge_buckets,
    "reduce-in-backward": reduce_in_backward,
    "reduce-once": reduce_once,
    "full-link-rate": full_link_rate,
}
