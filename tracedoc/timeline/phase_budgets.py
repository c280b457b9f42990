"""Split one step of a rank by phase: how long each lasted, computed, communicated and was exposed."""

from __future__ import annotations

import msgspec
import numpy as np

from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE, COPY, Activity, GpuEvents, gloo_rows
from tracedoc.timeline.phases import Phase, Phases
from tracedoc.timeline.steps import Window
from tracedoc.trace.columns import Trace
from tracedoc.trace.distinct import is_among

ORDER = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
"""In the order of a step; recomputation stands between forward and backward because it is forward work."""


class PhaseBudget(msgspec.Struct, frozen=True):
    """What one phase did in one step, in ns; work counts for the phase that launched it.

    ``span_ns`` are the stretches of the step from a compute kernel of the phase to the last of its own work
    before the next phase begins, and what it computes beside other phases; "other" has the rest of the step,
    in which no phase works. ``compute_ns`` and ``comm_ns`` are unions; ``exposed_comm_ns`` is the
    communication of the phase with no compute of any phase beside it.
    """

    phase: Phase
    span_ns: int
    compute_ns: int
    comm_ns: int
    exposed_comm_ns: int


def gpu_phase_budgets(
    events: GpuEvents, phases: Phases, window: Window, *, lane: tuple[int, int | None]
) -> tuple[PhaseBudget, ...]:
    """Return the phases of ``window`` on one GPU; ``lane`` is the device and its compute stream."""
    device, stream = lane
    near = np.flatnonzero(
        (events.device == device) & (events.end_ns > window.start_ns) & (events.start_ns < window.end_ns)
    )
    starts, ends = events.start_ns[near], events.end_ns[near]
    classes, labels = events.classes[near], phases.of_events[near]
    begins = (classes == COMPUTE) & (events.stream[near] == stream) & events.kernels[near]
    begins &= starts >= window.start_ns

    def spans(phase: Phase | None, *kinds: int) -> Spans:
        mine = is_among(classes, np.array(kinds, dtype=classes.dtype))
        mine &= (labels == phase) if phase is not None else True
        return Spans.of(starts[mine], ends[mine]).clip(window.start_ns, window.end_ns)

    work = {phase: spans(phase, COMPUTE, COMMUNICATION, COPY) for phase in ORDER}
    lasting = _lasting(starts[begins], labels[begins], work, window)
    compute = spans(None, COMPUTE)
    found = []
    for phase in ORDER:
        own, comm = spans(phase, COMPUTE), spans(phase, COMMUNICATION)
        span_ns = (lasting.get(phase, Spans.empty()) | own).total_ns
        found.append(_budget(phase, span_ns, own, comm, compute))
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


def _lasting(
    begins: np.ndarray, begin_labels: np.ndarray, own: dict[Phase, Spans], window: Window
) -> dict[Phase, Spans]:
    """Return when each phase lasts; ``begins`` are the starts of compute kernels, which ascend.

    A stretch of a phase begins with a kernel of it and ends where the next phase begins, or before that
    with the last of its own work: what follows until then (waiting for input, say) belongs to no phase.
    """
    if begins.size == 0:
        return {Phase.OTHER: Spans.of([window.start_ns], [window.end_ns])}
    change = np.concatenate(([0], np.flatnonzero(begin_labels[1:] != begin_labels[:-1]) + 1))
    starts, ends = begins[change], np.append(begins[change[1:]], window.end_ns)
    found = {}
    for phase in ORDER[:-1]:
        mine = begin_labels[change] == phase
        stretches = Spans.of(starts[mine], ends[mine])
        work = own[phase] & stretches
        first = np.searchsorted(work.starts, stretches.starts, side="left")
        last = np.searchsorted(work.starts, stretches.ends, side="left") - 1
        done = np.where(last >= first, work.ends[np.maximum(last, 0)] if len(work) else 0, stretches.starts)
        found[phase] = Spans.of(stretches.starts, done)
    known = Spans.empty()
    for spans in found.values():
        known = known | spans
    return {**found, Phase.OTHER: known.complement(window.start_ns, window.end_ns)}
