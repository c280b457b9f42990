"""Split what a rank did in an interval into nanoseconds by cause: arithmetic, copies, host work."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.idle_causes import CAUSES, LATE_LAUNCH
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.timeline.phases import Phase, Phases
from tracedoc.trace import frameworks, vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.trace.kernels import MATRIX
from tracedoc.values import once

WORK = (
    *("matrix", "compute", "communication", "copy"),
    *CAUSES[: CAUSES.index("launch")],
    *LATE_LAUNCH,
    *CAUSES[CAUSES.index("launch") + 1 :],
)
"""The causes: each nanosecond of a rank's device has exactly one.

matrix: matrix products, convolutions and attention; compute: other kernels and memsets; communication and
copy: their exposed time. The rest is idle time by :data:`tracedoc.idle_causes.CAUSES`, with late launches by
what the launching threads did.

In a CPU trace compute is that of operators, but time in the data loader is input even where operators make
the samples; idle time that no range explains is "unknown": the threads sleep, wait, or run code that the
profiler does not see.
"""

IDLE_WORK = WORK[4:]
"""Those that are idle time."""

_PART_OF = {"matrix": "compute", "dispatch": "python"}
"""Sets that lie whole inside another one, whose time they are taken from."""

_MATRIX_OPERATOR = re.compile(
    r"(?:aten|mkldnn|onednn|mkl|quantized|_C)::_?(?:mkldnn_|mkl_|scaled_|grouped_)*"
    r"(?:add|badd)?b?mm\b|aten::(?:addmv|mv|linear|matmul|dot)$|aten::\w*conv|\w+::\w*attention\w*$|"
    r"(?:mkldnn|mkl)::_?(?:mkldnn_|mkl_)?linear"
)


class Work(msgspec.Struct, frozen=True, eq=False):
    """What a rank did, as sets of time by the names in :data:`WORK` that occur; and when its kernels start.

    The sets are disjoint, but that "compute" holds "matrix", and "python" holds "dispatch".
    """

    spans: Mapping[str, Spans]
    compute_starts: Int64Array

    def within(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> Int64Array:
        """Return the nanoseconds of each interval ``[starts[i], ends[i])`` by cause: a row an interval.

        A row sums to the length of its interval where that lies inside the device's activity. An empty or
        reversed interval gives zeros.
        """
        covered = {name: spans.covered_ns(starts, ends) for name, spans in self.spans.items()}
        for part, whole in _PART_OF.items():
            if part in covered:
                covered[whole] -= covered[part]
        nothing = np.zeros(np.shape(starts), dtype=np.int64)
        return np.stack([covered.get(name, nothing) for name in WORK], axis=-1)


def rank_work(timeline: RankTimeline) -> Work | None:
    """The work of the rank's device and, where that was idle, of its host; ``None`` without activity."""
    activity, idle = timeline.activity, timeline.idle
    if activity is None or idle is None:
        return None
    matrix, compute_starts = _matrix(timeline, activity.compute)
    found = {
        "matrix": matrix,
        "compute": activity.compute,
        "communication": activity.exposed_comm,
        "copy": activity.exposed_copy,
    } | {cause: spans for cause, spans in idle.spans.items() if cause != "launch"}
    late = idle.spans["launch"]
    if timeline.is_cpu:
        loading = timeline.host_delays.input - activity.comm
        found |= {name: found[name] - loading for name in ("matrix", "compute")} | {"input": loading}
    elif len(late):
        optimizer = optimizer_spans(timeline)
        found["optimizer"] = late & optimizer
        found["python"] = late - optimizer
        found["dispatch"] = found["python"] & _in_calls(timeline)
    return Work({name: spans for name, spans in found.items() if len(spans)}, compute_starts)


def _in_calls(timeline: RankTimeline) -> Spans:
    """The time in which a launching thread is inside an operator or a runtime call."""
    trace = timeline.trace
    calls = trace.is_kind(Kind.CPU_OP, Kind.RUNTIME)
    calls &= trace.thread.among(timeline.launching_threads)
    return Spans.of_chosen(trace.ts_ns, trace.end_ns, calls)


def _matrix(timeline: RankTimeline, compute: Spans) -> tuple[Spans, Int64Array]:
    """The time of matrix work, and the start of each compute kernel (CPU: operator of it)."""
    trace, events = timeline.trace, timeline.events
    named = np.zeros(len(trace.names), dtype=bool)
    if timeline.is_cpu:
        for index, name in enumerate(trace.names):
            named[index] = _MATRIX_OPERATOR.match(name) is not None
        rows = np.flatnonzero((trace.kind == int(Kind.CPU_OP)) & named[trace.name])
        spans = trace.spans(rows)
        return spans & compute, trace.ts_ns[rows]
    for index, category in events.categories.items():
        named[index] = category in MATRIX
    computes = (events.classes == COMPUTE) & (events.device == timeline.device)
    mine = computes & named[trace.name[events.rows]]
    return Spans.of(events.start_ns[mine], events.end_ns[mine]), events.start_ns[computes & events.kernels]


@once
def optimizer_spans(timeline: RankTimeline) -> Spans:
    """When the host is inside ``Optimizer.step``."""
    trace = timeline.trace
    rows = trace.rows_named(vocabulary.optimizer_step_class, Kind.ANNOTATION)
    return trace.spans(rows)


_OF_DTENSORS = re.compile(r"(?:Redistribute|_(?:To|From)TorchTensor)$|fsdp::")
"""Operators that only run where parameters are DTensors: their own autograd functions, and those of FSDP2."""

_NORMS = frozenset({"aten::_foreach_norm", "aten::linalg_vector_norm"})
_CLIPS = "aten::_foreach_mul_"


@once
def dtensor_dispatch(timeline: RankTimeline) -> Spans:
    """When the host clips gradients, or updates parameters, that are DTensors (FSDP2, tensor parallelism).

    Each operator on them goes through Python that works out how its result is sharded. Clipping is from the
    first norm behind a backward pass to the last product of lists before the optimizer.
    """
    trace, updates = timeline.trace, optimizer_spans(timeline)
    if timeline.phases is None or not any(map(_OF_DTENSORS.match, trace.names)):
        return Spans.empty()
    norms, clips = (trace.rows_named(one, Kind.CPU_OP) for one in (_NORMS.__contains__, _CLIPS.__eq__))
    first, last = trace.ts_ns[norms], trace.end_ns[clips]
    found = []
    for start in updates.starts.tolist():
        since = max((end for _, end in timeline.phases.passes if end <= start), default=start)
        begins, ends = (times[(times >= since) & (times <= start)] for times in (first, last))
        if begins.size and ends.size:
            found.append((int(begins[0]), int(ends[-1])))
    return updates | Spans.from_pairs(found)


# Before a collective ----------------------------------------------------------------------------

PHASES = (
    "an unknown phase",
    "the forward pass",
    "between forward and backward",
    "the backward pass",
    "between backward and optimizer",
    "the optimizer",
    "between two steps",
)
"""Where in a step the host is, by the operators before and after."""

_FORWARD, _BACKWARD, _OPTIMIZER, _LOADER, _NEITHER = 0, 1, 2, 3, 4
_CLASS_OF = np.zeros(len(Phase), dtype=np.intp)
_CLASS_OF[Phase.OTHER] = _NEITHER
_CLASS_OF[Phase.FORWARD] = _FORWARD
_CLASS_OF[Phase.BACKWARD] = _CLASS_OF[Phase.RECOMPUTE] = _BACKWARD
_CLASS_OF[Phase.OPTIMIZER] = _OPTIMIZER
_PHASE_OF = np.array(
    [  # by the class of the operator before, then of the one after
        [1, 2, 4, 6],
        [6, 3, 4, 6],
        [6, 6, 5, 6],
        [6, 6, 6, 6],
    ],
    dtype=np.uint8,
)

_AFTER_ALL = np.iinfo(np.int64).max

SEED_NS = 1_000_000
"""The gradient of the loss (``aten::ones_like``) made this short before the backward pass is part of it."""


class WorkBefore(msgspec.Struct, frozen=True, eq=False):
    """What a rank did before each of its collectives, in the order of ``RankTimeline.collectives``.

    The interval runs from the start of the collective before on this rank (of any group; for the first one
    from the start of its step) to this one's start. Compared with the other ranks of the same collective it
    shows why this rank was late. What ran beside the collective before counts: a rank that waits there longer
    does meanwhile what a late one does afterwards. All zero outside the complete and the analysed steps.

    ``us_of[i, j]`` are microseconds of cause ``WORK[causes[j]]``, of those that occur. ``kernels`` counts
    compute kernels started in the interval: longer kernels keep the number, extra work raises it.
    ``away_us`` is the longest single piece of idle time that is the host's (every cause but "dependency"),
    ``away_phase`` where in the step the host was then (an index of :data:`PHASES`).
    """

    causes: npt.NDArray[np.uint8]
    us_of: npt.NDArray[np.unsignedinteger]
    kernels: npt.NDArray[np.unsignedinteger]
    away_us: npt.NDArray[np.unsignedinteger]
    away_phase: npt.NDArray[np.uint8]

    def us(self, collective: int) -> Int64Array:
        """Return the microseconds of every cause in :data:`WORK` before one collective."""
        return self.total_us(collective, collective + 1)

    def total_us(self, first: int, end: int) -> Int64Array:
        """Return the microseconds of every cause before the collectives from ``first`` to before ``end``."""
        found = np.zeros(len(WORK), dtype=np.int64)
        found[self.causes] = self.us_of[first:end].sum(axis=0, dtype=np.int64)
        return found


def work_before_collectives(timeline: RankTimeline, work: Work, host: HostPhases) -> WorkBefore:
    """The rank's work before each of its collectives."""
    starts, ends = intervals_before(timeline)
    nanoseconds = work.within(starts, ends)
    kernels = np.searchsorted(work.compute_starts, ends) - np.searchsorted(work.compute_starts, starts)
    away, middle = _longest_away(work, starts, ends)
    us = _microseconds(nanoseconds)
    causes = np.flatnonzero(us.any(axis=0))
    return WorkBefore(
        causes=causes.astype(np.uint8),
        us_of=np.ascontiguousarray(us[:, causes]),
        kernels=np.maximum(kernels, 0).astype(np.uint32),
        away_us=_microseconds(away),
        away_phase=np.where(away > 0, host.at(middle), 0).astype(np.uint8),
    )


def intervals_before(timeline: RankTimeline) -> tuple[Int64Array, Int64Array]:
    """Return the interval before each collective, as :class:`WorkBefore` defines it."""
    start = timeline.collectives.start_ns
    windows = [w for w in timeline.windows if w.complete or w == timeline.judged]
    judged = np.zeros(start.size, dtype=bool)
    opened = start.copy()
    for window in windows:
        inside = (start >= window.start_ns) & (start < window.end_ns)
        judged |= inside
        opened[inside] = window.start_ns
    before = opened
    if start.size > 1:  # in time order of their starts
        before[1:] = np.where(judged[1:], start[:-1], start[1:])
    return np.where(judged, before, start), start


def _longest_away(work: Work, starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the longest piece of the host's idle time in each interval, and its middle."""
    longest = np.zeros(starts.size, dtype=np.int64)
    middle = starts.copy()
    idle = Spans.empty()
    for name, spans in work.spans.items():
        if name in IDLE_WORK and name != "dependency" and name not in _PART_OF:
            idle |= spans
    kept = np.flatnonzero(ends > starts)
    pieces = idle & Spans(starts[kept], ends[kept])
    if len(pieces) == 0:
        return longest, middle
    owner = kept[np.searchsorted(starts[kept], pieces.starts, side="right") - 1]
    length = pieces.ends - pieces.starts
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    longest[owner[first]] = np.maximum.reduceat(length, first)
    chosen = np.flatnonzero(length == longest[owner])
    middle[owner[chosen]] = pieces.starts[chosen] + length[chosen] // 2  # of several the last counts
    return longest, middle


class HostPhases(msgspec.Struct, frozen=True, eq=False):
    """Where in the step the host is.

    The backward pass and the optimizer have a start and an end; elsewhere the operators before and after
    decide, which start at ``starts_ns`` and are of ``classes``: of a run of one class the first and the last.
    Those of no phase (clipping, logging, zeroing) are left out.
    """

    phases: Phases | None
    starts_ns: Int64Array
    classes: npt.NDArray[np.intp]

    def at(self, times: Int64Array) -> npt.NDArray[np.uint8]:
        """The phase of the step that the host is in at each time, as indices of :data:`PHASES`."""
        size = self.starts_ns.size
        if self.phases is None or size == 0:
            return np.zeros(times.size, dtype=np.uint8)
        after = np.searchsorted(self.starts_ns, times, side="right")
        known = (after > 0) & (after < size)
        before, behind = self.classes[np.maximum(after - 1, 0)], self.classes[np.minimum(after, size - 1)]
        found = np.where(known, _PHASE_OF[before, behind], 0)
        inside = _CLASS_OF[self.phases.at(times)]
        found = np.where(inside == _BACKWARD, _PHASE_OF[_BACKWARD, _BACKWARD], found)
        found = np.where(inside == _OPTIMIZER, _PHASE_OF[_OPTIMIZER, _OPTIMIZER], found)
        return found.astype(np.uint8)


def host_phases(timeline: RankTimeline) -> HostPhases:
    """Return the marks that show where in the step the host is."""
    trace, phases = timeline.trace, timeline.phases
    if phases is None:
        return HostPhases(None, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.intp))
    threads = _stepping_threads(timeline)
    loading, leading = timeline.host_delays.input, _before_forward(timeline, phases, threads)
    rows = _stepping_rows(trace, threads)
    seeds = _seeds(trace, phases, rows)
    # Between these edges all rows are of one class.
    edges = (phases.edges_ns, loading.starts, loading.ends, leading.starts, leading.ends)
    first = np.searchsorted(rows, np.searchsorted(trace.ts_ns, np.concatenate(edges)))
    first = distinct(np.concatenate((first, seeds, seeds + 1, [0])))
    first = first[first < rows.size]
    last = first + np.diff(first, append=rows.size) - 1
    marks = np.stack((first, last), axis=1).ravel()
    times = trace.ts_ns[rows[marks]]
    classes = _CLASS_OF[phases.at(times)]
    classes[loading.covered_ns(times, times + 1) > 0] = _LOADER
    classes[(classes == _FORWARD) & (leading.covered_ns(times, times + 1) > 0)] = _LOADER
    classes[is_among(marks, seeds)] = _BACKWARD
    kept = classes != _NEITHER
    return HostPhases(phases, times[kept], classes[kept])


def _stepping_threads(timeline: RankTimeline) -> npt.NDArray[np.int32]:
    """Return the threads that step the model."""
    if timeline.is_cpu:
        return timeline.trace.thread.distinct(timeline.trace.rows(Kind.CPU_OP))
    return timeline.launching_threads


def _stepping_rows(trace: Trace, threads: npt.NDArray[np.int32]) -> Rows:
    """Return the operators and loader ranges of these threads, in time order."""
    loads = trace.rows_named(vocabulary.data_loader, Kind.ANNOTATION)
    stepping = trace.kind == int(Kind.CPU_OP)
    stepping[loads] = True
    return np.flatnonzero(stepping & trace.thread.among(threads))


def _seeds(trace: Trace, phases: Phases, rows: Rows) -> npt.NDArray[np.intp]:
    """Places in ``rows`` of those that make the gradient of the loss."""
    made = trace.rows_named(lambda name: name == "aten::ones_like", Kind.CPU_OP)
    place = np.searchsorted(rows, made)
    known = np.append(rows, NO_ROW)[place] == made
    made, place = made[known], place[known]
    ends, passes = trace.end_ns[made], np.array([start for start, _ in phases.passes], dtype=np.int64)
    until = np.append(passes, _AFTER_ALL)[np.searchsorted(passes, ends)]
    near: npt.NDArray[np.intp] = place[until - SEED_NS < ends]
    return near


def _before_forward(timeline: RankTimeline, phases: Phases, threads: npt.NDArray[np.int32]) -> Spans:
    """Return the time before the first sure sign of each forward pass, where there is one.

    What leads to a backward pass counts as forward, and so do operators of a checkpoint or a metric that
    follow the optimizer. A wrapper's own range is the best sign, else an operator of a module.
    """
    trace = timeline.trace
    for is_sign in (frameworks.is_forward_wrapper, frameworks.is_forward_operator):
        signing = trace.rows_named(is_sign, Kind.CPU_OP, Kind.ANNOTATION)
        signs = trace.ts_ns[signing[trace.thread.among(threads, signing)]]
        if signs.size:
            break
    # Between the end of one pass and the start of the next, the first sign counts.
    ends = np.maximum.accumulate(np.array([end for _, end in phases.passes], dtype=np.int64))
    since = np.insert(ends, 0, trace.ts_ns[0])
    until = np.array([*(start for start, _ in phases.passes), _AFTER_ALL], dtype=np.int64)
    begun = np.append(signs, _AFTER_ALL)[np.searchsorted(signs, since)]
    return Spans.of(since, np.where(begun < until, begun, since))


def _microseconds(nanoseconds: Int64Array) -> npt.NDArray[np.uint32]:
    return np.minimum((nanoseconds + 500) // 1000, np.iinfo(np.uint32).max).astype(np.uint32)
