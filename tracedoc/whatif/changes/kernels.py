"""Changes of how long kernels take, and of how much work a step does."""

from __future__ import annotations

import math

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.spans import Int64Array
from tracedoc.step.program import Call, Doing, Group, Waste
from tracedoc.timeline.phases import Phase
from tracedoc.whatif.changes.change import Arguments, Change, NotApplicable, Parameter, of_scenario, scaled
from tracedoc.whatif.changes.host import COMPILED_HOST, PASSES, paced_passes
from tracedoc.whatif.changes.transfers import grow_with_batch, with_bytes

GROUPS = {
    "matrix": (Group.MATRIX,),
    "attention": (Group.ATTENTION,),
    "pointwise": (Group.POINTWISE, Group.CAST, Group.MEMSET),
    "optimizer": (Group.OPTIMIZER,),
    "all": (Group.MATRIX, Group.ATTENTION, Group.POINTWISE, Group.CAST, Group.MEMSET, Group.OPTIMIZER),
}

WASTES = {
    "attention": (Waste.ATTENTION, 0.0),
    "layout": (Waste.LAYOUT, 0.5),
    "fp32": (Waste.FP32, 0.0),
    "shapes": (Waste.SHAPES, 0.5),
    "loss": (Waste.LOSS, 0.5),
    "fusion": (Waste.FUSION, 0.5),
}
"""How the same could be computed in less time, and by which share the time that goes may be more or less."""

PRECISION_DOUBT = 1 / 3
"""By this share matrix products in fewer bits may be faster or slower than is likely: shapes decide."""

DOUBLED = (1.6, 1.8, 2.0)
"""Kernels of twice the batch take this many times as long: small ones leave part of the device idle."""


def work_left(share: float, doubled: float) -> float:
    """What kernels take of their time without a share of their work; twice of it takes ``doubled`` of it."""
    return float((1.0 - share) ** math.log2(doubled))


def batch_work(program: RunProgram) -> tuple[Int64Array, Int64Array]:
    """What both passes compute: ns of events and, on CPUs, of the host's points."""
    layout = program.layout
    dur = np.where(np.isin(layout.event_part, PASSES) & layout.computes, program.dur, 0).astype(np.int64)
    lag = np.zeros(layout.points, dtype=np.int64)
    if layout.is_cpu:
        lag = np.where(np.isin(layout.part, PASSES), program.lag, 0).astype(np.int64)
        points, paused = layout.at(Doing.NOTHING)
        lag[points] -= np.minimum(paused, lag[points])
    return dur, lag


def less_padding(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let both passes do a share of their work less, and send as much less of samples."""
    dur, lag = batch_work(program)
    if not dur.any() and not lag.any():
        return NotApplicable("the capture does not show what belongs to the forward and backward pass")
    share = arguments.number("share")
    gone = 1.0 - work_left(share, of_scenario(program.scenario, *DOUBLED[::-1]))
    program = with_bytes(program, arguments, grow_with_batch(program), 1.0 - share)
    return program.edited(
        dur=program.dur - np.rint(gone * dur).astype(np.int64),
        lag=program.lag - np.rint(gone * lag).astype(np.int64),
    )


def faster_kernels(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let kernels of a group take less time."""
    return _faster(program, arguments.word("of"), arguments.number("by"))


def fewer_bits(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let matrix kernels take less time, a third more or less of it than is likely."""
    by = arguments.number("by")
    least, most = max(by * (1 - PRECISION_DOUBT), 1.0), by * (1 + PRECISION_DOUBT)
    return _faster(program, "matrix", of_scenario(program.scenario, most, by, least))


def _faster(program: RunProgram, group: str, by: float) -> RunProgram | NotApplicable:
    """The program whose kernels of a group are ``by`` times as fast."""
    layout = program.layout
    chosen = np.isin(layout.group, GROUPS[group]) & layout.computes
    if not chosen.any():
        return NotApplicable(f"the step has no kernel of the group {group}")
    return program.edited(dur=scaled(program.dur, chosen, 1.0 / by))


def better_kernels(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let kernels take what the same takes computed another way."""
    return without_waste(program, *WASTES[arguments.word("of")])


def without_waste(program: RunProgram, waste: Waste, doubt: float) -> RunProgram | NotApplicable:
    """Let kernels take less by what one kind of waste costs."""
    layout = program.layout
    mine = layout.waste == waste
    if not mine.any():
        return NotApplicable("the step has no kernel of that kind")
    factor = of_scenario(program.scenario, 1 + doubt, 1.0, 1 - doubt)
    dur = program.dur.astype(np.int64)
    dur[layout.waste_event[mine]] -= np.rint(factor * layout.waste_ns[mine]).astype(np.int64)
    return program.edited(dur=np.maximum(dur, 0))


def compile_model(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let the host take a part of its time for the passes, and chains of kernels be one."""
    paced = paced_passes(program, COMPILED_HOST)
    fused = without_waste(program if isinstance(paced, NotApplicable) else paced, *WASTES["fusion"])
    return paced if isinstance(fused, NotApplicable) else fused


def double_batch(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Do twice the work a step: kernels and copies of both passes, messages of samples, the next batch."""
    layout = program.layout
    passes = np.isin(layout.event_part, PASSES)
    if not (passes & layout.computes).any():
        return NotApplicable(
            "the capture does not show which kernels belong to the forward and backward pass"
        )
    works = passes & (layout.computes | (layout.group == Group.COPY_OTHER))
    dur = scaled(program.dur, works, of_scenario(program.scenario, *DOUBLED))
    dur = scaled(dur, layout.group == Group.COPY_IN, 2.0)
    loads = layout.kind == Call.INPUT
    program = with_bytes(program, arguments, grow_with_batch(program), 2.0)
    return program.edited(
        dur=dur,
        own=np.where(loads, 2 * program.own, program.own),
        ready=np.where(program.ready >= 0, 2 * program.ready, program.ready),
    )


def no_recompute(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Keep activations: nothing, or only a part, is computed twice."""
    layout, stays = program.layout, arguments.number("stays")
    again = (layout.event_part == Phase.RECOMPUTE) & layout.computes
    points, ns = layout.at(Doing.RECOMPUTING)
    if not again.any() and not points.size:
        return NotApplicable("nothing is recomputed in the step")
    lag = scaled(program.lag.astype(np.int64), (layout.part == Phase.RECOMPUTE) & ~layout.is_cpu, stays)
    lag[points] = np.maximum(lag[points] - np.rint(ns * (1 - stays)).astype(np.int64), 0)
    return program.edited(dur=scaled(program.dur, again, stays), lag=lag)


CHANGES = (
    Change(
        "better-kernels",
        "kernels of a kind take what the same takes computed another way",
        better_kernels,
        (
            Parameter(
                "of", "how: fused attention, no reordering, tensor cores ...", "fusion", choices=tuple(WASTES)
            ),
        ),
    ),
    Change(
        "compile-model",
        "forward and backward pass are compiled: fewer launches, each at less cost, and fused kernels",
        compile_model,
        (),
        "compiled code needs 20 to 80 % of today's host time",
    ),
    Change(
        "faster-kernels",
        "kernels of a group are this many times as fast",
        faster_kernels,
        (
            Parameter("of", "which kernels", "all", choices=tuple(GROUPS)),
            Parameter("by", "the factor, above 1 for faster ones", 2.0, 0.1, 100.0),
        ),
        "{of} kernels run {by:g} times as fast",
    ),
    Change(
        "fewer-bits",
        "matrix products are computed in 16 bits, or in TF32",
        fewer_bits,
        (Parameter("by", "how many times as fast they are then", 2.0, 1.0, 100.0),),
        "matrix kernels run {by:.2g} times as fast, give or take a third",
    ),
    Change(
        "double-batch",
        "a step does twice the work; the answer is the time for as much work as today",
        double_batch,
        (),
        "kernels take 1.6 to 2 times as long, gradient messages and optimizer as long as now",
        units=2.0,
    ),
    Change(
        "less-padding",
        "batches hold no padding: a share of the work of both passes goes",
        less_padding,
        (Parameter("share", "the share of a batch's places that is padding now", 0.3, 0.0, 1.0),),
        "kernels of half the work take a half to five eighths of their time",
    ),
    Change(
        "no-recompute",
        "activations are kept instead of recomputed",
        no_recompute,
        (Parameter("stays", "the share of the recomputation that stays", 0.0, 0.0, 1.0),),
        "there is memory for the activations",
    ),
)
