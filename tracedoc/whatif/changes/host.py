"""Changes of what the host does: its pace, and what it waits for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tracedoc.play.run_program import Layout, RunProgram, Scenario
from tracedoc.spans import Int64Array
from tracedoc.step.nodes import INPUT_PART
from tracedoc.step.program import Call, Cause, Doing, Group
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.stalls import away_after_ns
from tracedoc.trace.distinct import is_among, median
from tracedoc.whatif.changes.change import (
    PASSES,
    Mask,
    NotApplicable,
    Parameter,
    as_change,
    of_scenario,
    scaled,
)
from tracedoc.whatif.even_ranks import after_waits, pauses, spent
from tracedoc.whatif.removal import Part, Removal, Times, removed

CAPTURED_HOST = (0.03, 0.06, 0.2)
"""With CUDA graphs the host takes this share of its time for the same kernels."""

COMPILED_HOST = (0.2, 0.4, 0.8)
"""Compiled code launches fewer kernels, each at less cost, but still one by one (decision 0003)."""

READY_NS = 100_000
"""What it takes to be handed a batch that is ready."""

STILL_WAITED = (0.0, 0.25, 0.5)
"""Workers of a loader take cores from the training process: so much of the wait for a batch the host takes
longer elsewhere. In the pair of PyTorch's profiler tutorial it is a quarter to a third."""

STACKS_DOUBT = 0.4
"""What a function takes by a step with Python stacks may be so much more or less: stacks cost most where
operators are short."""

ON_CPUS = "the ranks compute on CPUs: the time of the host is the work itself"


def synced(program: RunProgram, own: Times) -> Removal | None:
    """Waits of the host for the GPU, with what their calls take of ``own`` beyond them, if there are any.

    Not those for copies of batches, for what is offloaded, and of the allocator. Perhaps what the host does
    right after a wait, longer than it takes to launch, goes with it.
    """
    layout = program.layout
    batches = (layout.cause_kind == Cause.COPY) & (layout.group[layout.cause_from] == Group.COPY_IN)
    waits = is_among(layout.cause_kind, (Cause.SYNC, Cause.COPY)) & ~batches
    waits &= ~is_among(layout.cause_from, layout.offload_event)
    waits[waits] = layout.kind[layout.cause_to[waits]] != Call.ALLOCATION
    returns = layout.returns(waits)
    perhaps = after_waits(program, returns)
    return Removal.of(own=Part.within(returns, own), dropped=waits, perhaps=perhaps)


def allocated(program: RunProgram, own: Times) -> Removal | None:
    """Calls of the allocator that take long, of ``own`` and in waits for the GPU, if there are any."""
    layout = program.layout
    calls = layout.kind == Call.ALLOCATION
    hosts = layout.to_host
    freed = np.zeros(layout.cause_kind.size, dtype=bool)
    freed[hosts] = calls[layout.cause_to[hosts]]
    return Removal.of(own=Part.within(calls, own), dropped=freed)


@as_change(assuming="nothing needs the values earlier; at best the code right after the waits goes with them")
def no_sync(program: RunProgram) -> RunProgram:
    """The host never waits for the GPU.

    It does in synchronisation, and in copies to the host that block.
    """
    if program.layout.is_cpu:
        raise NotApplicable(ON_CPUS)
    return removed(program, synced(program, program.own), "the host never waits for the GPU in the step")


@as_change(Parameter("by", "the factor, from 0 to 1", 0.5, 0.0, 1.0))
def faster_host(program: RunProgram, by: float) -> RunProgram:
    """The host takes this share of its time between two calls; 0 for a host that costs nothing."""
    return _paced(program, (by, by, by), program.layout.part != INPUT_PART)


def paced_passes(program: RunProgram, shares: tuple[float, float, float]) -> RunProgram:
    """Let the host take a share of its time, by scenario, for the kernels of both passes."""
    return _paced(program, shares, _launching_passes(program))


def paced_updates(program: RunProgram, shares: tuple[float, float, float]) -> RunProgram:
    """Let the host take a share of its time, by scenario, for the optimizer."""
    return _paced(program, shares, program.layout.part == Phase.OPTIMIZER)


@as_change(assuming="shapes are static, and no control flow depends on data")
def capture_graph(program: RunProgram) -> RunProgram:
    """Forward and backward pass are CUDA graphs, and cost the host next to nothing."""
    return paced_passes(program, CAPTURED_HOST)


@as_change()
def calm_allocator(program: RunProgram) -> RunProgram:
    """Device memory is neither allocated nor freed in the step."""
    return removed(program, allocated(program, program.own), "no memory is allocated or freed in the step")


@as_change(
    Parameter("by", "time between two batches, as a share of today's; 0: always ready", 0.0, 0.0, 1.0),
    assuming="worker processes have spare cores (else up to half of the gain is lost)",
)
def feed_input(program: RunProgram, by: float) -> RunProgram:
    """Batches are made ahead, by worker processes.

    They take a share of the time that passes between two today.
    """
    layout = program.layout
    loads = layout.kind == Call.INPUT
    if not loads.any():
        raise NotApplicable("no data loader is asked for a batch in the step")
    waited = program.own.astype(np.int64)
    waited[layout.batch_point] = layout.batch_ns
    own = np.where(loads, np.minimum(program.own, READY_NS), program.own)
    fed = np.where(loads, np.maximum(waited - READY_NS, 0), 0)
    rank = layout.point_rank
    stays, host = (np.bincount(rank, weights=ns) for ns in (fed, program.lag))
    slower = 1.0 + of_scenario(program.scenario, *STILL_WAITED) * stays / np.maximum(host, 1.0)
    lag = np.rint(program.lag * slower[rank]).astype(np.int64)
    # A batch that the training thread makes takes what its call does; of workers, what passes between two.
    made = np.where(program.ready >= 0, program.ready, np.where(loads, program.own, NONE))
    return program.edited(lag=lag, own=own, ready=scaled(made, made >= 0, by))


@as_change(assuming="pinned copies take 15 to 50 % of the time of pageable ones")
def pin_copies(program: RunProgram) -> RunProgram:
    """Batches are copied from pinned memory, without blocking the host.

    The call does not block, and the copy is faster.
    At best it runs beside compute, on a stream of its own.
    """
    layout = program.layout
    blocking = layout.cause_kind == Cause.COPY
    blocking &= layout.group[layout.cause_from] == Group.COPY_IN
    if not blocking.any():
        raise NotApplicable("no copy to the device blocks the host")
    copies = is_among(np.arange(layout.events), layout.cause_from[blocking])
    factor = of_scenario(program.scenario, 0.0, 0.3, 0.5)
    return program.edited(
        active=program.active & ~blocking,
        own=np.where(layout.returns(blocking), 0, program.own),
        dur=scaled(program.dur, copies, factor),
    )


def operators_in(layout: Layout, lag: Int64Array, outside: float, backward: float) -> Int64Array:
    """Shares of what operators take of the host's time on a CPU, outside and in backward passes."""
    taken = np.zeros(lag.size)
    for share, doing in ((outside, Doing.OUTSIDE), (backward, Doing.BACKWARD)):
        part = spent(layout, doing, lag)
        taken[part.where] += share * part.ns
    return np.rint(taken).astype(np.int64)


@as_change(
    Parameter("ms", "the time in ms that it takes in a step, on the rank where it takes least", None, 0.0),
    Parameter("forward", "its share of operators outside backward passes", 0.0, 0.0, 1.0),
    Parameter("backward", "its share of operators in backward passes", 0.0, 0.0, 1.0),
    assuming="the step does not need what it makes, or finds it made",
)
def skip_code(program: RunProgram, ms: float, forward: float, backward: float) -> RunProgram:
    """On CPUs, code of the script that takes so long between operators runs outside the step.

    Nor at the operators that it calls, by its shares of what all take.

    The longest pauses of each rank go, until they are as long as the function is at least: one rank may take
    longer at it than another. What else of them is not the function's stays in the slow scenario. Where the
    function takes longer than they are, the rest is Python between its operators, which goes in the fast one.
    """
    if not program.layout.is_cpu:
        raise NotApplicable("on GPUs the host's code may run while the device works")
    layout, ns = program.layout, ms * 1e6
    away = pauses(program, program.lag.astype(np.int64))
    taken = np.zeros_like(away)
    between = spent(layout, Doing.BETWEEN, program.lag - away).whole(away)
    for first, last in pairwise(layout.point_base.tolist()):
        order = first + np.argsort(-away[first:last], kind="stable")
        before = np.cumsum(away[order]) - away[order]
        gone = np.where(before < ns, away[order], 0)
        if program.scenario is Scenario.SLOW:
            gone = np.minimum(gone, np.maximum(ns - before, 0)).astype(np.int64)
        taken[order] = gone
        if program.scenario is Scenario.FAST:
            rest, mine = ns - gone.sum(), between[first:last]
            taken[first:last] += np.rint(mine * min(max(rest, 0) / max(mine.sum(), 1), 1.0)).astype(np.int64)
    doubt = of_scenario(program.scenario, 1 + STACKS_DOUBT, 1.0, 1 - STACKS_DOUBT)
    taken += operators_in(layout, program.lag, min(forward * doubt, 1.0), min(backward * doubt, 1.0))
    if not taken.any():
        raise NotApplicable("no operator waits for the script's own code")
    return program.edited(lag=program.lag - np.minimum(taken, program.lag))


def _launching_passes(program: RunProgram) -> Mask:
    """Return the points of both passes whose lag compiling the model shortens.

    Calls of collectives stay, for hooks of the wrapper make them, and so do long gaps: the host is at
    something other than launching then.
    """
    passes = np.asarray(is_among(program.layout.part, PASSES) & (program.layout.kind != Call.COMM))
    launches = program.lag[passes & (program.layout.kind == Call.LAUNCH)]
    if launches.size:
        passes &= program.lag <= away_after_ns(float(median(launches)))
    return passes


def _paced(program: RunProgram, shares: tuple[float, float, float], chosen: Mask) -> RunProgram:
    """The program whose host takes a share of its time, by scenario, at some points."""
    if program.layout.is_cpu:
        raise NotApplicable(ON_CPUS)
    if not (program.lag[chosen] > 0).any():
        raise NotApplicable("the capture shows no work of the host there")
    return program.edited(lag=scaled(program.lag, chosen, of_scenario(program.scenario, *shares)))
