"""Bound what hiding one kind of communication gives: no more than there is compute to hide it behind."""

from __future__ import annotations

from collections.abc import Callable

from tracedoc.diagnosis import Gain
from tracedoc.facts.measure_run import Measurements
from tracedoc.values import Unknown
from tracedoc.whatif.bounds import hidden_by_compute, measured


def hide(fact: str, assumption: str) -> Callable[[Measurements, str | None], Gain | Unknown]:
    """Return the estimator that bounds hiding the time that ``fact`` measures.

    At most that time, the compute that runs with no communication beside it, and the step minus the host's
    own work.
    """

    def bound(measurements: Measurements, key: str | None) -> Gain | Unknown:
        exposed = measured(measurements, fact, key)
        if isinstance(exposed, Unknown):
            return exposed
        return hidden_by_compute(measurements, key, exposed, assumption)

    return bound


HIDING_GAINS = {
    "hide-all-to-alls": hide("all_to_all_exposed_ms", "other work of the step hides all of them"),
    "hide-layer-exchange": hide("layer_exchange_ms", "the matrix products before and after hide all of it"),
    "hide-sends": hide("p2p_exposed_ms", "every transfer runs beside the compute of another micro-batch"),
}
