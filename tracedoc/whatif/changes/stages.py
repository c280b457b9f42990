"""Changes of a pipeline: its stages, and how many micro-batches pass through them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import RunProgram
from tracedoc.step.program import Call
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.whatif.changes.change import PASSES, NotApplicable, as_change, of_scenario
from tracedoc.whatif.changes.kernels import UNFILLED_NS, batch_work, growing
from tracedoc.whatif.changes.transfers import with_bytes
from tracedoc.whatif.even_ranks import all_passes, between_stages, scale_to

OF_STAGES = (1.0, 1.05, 1.15)
"""Between its first and its last micro-batch a stage takes so many times what its own work takes: what it
waits for its neighbours there."""

NO_STAGES = "the ranks are no stages of a pipeline"


@as_change(assuming="layers can be divided so")
def balance_stages(program: RunProgram) -> RunProgram:
    """The passes of all stages compute equally long: layers move from the longest to the others."""
    if not between_stages(program).any():
        raise NotApplicable(NO_STAGES)
    dur = program.dur.astype(np.int64)
    passes, sums = all_passes(program, dur)
    if program.layout.is_cpu or not (sums > 0).all():
        raise NotApplicable("not every rank shows what its passes compute")
    scale_to(dur, passes, sums, float(sums.mean()))
    return program.edited(dur=dur)


@as_change(units=2.0)
def more_micro_batches(program: RunProgram) -> RunProgram:
    """A step has twice the micro-batches; the answer is the time for as much work as today."""
    if not between_stages(program).any():
        raise NotApplicable(NO_STAGES)
    loads = program.layout.kind == Call.INPUT
    own = np.where(loads, 2 * program.own, program.own)
    ready = np.where(program.ready >= 0, 2 * program.ready, program.ready)
    return _once_more(program.edited(own=own, ready=ready))


@as_change(assuming="kernels of half the work take half of their time, short ones up to 0.7 of it")
def halve_micro_batches(program: RunProgram) -> RunProgram:
    """A step has twice the micro-batches, each of half the samples."""
    between = between_stages(program)
    if not between.any():
        raise NotApplicable(NO_STAGES)
    unfilled_ns = of_scenario(program.scenario, *UNFILLED_NS[::-1])
    dur = program.dur.astype(np.int64)
    for events in all_passes(program, dur)[0]:
        dur[events] -= growing(dur[events], unfilled_ns) // 2
    lag = program.lag - batch_work(program)[1] // 2
    return _once_more(with_bytes(program.edited(dur=dur, lag=lag), between, 0.5))


def _once_more(program: RunProgram) -> RunProgram:
    """The program in which every rank does its passes twice.

    Between the first and the last micro-batch the slowest stage works without a break, and the others wait
    for it: the step takes longer by what the passes take there. So it does in each pipeline where replicas
    are not known to meet.
    """
    layout = program.layout
    dur, lag = program.dur.astype(np.int64), program.lag.astype(np.int64)
    passes, sums = all_passes(program, dur)
    in_passes = is_among(layout.part, PASSES)
    of_host = batch_work(program)[1] if layout.is_cpu else np.where(in_passes, lag + program.own, 0)
    rank = layout.point_rank
    hosts = np.bincount(rank, weights=of_host, minlength=len(layout.ranks))
    longer = np.maximum(hosts, sums)
    meets = _meeting(program)
    for one in distinct(meets).tolist():
        slowest = int(np.where(meets == one, longer, -1).argmax())
        more = round(longer[slowest] * of_scenario(program.scenario, *OF_STAGES))
        if layout.is_cpu or not passes[slowest].size:
            lag[np.flatnonzero(in_passes & (rank == slowest))[-1:]] += more
        else:
            dur[passes[slowest][-1]] += more
    return program.edited(dur=dur, lag=lag)


def _meeting(program: RunProgram) -> npt.NDArray[np.intp]:
    """For each rank the first of those that it meets in operations, or that others meet whom it meets."""
    joins = program.layout.joins
    found = np.arange(len(program.layout.ranks))
    known = np.flatnonzero(program.joined)
    rank, op = program.layout.rank_of_event(joins.event[known]), joins.op[known]
    while True:
        least = np.full(joins.operations, found.size)
        np.minimum.at(least, op, found[rank])
        nearer = found.copy()
        np.minimum.at(nearer, rank, least[op])
        if (nearer == found).all():
            return found
        found = nearer
