"""Facts about sharded parameters (FSDP, ZeRO-3): the units, how they are gathered, and what they stall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.shards.shard_units import (
    BACKWARD,
    FORWARD,
    ROOT,
    ShardCalls,
    Units,
    block_of,
    unit_bytes,
    unit_elements,
)
from tracedoc.timeline.shards.times import UNKNOWN_DEPTH, block_count, picked
from tracedoc.trace.distinct import distinct
from tracedoc.values import Unknown, Value

NOT_SHARDED = Unknown("no parameters are gathered by FSDP or ZeRO-3 in this trace")
NOT_TIMED = Unknown("a CPU trace has no compute stream that stalls")
NO_SIZES = Unknown("the gathers carry no sizes")

THRICE = 2.5
"""From this many gathers of a unit on, most units are gathered a third time."""


@rank_fact("sharding_framework", unit="text", values=("FSDP1", "FSDP2", "ZeRO-3"))
def sharding_framework(timeline: RankTimeline) -> Value:
    """What shards the parameters: "FSDP1", "FSDP2" or "ZeRO-3", read from the ranges that it writes."""
    return NOT_SHARDED if timeline.units is None else timeline.units.units.framework


@rank_fact("fsdp_units", unit="count", needs=("collectives",))
def fsdp_units(timeline: RankTimeline) -> Value:
    """Distinct units of parameters that are gathered together.

    FSDP2 names them. For FSDP1 and ZeRO-3 a unit is a place in the order of the forward pass; ZeRO-3 may
    gather several modules at once, which then are one unit, and never gathers small persistent parameters.
    """
    return _of_units(timeline, lambda units: len(units.names))


@rank_fact("median_unit_bytes", unit="bytes", needs=("collectives",))
def median_unit_bytes(timeline: RankTimeline) -> Value:
    """Median gathered size of the units, the root's own parameters left out where the root has a name."""

    def median(units: Units) -> Value:
        sizes = _inner_sizes(units)
        return float(np.median(sizes)) if sizes.size else NO_SIZES

    return _of_units(timeline, median)


@rank_fact("largest_unit_frac", unit="fraction", needs=("collectives",))
def largest_unit_frac(timeline: RankTimeline) -> Value:
    """Share of all gathered bytes (each unit counted once) that the largest unit holds."""

    def largest(units: Units) -> Value:
        sizes = unit_bytes(units)
        return NO_SIZES if np.isnan(sizes).any() else float(sizes.max() / max(sizes.sum(), 1.0))

    return _of_units(timeline, largest)


@rank_fact("all_units_bytes", unit="bytes", needs=("collectives",))
def all_units_bytes(timeline: RankTimeline) -> Value:
    """Gathered size of all units, each counted once: what the whole model takes when it is gathered."""

    def total(units: Units) -> Value:
        sizes = unit_bytes(units)
        return NO_SIZES if np.isnan(sizes).any() else float(sizes.sum())

    return _of_units(timeline, total)


@rank_fact("fsdp_blocks", unit="count", needs=("collectives",))
def fsdp_blocks(timeline: RankTimeline) -> Value:
    """Repeated blocks of the model (transformer layers) that the units belong to, the root left out.

    With names: distinct names up to the first number (``layers.3``). Without: the units over the shortest
    pattern of sizes that repeats through the forward pass. Where nothing repeats, every unit is a block.
    """
    return _of_units(timeline, block_count)


@rank_fact("block_bytes", unit="bytes", needs=("collectives",))
def block_bytes(timeline: RankTimeline) -> Value:
    """Median gathered size of a block: what a unit would hold if each block were one unit.

    Without names it is the mean.
    """

    def median(units: Units) -> Value:
        sizes = _inner_sizes(units)
        if not sizes.size:
            return NO_SIZES
        if not units.named:
            return float(sizes.sum() / block_count(units))
        totals: Counter[str] = Counter()
        inner = [name for name in units.names if name != ROOT] or list(units.names)
        for name, size in zip(inner, sizes.tolist(), strict=True):
            totals[block_of(name)] += size
        return float(np.median(list(totals.values())))

    return _of_units(timeline, median)


@rank_fact("block_name", unit="text", needs=("collectives",))
def block_name(timeline: RankTimeline) -> Value:
    """Where the repeated blocks are, as the module list that holds most of them: ``model.layers``."""

    return _of_units(timeline, lambda units: _block_list(units) or Unknown("the units have no names"))


@rank_fact("blocks_in_code", unit="text", needs=("collectives",))
def blocks_in_code(timeline: RankTimeline) -> Value:
    """How the list of blocks is reached from the model: by its name, else as most models call it."""

    def path(units: Units) -> Value:
        name = _block_list(units)
        return f"model.{name}" if name else "model.layers"

    return _of_units(timeline, path)


@rank_fact("prefetch_elements", unit="count", needs=("collectives",))
def prefetch_elements(timeline: RankTimeline) -> Value:
    """Elements of two blocks of median size: what DeepSpeed's prefetch bucket needs to hold."""

    def two_blocks(units: Units) -> Value:
        elements = unit_elements(units)
        if np.isnan(elements).any():
            return NO_SIZES
        return int(2 * float(np.median(elements)) * max(len(units.names) / max(block_count(units), 1), 1.0))

    return _of_units(timeline, two_blocks)


@rank_fact("estimated_parameters", unit="count", needs=("collectives",))
def estimated_parameters(timeline: RankTimeline) -> Value:
    """Elements of all units, each counted once: the parameters that are sharded, padding included.

    Parameters that ZeRO-3 keeps on every rank are not in it. Unknown where units of mixed types travel as
    bytes.
    """

    def total(units: Units) -> Value:
        elements = unit_elements(units)
        return (
            Unknown("some gathers carry no element count")
            if np.isnan(elements).any()
            else int(elements.sum())
        )

    return _of_units(timeline, total)


@rank_fact("gathers_per_unit", unit="ratio", needs=("collectives",))
def gathers_per_unit(timeline: RankTimeline) -> Value:
    """All-gathers of the median step for each unit and micro-batch: 1 gathered once, 2 again in backward."""

    def ratio(calls: ShardCalls, units: Units) -> Value:
        return len(calls) / len(units.names) / _micro_batches(calls, units)

    return _of_step(timeline, ratio)


@rank_fact("regather_frac", unit="fraction", needs=("collectives",))
def regather_frac(timeline: RankTimeline) -> Value:
    """Share of the units that the median step gathers again in its backward pass."""

    def share(calls: ShardCalls, units: Units) -> Value:
        return float(distinct(calls.unit[calls.phase != FORWARD]).size / len(units.names))

    return _of_step(timeline, share)


@rank_fact("gathered_thrice", unit="bool", needs=("collectives",))
def gathered_thrice(timeline: RankTimeline) -> Value:
    """Whether most units are gathered three times a micro-batch: forward, recomputed forward, backward.

    Checkpointing that stands outside of FSDP recomputes a block whose parameters were freed again. Judged by
    ``gathers_per_unit`` of 2.5 and more.
    """
    ratio = gathers_per_unit(timeline)
    return ratio if isinstance(ratio, Unknown) else float(ratio) >= THRICE


@rank_fact("prefetch_depth", unit="count", needs=("collectives", "launches"))
def prefetch_depth(timeline: RankTimeline) -> Value:
    """How many units ahead the gathers of the median step start, as their median; 0: not ahead at all."""
    return _depth(timeline, None)


@rank_fact("forward_prefetch_depth", unit="count", needs=("collectives", "launches"))
def forward_prefetch_depth(timeline: RankTimeline) -> Value:
    """How many units ahead the gathers of the forward pass start (:func:`prefetch_depth`)."""
    return _depth(timeline, FORWARD)


@rank_fact("backward_prefetch_depth", unit="count", needs=("collectives", "launches"))
def backward_prefetch_depth(timeline: RankTimeline) -> Value:
    """How many units ahead the gathers of the backward pass start (:func:`prefetch_depth`)."""
    return _depth(timeline, BACKWARD)


@rank_fact("backward_prefetch_frac", unit="fraction", needs=("collectives", "host_ops"))
def backward_prefetch_frac(timeline: RankTimeline) -> Value:
    """Share of the backward pass's gathers that FSDP launches ahead, from a range named prefetch.

    Unknown for ZeRO-3, which writes no ranges, and where the backward pass gathers nothing.
    """

    def share(calls: ShardCalls, units: Units) -> Value:
        if not units.framework.startswith("FSDP"):
            return Unknown(f"{units.framework} does not say what it fetches ahead")
        again = calls.phase != FORWARD
        return float(calls.prefetched[again].mean()) if again.any() else Unknown("nothing is gathered again")

    return _of_step(timeline, share)


def _of_units(timeline: RankTimeline, measure: Callable[[Units], Value]) -> Value:
    return NOT_SHARDED if timeline.units is None else measure(timeline.units.units)


def _of_step(timeline: RankTimeline, measure: Callable[[ShardCalls, Units], Value]) -> Value:
    """Measure the gathers that the analysed step launched."""
    if timeline.units is None:
        return NOT_SHARDED
    units, mine = timeline.units.units, _judged_gathers(timeline)
    if mine is None or not mine.any():
        return NO_STEP
    return measure(picked(units.gathers, mine), units)


def _judged_gathers(timeline: RankTimeline) -> npt.NDArray[np.bool_] | None:
    if timeline.units is None or timeline.judged is None:
        return None
    steps = timeline.units.units.gathers.step
    if timeline.host.source == "none":
        return np.ones(steps.size, dtype=bool)
    return np.asarray(steps == timeline.judged.index)


def _micro_batches(calls: ShardCalls, units: Units) -> float:
    """Return how often the step runs forward: the median number of forward gathers of a unit, 1 at least."""
    forward = np.bincount(calls.unit[calls.phase == FORWARD], minlength=len(units.names))
    return max(float(np.median(forward)), 1.0)


def _inner_sizes(units: Units) -> npt.NDArray[np.float64]:
    """Return the sizes of the units without the root; empty where one is not recorded."""
    sizes = unit_bytes(units)
    inner = np.array([name != ROOT for name in units.names], dtype=bool)
    if units.named and inner.any():
        sizes = sizes[inner]
    return np.empty(0) if np.isnan(sizes).any() else sizes


def _block_list(units: Units) -> str:
    numbered = [block_of(one) for one in units.names if one != ROOT] if units.named else []
    lists = Counter(one.rpartition(".")[0] for one in dict.fromkeys(numbered) if one[-1:].isdecimal())
    return next((one for one, _ in lists.most_common(1) if one), "")


def _depth(timeline: RankTimeline, phase: int | None) -> Value:
    if timeline.units is None:
        return NOT_SHARDED
    times, calls, mine = timeline.units.gather_times, timeline.units.units.gathers, _judged_gathers(timeline)
    if times is None:
        return NOT_TIMED
    if mine is None:
        return NO_STEP
    mine = mine & (times.depth != UNKNOWN_DEPTH)
    if phase is not None:
        mine = mine & ((calls.phase == FORWARD) == (phase == FORWARD))
    return (
        int(np.median(times.depth[mine]))
        if mine.any()
        else Unknown("the order in which the units are used is not known")
    )
