"""Split a capture as HolisticTraceAnalysis does, one definition after the other.

Both tools split the time from the first to the last GPU event. Where they define something differently, the
numbers differ; each stage here takes one definition over from HTA (0.5), so that the change from stage to
stage is what that definition is worth in this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE, busiest_device, classify_gpu_events
from tracedoc.timeline.launches import link_launches
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.compact import NO_ID
from tracedoc.trace.distinct import is_among

OTHER = 3
"""Busy, and neither compute nor communication: copies, and for HTA memsets and records of waiting."""

# HTA 0.5, hta/utils/utils.py: which names are communication, and which are no computation.
_COMMUNICATION = re.compile(r"^nccl.*Kernel")
_NO_COMPUTATION = re.compile(r"(^nccl.*Kernel)|(.*(Memcpy)|(Memset))|(.*Sync)")


class CaptureSplit(msgspec.Struct, frozen=True):
    """One way to split a capture, in ms: compute + non_compute + idle = span."""

    span_ms: float
    compute_ms: float
    non_compute_ms: float
    idle_ms: float
    overlap_frac: float | None


class Stage(msgspec.Struct, frozen=True):
    """The split once one more definition is HTA's; ``reason`` says which, with the events it concerns."""

    reason: str
    split: CaptureSplit


def stages(trace: Trace) -> Iterator[Stage]:
    """Yield tracedoc's split, with an empty reason, and then a stage for each definition that matters here.

    Nothing is yielded for a trace without GPU events.
    """
    events = classify_gpu_events(trace, link_launches(trace))
    if not events.rows.size:
        return
    rows = events.rows
    classes = np.where(np.isin(events.classes, (COMPUTE, COMMUNICATION)), events.classes, OTHER)
    one = trace.device[rows] == busiest_device(events)
    yield Stage("", _split(trace, rows[one], classes[one]))
    if not one.all():
        reason = f"HTA counts all GPUs of a file as one: {int((~one).sum())} events more"
        yield Stage(reason, _split(trace, rows, classes))
    memsets = trace.kind[rows] == int(Kind.MEMSET)
    if memsets.any():
        classes = np.where(memsets, OTHER, classes)
        reason = f"memsets ({int(memsets.sum())}) are compute for tracedoc and memory for HTA"
        yield Stage(reason, _split(trace, rows, classes))
    theirs = _their_classes(trace)[trace.name[rows]]
    if (other := theirs != classes).any():
        classes = theirs
        name = trace.row_name(int(rows[np.flatnonzero(other)[0]]))
        reason = f"HTA classes {int(other.sum())} events differently, by names such as {name[:60]}"
        yield Stage(reason, _split(trace, rows, classes))
    waits = np.flatnonzero((trace.kind == int(Kind.SYNC)) & (trace.stream != NO_ID))
    if waits.size:
        rows = np.concatenate((rows, waits))
        classes = np.concatenate((classes, _their_classes(trace)[trace.name[waits]]))
        reason = f"HTA counts {waits.size} records of waiting (cuda_sync) as work"
        yield Stage(reason, _split(trace, rows, classes))
    kept = _launched_in_steps(trace, rows)
    if kept is not None and not kept.all():
        reason = (
            f"HTA leaves out {int((~kept).sum())} of {kept.size} GPU events: no call up to the end of the"
            " last profiler step launched them"
        )
        yield Stage(reason, _split(trace, rows[kept], classes[kept]))


def _their_classes(trace: Trace) -> npt.NDArray[np.int8]:
    """Return the class that HTA gives to each name."""
    classes = np.full(max(len(trace.names), 1), COMPUTE, dtype=np.int8)
    for index, name in enumerate(trace.names):
        if _COMMUNICATION.match(name):
            classes[index] = COMMUNICATION
        elif _NO_COMPUTATION.match(name):
            classes[index] = OTHER
    return classes


def _launched_in_steps(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_] | None:
    """A mask of the GPU events that HTA keeps; ``None`` where it keeps all: the file names one step, or none.

    It keeps those whose correlation id is that of a host event that starts before the last step ends.
    """
    named = trace.named(lambda name: "ProfilerStep" in name)
    if int(named.sum()) < 2:
        return None
    host = trace.stream == NO_ID
    steps = host & named[trace.name]
    if not steps.any():
        return None
    end_ns = int(trace.end_ns[steps].max())
    ids = trace.correlation[host & (trace.ts_ns <= end_ns)]
    return np.asarray(is_among(trace.correlation[rows], np.unique(ids)))


def _split(trace: Trace, rows: npt.NDArray[np.intp], classes: npt.NDArray[np.generic]) -> CaptureSplit:
    if not rows.size:
        return CaptureSplit(0.0, 0.0, 0.0, 0.0, None)
    starts, ends = trace.ts_ns[rows], trace.end_ns[rows]
    compute, comm = (Spans.of(starts[classes == c], ends[classes == c]) for c in (COMPUTE, COMMUNICATION))
    span = int(ends.max() - starts.min())
    busy = Spans.of(starts, ends).total_ns
    hidden = comm.total_ns - (comm - compute).total_ns
    return CaptureSplit(
        span / 1e6,
        compute.total_ns / 1e6,
        (busy - compute.total_ns) / 1e6,
        (span - busy) / 1e6,
        hidden / comm.total_ns if comm.total_ns else None,
    )
