"""Bound what better sharding gives: units of another size, earlier gathers."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tracedoc.diagnosis import Gain
from tracedoc.facts.catalog import Fact
from tracedoc.facts.measure_run import Measurements
from tracedoc.topics.sharding.rank import fsdp_blocks, fsdp_units, sharding_hook_host_ms
from tracedoc.topics.sharding.run import hideable_backward_stall_ms, hideable_gather_stall_ms
from tracedoc.topics.sharding.units import fine_wrapping_cost_ms, sharded_exposed_ms
from tracedoc.values import Unknown
from tracedoc.whatif.bounds import at_most, hidden_by_compute, measured, within_host_work


def merge_units(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what one unit a block gives: the latency of calls that disappear, idle time under their hooks.

    The bytes still travel at the link's rate, and the hooks of the blocks stay; at most the step minus the
    host's other work and minus compute.
    """
    cost = measured(measurements, fine_wrapping_cost_ms, key)
    if isinstance(cost, Unknown):
        return cost
    units = measured(measurements, fsdp_units, key)
    blocks = measured(measurements, fsdp_blocks, key)
    hooks = measured(measurements, sharding_hook_host_ms, key)
    saved = 0.0
    if not (isinstance(hooks, Unknown) or isinstance(units, Unknown) or isinstance(blocks, Unknown)):
        saved = hooks * max(1.0 - blocks / max(units, 1.0), 0.0)
    high, assumptions = within_host_work(measurements, key, cost, saved_host_ms=saved)
    return Gain(
        0.0,
        high,
        "ceiling",
        ("each block is one unit, whose bytes travel at the link's full rate", *assumptions),
    )


def gather_ahead(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what earlier gathers give: stalls less waiting, less what no compute before them could hide."""
    return _ahead(measurements, key, hideable_gather_stall_ms, "every gather starts one unit ahead")


def gather_backward_ahead(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what fetching ahead in backward gives: its stalls that compute before them could hide."""
    return _ahead(
        measurements,
        key,
        hideable_backward_stall_ms,
        "each backward gather starts one unit ahead",
    )


def split_units(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """Bound what smaller units give: exposed gathers and reductions, at most what there is to hide them.

    That is compute, and of the gathers and reductions of a backward pass, which then run beside each other,
    the shorter ones: half of all at most.
    """
    exposed = measured(measurements, sharded_exposed_ms, key)
    if isinstance(exposed, Unknown):
        return exposed
    return hidden_by_compute(
        measurements,
        key,
        exposed,
        "all but the first and last unit hides behind compute and other units",
        beside_ms=exposed / 2,
    )


def _ahead(measurements: Measurements, key: str | None, fact: Fact, assumption: str) -> Gain | Unknown:
    gain = at_most(measurements, key, fact, assumption, host_stays=True)
    if isinstance(gain, Unknown) or measurements.available["multi_rank"].state == "present":
        return gain
    alone = "none of it is waiting for peers, which one rank alone cannot show"
    return replace(gain, assumptions=(*gain.assumptions, alone))


SHARDING_GAINS: dict[str, Callable[[Measurements, str | None], Gain | Unknown]] = {
    "merge-units": merge_units,
    "gather-ahead": gather_ahead,
    "gather-backward-ahead": gather_backward_ahead,
    "split-units": split_units,
}
"""Estimators of the sharding rules, by name."""
