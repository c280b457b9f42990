"""The causes of the ledger inside compute: kernels that would go, or take less."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.ranks.code_places import beside_training
from tracedoc.ranks.run_view import RunView
from tracedoc.step.program import Doing, Group
from tracedoc.step.waste import HALF_AS_WIDE
from tracedoc.timeline.phases import Phase
from tracedoc.topics.host.in_loop import beside_pauses_ms, script_code_in_operators
from tracedoc.topics.input.run import padding_frac
from tracedoc.whatif.changes.change import Mask
from tracedoc.whatif.changes.host import STACKS_DOUBT, operators_in
from tracedoc.whatif.changes.kernels import (
    UNFILLED_NS,
    WASTES,
    batch_work,
    fused_updates,
    growing,
    of_updates,
    repeated_small,
    wasted,
)
from tracedoc.whatif.even_ranks import Even, spent
from tracedoc.whatif.removal import Part, Removal, Times


def compute_causes(run: RunView, program: RunProgram, even: Even) -> dict[str, Removal | None]:
    """The causes inside compute by their ids, ``None`` where the step has nothing of one."""
    layout = program.layout
    again = np.asarray((layout.event_part == Phase.RECOMPUTE) & layout.computes)
    small = repeated_small(program) & ~again
    of_optimizer = of_updates(layout)
    copies = np.asarray((layout.group == Group.COPY_OTHER) & ~(again | small | of_optimizer))
    others = ~(again | small | of_optimizer | copies)
    beside = called_beside(run, program, even)
    recomputed = Removal.of(lag=spent(layout, Doing.RECOMPUTING, even.lag))
    found = {
        "compute.recompute": recomputed or _without_kernels(program, even, again),
        "compute.optimizer": fused_updates(program, even.dur),
        "compute.small_kernels": _without_kernels(program, even, small & ~of_optimizer),
        "compute.beside": None if pauses_more(run) else Removal.of(lag=beside, doubt=STACKS_DOUBT),
        "compute.copies": Removal.of(dur=Part.within(copies, even.dur)),
        **{f"compute.{name}": wasted(program, even.dur, *waste, others) for name, waste in WASTES.items()},
    }
    double = spent(layout, Doing.DOUBLE, even.lag)
    halved = Part(double.where, np.rint(double.ns * HALF_AS_WIDE).astype(np.int64))
    untouched = spent(layout, Doing.UNTOUCHED, even.lag)
    for name, part in (("fp64", halved), ("untouched", untouched)):
        if part.ns.any():
            found[f"compute.{name}"] = Removal.of(lag=part, doubt=WASTES[name][1])
    return {**found, "compute.padding": _padded(run, program, even, found)}


def called_beside(run: RunView, program: RunProgram, even: Even) -> Times:
    """What operators on a CPU take that the script calls beside training, with short times between them."""
    layout, beside = program.layout, beside_training(run)
    if not layout.is_cpu or beside is None:
        return np.zeros_like(even.lag)
    return operators_in(layout, even.lag, beside.forward_frac, beside.backward_frac)


def pauses_more(run: RunView) -> bool:
    """Whether the function whose operators run beside training is longer in none: its pauses tell both."""
    digest = run.representative_digest
    if digest is None or beside_pauses_ms(run, digest) == 0.0:
        return False
    return script_code_in_operators(run, digest) is False


def _padded(
    run: RunView, program: RunProgram, even: Even, others: Mapping[str, Removal | None]
) -> Removal | None:
    """What both passes take for places of a batch that hold no token, of what other causes leave."""
    jobs = [run.job.rank(rank) for rank in program.layout.ranks]
    known = [0.0 if one is None else padding_frac(one) for one in jobs]
    shares = np.array([one if isinstance(one, float) else 0.0 for one in known])
    if not shares.any():
        return None
    dur, lag = batch_work(program.edited(dur=even.dur, lag=even.lag))
    parts = [one.parts for one in others.values() if one is not None]
    for name, column in (("dur", dur), ("lag", lag)):
        for part in (one[name] for one in parts if name in one):
            column[part.where] -= np.minimum(part.ns, column[part.where])
    most, layout = int(dur.sum() + lag.sum()), program.layout
    dur, lag = (growing(times, UNFILLED_NS[1]) for times in (dur, lag))
    return Removal.of(
        dur=np.rint(dur * shares[layout.event_rank]).astype(np.int64),
        lag=np.rint(lag * shares[layout.point_rank]).astype(np.int64),
        doubt=most / max(int(dur.sum() + lag.sum()), 1) - 1.0,
    )


def _without_kernels(program: RunProgram, even: Even, gone: Mask) -> Removal | None:
    """What kernels take, with the gaps before them."""
    return Removal.of(dur=Part.within(gone, even.dur), gap=Part.within(gone, program.layout.gap))
