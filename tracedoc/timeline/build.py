"""Build the timeline of one rank: steps, activity, idle causes and collectives of its trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.errors import Failures, InputError, TraceLimit
from tracedoc.timeline.activity import (
    COMMUNICATION,
    COMPUTE,
    Activity,
    Budget,
    GpuEvents,
    busiest_device,
    classify_gpu_events,
    compute_stream,
    computes_on_cpu,
    cpu_activity,
    device_activity,
    gloo_rows,
)
from tracedoc.timeline.collective_table import CollectiveTable
from tracedoc.timeline.collectives import gloo_collectives, gpu_collectives
from tracedoc.timeline.idle import (
    HostSpans,
    IdleCauses,
    Quiet,
    cpu_idle_causes,
    find_quiet,
    foreign_turns,
    host_spans,
    idle_causes,
    launches_graphs,
)
from tracedoc.timeline.kernel_work import KernelWork, kernel_work
from tracedoc.timeline.launches import Launches, link_launches
from tracedoc.timeline.phases import PhaseBudget, Phases, cpu_phase_budgets, find_phases, gpu_phase_budgets
from tracedoc.timeline.shards.times import UnitTable, unit_table
from tracedoc.timeline.steps import (
    HostStep,
    HostSteps,
    find_host_steps,
    holds_iteration,
    repeated_operators,
    repeated_steps,
)
from tracedoc.timeline.syncs import Syncs, launching_threads
from tracedoc.timeline.windows import (
    Window,
    assign_steps,
    gpu_windows,
    host_windows,
    known_part,
    known_windows,
)
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct
from tracedoc.units import format_percent

QUEUED_IDLE_SHARE = 0.10
"""More idle time than this with work queued and nothing running: the trace lost kernels (CUDA graphs)."""

QUEUED_NS = 1_000_000
"""A kernel that starts so long after its launch, with nothing of its step before, waited for its turn."""


class RankTimeline(msgspec.Struct, frozen=True, eq=False):
    """What one rank's GPU (or CPU, in a CPU trace) did, and in which step.

    ``device`` is the ordinal of the analysed GPU, ``None`` for a CPU trace or where no device activity was
    captured; then ``activity`` and ``idle`` are ``None`` unless ``is_cpu``. ``windows`` are in time order;
    ``judged`` is the one that stands for the rank: the complete step of lower-median length, else the
    longest one; ``judged_budget`` is its exact budget. ``step_position[i]`` is the position in
    ``host.steps`` of the GPU event ``events.rows[i]``. ``syncs`` is ``None`` in a CPU trace, ``phases``
    without a backward pass. ``phase_budgets`` are those of the analysed step. ``cut``: what the trace shows
    ends before the capture did, or lacks kernels, so that only complete steps are known, and analysed.
    ``positions`` are those of steps in ``host.steps``, by number; ``launching_threads`` are the host threads
    that launch kernels. ``work`` is what kernels compute and move, ``None`` where it could not be told.
    ``kept`` caches what several facts are made of.
    """

    trace: Trace
    is_cpu: bool
    host: HostSteps
    host_delays: HostSpans
    launches: Launches
    events: GpuEvents
    step_position: np.ndarray
    device: int | None = None
    stream: int | None = None
    activity: Activity | None = None
    idle: IdleCauses | None = None
    windows: tuple[Window, ...] = ()
    judged: Window | None = None
    judged_budget: Budget | None = None
    collectives: CollectiveTable = msgspec.field(default_factory=CollectiveTable.empty)
    limits: tuple[TraceLimit, ...] = ()
    syncs: Syncs | None = None
    phases: Phases | None = None
    units: UnitTable | None = None
    phase_budgets: tuple[PhaseBudget, ...] = ()
    positions: Mapping[int, int] = {}
    cut: bool = False
    quiet: Quiet | None = None
    work: KernelWork | None = None
    launching_threads: npt.NDArray[np.int32] = msgspec.field(
        default_factory=lambda: np.empty(0, dtype=np.int32)
    )
    kept: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def complete_windows(self) -> tuple[Window, ...]:
        """The steps that were captured whole."""
        return tuple(window for window in self.windows if window.complete)

    @property
    def judged_host_step(self) -> HostStep | None:
        """The host's side of the analysed step, ``None`` where steps are not known."""
        position = None if self.judged is None else self.position_of(self.judged)
        return None if position is None else self.host.steps[position]

    def position_of(self, window: Window) -> int | None:
        """Return the position in ``host.steps`` of a window's step, ``None`` for the whole capture."""
        return self.positions.get(window.index)

    def __post_init__(self) -> None:
        if len(self.positions) < len(self.host.steps):
            found = {step.index: p for p, step in reversed([*enumerate(self.host.steps)])}
            msgspec.structs.force_setattr(self, "positions", found)


def build_timeline(trace: Trace, *, steps: tuple[int, int] | None = None) -> RankTimeline:
    """Return the timeline of one rank; ``steps`` limits the analysed steps to ``[first, last]``.

    Raises :class:`InputError` for a file into which several ranks were merged, or in which nothing ran.
    """
    _refuse_without_work(trace)
    launches = link_launches(trace)
    has_device = launches.gpu_rows.size > 0
    trace, launches, called, limits = known_part(trace, launches)
    cut = bool(limits) or trace.info.known_until_ns is not None
    host = find_host_steps(trace)
    events = classify_gpu_events(trace, launches)
    _refuse_merged_devices(trace, events)
    delays = host_spans(trace)
    # What a device did may be recorded, and yet not in the known part.
    unread = () if has_device else _unread_device(trace)
    if events.rows.size:
        timeline = _gpu_timeline(trace, host, launches, events, delays, cut=cut)
    elif unread is None:
        timeline = _cpu_timeline(trace, host, launches, events, delays)
    else:
        position = np.empty(0, dtype=np.int64)
        timeline = RankTimeline(
            trace, False, host, delays, launches, events, position, limits=(*host.limits, *unread)
        )
    windows, lost = known_windows(trace, timeline.host, launches, called, timeline.windows, cut=cut)
    limits = (*timeline.limits, *limits, *lost)
    timeline = _of_steps(replace(timeline, cut=cut or bool(lost), windows=windows, limits=limits), steps)
    failures = Failures()
    phases = failures.contain(
        "the phases of the step",
        lambda: find_phases(trace, timeline.host, events, timeline.device, is_cpu=timeline.is_cpu),
        None,
    )
    units = failures.contain("the sharded units", lambda: _units(timeline), None)
    work = failures.contain(
        "the work of kernels", lambda: kernel_work(trace, timeline.events, timeline.device), None
    )
    judged = _judge(replace(timeline, phases=phases, units=units, work=work))
    budgets: tuple[PhaseBudget, ...] = failures.contain(
        "the times of phases", lambda: _phase_budgets(judged), ()
    )
    return replace(judged, phase_budgets=budgets, limits=(*judged.limits, *failures.of_trace()))


def _of_steps(timeline: RankTimeline, steps: tuple[int, int] | None) -> RankTimeline:
    """The timeline with the windows of some steps; of what is cut, of complete ones."""
    kept = tuple(
        window
        for window in timeline.windows
        if (steps is None or steps[0] <= window.index <= steps[1]) and (window.complete or not timeline.cut)
    )
    return replace(timeline, windows=kept)


def _refuse_without_work(trace: Trace) -> None:
    beside = trace.is_kind(Kind.ANNOTATION, Kind.PYTHON, Kind.OVERHEAD, Kind.INSTANT)
    if len(trace) and beside.all() and trace.info.known_until_ns is None:
        if trace.is_kind(Kind.PYTHON).any():
            raise InputError(
                f"{trace.info.source} holds functions of Python alone: no operator and no kernel is recorded",
                "pass activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] to the profiler beside "
                "with_stack=True, and start it in the thread that runs the model: it records no "
                "operators of others; where the loop ends in the schedule, end that with repeat=1",
            )
        if gloo_rows(trace).size:
            raise InputError(
                f"{trace.info.source} holds transfers of gloo alone: what the training thread did is missing",
                "record it again, and keep the events of all threads",
            )
        raise InputError(
            f"{trace.info.source} holds no operator and no kernel: the profiler stopped right after it began",
            "a schedule that starts over as the loop ends writes such a file over the one before: end it "
            "with repeat=1, or give each file a name (on_trace_ready=tensorboard_trace_handler(folder))",
        )


def _refuse_merged_devices(trace: Trace, events: GpuEvents) -> None:
    # One process may drive several GPUs, but then its host and its compute are in the trace as well.
    devices = distinct(events.device[events.classes == COMMUNICATION])
    alone = bool((events.classes == COMMUNICATION).all()) and not trace.is_kind(Kind.CPU_OP).any()
    if devices.size > 1 and alone:
        raise InputError(
            f"{trace.info.source} holds nothing but the communication of {devices.size} devices: "
            "the kernels of several ranks were merged into it",
            "diagnose the folder with the ranks' own files",
        )


def _units(timeline: RankTimeline) -> UnitTable | None:
    return unit_table(
        timeline.trace,
        timeline.events,
        timeline.collectives,
        device=timeline.device,
        stream=timeline.stream,
        activity=timeline.activity,
    )


def _gpu_timeline(
    trace: Trace, host: HostSteps, launches: Launches, events: GpuEvents, delays: HostSpans, *, cut: bool
) -> RankTimeline:
    device = busiest_device(events)
    activity = device_activity(events, device)
    stream = compute_stream(events, device)
    own = events.on(device)
    boundary = own.kernels & (own.stream == stream)
    if host.source == "none" and stream is not None:
        host = repeated_steps(trace, launches, own.rows[boundary]) or host
    position, limits = assign_steps(trace, events, host)
    own_position = position[events.device == device]
    windows = gpu_windows(own, own_position, boundary, host) if stream is not None else ()
    if not any(window.complete for window in windows):
        windows = _own_extents(trace, own, boundary, own_position, host, activity, cut=cut)
    numbers = np.array([step.index for step in host.steps] + [-1, -1], dtype=np.int64)[position]
    collectives = gpu_collectives(trace, events, device, numbers).with_exposure(activity.exposed_comm)
    reach = (min([w.start_ns for w in windows]), max([w.end_ns for w in windows]))
    threads = launching_threads(trace, events)
    quiet = find_quiet(trace, events, threads)
    idle, syncs = idle_causes(trace, events, activity, device, delays, quiet, reach)
    return RankTimeline(
        trace=trace,
        is_cpu=False,
        host=host,
        host_delays=delays,
        launches=launches,
        events=events,
        step_position=position,
        device=device,
        stream=stream,
        activity=activity,
        idle=idle,
        syncs=syncs,
        windows=windows,
        collectives=collectives,
        limits=(*host.limits, *limits, *_unnamed_device(trace), *_other_devices(trace, events, device)),
        launching_threads=threads,
        quiet=quiet,
    )


def _unnamed_device(trace: Trace) -> tuple[TraceLimit, ...]:
    """The limit of a trace whose file does not say which GPU ran."""
    what, effect = "the file does not name its GPU", "precision, peak rates and its link are not judged"
    return () if trace.info.devices else (TraceLimit("unnamed-device", trace.info.source, what, effect),)


def _other_devices(trace: Trace, events: GpuEvents, device: int) -> tuple[TraceLimit, ...]:
    """The limit of a trace of a process that computes on several GPUs, of which one is analysed."""
    computes = events.classes == COMPUTE
    others = computes & (events.device != device)
    if not others.any():
        return ()
    length = events.end_ns - events.start_ns
    share = format_percent(float(length[others].sum() / max(length[computes].sum(), 1)))
    count = distinct(events.device[computes]).size
    what = f"the process computes on {count} GPUs; GPU {device} is analysed, {share} of compute is elsewhere"
    effect = "while it waits for another one it counts as idle"
    return (TraceLimit("other-gpus", trace.info.source, what, effect),)


def _cpu_timeline(
    trace: Trace, host: HostSteps, launches: Launches, events: GpuEvents, delays: HostSpans
) -> RankTimeline:
    threads = _stepping_threads(trace)
    activity = cpu_activity(trace, threads)
    if host.source == "none":
        host = repeated_operators(trace, threads) or host
    windows = host_windows(host)
    if not windows:
        windows = (Window(0, activity.start_ns, activity.end_ns, False),)
    first = min(activity.start_ns, windows[0].start_ns)
    last = max(activity.end_ns, windows[-1].end_ns)
    rows = gloo_rows(trace)
    starts = np.array([step.start_ns for step in host.steps], dtype=np.int64)
    numbers = np.array([step.index for step in host.steps] + [-1], dtype=np.int64)
    begins = trace.ts_ns[rows]
    step = numbers[np.searchsorted(starts, begins, side="right") - 1]
    step[begins >= (host.steps[-1].end_ns if host.steps else 0)] = -1
    return RankTimeline(
        trace=trace,
        is_cpu=True,
        host=host,
        host_delays=delays,
        launches=launches,
        events=events,
        step_position=np.empty(0, dtype=np.int64),
        activity=activity,
        idle=cpu_idle_causes(activity, first, last, delays),
        windows=windows,
        collectives=gloo_collectives(trace, step, rows).with_exposure(activity.exposed_comm),
        limits=(
            *host.limits,
            TraceLimit(
                "cpu-trace",
                trace.info.source,
                "CPU run, without GPU activity: compute is operator time, communication is gloo",
                "shares of time say little about a GPU job; counts, loader waits and arrival order hold",
            ),
        ),
    )


def _stepping_threads(trace: Trace) -> np.ndarray:
    """Return the threads that run the training loop: those with steps, backward nodes or an optimizer."""
    rows = trace.rows_named(
        lambda name: vocabulary.is_of_loop(name) or vocabulary.is_backward_node(name),
        Kind.CPU_OP,
        Kind.ANNOTATION,
    )
    if rows.size == 0:
        rows = np.flatnonzero(trace.kind == int(Kind.CPU_OP))
    return distinct(trace.thread[rows])


def _unread_device(trace: Trace) -> tuple[TraceLimit, ...] | None:
    """The limits of a trace of a GPU job that holds no GPU event, ``None`` for a trace of a CPU run.

    A machine with a GPU may run a model on its CPU: no call launches, and operators are those of the CPU.
    """
    if (trace.kind == int(Kind.ACCELERATOR)).any():
        return ()  # the reader has said so: unknown-device
    launched = any(
        vocabulary.launches(trace.names[name])
        for name in distinct(trace.name[trace.kind == int(Kind.RUNTIME)]).tolist()
    )
    if not (launched or trace.info.devices or trace.info.backend in ("nccl", "rccl")):
        return None
    if not launched and computes_on_cpu(trace):
        return None
    what = "the trace holds no GPU activity: " + (
        "kernels were launched, but what ran of them was not recorded; call torch.cuda.synchronize() "
        "before the profiler stops"
        if launched
        else "neither kernels nor launches were recorded; pass ProfilerActivity.CUDA to the profiler, "
        "or, if the model was not on the GPU, move it there with model.to('cuda')"
    )
    effect = "nothing is said about this rank's device time"
    return (TraceLimit("no-gpu-activity", trace.info.source, what, effect),)


def _own_extents(
    trace: Trace,
    own: GpuEvents,
    begins: np.ndarray,
    position: np.ndarray,
    host: HostSteps,
    activity: Activity,
    *,
    cut: bool,
) -> tuple[Window, ...]:
    """Return the windows of steps of which no next one was captured; without steps, one window.

    A step that the profiler marked begins on the GPU with its host range, or when work of another step has
    ended; it is whole if all its work has ended when that range does. Other windows go from a step's first
    to its last own event, and are incomplete; from its first kernel on the compute stream where the GPU still
    ran earlier steps when the host launched it. ``own`` are the events of the device, ``begins`` marks the
    kernels on the compute stream.
    """
    starts, ends = own.start_ns, own.end_ns
    windows = []
    for index, step in enumerate(host.steps):
        mine = position == index
        if not mine.any():
            continue
        first, last, whole = int(starts[mine].min()), int(ends[mine].max()), False
        if host.source == "profiler" and (step.finished or (not cut and holds_iteration(trace, step))):
            others = ends[~mine & (starts < first)]
            clear = step.start_ns >= int(others.max(initial=step.start_ns))
            whole = clear and step.start_ns <= first and last <= step.end_ns
            first = min(first, max(step.start_ns, int(others.max(initial=step.start_ns))))
            last = step.end_ns if whole else last
        if not whole and _waited_for_its_turn(own, mine):
            first = int(starts[mine & begins].min(initial=last))
        windows.append(Window(step.index, first, last, whole))
    return tuple(windows) or (Window(0, activity.start_ns, activity.end_ns, False),)


def _waited_for_its_turn(own: GpuEvents, mine: np.ndarray) -> bool:
    """True where a step's first kernel was launched long before it starts, with nothing in between.

    ``mine`` marks the events of the step. Then the GPU was busy with steps before the capture, of whose
    kernels none is shown.
    """
    kernels = np.flatnonzero(mine & own.kernels)
    if kernels.size == 0 or not own.linked[kernels[0]]:
        return False
    start, ends = int(own.start_ns[kernels[0]]), own.end_ns[mine]
    idle_since = max(int(own.launch_ns[kernels[0]]), int(ends[ends <= start].max(initial=0)))
    return start - idle_since > QUEUED_NS


def _judge(timeline: RankTimeline) -> RankTimeline:
    """Choose the step that stands for the rank."""
    windows = timeline.windows
    complete = sorted((w for w in windows if w.complete), key=lambda w: (w.end_ns - w.start_ns, w.index))
    limits = timeline.limits
    judged: Window | None = None
    if complete:
        judged = complete[(len(complete) - 1) // 2]
    elif not timeline.cut:
        judged = max(windows, key=lambda w: w.end_ns - w.start_ns, default=None)
        if judged is not None:
            what = (
                "no training step was found"
                if timeline.host.source == "none"
                else "no complete step was captured"
            )
            limits = (
                *limits,
                TraceLimit(
                    "no-complete-step",
                    timeline.trace.info.source,
                    what,
                    "the longest part is analysed as a step",
                ),
            )
    activity = timeline.activity
    doubt = _queued_idle(timeline, judged)
    return replace(
        timeline,
        judged=judged,
        judged_budget=activity.budget(judged.start_ns, judged.end_ns) if judged and activity else None,
        limits=(*limits, *((doubt,) if doubt else ())),
    )


def _phase_budgets(timeline: RankTimeline) -> tuple[PhaseBudget, ...]:
    phases, window, activity = timeline.phases, timeline.judged, timeline.activity
    if phases is None or window is None or activity is None:
        return ()
    if timeline.device is None:
        return cpu_phase_budgets(timeline.trace, phases, activity, window)
    lane = (timeline.device, timeline.stream)
    return gpu_phase_budgets(timeline.events, phases, window, lane=lane)


def _queued_idle(timeline: RankTimeline, judged: Window | None) -> TraceLimit | None:
    if judged is None or timeline.idle is None or judged.end_ns <= judged.start_ns:
        return None
    queued = timeline.idle.spans["dependency"].clip(judged.start_ns, judged.end_ns)
    unexplained = queued - foreign_turns(timeline.trace, queued)
    share = unexplained.total_ns / (judged.end_ns - judged.start_ns)
    if share <= QUEUED_IDLE_SHARE:
        return None
    return TraceLimit(
        "idle-with-work-queued",
        timeline.trace.info.source,
        f"for {format_percent(share)} of the step work was queued and nothing ran",
        "that idle time is unreliable: "
        + ("kernels of CUDA graphs may be missing, or " if launches_graphs(timeline.trace) else "")
        + "another device, or a process that shares this one, is waited for",
    )
