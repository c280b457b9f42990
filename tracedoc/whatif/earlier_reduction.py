"""Bound what a better reduction of gradients gives: earlier calls, and a link at its rate."""

from __future__ import annotations

from tracedoc.diagnosis import Gain
from tracedoc.facts.measure_run import Measurements
from tracedoc.topics.communication.run import exposed_transfer_ms
from tracedoc.topics.gradients.run import late_reduction_ms
from tracedoc.topics.links.run import link_efficiency_frac
from tracedoc.topics.step.rank import backward_compute_ms, comm_ms
from tracedoc.values import Unknown
from tracedoc.whatif.bounds import measured, within_host_work


def reduce_in_backward(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what reducing beside backward gives: the late reduction, at most backward's compute."""
    late = measured(measurements, late_reduction_ms, key)
    compute = measured(measurements, backward_compute_ms, key)
    if isinstance(late, Unknown):
        return late
    hidden = late if isinstance(compute, Unknown) else min(late, compute)
    high, assumptions = within_host_work(measurements, key, hidden)
    return Gain(0.0, high, "ceiling", ("all but the last bucket hide behind the backward pass", *assumptions))


def full_link_rate(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what a link at its rate gives: what all transfers save, at most what of them is exposed.

    What a transfer saves may come off its exposed part alone, for the rest of it then hides as before.
    """
    exposed = measured(measurements, exposed_transfer_ms, key)
    efficiency = measured(measurements, link_efficiency_frac, key)
    comm = measured(measurements, comm_ms, key)
    if isinstance(exposed, Unknown):
        return exposed
    if isinstance(efficiency, Unknown):
        return efficiency
    saved = exposed if isinstance(comm, Unknown) else comm * max(1.0 - efficiency, 0.0)
    high, assumptions = within_host_work(measurements, key, min(exposed, saved))
    return Gain(0.0, high, "ceiling", ("transfers reach what their size should on this link", *assumptions))


GRADIENT_GAINS = {
    "reduce-in-backward": reduce_in_backward,
    "full-link-rate": full_link_rate,
}
