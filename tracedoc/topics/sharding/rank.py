"""Facts of one rank about sharded parameters: the units, how they are gathered, and offloading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.shards.shard_units import (
    FORWARD,
    ROOT,
    ShardCalls,
    Units,
    block_of,
    unit_bytes,
    unit_elements,
)
from tracedoc.timeline.shards.times import block_count, picked
from tracedoc.timeline.stalls import (
    cpu_optimizer_idle,
    cpu_optimizer_spans,
    hook_idle,
    large_host_copies,
    offload_stall,
    offloads,
)
from tracedoc.topics.step.rank import NO_STEP
from tracedoc.trace.distinct import distinct
from tracedoc.values import Unknown, Value

NOT_SHARDED = Unknown("no parameters are gathered by FSDP or ZeRO-3 in this trace")

NOT_TIMED = Unknown("a CPU trace has no compute stream that stalls")

NO_SIZES = Unknown("the gathers carry no sizes")

THRICE = 2.5
"""From this many gathers of a unit on, most units are gathered a third time."""


@rank_fact(unit="text", values=("FSDP1", "FSDP2", "ZeRO-3"))
def sharding_framework(timeline: RankTimeline) -> Value:
    """What shards the parameters: "FSDP1", "FSDP2" or "ZeRO-3", read from the ranges that it writes."""
    return NOT_SHARDED if timeline.units is None else timeline.units.units.framework


@rank_fact(unit="count", needs=("collectives",))
def fsdp_units(timeline: RankTimeline) -> Value:
    """Distinct units of parameters that are gathered together.

    FSDP2 names them. For FSDP1 and ZeRO-3 a unit is a place in the order of the forward pass; ZeRO-3 may
    gather several modules at once, which then are one unit, and never gathers small persistent parameters.
    """
    return _of_units(timeline, lambda units: len(units.names))


@rank_fact(unit="bytes", needs=("collectives",))
def median_unit_bytes(timeline: RankTimeline) -> Value:
    """Median gathered size of the units, the root's own parameters left out where the root has a name."""

    def median(units: Units) -> Value:
        sizes = _inner_sizes(units)
        return float(np.median(sizes)) if sizes.size else NO_SIZES

    return _of_units(timeline, median)


@rank_fact(unit="fraction", needs=("collectives",))
def largest_unit_frac(timeline: RankTimeline) -> Value:
    """Share of all gathered bytes (each unit counted once) that the largest unit holds."""

    def largest(units: Units) -> Value:
        sizes = unit_bytes(units)
        return NO_SIZES if np.isnan(sizes).any() else float(sizes.max() / max(sizes.sum(), 1.0))

    return _of_units(timeline, largest)


@rank_fact(unit="bytes", needs=("collectives",))
def all_units_bytes(timeline: RankTimeline) -> Value:
    """Gathered size of all units, each counted once: what the whole model takes when it is gathered."""

    def total(units: Units) -> Value:
        sizes = unit_bytes(units)
        return NO_SIZES if np.isnan(sizes).any() else float(sizes.sum())

    return _of_units(timeline, total)


@rank_fact(unit="count", needs=("collectives",))
def fsdp_blocks(timeline: RankTimeline) -> Value:
    """Repeated blocks of the model (transformer layers) that the units belong to, the root left out.

    With names: distinct names up to the first number (``layers.3``). Without: the units over the shortest
    pattern of sizes that repeats through the forward pass. Where nothing repeats, every unit is a block.
    """
    return _of_units(timeline, block_count)


@rank_fact(unit="bytes", needs=("collectives",))
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


@rank_fact(unit="text", needs=("collectives",))
def blocks_in_code(timeline: RankTimeline) -> Value:
    """How the list of blocks is reached from the model: by its name, else as most models call it."""

    def path(units: Units) -> Value:
        name = _block_list(units)
        return f"model.{name}" if name else "model.layers"

    return _of_units(timeline, path)


@rank_fact(unit="count", needs=("collectives",))
def prefetch_elements(timeline: RankTimeline) -> Value:
    """Elements of two blocks of median size: what DeepSpeed's prefetch bucket needs to hold."""

    def two_blocks(units: Units) -> Value:
        elements = unit_elements(units)
        if np.isnan(elements).any():
            return NO_SIZES
        return int(2 * float(np.median(elements)) * max(len(units.names) / max(block_count(units), 1), 1.0))

    return _of_units(timeline, two_blocks)


@rank_fact(unit="count", needs=("collectives",))
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


@rank_fact(unit="ratio", needs=("collectives",))
def gathers_per_unit(timeline: RankTimeline) -> Value:
    """All-gathers of the median step for each unit and micro-batch: 1 gathered once, 2 again in backward."""

    def ratio(calls: ShardCalls, units: Units) -> Value:
        return len(calls) / len(units.names) / _micro_batches(calls, units)

    return _of_step(timeline, ratio)


@rank_fact(unit="fraction", needs=("collectives",))
def regather_frac(timeline: RankTimeline) -> Value:
    """Share of the units that the median step gathers again in its backward pass."""

    def share(calls: ShardCalls, units: Units) -> Value:
        return float(distinct(calls.unit[calls.phase != FORWARD]).size / len(units.names))

    return _of_step(timeline, share)


@rank_fact(unit="bool", needs=("collectives", gathers_per_unit))
def regathers_for_recompute(timeline: RankTimeline) -> Value:
    """Whether most units are gathered three times a micro-batch: forward, recomputed forward, backward.

    Checkpointing that stands outside of FSDP recomputes a block whose parameters were freed again. Judged by
    ``gathers_per_unit`` of 2.5 and more.
    """
    found = gathers_per_unit(timeline)
    return found if isinstance(found, Unknown) else float(found) >= THRICE


@rank_fact(unit="fraction", needs=("collectives", "host_ops"))
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
    """The forward passes of the step: the median number of forward gathers of a unit, 1 at least."""
    forward = np.bincount(calls.unit[calls.phase == FORWARD], minlength=len(units.names))
    return max(float(np.median(forward)), 1.0)


def _inner_sizes(units: Units) -> npt.NDArray[np.float64]:
    """The sizes of the units without the root; empty where one is not recorded."""
    sizes = unit_bytes(units)
    inner = np.array([name != ROOT for name in units.names], dtype=bool)
    if units.named and inner.any():
        sizes = sizes[inner]
    return np.empty(0) if np.isnan(sizes).any() else sizes


def _block_list(units: Units) -> str:
    numbered = [block_of(one) for one in units.names if one != ROOT] if units.named else []
    lists = Counter(one.rpartition(".")[0] for one in dict.fromkeys(numbered) if one[-1:].isdecimal())
    return next((one for one, _ in lists.most_common(1) if one), "")


# -- the order of gathers


FEWEST_STEPS = 3
"""Two steps that differ may be the last of a batch and the first of the next."""


@rank_fact(unit="fraction", needs=("collectives",))
def gather_order_changes_frac(timeline: RankTimeline) -> Value:
    """Share of the complete steps after the first whose parameter gathers differ from the step before.

    Compared are the sizes of all gathers in the order of their launch: another number, or another order.
    Modules of one size that change places cannot be told. Unknown with fewer than three complete steps.
    """
    if timeline.units is None:
        return NOT_SHARDED
    gathers = timeline.units.units.gathers
    steps = [window.index for window in timeline.complete_windows]
    if len(steps) < FEWEST_STEPS:
        return Unknown(f"fewer than {FEWEST_STEPS} complete steps to compare")
    orders = [gathers.nbytes[gathers.step == step].tolist() for step in steps]
    return float(sum(one != other for one, other in pairwise(orders)) / (len(orders) - 1))


# -- hooks of FSDP


NO_HOOKS = Unknown("no range of FSDP is in this trace")


@rank_fact(
    unit="ms",
    needs=("host_ops", "launches"),
    interval="GPU idle while the host is inside the hooks of FSDP",
)
def sharding_hook_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """GPU idle time of the median step in late launches while the host is inside FSDP's hooks.

    0 where the pace of launches leaves the GPU idle for less than 20 % of the step: the profiler's own cost
    may explain that much.
    """
    if timeline.units is None or not len(timeline.units.units.hooks):
        return NO_HOOKS
    spans = hook_idle(timeline)
    return NO_STEP if spans is None else spans


# -- offloading


@rank_fact(unit="bytes", needs=("gpu", "kernels"))
def offloaded_bytes_per_step(timeline: RankTimeline) -> Value:
    """Bytes of large copies (1 MiB and more) to and from the host in the median step, where it offloads.

    0 unless large copies bring 16 MiB or more to the host, or the optimizer runs on the CPU: batches only
    travel to the GPU.
    """
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    rows = large_host_copies(timeline)
    sizes = timeline.trace.nbytes[rows]
    if (sizes < 0).any():
        return Unknown("the copies carry no size")
    return int(sizes.sum()) if offloads(timeline, cpu_optimizer_spans(timeline)) else 0


@rank_fact(unit="ms", needs=("gpu", "kernels", "host_ops"))
def cpu_optimizer_idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which the GPU is idle while an optimizer runs that launches no kernels."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return cpu_optimizer_idle(timeline, cpu_optimizer_spans(timeline)).total_ns / 1e6


@rank_fact(
    unit="ms",
    needs=("gpu", "kernels"),
    interval="offload copy with nothing beside it, or GPU idle under the optimizer",
)
def offload_stall_ms(timeline: RankTimeline) -> Spans | Unknown:
    """What offloading costs the median step: exposed large copies, and idle time under a CPU optimizer."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return offload_stall(timeline)
