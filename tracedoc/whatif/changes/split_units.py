"""The change that makes several sharded units of the largest one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import Index, RunProgram, Scenario
from tracedoc.play.scenarios import call_latency
from tracedoc.step.program import Doing
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import distinct
from tracedoc.whatif.changes.buckets import cut_reductions, nearest
from tracedoc.whatif.changes.change import Arguments, NotApplicable, Parameter, as_change
from tracedoc.whatif.changes.gathers import of_units, unit_gathers

PASSES = ((Phase.FORWARD,), (Phase.BACKWARD, Phase.RECOMPUTE))


@as_change(
    Parameter("count", "how many it becomes", 8.0, 2, 256),
    assuming="its compute is shared equally by the new units",
)
def split_units(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """The largest sharded unit becomes several, gathered and reduced one after the other.

    The pieces of a reduction are ready one after the other in the backward pass.
    """
    joins = program.layout.joins
    chosen = unit_gathers(program)
    if not chosen.any():
        return NotApplicable("the step gathers no sharded units")
    if not (joins.nbytes[chosen] > 0).all():
        return NotApplicable("the sizes of the units are not known")
    if program.layout.is_cpu:
        return NotApplicable("the ranks compute on CPUs: what runs beside a gather there slows it down")
    pieces = int(arguments.number("count"))
    largest = joins.nbytes[chosen].max()
    # In the fast scenario, where a call less saves most, a further one costs least.
    latency = call_latency(program, arguments.splits, program.scenario.opposite)
    large = np.flatnonzero(chosen & (2 * joins.nbytes > largest))
    gathered = _in_pieces(program, large, pieces, latency)
    reductions = of_units(program, joins.gradients & program.launched)
    if reductions.any() and (joins.nbytes[reductions] > 0).all():
        size = float(joins.nbytes[reductions].max()) / pieces
        gathered = cut_reductions(gathered, size, latency) or gathered
    if gathered is program:
        return NotApplicable("the capture does not show the compute of the largest unit")
    return gathered


def _in_pieces(program: RunProgram, large: Index, pieces: int, latency: npt.NDArray[np.int64]) -> RunProgram:
    """Return the program with gathers in pieces, each needed by an equal share of the pass's compute.

    All pieces are gathered one after the other; but for the fast scenario, each when the one before begins to
    compute, and in the slow one, when the host launches what needs it.
    """
    layout, joins = program.layout, program.layout.joins
    transfer, dur, lag = program.transfer.copy(), program.dur.astype(np.int64), program.lag.astype(np.int64)
    ties: list[tuple[int, int, int, bool]] = []
    for part in large.tolist():
        event = int(joins.event[part])
        computed = _computed_after(program, event)
        if computed.size < 2:
            continue
        done = np.cumsum(program.dur[computed], dtype=np.int64)
        shares = np.arange(1, pieces) / pieces
        begins = distinct(nearest(done, shares * done[-1]) + 1)
        begins = begins[begins < computed.size]
        if not begins.size:
            continue
        own = min(int(latency[part]), int(program.transfer[part]))
        piece = own + (int(program.transfer[part]) - own) // (begins.size + 1)
        transfer[part] = piece
        before = np.concatenate(([0], begins))
        for number, begin in enumerate(begins.tolist()):
            target = int(computed[begin])
            ties.append((event, target, (number + 1) * piece, False))
            if program.scenario is not Scenario.FAST:
                start = int(computed[before[number]])
                ties.append((start, target, max(piece - int(program.dur[start]), 0), False))
            if program.scenario is Scenario.SLOW and layout.point[target] >= 0:
                ties.append((int(layout.point[target]), target, piece, True))
        if program.scenario is not Scenario.SLOW:
            _spread_hooks(program, lag, event, computed[np.append(0, begins)])
        beside = min(begins.size * piece / max(int(done[-1]), 1), 1.0)
        dur[computed] = np.rint(dur[computed] * (1 + program.contention * beside))
    if not ties:
        return program
    edited = program.edited(transfer=transfer, dur=dur, lag=lag)
    return edited.tied(*np.array(ties, dtype=np.int64).T)


def _spread_hooks(program: RunProgram, lag: npt.NDArray[np.int64], event: int, begins: Index) -> None:
    """Move the host's time in a unit's hook to where the pieces begin to compute, an equal share to each.

    It is spent for each parameter, in the hook of its unit. That before the first compute stays with it.
    """
    layout, extra = program.layout, program.extra
    first, called = int(layout.point[begins[0]]), int(layout.point[event])
    hooks, hook_ns = layout.at(Doing.HOOKS)
    if called == NONE:  # the step before calls it
        early = extra.source[(extra.target == event) & extra.of_point]
        if not early.size or first < 0:
            return
        called = int(early[0])
        rank = int(layout.rank_of_event(event))
        inside = (hooks >= called) & (hooks < layout.point_base[rank + 1])
        inside |= (hooks >= layout.point_base[rank]) & (hooks <= first)
    else:
        inside = (hooks >= called) & (hooks <= first)
    points = layout.point[begins[1:]]
    points = points[points >= 0]
    if not points.size:
        return
    moved = np.minimum(hook_ns[inside].astype(np.int64), lag[hooks[inside]])
    moved = moved * points.size // (points.size + 1)
    lag[hooks[inside]] -= moved
    np.add.at(lag, points, int(moved.sum()) // points.size)


def _computed_after(program: RunProgram, event: int) -> Index:
    """Return the compute of a gather's pass that was launched after it, in its order."""
    layout = program.layout
    rank = int(layout.rank_of_event(event))
    mine = np.arange(layout.event_base[rank], layout.event_base[rank + 1])
    part = layout.event_part[event]
    parts = next((passes for passes in PASSES if part in passes), ())
    chosen = layout.computes_of(mine) & np.isin(layout.event_part[mine], parts)
    chosen &= layout.point[mine] > layout.point[event]
    return np.asarray(mine[chosen][np.argsort(layout.point[mine[chosen]], kind="stable")], dtype=np.intp)
