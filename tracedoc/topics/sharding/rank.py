"""Facts of one rank about sharded parameters: the units, how they are gathered, and offloading."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.activity import Activity
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
from tracedoc.timeline.stalls import cpu_optimizer_spans, large_host_copies, offloads
from tracedoc.topics.step.rank import NO_STEP, in_step
from tracedoc.trace.distinct import distinct, median
from tracedoc.values import Unknown, Value, needed, needed_number

NOT_SHARDED = Unknown("no parameters are gathered by FSDP or ZeRO-3 in this trace")

NOT_TIMED = Unknown("a CPU trace has no compute stream that stalls")

NO_SIZES = Unknown("the gathers carry no sizes")

THRICE = 2.5
"""From this many gathers of a unit on, most units are gathered a third time."""


@rank_fact(unit="text", values=("FSDP1", "FSDP2", "ZeRO-3"))
def sharding_framework(timeline: RankTimeline) -> Value:
    """What shards the parameters: "FSDP1", "FSDP2" or "ZeRO-3", read from the ranges that it writes."""
    return needed(_units(timeline)).framework


@rank_fact(unit="count", needs=("collectives",))
def fsdp_units(timeline: RankTimeline) -> Value:
    """Distinct units of parameters that are gathered together.

    FSDP2 names them. For FSDP1 and ZeRO-3 a unit is a place in the order of the forward pass; ZeRO-3 may
    gather several modules at once, which then are one unit, and never gathers small persistent parameters.
    """
    return len(needed(_units(timeline)).names)


@rank_fact(unit="bytes", needs=("collectives",))
def median_unit_bytes(timeline: RankTimeline) -> Value:
    """Median gathered size of the units, the root's own parameters left out where the root has a name."""
    sizes = _inner_sizes(needed(_units(timeline)))
    return float(median(sizes)) if sizes.size else NO_SIZES


@rank_fact(unit="fraction", needs=("collectives",))
def largest_unit_frac(timeline: RankTimeline) -> Value:
    """Share of all gathered bytes (each unit counted once) that the largest unit holds."""
    sizes = unit_bytes(needed(_units(timeline)))
    return NO_SIZES if np.isnan(sizes).any() else float(sizes.max() / max(sizes.sum(), 1.0))


@rank_fact(unit="bytes", needs=("collectives",))
def all_units_bytes(timeline: RankTimeline) -> Value:
    """Gathered size of all units, each counted once: what the whole model takes when it is gathered."""
    sizes = unit_bytes(needed(_units(timeline)))
    return NO_SIZES if np.isnan(sizes).any() else float(sizes.sum())


@rank_fact(unit="count", needs=("collectives",))
def fsdp_blocks(timeline: RankTimeline) -> Value:
    """Repeated blocks of the model (transformer layers) that the units belong to, the root left out.

    With names: distinct names up to the first number (``layers.3``). Without: the units over the shortest
    pattern of sizes that repeats through the forward pass. Where nothing repeats, every unit is a block.
    """
    return block_count(needed(_units(timeline)))


@rank_fact(unit="bytes", needs=("collectives",))
def block_bytes(timeline: RankTimeline) -> Value:
    """Median gathered size of a block: what a unit would hold if each block were one unit.

    Without names it is the mean.
    """
    units = needed(_units(timeline))
    sizes = _inner_sizes(units)
    if not sizes.size:
        return NO_SIZES
    if not units.named:
        return float(sizes.sum() / block_count(units))
    totals: Counter[str] = Counter()
    inner = [name for name in units.names if name != ROOT] or list(units.names)
    for name, size in zip(inner, sizes.tolist(), strict=True):
        totals[block_of(name)] += size
    return float(median(list(totals.values())))


@rank_fact(unit="text", needs=("collectives",))
def blocks_in_code(timeline: RankTimeline) -> Value:
    """How the list of blocks is reached from the model: by its name, else as most models call it."""
    name = _block_list(needed(_units(timeline)))
    return f"model.{name}" if name else "model.layers"


@rank_fact(unit="count", needs=("collectives",))
def prefetch_elements(timeline: RankTimeline) -> Value:
    """Elements of two blocks of median size: what DeepSpeed's prefetch bucket needs to hold."""
    units = needed(_units(timeline))
    elements = unit_elements(units)
    if np.isnan(elements).any():
        return NO_SIZES
    return int(2 * float(median(elements)) * max(len(units.names) / max(block_count(units), 1), 1.0))


@rank_fact(unit="count", needs=("collectives",))
def estimated_parameters(timeline: RankTimeline) -> Value:
    """Elements of all units, each counted once: the parameters that are sharded, padding included.

    Parameters that ZeRO-3 keeps on every rank are not in it. Unknown where units of mixed types travel as
    bytes.
    """
    elements = unit_elements(needed(_units(timeline)))
    if np.isnan(elements).any():
        return Unknown("some gathers carry no element count")
    return int(elements.sum())


@rank_fact(unit="ratio", needs=("collectives",))
def gathers_per_unit(timeline: RankTimeline) -> Value:
    """All-gathers of the median step for each unit and micro-batch: 1 gathered once, 2 again in backward."""
    calls, units = needed(_gathers_of_step(timeline)), needed(_units(timeline))
    return len(calls) / len(units.names) / _micro_batches(calls, units)


@rank_fact(unit="fraction", needs=("collectives",))
def regather_frac(timeline: RankTimeline) -> Value:
    """Share of the units that the median step gathers again in its backward pass."""
    calls, units = needed(_gathers_of_step(timeline)), needed(_units(timeline))
    return float(distinct(calls.unit[calls.phase != FORWARD]).size / len(units.names))


@rank_fact(unit="bool", needs=("collectives", gathers_per_unit))
def regathers_for_recompute(timeline: RankTimeline) -> Value:
    """Whether most units are gathered three times a micro-batch: forward, recomputed forward, backward.

    Checkpointing that stands outside of FSDP recomputes a block whose parameters were freed again. Judged by
    ``gathers_per_unit`` of 2.5 and more.
    """
    return needed_number(gathers_per_unit(timeline)) >= THRICE


@rank_fact(unit="fraction", needs=("collectives", "host_ops"))
def backward_prefetch_frac(timeline: RankTimeline) -> Value:
    """Share of the backward pass's gathers that FSDP launches ahead, from a range named prefetch.

    Unknown for ZeRO-3, which writes no ranges, and where the backward pass gathers nothing.
    """
    calls, framework = needed(_gathers_of_step(timeline)), needed(_units(timeline)).framework
    if not framework.startswith("FSDP"):
        return Unknown(f"{framework} does not say what it fetches ahead")
    again = calls.phase != FORWARD
    return float(calls.prefetched[again].mean()) if again.any() else Unknown("nothing is gathered again")


def _units(timeline: RankTimeline) -> Units | Unknown:
    return NOT_SHARDED if timeline.units is None else timeline.units.units


def _gathers_of_step(timeline: RankTimeline) -> ShardCalls | Unknown:
    """The gathers that the analysed step launched."""
    gathers = needed(_units(timeline)).gathers
    if timeline.judged is None:
        return NO_STEP
    mine = np.asarray(gathers.step == timeline.judged.index)
    if timeline.host.source == "none":
        mine = np.ones(len(gathers), dtype=bool)
    return picked(gathers, mine) if mine.any() else NO_STEP


def _micro_batches(calls: ShardCalls, units: Units) -> float:
    """The forward passes of the step: the median number of forward gathers of a unit, 1 at least."""
    forward = np.bincount(calls.unit[calls.phase == FORWARD], minlength=len(units.names))
    return max(float(median(forward)), 1.0)


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
    gathers = needed(_units(timeline)).gathers
    steps = [window.index for window in timeline.complete_windows]
    if len(steps) < FEWEST_STEPS:
        return Unknown(f"fewer than {FEWEST_STEPS} complete steps to compare")
    orders = [gathers.nbytes[gathers.step == step].tolist() for step in steps]
    return float(sum(one != other for one, other in pairwise(orders)) / (len(orders) - 1))


# -- offloading


@rank_fact(unit="bytes", needs=("gpu", "kernels"))
def offloaded_bytes_per_step(timeline: RankTimeline) -> Value:
    """Bytes of large copies (1 MiB and more) to and from the host in the median step, where it offloads.

    0 unless large copies bring 16 MiB or more to the host, or the optimizer runs on the CPU: batches only
    travel to the GPU.
    """
    needed(in_step(timeline))
    rows = large_host_copies(timeline)
    sizes = timeline.trace.nbytes[rows]
    if (sizes < 0).any():
        return Unknown("the copies carry no size")
    return int(sizes.sum()) if offloads(timeline, cpu_optimizer_spans(timeline)) else 0


@rank_fact(unit="ms", needs=("gpu", "kernels", "host_ops"))
def cpu_optimizer_idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which the GPU is idle while an optimizer runs that launches no kernels."""
    return _under_cpu_optimizer(timeline, needed(in_step(timeline))).total_ns / 1e6


def _under_cpu_optimizer(timeline: RankTimeline, step: Activity) -> Spans:
    if timeline.device is None:
        return Spans.empty()
    return step.busy.complement(step.start_ns, step.end_ns) & cpu_optimizer_spans(timeline)


@rank_fact(
    unit="ms",
    needs=("gpu", "kernels"),
    interval="offload copy with nothing beside it, or GPU idle under the optimizer",
)
def offload_stall_ms(timeline: RankTimeline) -> Spans | Unknown:
    """What offloading costs the median step: exposed large copies, and idle time under a CPU optimizer."""
    step, rows, trace = needed(in_step(timeline)), large_host_copies(timeline), timeline.trace
    idle = _under_cpu_optimizer(timeline, step)
    if not offloads(timeline, cpu_optimizer_spans(timeline)):
        return idle
    return (Spans.of(trace.ts_ns[rows], trace.end_ns[rows]) & step.exposed_copy) | idle
