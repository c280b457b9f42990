"""Changes of what the host does: its pace, and what it waits for."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.step.calls import INPUT_PART
from tracedoc.step.program import Call, Cause, Group
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.stalls import away_after_ns
from tracedoc.whatif.changes.change import (
    Arguments,
    Change,
    Mask,
    NotApplicable,
    Parameter,
    of_scenario,
    scaled,
)

PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
CAPTURED_HOST = (0.03, 0.06, 0.2)
"""With CUDA graphs the host takes this share of its time for the same kernels."""

COMPILED_HOST = (0.2, 0.4, 0.8)
"""Compiled code launches fewer kernels, each at less cost, but still one by one (decision 0003)."""

FUSED_HOST = (0.05, 0.1, 0.3)
FUSED_KERNELS = (0.6, 0.8, 1.0)
"""A fused optimizer launches few kernels, and reads and writes each value once."""

READY_NS = 100_000
"""What it takes to be handed a batch that is ready."""

FED = (0.75, 0.85, 1.0)
"""Workers of a loader take cores from the training process: so much of the replayed gain counts."""

ON_CPUS = NotApplicable("the ranks compute on CPUs: the time of the host is the work itself")


def no_sync(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Never wait for the GPU: synchronisation, and copies to the host that block."""
    if program.layout.is_cpu:
        return ON_CPUS
    layout = program.layout
    copied = layout.cause_kind == Cause.COPY
    copied &= layout.group[layout.cause_from] == Group.COPY_OUT
    waits = (layout.cause_kind == Cause.SYNC) | copied
    waits &= (
        layout.kind[np.where(layout.to_host, layout.cause_to, 0)] != Call.ALLOCATION if waits.any() else True
    )
    if not waits.any():
        return NotApplicable("the host never waits for the GPU in the step")
    own = program.own.copy()
    own[layout.cause_to[waits]] = 0
    return program.edited(active=program.active & ~waits, own=own)


def faster_host(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let the host take a part of its time between calls."""
    if program.layout.is_cpu:
        return ON_CPUS
    return _paced(program, arguments.number("by"), _working(program))


def paced_passes(program: RunProgram, shares: tuple[float, float, float]) -> RunProgram | NotApplicable:
    """Let the host take a share of its time, by scenario, for the kernels of both passes."""
    if program.layout.is_cpu:
        return ON_CPUS
    return _paced(program, of_scenario(program.scenario, *shares), _launching_passes(program))


def capture_graph(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let the kernels of the forward and backward pass cost the host next to nothing."""
    return paced_passes(program, CAPTURED_HOST)


def fuse_optimizer(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let the optimizer cost the host little, and its kernels less."""
    if program.layout.is_cpu:
        return ON_CPUS
    edited = _paced(
        program, of_scenario(program.scenario, *FUSED_HOST), _in_parts(program, (Phase.OPTIMIZER,))
    )
    if isinstance(edited, NotApplicable):
        return edited
    chosen = (program.layout.event_part == Phase.OPTIMIZER) & program.layout.computes
    return edited.edited(dur=scaled(edited.dur, chosen, of_scenario(program.scenario, *FUSED_KERNELS)))


def calm_allocator(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Take no time for allocating and freeing device memory."""
    layout = program.layout
    calls = layout.kind == Call.ALLOCATION
    if not calls.any():
        return NotApplicable("no memory is allocated or freed in the step")
    hosts = layout.to_host
    freed = np.zeros(layout.cause_kind.size, dtype=bool)
    freed[hosts] = calls[layout.cause_to[hosts]]
    return program.edited(own=np.where(calls, 0, program.own), active=program.active & ~freed)


def feed_input(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Let workers make batches ahead, in a share of the time that passes between two today."""
    layout = program.layout
    loads = layout.kind == Call.INPUT
    if not loads.any():
        return NotApplicable("no data loader is asked for a batch in the step")
    own = np.where(loads, np.minimum(program.own, READY_NS), program.own)
    # A batch that the training thread makes takes what its call does; of workers, what passes between two.
    made = np.where(program.ready >= 0, program.ready, np.where(loads, program.own, NONE))
    return program.edited(own=own, ready=scaled(made, made >= 0, arguments.number("by")))


def pin_copies(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """Copy batches from pinned memory: the call does not block, and the copy is faster.

    At best it runs beside compute, on a stream of its own.
    """
    layout = program.layout
    blocking = layout.cause_kind == Cause.COPY
    blocking &= layout.group[layout.cause_from] == Group.COPY_IN
    if not blocking.any():
        return NotApplicable("no copy to the device blocks the host")
    own = program.own.copy()
    own[layout.cause_to[blocking]] = 0
    copies = np.zeros(program.dur.size, dtype=bool)
    copies[layout.cause_from[blocking]] = True
    factor = of_scenario(program.scenario, 0.0, 0.3, 0.5)
    return program.edited(active=program.active & ~blocking, own=own, dur=scaled(program.dur, copies, factor))


def _working(program: RunProgram) -> Mask:
    return np.asarray(program.layout.part != INPUT_PART)


def _in_parts(program: RunProgram, parts: tuple[Phase, ...]) -> Mask:
    return np.isin(program.layout.part, parts)


def _launching_passes(program: RunProgram) -> Mask:
    """Return the points of both passes whose lag compiling the model shortens.

    Calls of collectives stay, for hooks of the wrapper make them, and so do long gaps: the host is at
    something other than launching then.
    """
    passes = np.asarray(_in_parts(program, PASSES) & (program.layout.kind != Call.COMM))
    launches = program.lag[passes & (program.layout.kind == Call.LAUNCH)]
    if launches.size:
        passes &= program.lag <= away_after_ns(float(np.median(launches)))
    return passes


def _paced(program: RunProgram, factor: float, chosen: Mask) -> RunProgram | NotApplicable:
    if not (program.lag[chosen] > 0).any():
        return NotApplicable("the capture shows no work of the host there")
    return program.edited(lag=scaled(program.lag, chosen, factor))


CHANGES = (
    Change("no-sync", "the host never waits for the GPU", no_sync, (), "nothing needs the values earlier"),
    Change(
        "faster-host",
        "the host takes this share of its time between two calls; 0 for a host that costs nothing",
        faster_host,
        (Parameter("by", "the factor, from 0 to 1", 0.5, 0.0, 1.0),),
    ),
    Change(
        "capture-graph",
        "forward and backward pass are CUDA graphs, and cost the host next to nothing",
        capture_graph,
        (),
        "shapes are static, and no control flow depends on data",
    ),
    Change(
        "fuse-optimizer",
        "the optimizer is fused: few launches, each value read and written once",
        fuse_optimizer,
    ),
    Change("calm-allocator", "device memory is neither allocated nor freed in the step", calm_allocator),
    Change(
        "feed-input",
        "batches are made ahead, by worker processes",
        feed_input,
        (Parameter("by", "time between two batches, as a share of today's; 0: always ready", 0.0, 0.0, 1.0),),
        "worker processes have spare cores (else up to a quarter of the gain is lost)",
        FED,
    ),
    Change(
        "pin-copies",
        "batches are copied from pinned memory, without blocking the host",
        pin_copies,
        (),
        "pinned copies take 15 to 50 % of the time of pageable ones",
    ),
)
