"""Split one step of a rank by phase: how long each lasted, computed, communicated and was exposed."""

from __future__ import annotations

import msgspec
import numpy as np

from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE, Activity, GpuEvents, gloo_rows
from tracedoc.timeline.phases import Phase, Phases
from tracedoc.timeline.steps import Window
from tracedoc.trace.columns import Kind, Trace

ORDER = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
"""In the order of a step; recomputation stands between forward and backward because it is forward work."""


class PhaseBudget(msgspec.Struct, frozen=True):
    """What one phase did in one step, in ns; work counts for the phase that launched it.

    ``span_ns`` are the stretches of the step that begin with a compute kernel of the phase: over all phases
    they add up to the step. ``compute_ns`` and ``comm_ns`` are unions; ``exposed_comm_ns`` is the
    communication of the phase with no compute of any phase beside it.
    """

    phase: Phase
    span_ns: int
    compute_ns: int
    comm_ns: int
    exposed_comm_ns: int


def gpu_phase_budgets(
    trace: Trace, events: GpuEvents, phases: Phases, window: Window, *, lane: tuple[int, int | None]
) -> tuple[PhaseBudget, ...]:
    """Return the phases of ``window`` on one GPU; ``lane`` is the device and its compute stream."""
    device, stream = lane
    starts, ends = trace.ts_ns[events.rows], trace.end_ns[events.rows]
    near = np.flatnonzero(
        (trace.device[events.rows] == device) & (ends > window.start_ns) & (starts < window.end_ns)
    )
    starts, ends = starts[near], ends[near]
    classes, labels = events.classes[near], phases.of_events[near]
    rows = events.rows[near]
    begins = (
        (classes == COMPUTE)
        & (trace.stream[rows] == stream)
        & (trace.kind[rows] == int(Kind.KERNEL))
        & (starts >= window.start_ns)
    )
    lasting = _lasting(starts[begins], labels[begins], window)

    def spans(kind: int, phase: Phase | None = None) -> Spans:
        mine = (classes == kind) & ((labels == phase) if phase is not None else True)
        return Spans.of(starts[mine], ends[mine]).clip(window.start_ns, window.end_ns)

    compute = spans(COMPUTE)
    found = [
        _budget(phase, lasting[phase], spans(COMPUTE, phase), spans(COMMUNICATION, phase), compute)
        for phase in ORDER
    ]
    return tuple(budget for budget in found if _holds(budget))


def cpu_phase_budgets(
    trace: Trace, phases: Phases, activity: Activity, window: Window
) -> tuple[PhaseBudget, ...]:
    """Return the phases of ``window`` in a CPU trace, where the host itself computes."""
    compute = activity.compute.clip(window.start_ns, window.end_ns)
    rows = gloo_rows(trace)
    found = []
    for phase in ORDER:
        if phase is Phase.OTHER:
            known = Spans.empty()
            for other in ORDER[:-1]:
                known = known | phases.host_spans(other)
            lasting = known.complement(window.start_ns, window.end_ns)
        else:
            lasting = phases.host_spans(phase).clip(window.start_ns, window.end_ns)
        mine = rows[phases.of_collectives == phase]
        comm = Spans.of(trace.ts_ns[mine], trace.end_ns[mine]).clip(window.start_ns, window.end_ns)
        found.append(_budget(phase, lasting.total_ns, compute & lasting, comm, compute))
    return tuple(budget for budget in found if _holds(budget))


def _budget(phase: Phase, span_ns: int, own: Spans, comm: Spans, compute: Spans) -> PhaseBudget:
    return PhaseBudget(phase, span_ns, own.total_ns, comm.total_ns, (comm - compute).total_ns)


def _holds(budget: PhaseBudget) -> bool:
    return budget.span_ns > 0 or budget.compute_ns > 0 or budget.comm_ns > 0


def _lasting(starts: np.ndarray, labels: np.ndarray, window: Window) -> dict[Phase, int]:
    """Return how long each phase lasts: from a kernel of it to the first of the next. Starts ascend."""
    length = window.end_ns - window.start_ns
    if starts.size == 0:
        return {phase: length if phase is Phase.OTHER else 0 for phase in Phase}
    change = np.concatenate(([0], np.flatnonzero(labels[1:] != labels[:-1]) + 1))
    edges = np.concatenate(([window.start_ns], starts[change[1:]], [window.end_ns]))
    lengths = np.diff(edges)
    return {phase: int(lengths[labels[change] == phase].sum()) for phase in Phase}
