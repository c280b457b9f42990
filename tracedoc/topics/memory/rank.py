"""Facts of one rank about device memory, and copies that nothing hides."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.activity import Activity, is_library
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW
from tracedoc.timeline.syncs import wait_causes
from tracedoc.topics.step.rank import idle_of_cause, in_step
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import median
from tracedoc.trace.vocabulary import RuntimeRole
from tracedoc.units import format_ms
from tracedoc.values import Unknown, Value, needed, once

BUCKET_COPY = "copy_bucket_to_grad"
"""The end of the name of DDP's range around a copy of a reduced bucket into a gradient."""


@rank_fact(
    unit="ms",
    needs=("host_ops", "launches"),
    interval="GPU idle while device memory is allocated or freed",
)
def allocator_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which the GPU is idle while the host allocates or frees device memory."""
    return idle_of_cause(timeline, "allocator")


@rank_fact(unit="count", needs=("host_ops", "launches"))
def allocator_calls_per_step(timeline: RankTimeline) -> Value:
    """Median number of cudaMalloc, cudaFree and their like in a host step; the first step is left out.

    The first captured step may still be growing the allocator's pool. Of a capture of two steps, whose last
    one is cut off, it is what that one shows: the step may have more.
    """
    later = timeline.host.steps[1:]
    steps = [step for step in later if step.finished] or later[-1:]
    trace = timeline.trace
    calls = trace.rows_named(
        lambda name: vocabulary.runtime_role(name) is RuntimeRole.ALLOCATION, Kind.RUNTIME
    )
    times = trace.ts_ns[calls]
    first = np.searchsorted(times, [step.start_ns for step in steps])
    last = np.searchsorted(times, [step.end_ns for step in steps])
    if not steps or not (steps[0].finished or (last > first).any()):
        return Unknown("no finished step after the first one")
    return float(median(last - first))


@rank_fact(unit="ms", needs=("gpu", "kernels"))
def exposed_host_copy_ms(timeline: RankTimeline) -> Value:
    """Exposed copy time of the median step in which a copy between host and device runs.

    The rest of :func:`exposed_copy_ms` is copies within the device, which are memory traffic of operators
    (``aten::copy_``, ``contiguous``, ``cat``) and cross no bus.
    """
    step = needed(in_step(timeline))
    host = step.exposed_copy & _copies(timeline, step, frozenset({"HtoD", "DtoH"}))
    if step.exposed_copy - host - _copies(timeline, step, frozenset({"DtoD"})):
        return Unknown("some copies do not name the memories they run between")
    return host.total_ns / 1e6


@rank_fact(unit="text", needs=("gpu", "kernels", "launches"))
def exposed_copy_operators(timeline: RankTimeline) -> Value:
    """The operators that ask for the exposed copies of the median step, with their exposed time.

    The three that take longest, by the outermost library operator around the call; "other code" is none.
    """
    found = needed(_copy_times(timeline))
    longest = sorted(found.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {format_ms(ns / 1e6)}" for name, ns in longest) or "none"


@rank_fact(unit="ms", needs=("gpu", "kernels", "launches"))
def bucket_copy_ms(timeline: RankTimeline) -> Value:
    """Exposed copy time of the median step in which DDP copies reduced buckets into gradients.

    It does so unless gradients are views of the buckets (``gradient_as_bucket_view=True``).
    """
    found = needed(_copy_times(timeline))
    return sum(ns for name, ns in found.items() if name.endswith(BUCKET_COPY)) / 1e6


@once
def _copy_times(timeline: RankTimeline) -> dict[str, int] | Unknown:
    """The exposed time, in ns, of the median step's copies by the operator that asks for them."""
    step, trace = needed(in_step(timeline)), timeline.trace
    rows = trace.kind_rows_between(Kind.MEMCPY, step.start_ns, step.end_ns)
    rows = rows[trace.device[rows] == timeline.device]
    times = step.exposed_copy.covered_ns(trace.ts_ns[rows], trace.end_ns[rows])
    rows, times = rows[times > 0], times[times > 0]
    if rows.size == 0:
        return {}
    calls = timeline.launches.launch_rows[np.searchsorted(timeline.launches.gpu_rows, rows)]
    linked = calls != NO_ROW
    total: dict[str, int] = {}
    if not linked.all():
        total["other code"] = int(times[~linked].sum())
    for cause, time in zip(wait_causes(trace, calls[linked]), times[linked].tolist(), strict=True):
        name = cause.operator if is_library(cause.operator) else "other code"
        total[name] = total.get(name, 0) + time
    return total


def _copies(timeline: RankTimeline, step: Activity, directions: frozenset[str]) -> Spans:
    """The copies of these directions on the analysed device that reach into a step."""
    trace, events = timeline.trace, timeline.events
    mine = (events.kinds == int(Kind.MEMCPY)) & (events.device == timeline.device)
    mine &= (events.end_ns > step.start_ns) & (events.start_ns < step.end_ns)
    rows = events.rows[mine]
    rows = rows[trace.named_among(rows, lambda name: vocabulary.copy_kind(name).direction in directions)]
    return Spans.of(trace.ts_ns[rows], trace.end_ns[rows])


@rank_fact(unit="bytes", needs=("gpu", "memory"))
def peak_allocated_bytes(timeline: RankTimeline) -> Value:
    """Most device memory in tensors at any time of the capture, by the allocator's counters.

    Of the analysed device. What other libraries hold (NCCL's buffers, the CUDA context) is not counted.
    """
    return _peak_counter(timeline, "allocated")


@rank_fact(unit="bytes", needs=("gpu", "memory"))
def peak_reserved_bytes(timeline: RankTimeline) -> Value:
    """Most device memory held by PyTorch's allocator at any time of the capture."""
    return _peak_counter(timeline, "reserved")


@rank_fact(unit="bytes", needs=("gpu",))
def device_memory_bytes(timeline: RankTimeline) -> Value:
    """Memory of the analysed device, as ``deviceProperties`` says."""
    sizes = {device.index: device.memory_bytes for device in timeline.trace.info.devices}
    size = sizes.get(-1 if timeline.device is None else timeline.device)
    return size if size else Unknown("the file does not say how much memory the device has")


def _peak_counter(timeline: RankTimeline, counter: str) -> Value:
    memory = timeline.trace.memory
    if memory is None:
        return Unknown("device memory was not recorded (profile_memory=True)")
    values = getattr(memory, counter)[memory.device == timeline.device]
    largest = int(values.max(initial=-1))
    return largest if largest >= 0 else Unknown("the counters of the allocator are of another device")
