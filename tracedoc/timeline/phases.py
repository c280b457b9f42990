"""Find the phases of training on the host, and which phase launched each GPU event.

Forward, backward, recomputation and optimizer are read from the host's own ranges, never from GPU time:
the GPU may run two steps behind. A GPU event has the phase in which it was launched.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.spans import Spans, in_order, places_in
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE, COPY, Activity, GpuEvents, gloo_rows
from tracedoc.timeline.collectives import gloo_calls
from tracedoc.timeline.lags import ROUNDED_NS
from tracedoc.timeline.launches import Rows
from tracedoc.timeline.steps import HostSteps, outermost_rows
from tracedoc.timeline.windows import Window, fill_unlinked
from tracedoc.trace import frameworks, vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import difference, distinct, is_among

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Phase(IntEnum):
    """What the host was doing. ``OTHER`` is the rest: data, gradient clipping, zeroing, logging."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    RECOMPUTE = 3  # forward operators inside a node of the backward graph: activation checkpointing
    OPTIMIZER = 4


class Phases(msgspec.Struct, frozen=True, eq=False):
    """The phases of one rank on the host, and of its GPU events.

    From ``edges_ns[i]`` until the next edge the phase is ``labels[i]``; before the first edge it is OTHER.
    ``passes`` are the backward passes as ``(start_ns, end_ns)``, in time order; ``nodes`` the time inside
    nodes of the backward graph. ``of_events[i]`` is the phase of the GPU event ``events.rows[i]``,
    ``of_collectives[i]`` that of the timeline's ``collectives[i]``, which the host called at
    ``asked_ns[i]`` (its own start where the call is not known).
    """

    edges_ns: Int64Array
    labels: npt.NDArray[np.uint8]
    passes: tuple[tuple[int, int], ...]
    nodes: Spans
    of_events: npt.NDArray[np.uint8]
    of_collectives: npt.NDArray[np.uint8]
    asked_ns: Int64Array

    def at(self, times_ns: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Return the phase at each host time."""
        position = places_in(self.edges_ns, np.asarray(times_ns, dtype=np.int64))
        return np.asarray(np.concatenate(([np.uint8(Phase.OTHER)], self.labels))[position], dtype=np.uint8)

    def host_spans(self, phase: Phase) -> Spans:
        """Return the host time of one phase. OTHER has no end, so it ends with the last edge."""
        mine = np.flatnonzero(self.labels[:-1] == phase)
        return Spans.of(self.edges_ns[mine], self.edges_ns[mine + 1])


GRADIENT_ELEMENTS = 65_536
"""An all-reduce of fewer elements after the last node may carry a norm or a flag instead of gradients."""


class _Marks(msgspec.Struct, frozen=True, eq=False):
    """The host rows that separate the phases."""

    backward: Rows
    tails: Rows
    optimizer: Rows
    busy: Rows  # loader and zero_grad: neither forward nor anything else
    begins: Int64Array  # where a forward pass has surely begun
    gathers: Rows
    stepping: Rows  # every operator and range on the threads that run the training loop
    transfers: Rows  # sends and receives
    engine: npt.NDArray[np.int32]  # the threads that do nothing but run backward passes


def find_phases(
    trace: Trace, host: HostSteps, events: GpuEvents, device: int | None, *, is_cpu: bool
) -> Phases | None:
    """Return the phases, ``None`` where the trace holds no backward pass (inference, GPU-only traces).

    ``device`` is the analysed GPU, ``None`` where there is none; ``is_cpu`` is false for a GPU job without
    GPU events, whose transfers are not the timeline's collectives. An unlinked GPU event takes the phase of
    the next linked one on its stream, as with steps.
    """
    marks = _marks(trace)
    nodes = trace.spans(marks.backward)
    if len(nodes) == 0:
        return None
    boundaries = _boundaries(host)
    passes = _passes(trace, marks, nodes, boundaries)
    backward = Spans.from_pairs(passes)
    optimizer = _optimizer_spans(trace, marks, passes)
    forward, updating = _forward_spans(trace, marks, passes, optimizer, boundaries)
    recompute = _recompute_spans(trace, marks.backward) & backward
    optimizer = (optimizer | updating) - backward
    parts = (
        (Phase.FORWARD, forward - optimizer - backward),
        (Phase.BACKWARD, backward - recompute),
        (Phase.RECOMPUTE, recompute),
        (Phase.OPTIMIZER, optimizer),
    )
    edges, labels = _edges(parts)
    none = np.empty(0, dtype=np.uint8)
    phases = Phases(edges, labels, passes, nodes, none, none, none.astype(np.int64))
    of_events = _of_events(trace, phases, events, marks.engine)
    if device is None:
        rows = gloo_rows(trace) if is_cpu else np.empty(0, dtype=np.intp)
        calls = gloo_calls(trace, rows)
        asked = trace.ts_ns[[calls.get(row, row) for row in rows.tolist()]]
        return replace(phases, of_events=of_events, of_collectives=phases.at(asked), asked_ns=asked)
    mine = (events.classes == COMMUNICATION) & (events.device == device)
    return replace(
        phases, of_events=of_events, of_collectives=of_events[mine], asked_ns=events.launch_ns[mine]
    )


def _boundaries(host: HostSteps) -> Int64Array:
    """Where marked steps begin and end: what follows the last mark is no part of a step."""
    marked = host.steps if host.source == "profiler" else ()
    edges = [edge for step in marked for edge in (step.start_ns, step.end_ns)]
    return distinct(np.array(edges, dtype=np.int64))


def _marks(trace: Trace) -> _Marks:
    names = trace.names
    evaluation = trace.named(frameworks.is_evaluation)
    backward = evaluation if evaluation.any() else trace.named(vocabulary.is_backward_node)
    optimizer = trace.named(vocabulary.optimizer_step_class)
    if not _host_rows(trace, optimizer).size:
        optimizer = trace.named(frameworks.is_optimizer_label)
    busy = trace.named(lambda name: vocabulary.data_loader(name) is not None or vocabulary.is_zero_grad(name))
    begins = trace.named(
        lambda name: frameworks.is_forward_wrapper(name) or frameworks.is_forward_operator(name)
    )
    step = trace.named(vocabulary.is_step)
    backward_rows = _host_rows(trace, backward)
    passing = trace.thread.distinct(backward_rows)
    loop = _loop_threads(trace, passing, marked=optimizer | busy | step, begins=begins & ~backward)
    engine = difference(passing, loop)
    # Hooks of ZeRO-3 gather the first module's parameters before any sign of the forward pass.
    hooked = any(frameworks.is_zero3_mark(name) for name in names)
    begin_rows = _host_rows(trace, begins & ~backward)
    busy_rows = _host_rows(trace, busy)
    host = trace.is_kind(Kind.CPU_OP, Kind.ANNOTATION)
    tails = host & trace.thread.among(engine)
    tails[trace.rows_named(frameworks.is_backward_tail, Kind.CPU_OP, Kind.ANNOTATION)] = True
    tails[_reductions(trace)] = True
    stepping = host & trace.thread.among(loop)
    if evaluation.any():
        stepping[_host_rows(trace, step)] = False
    else:
        # Before torch 1.9 the engine's own sums of gradients have no range between the nodes.
        stepping &= (begins | optimizer | busy)[trace.name]
    return _Marks(
        backward=backward_rows[trace.kind[backward_rows] == int(Kind.CPU_OP)],
        tails=np.flatnonzero(tails),
        optimizer=outermost_rows(trace, _host_rows(trace, optimizer)),
        busy=busy_rows[trace.thread.among(loop, busy_rows)],
        begins=trace.ts_ns[begin_rows[~trace.thread.among(engine, begin_rows)]],
        gathers=_host_rows(trace, trace.named(frameworks.is_parameter_gather) & (not hooked)),
        stepping=np.flatnonzero(stepping),
        transfers=_host_rows(trace, trace.named(_passes_data)),
        engine=engine,
    )


def _passes_data(name: str) -> bool:
    return name.startswith("c10d::") and vocabulary.collective_op(name) in vocabulary.P2P_OPS


def _host_rows(trace: Trace, chosen: BoolArray) -> Rows:
    """Return the operators and ranges of the chosen names, in time order."""
    return trace.rows_of_names(chosen, Kind.CPU_OP, Kind.ANNOTATION)


def _loop_threads(
    trace: Trace, passing: npt.NDArray[np.int32], *, marked: BoolArray, begins: BoolArray
) -> npt.NDArray[np.int32]:
    """Return the threads that run the training loop; on GPUs the engine runs backward on one of its own.

    Best those with steps, optimizers or loaders (``marked``), else those with forward passes (``begins``) and
    no backward nodes, else those with backward nodes (``passing``).
    """
    stepping = trace.thread.distinct(_host_rows(trace, marked))
    if stepping.size:
        return stepping
    for found in (difference(trace.thread.distinct(_host_rows(trace, begins)), passing), passing):
        if found.size:
            return found
    return trace.thread.distinct(trace.rows(Kind.CPU_OP, Kind.ANNOTATION))


def _reductions(trace: Trace) -> Rows:
    """Return the host calls that reduce gradients, as far as their kind or size shows it."""
    ops = [vocabulary.collective_op(name) if name.startswith("c10d::") else None for name in trace.names]
    surely = np.array([op in ("reduce_scatter", "reduce") for op in ops], dtype=bool)
    perhaps = np.array([op == "all_reduce" for op in ops], dtype=bool)
    found = _host_rows(trace, surely).tolist()
    for row in _host_rows(trace, perhaps).tolist():
        shapes = trace.shapes.get(row)
        if shapes is not None and shapes.dims and frameworks.elements(shapes.dims[0]) >= GRADIENT_ELEMENTS:
            found.append(row)
    recorded = np.fromiter(trace.collectives, dtype=np.intp, count=len(trace.collectives))
    for row in recorded[trace.kind[recorded] == int(Kind.CPU_OP)].tolist():
        arguments = trace.collectives[row]
        op = vocabulary.collective_op(arguments.name)
        large = (arguments.in_elements or 0) >= GRADIENT_ELEMENTS
        if op in ("reduce_scatter", "reduce") or (op == "all_reduce" and large):
            found.append(row)
    return distinct(np.array(found, dtype=np.intp))


def _passes(trace: Trace, marks: _Marks, nodes: Spans, boundaries: Int64Array) -> tuple[tuple[int, int], ...]:
    """Join nodes into backward passes: between the nodes of one pass the training loop launches nothing.

    Nor does the engine send or receive between two nodes: a pipeline does, between two passes.
    """
    gap_starts, gap_ends = nodes.ends[:-1], nodes.starts[1:]
    rows, sent = marks.stepping, marks.transfers
    # Of times in whole microseconds, what a node calls last may begin as it ends.
    called = trace.dur_ns[rows] <= ROUNDED_NS
    called[called] = is_among(trace.ts_ns[rows[called]], gap_starts)
    starts = trace.ts_ns[rows[~called]]
    held = np.searchsorted(starts, gap_ends, side="left") - np.searchsorted(starts, gap_starts, side="left")
    # A call may seem to begin before the node has ended: old traces are good to a quarter of a microsecond.
    held += np.searchsorted(trace.ts_ns[sent], gap_ends, side="left")
    held -= np.searchsorted(in_order(trace.end_ns[sent]), gap_starts, side="right")
    cut = np.flatnonzero(
        (held > 0) | (np.searchsorted(boundaries, gap_ends) > np.searchsorted(boundaries, gap_starts))
    )
    first = nodes.starts[np.concatenate(([0], cut + 1))]
    last = nodes.ends[np.concatenate((cut, [len(nodes) - 1]))]
    # What follows the last node (buckets copied back) belongs to the pass until the loop goes on.
    limits = np.concatenate((first[1:], [np.iinfo(np.int64).max]))
    stops = np.sort(np.concatenate((trace.ts_ns[marks.optimizer], marks.begins, boundaries, limits[-1:])))
    until = np.minimum(limits, stops[np.searchsorted(stops, last)])
    ends = _last_ends(trace, marks.tails, last, until)
    return tuple(zip(first.tolist(), ends.tolist(), strict=True))


def _last_ends(trace: Trace, rows: Rows, since: Int64Array, until: Int64Array) -> Int64Array:
    """The end of the last of the rows that start in ``[since[i], until[i])``, or ``since[i]``."""
    times = trace.ts_ns[rows]
    found: Int64Array = np.array(since)
    begins, stops = np.searchsorted(times, since), np.searchsorted(times, until)
    for place in np.flatnonzero(stops > begins).tolist():
        inside = rows[begins[place] : stops[place]]
        found[place] = max(int(since[place]), int(trace.end_ns[inside].max()))
    return found


def _optimizer_spans(trace: Trace, marks: _Marks, passes: tuple[tuple[int, int], ...]) -> Spans:
    """Return the optimizer's time. A closure runs the passes inside ``step``: what follows them counts."""
    starts, ends = trace.ts_ns[marks.optimizer], trace.end_ns[marks.optimizer]
    pass_starts = np.array([start for start, _ in passes], dtype=np.int64)
    pass_ends = np.array([end for _, end in passes], dtype=np.int64)
    last = np.searchsorted(pass_starts, ends, side="left") - 1
    inside = (last >= 0) & (pass_starts[np.maximum(last, 0)] >= starts)
    return Spans.of(np.where(inside, pass_ends[np.maximum(last, 0)], starts), ends)


def _forward_spans(
    trace: Trace,
    marks: _Marks,
    passes: tuple[tuple[int, int], ...],
    optimizer: Spans,
    boundaries: Int64Array,
) -> tuple[Spans, Spans]:
    """Return the forward time, and the time after an optimizer that hands parameters back.

    Forward is what leads to a backward pass: since the pass, optimizer or step boundary before it, without
    waiting for data and zeroing gradients. After the last block it counts from a sure sign only.
    """
    blocks = [(start, end, False) for start, end in passes]
    blocks += [(start, end, True) for start, end in optimizer.pairs()]
    blocks.sort()
    begins = np.sort(marks.begins)
    times = np.concatenate((trace.ts_ns[marks.stepping], boundaries[:1], [blocks[0][0]]))
    first = int(times.min())
    last = int(max(trace.end_ns[marks.stepping].max(initial=0), blocks[-1][1]))
    forward, updating = [], []
    edges = [(first, False), *((end, is_optimizer) for _, end, is_optimizer in blocks)]
    targets = [(start, not is_optimizer) for start, _, is_optimizer in blocks]
    targets.append((last, False))
    reach = edges[0][0]
    for number, ((end, after_optimizer), (start, leads_to_backward)) in enumerate(
        zip(edges, targets, strict=True)
    ):
        reach = max(reach, end)
        if start <= reach:
            continue
        sign = int(np.searchsorted(begins, reach, side="left"))
        begun = int(begins[sign]) if sign < begins.size else start
        gathered = _gathered_until(trace, marks, reach, min(begun, start)) if marks.gathers.size else reach
        if gathered > reach and (after_optimizer or number == 0):
            updating.append((reach, gathered))
        if leads_to_backward:
            crossed = boundaries[(boundaries > reach) & (boundaries <= start)]
            forward.append((int(crossed[-1]) if crossed.size else reach, start))
        elif start == last and begun < start:
            forward.append((begun, start))
    if updating and len(optimizer) and updating[0][0] < int(optimizer.starts[0]) and len(updating) == 1:
        updating = []  # The capture begins with a gather that no captured optimizer step is followed by.
    busy = trace.spans(marks.busy)
    return Spans.from_pairs(forward) - busy, Spans.from_pairs(updating)


def _gathered_until(trace: Trace, marks: _Marks, start: int, end: int) -> int:
    begins, ends = trace.ts_ns[marks.gathers], trace.end_ns[marks.gathers]
    # Rounding may let one begin a nanosecond before what it follows has ended.
    return int(ends[(begins < end) & (ends > start)].max(initial=start))


def _recompute_spans(trace: Trace, backward: Rows) -> Spans:
    """Return the time of forward operators inside backward nodes, from the first child to the last of them.

    The nodes of a nested pass (reentrant checkpointing) are backward again.
    """
    composite = trace.named(frameworks.is_forward_operator)
    wrapper = trace.named(vocabulary.is_backward_node)
    operators = trace.rows_of_names(composite, Kind.CPU_OP)
    pairs: list[tuple[int, int]] = []
    nested: list[Spans] = []
    for thread in distinct(trace.thread[operators]).tolist():
        nodes = backward[trace.thread[backward] == thread]
        outer = outermost_rows(trace, nodes)
        if outer.size == 0:
            continue
        mine = operators[trace.thread[operators] == thread]
        holder = np.searchsorted(trace.ts_ns[outer], trace.ts_ns[mine], side="right") - 1
        inside = (holder >= 0) & (trace.ts_ns[mine] < trace.end_ns[outer[np.maximum(holder, 0)]])
        inner = difference(nodes, outer)
        within = trace.spans(inner)
        mine, holder = mine[inside], holder[inside]
        own = within.covered_ns(trace.ts_ns[mine], trace.ts_ns[mine] + 1) == 0
        mine, holder = mine[own], holder[own]
        if mine.size == 0:
            continue
        nested.append(within)
        children = np.flatnonzero(
            (trace.kind == int(Kind.CPU_OP)) & (trace.thread == thread) & ~wrapper[trace.name]
        )
        for index in distinct(holder).tolist():
            row = int(outer[index])
            child = children[np.searchsorted(trace.ts_ns[children], trace.ts_ns[row], side="left")]
            pairs.append((int(trace.ts_ns[child]), int(trace.end_ns[mine[holder == index]].max())))
    spans = Spans.from_pairs(pairs)
    for within in nested:
        spans = spans - within
    return spans


def _edges(parts: tuple[tuple[Phase, Spans], ...]) -> tuple[Int64Array, npt.NDArray[np.uint8]]:
    """Return the steps of the function of time that the disjoint parts describe."""
    starts = np.concatenate([spans.starts for _, spans in parts])
    ends = np.concatenate([spans.ends for _, spans in parts])
    labels = np.concatenate([np.full(len(spans), int(phase), dtype=np.uint8) for phase, spans in parts])
    order = np.argsort(starts, kind="stable")
    starts, ends, labels = starts[order], ends[order], labels[order]
    opens = np.append(starts[1:] > ends[:-1], True)
    edges = np.concatenate((starts, ends[opens]))
    values = np.concatenate((labels, np.full(int(opens.sum()), int(Phase.OTHER), dtype=np.uint8)))
    order = np.argsort(edges, kind="stable")
    return edges[order], values[order]


def _of_events(
    trace: Trace, phases: Phases, events: GpuEvents, engine: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint8]:
    labels = phases.at(events.launch_ns)
    strayed = (
        events.linked & trace.thread.among(engine, events.launch_rows) & (labels != int(Phase.RECOMPUTE))
    )
    labels[strayed] = int(Phase.BACKWARD)
    found = fill_unlinked(events, labels.astype(np.int8))
    return np.where(found < 0, int(Phase.OTHER), found).astype(np.uint8)


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
        comm = trace.spans(mine).clip(window.start_ns, window.end_ns)
        found.append(_budget(phase, lasting.total_ns, compute & lasting, comm, compute))
    return tuple(budget for budget in found if _holds(budget))


def _budget(phase: Phase, span_ns: int, own: Spans, comm: Spans, compute: Spans) -> PhaseBudget:
    return PhaseBudget(phase, span_ns, own.total_ns, comm.total_ns, (comm - compute).total_ns)


def _holds(budget: PhaseBudget) -> bool:
    return budget.span_ns > 0 or budget.compute_ns > 0 or budget.comm_ns > 0


def _lasting(
    begins: np.ndarray, begin_labels: np.ndarray, own: dict[Phase, Spans], window: Window
) -> dict[Phase, Spans]:
    """The time of each phase; ``begins`` are the starts of compute kernels, which ascend.

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
