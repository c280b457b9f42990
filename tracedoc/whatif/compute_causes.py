"""The causes of the ledger inside compute: kernels that would go, or take less."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.ranks.run_view import RunView
from tracedoc.step.kernels.times import SMALL_NS
from tracedoc.step.program import Doing, Group, Waste
from tracedoc.timeline.phases import Phase
from tracedoc.topics.input.limits import padding_frac
from tracedoc.whatif.changes.change import Mask
from tracedoc.whatif.changes.kernels import DOUBLED, WASTES, batch_work, work_left
from tracedoc.whatif.even_ranks import Even, spent
from tracedoc.whatif.removal import Removal, chosen_of


def compute_causes(run: RunView, program: RunProgram, even: Even) -> dict[str, Removal | None]:
    """The causes inside compute by their ids, ``None`` where the step has nothing of one."""
    layout = program.layout
    again = np.asarray((layout.event_part == Phase.RECOMPUTE) & layout.computes)
    small = _repeated_small(program) & ~again
    of_optimizer = (layout.event_part == Phase.OPTIMIZER) | (layout.group == Group.OPTIMIZER)
    copies = np.asarray((layout.group == Group.COPY_OTHER) & ~(again | small | of_optimizer))
    copied = chosen_of(even.dur, copies)
    others = ~(again | small | of_optimizer | copies)
    found = {
        "compute.recompute": _recomputing(program, even) or _without_kernels(program, even, again),
        "compute.optimizer": _optimizer(program, even, small & of_optimizer),
        "compute.small_kernels": _without_kernels(program, even, small & ~of_optimizer),
        "compute.copies": None if copied is None else Removal(dur=copied),
        **{f"compute.{name}": _wasted(program, even, *waste, others) for name, waste in WASTES.items()},
    }
    return {**found, "compute.padding": _padded(run, program, even, found)}


def _padded(
    run: RunView, program: RunProgram, even: Even, others: Mapping[str, Removal | None]
) -> Removal | None:
    """What both passes take for places of a batch that hold no token, of what other causes leave."""
    jobs = [None if run.job is None else run.job.rank(rank) for rank in program.layout.ranks]
    known = [0.0 if one is None else padding_frac(one) for one in jobs]
    shares = np.array([one if isinstance(one, float) else 0.0 for one in known])
    if not shares.any():
        return None
    dur, lag = batch_work(program.edited(dur=even.dur, lag=even.lag))
    for one in others.values():
        dur -= 0 if one is None or one.dur is None else np.minimum(one.dur, dur)
        lag -= 0 if one is None or one.lag is None else np.minimum(one.lag, lag)
    most, likely, _ = (
        np.array([1.0 - work_left(share, doubled) for share in shares.tolist()])
        for doubled in reversed(DOUBLED)
    )
    layout = program.layout
    doubt = float(most.max() / likely.max()) - 1.0
    on_host = lag * likely[layout.rank_of_point(np.arange(layout.points))] if lag.any() else lag
    return Removal(
        dur=np.rint(dur * likely[layout.event_rank]).astype(np.int64) if layout.events else None,
        lag=np.rint(on_host).astype(np.int64) if lag.any() else None,
        doubt=doubt,
    )


def _recomputing(program: RunProgram, even: Even) -> Removal | None:
    """What ranks on CPUs compute again."""
    lag = spent(program.layout, Doing.RECOMPUTING, even.lag)
    return Removal(lag=lag) if lag.any() else None


def _wasted(program: RunProgram, even: Even, waste: Waste, doubt: float, others: Mask) -> Removal | None:
    """What kernels take beyond what the same would take computed another way."""
    layout = program.layout
    mine = (layout.waste == waste) & others[layout.waste_event]
    events = layout.waste_event[mine]
    taken = np.zeros(layout.events, dtype=np.int64)
    share = layout.waste_ns[mine] / np.maximum(program.dur[events], 1)
    taken[events] = np.rint(even.dur[events] * np.minimum(share, 1.0))
    return Removal(dur=taken, doubt=doubt) if taken.any() else None


UNFUSED = 0.5
"""A fused optimizer takes this share of what one of single operators takes: Adam then reads and writes seven
values for each parameter instead of some fifteen."""


def _optimizer(program: RunProgram, even: Even, small: Mask) -> Removal | None:
    """What small kernels of an optimizer take, and larger ones for what they read and write again."""
    layout = program.layout
    again = (layout.event_part == Phase.OPTIMIZER) & (layout.group == Group.POINTWISE) & ~small
    less = np.where(again, np.rint(even.dur * (1 - UNFUSED)).astype(np.int64), even.dur)
    dur = chosen_of(less, np.asarray(again | small))
    return None if dur is None else Removal(dur=dur, gap=np.where(small, layout.gap, 0))


def _repeated_small(program: RunProgram) -> Mask:
    """Which kernels are small, and follow a small one on their stream: fused, they are one with it.

    Matrix products and attention, as small as they are, stay kernels of their own.
    """
    layout = program.layout
    alone = np.isin(layout.group, (Group.MATRIX, Group.ATTENTION))
    small = layout.computes & ~alone & (program.dur < SMALL_NS)
    follows = np.zeros(layout.events, dtype=bool)
    lane = layout.lane(np.arange(layout.events))
    follows[1:] = small[1:] & small[:-1] & (lane[1:] == lane[:-1])
    return follows


def _without_kernels(program: RunProgram, even: Even, gone: Mask) -> Removal | None:
    """What kernels take, with the gaps before them."""
    dur = chosen_of(even.dur, gone)
    return None if dur is None else Removal(dur=dur, gap=np.where(gone, program.layout.gap, 0))
