"""Changes of how long kernels take, and of how much work a step does."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import Layout, RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.kernel_times import SMALL_NS
from tracedoc.step.program import Call, Doing, Group, Waste, narrow
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import is_among
from tracedoc.whatif.changes.change import (
    PASSES,
    Mask,
    NotApplicable,
    Parameter,
    as_change,
    of_scenario,
    scaled,
    where_possible,
)
from tracedoc.whatif.changes.host import COMPILED_HOST, paced_passes, paced_updates
from tracedoc.whatif.changes.transfers import grow_with_batch, with_bytes
from tracedoc.whatif.removal import Part, Removal, Times, removed, without

GROUPS: dict[str, tuple[Group, ...]] = {
    "matrix": (Group.MATRIX,),
    "attention": (Group.ATTENTION,),
    "pointwise": (Group.POINTWISE, Group.CAST, Group.MEMSET, Group.BUCKETS),
    "optimizer": (Group.OPTIMIZER,),
}
GROUPS["all"] = tuple(dict.fromkeys(one for groups in GROUPS.values() for one in groups))

WASTES = {
    "attention": (Waste.ATTENTION, 0.0),
    "layout": (Waste.LAYOUT, 0.5),
    "fp32": (Waste.FP32, 0.15),
    "shapes": (Waste.SHAPES, 0.5),
    "loss": (Waste.LOSS, 0.5),
    "fp64": (Waste.FP64, 0.5),
    "untouched": (Waste.UNTOUCHED, 0.3),
    "fusion": (Waste.FUSION, 0.5),
}
"""How the same could be computed in less time, and by which share the time that goes may be more or less."""

PRECISION_DOUBT = 2.0
"""So many times as fast as is likely matrix products in fewer bits may be, or as slow: shapes decide."""

FUSED_HOST = (0.05, 0.1, 0.3)
"""A fused optimizer launches few kernels: it takes this share of the host's time."""

UNFUSED, UNFUSED_DOUBT = 0.55, 0.25
"""This share of what an optimizer of single operators takes is reading and writing values again, give or take
a quarter: fused, AdamW moves 7 values for each parameter instead of 20, SGD with momentum 5 instead of 8."""

UNFILLED_NS, UNFILLED_SHARE = (50_000, 5_000, 0), 0.4
"""Of a kernel's time so much, and at most this share, is the same for twice the work: it starts and ends, and
the blocks of its last wave leave processors idle, for at most 50 us (a tile of 128 x 128 over 4,096 products
on one processor of an A100)."""


def growing(times: Times, unfilled_ns: float) -> Int64Array:
    """What of the times of kernels grows with their work, in ns, where ``unfilled_ns`` of each may not."""
    less: Int64Array = np.minimum(UNFILLED_SHARE * times, unfilled_ns).astype(np.int64)
    return times.astype(np.int64) - less


def batch_work(program: RunProgram, unfilled_ns: float = 0.0) -> tuple[Int64Array, Int64Array]:
    """What both passes compute that grows with the batch: ns of events and, on CPUs, of the host's points."""
    layout = program.layout
    works = _of_passes(layout) & layout.computes
    dur = np.where(works, program.dur, 0).astype(np.int64)
    lag = np.zeros(layout.points, dtype=np.int64)
    if layout.is_cpu:
        lag = np.where(is_among(layout.part, PASSES), program.lag, 0).astype(np.int64)
        for doing in (Doing.NOTHING, Doing.BETWEEN):
            points, ns = layout.at(doing)
            lag[points] -= np.minimum(ns, lag[points])
    return growing(dur, unfilled_ns), growing(lag, unfilled_ns)


def _of_passes(layout: Layout) -> Mask:
    """Which events belong to the two passes, but for what moves gradients into buckets, or back."""
    return np.asarray(is_among(layout.event_part, PASSES) & (layout.group != Group.BUCKETS))


@as_change(
    Parameter("share", "the share of a batch's places that is padding now", 0.3, 0.0, 1.0),
    assuming="kernels of half the work take half of their time, short ones up to 0.7 of it",
)
def less_padding(program: RunProgram, share: float) -> RunProgram:
    """Batches hold no padding: a share of the work of both passes goes."""
    dur, lag = batch_work(program, of_scenario(program.scenario, *UNFILLED_NS[::-1]))
    if not dur.any() and not lag.any():
        raise NotApplicable("the capture does not show what belongs to the forward and backward pass")
    program = with_bytes(program, grow_with_batch(program), 1.0 - share)
    return program.edited(
        dur=program.dur - np.rint(share * dur).astype(np.int64),
        lag=program.lag - np.rint(share * lag).astype(np.int64),
    )


@as_change(
    Parameter("of", "which kernels", "all", choices=tuple(GROUPS)),
    Parameter("by", "the factor, above 1 for faster ones", 2.0, 0.1, 100.0),
    assuming="{of} kernels run {by:g} times as fast",
)
def faster_kernels(program: RunProgram, of: str, by: float) -> RunProgram:
    """Kernels of a group are this many times as fast."""
    chosen = is_among(program.layout.group, GROUPS[of]) & program.layout.computes
    if not chosen.any():
        raise NotApplicable(f"the step has no kernel of the group {of}")
    return program.edited(dur=scaled(program.dur, chosen, 1.0 / by))


@as_change(
    Parameter("by", "how many times as fast they are then", 2.0, 1.0, 100.0),
    assuming="products in fp32 run {by:.2g} times as fast, from half of that to twice",
)
def fewer_bits(program: RunProgram, by: float) -> RunProgram:
    """Matrix products in fp32, off the tensor cores, are computed in 16 bits, or in TF32."""
    layout = program.layout
    by = max(of_scenario(program.scenario, PRECISION_DOUBT * by, by, by / PRECISION_DOUBT), 1.0)
    plain = np.zeros(layout.events, dtype=bool)
    plain[layout.waste_event[layout.waste == Waste.FP32]] = True
    if not plain.any():
        raise NotApplicable("the step has no product in fp32 that is known to run off the tensor cores")
    return program.edited(dur=scaled(program.dur, plain, 1.0 / by))


@as_change(
    Parameter("of", "how: fused attention, no reordering, tensor cores ...", "fusion", choices=tuple(WASTES))
)
def better_kernels(program: RunProgram, of: str) -> RunProgram:
    """Kernels of a kind take what the same takes computed another way."""
    return removed(program, wasted(program, program.dur, *WASTES[of]), "the step has no kernel of that kind")


def wasted(
    program: RunProgram, dur: Times, waste: Waste, doubt: float, others: Mask | None = None
) -> Removal | None:
    """What kernels, which take ``dur``, take beyond what the same would take computed another way.

    Of ``others`` alone, if these are given; ``None`` where it is nothing.
    """
    layout = program.layout
    mine = layout.waste == waste
    if others is not None:
        mine &= others[layout.waste_event]
    events = layout.waste_event[mine]
    taken = layout.waste_ns[mine] / np.maximum(program.dur[events], 1)
    np.minimum(taken, 1.0, out=taken)
    taken *= dur[events]
    np.rint(taken, out=taken)
    return Removal.of(dur=Part(events, narrow(taken.astype(np.int64))), doubt=doubt)


def repeated_small(program: RunProgram) -> Mask:
    """Which kernels are small, and follow a small one on their stream: fused, they are one with it.

    Matrix products and attention, as small as they are, stay kernels of their own.
    """
    layout = program.layout
    alone = is_among(layout.group, (Group.MATRIX, Group.ATTENTION))
    return _following(layout, layout.computes & ~alone & (program.dur < SMALL_NS))


def _following(layout: Layout, chosen: Mask) -> Mask:
    """Which of some events come right after another of them on their stream."""
    rank, stream = layout.event_rank, layout.stream
    found = np.zeros(layout.events, dtype=bool)
    found[1:] = chosen[1:] & chosen[:-1] & (rank[1:] == rank[:-1]) & (stream[1:] == stream[:-1])
    return found


def of_updates(layout: Layout) -> Mask:
    """Which events update parameters."""
    return np.asarray((layout.event_part == Phase.OPTIMIZER) | (layout.group == Group.OPTIMIZER))


def fused_updates(program: RunProgram, dur: Times) -> Removal | None:
    """What an optimizer's kernels, which take ``dur``, take beyond those of a fused one, if anything.

    That is what they read and write again, what small ones take to start and end, and the gaps between them.
    """
    layout = program.layout
    small = repeated_small(program) & of_updates(layout)
    single = (layout.event_part == Phase.OPTIMIZER) & (layout.group == Group.POINTWISE)
    some = np.flatnonzero(single | small)
    started = np.where(small[some], dur[some] / 2, 0.0)
    again = UNFUSED * (dur[some] - started)
    taken = Part(some, np.rint(started + again).astype(np.int64))
    gap = Part.within(small | _following(layout, single | small), layout.gap)
    return Removal.of(dur=taken, gap=gap, doubt=UNFUSED_DOUBT if again.any() else 0.0)


@as_change()
def fuse_optimizer(program: RunProgram) -> RunProgram:
    """The optimizer is fused: few launches, each value read and written once."""
    fused = None if program.layout.is_cpu else fused_updates(program, program.dur)
    if fused is None:
        return paced_updates(program, FUSED_HOST)
    return without(where_possible(paced_updates, program, FUSED_HOST), [fused])


@as_change(assuming="compiled code needs 20 to 80 % of today's host time")
def compile_model(program: RunProgram) -> RunProgram:
    """Forward and backward pass are compiled: fewer launches, each at less cost, and fused kernels."""
    fused = wasted(program, program.dur, *WASTES["fusion"])
    if fused is None:
        return paced_passes(program, COMPILED_HOST)
    return without(where_possible(paced_passes, program, COMPILED_HOST), [fused])


@as_change(
    assuming="kernels take 1.6 to 2 times as long, long ones twice, gradient messages and optimizer as now",
    units=2.0,
)
def double_batch(program: RunProgram) -> RunProgram:
    """A step does twice the work; the answer is the time for as much work as today.

    Kernels and copies of both passes, messages of samples and the next batch grow.
    """
    layout = program.layout
    passes = _of_passes(layout)
    if not (passes & layout.computes).any():
        raise NotApplicable("the capture does not show which kernels belong to the forward and backward pass")
    works = passes & (layout.computes | (layout.group == Group.COPY_OTHER))
    more = growing(program.dur, of_scenario(program.scenario, *UNFILLED_NS))
    dur = program.dur + np.where(works, more, 0)
    dur = scaled(dur, layout.group == Group.COPY_IN, 2.0)
    loads = layout.kind == Call.INPUT
    program = with_bytes(program, grow_with_batch(program), 2.0)
    return program.edited(
        dur=dur,
        own=np.where(loads, 2 * program.own, program.own),
        ready=np.where(program.ready >= 0, 2 * program.ready, program.ready),
    )


@as_change(
    Parameter("stays", "the share of the recomputation that stays", 0.0, 0.0, 1.0),
    assuming="there is memory for the activations",
)
def no_recompute(program: RunProgram, stays: float) -> RunProgram:
    """Activations are kept instead of recomputed."""
    layout = program.layout
    again = (layout.event_part == Phase.RECOMPUTE) & layout.computes
    points, ns = layout.at(Doing.RECOMPUTING)
    if not again.any() and not points.size:
        raise NotApplicable("nothing is recomputed in the step")
    lag = scaled(program.lag.astype(np.int64), (layout.part == Phase.RECOMPUTE) & ~layout.is_cpu, stays)
    lag[points] = np.maximum(lag[points] - np.rint(ns * (1 - stays)).astype(np.int64), 0)
    return program.edited(dur=scaled(program.dur, again, stays), lag=lag)
