"""Facts about the kernels of a step: what they compute, in which format, how long they queue."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import in_order
from tracedoc.step.device import device_name, half_tflops, judged_peak, unlisted
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.host import MATRIX
from tracedoc.timeline.phases import Phase
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import intersection
from tracedoc.trace.kernels import matrix_format
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value

KNOWN_SHARE = 0.80
"""The format must be known of this share of the matrix kernels' time."""

_NO_KERNEL = Unknown("the step holds no compute kernel")
_NO_MATRIX = Unknown("the step holds no matrix product, convolution or attention kernel")


@rank_fact("kernel_categories", unit="text", needs=("gpu", "kernels"))
def kernel_categories(timeline: RankTimeline) -> Value:
    """What the compute kernels of the median step compute, by their names, as shares of their summed time.

    Categories are gemm, attention, convolution, optimizer, normalisation, softmax, embedding, reduction,
    copy, quantisation, elementwise and other; those under 1 % are left out.
    """
    rows = judged_kernels(timeline)
    total = int(timeline.trace.dur_ns[rows].sum())
    if total == 0:
        return _NO_KERNEL
    times: dict[str, int] = {}
    names, summed = _time_by_name(timeline, rows)
    for name_id, time in zip(names, summed, strict=True):
        category = timeline.events.categories[name_id].value
        times[category] = times.get(category, 0) + time
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {format_percent(ns / total)}" for name, ns in ordered if ns >= 0.01 * total)


@rank_fact("tensor_core_frac", unit="fraction", needs=("gpu", "kernels"))
def tensor_core_frac(timeline: RankTimeline) -> Value:
    """Share of the median step's matrix-kernel time that runs on tensor cores, by the kernels' names.

    Matrix kernels are products, convolutions and attention; kernels that only transpose or add up parts do
    not count. AMD's matrix cores count. Unknown where the names show it for less than 80 % of the time.
    """
    formats = _format_times(timeline)
    total = sum(formats.values())
    if total == 0:
        return _NO_MATRIX
    known = sum(ns for (_, on), ns in formats.items() if on is not None)
    if known < KNOWN_SHARE * total:
        share = format_percent(known / total)
        return Unknown(f"kernel names show it for only {share} of the kernel time")
    return sum(ns for (_, on), ns in formats.items() if on) / known


@rank_fact("plain_matrix_ms", unit="ms", needs=("gpu", "kernels"))
def plain_matrix_ms(timeline: RankTimeline) -> float | Unknown:
    """Summed time of the median step's matrix kernels that surely run off the tensor cores, in fp32.

    Products with a vector are left out: they read each number once, and tensor cores would not help.
    """
    rows = judged_kernels(timeline)
    if rows.size == 0:
        return _NO_KERNEL
    total = 0
    for name_id, time in zip(*_time_by_name(timeline, rows), strict=True):
        name = timeline.trace.names[name_id]
        found = matrix_format(name) if timeline.events.categories[name_id] in MATRIX else None
        plain = found is not None and found.tensor_cores is False and found.dtype in ("fp32", "")
        total += time if plain and "gemv" not in name and "dot_kernel" not in name else 0
    return total / 1e6


@rank_fact("tensor_core_saving_ms", unit="ms", needs=("gpu", "kernels"))
def tensor_core_saving_ms(timeline: RankTimeline) -> Value:
    """What :func:`plain_matrix_ms` would save if it ran faster by the ratio of the device's peaks.

    The ratio is that of 16 bits on tensor cores and of fp32 on plain cores. All of it where the device is
    not in the table, or its peak in fp32 is not.
    """
    plain, peak = plain_matrix_ms(timeline), judged_peak(timeline)
    if isinstance(plain, Unknown) or isinstance(peak, Unknown) or not peak.fp32_tflops:
        return plain
    half = peak.bf16_tflops or peak.fp16_tflops
    return plain * max(1.0 - peak.fp32_tflops / half, 0.0) if half else 0.0


@rank_fact("matrix_dtypes", unit="text", needs=("gpu", "kernels"))
def matrix_dtypes(timeline: RankTimeline) -> Value:
    """Number formats of the median step's matrix kernels, by their names, as shares of their summed time."""
    formats = _format_times(timeline)
    total = sum(formats.values())
    if total == 0:
        return _NO_MATRIX
    times: dict[str, int] = {}
    for (dtype, _), ns in formats.items():
        times[dtype or "unknown"] = times.get(dtype or "unknown", 0) + ns
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {format_percent(ns / total)}" for name, ns in ordered if ns >= 0.01 * total)


@rank_fact("launch_latency_ms", unit="ms", needs=("launches", "kernels"))
def launch_latency_ms(timeline: RankTimeline) -> Value:
    """Median time from the start of a launch to that of its kernel, of kernels that found the GPU waiting.

    Those are the analysed step's compute kernels launched after everything before them on the device had
    ended; elsewhere the time in the queue would be measured (:func:`queue_lead_ms`).
    """
    waited, leads = _launches_of_step(timeline)
    return (
        float(np.median(leads[waited])) / 1e6 if waited.any() else Unknown("no kernel found the GPU waiting")
    )


@rank_fact("queue_lead_ms", unit="ms", needs=("launches", "kernels"))
def queue_lead_ms(timeline: RankTimeline) -> Value:
    """How far the host runs ahead of the GPU: median time from launch to start of the step's kernels."""
    _, leads = _launches_of_step(timeline)
    return float(np.median(leads)) / 1e6 if leads.size else Unknown("no launch belongs to the step")


@rank_fact("queue_depth", unit="count", needs=("launches", "kernels"))
def queue_depth(timeline: RankTimeline) -> Value:
    """Median number of GPU events launched and not started yet, when a kernel of the median step starts.

    Zero and one mean that the GPU waits for each launch; some 1,000 that the queue is full.
    """
    window, events = timeline.judged, timeline.events
    times = timeline.trace.ts_ns[judged_kernels(timeline)]
    mine = (events.device == timeline.device) & events.linked
    if window is None or times.size == 0 or not mine.any():
        return Unknown("no launch belongs to the step")
    launched, started = in_order(events.launch_ns[mine]), events.start_ns[mine]
    depth = np.searchsorted(launched, times, side="right") - np.searchsorted(started, times, side="right")
    return float(np.median(np.maximum(depth, 0)))


@rank_fact("peak_half_tflops", unit="tflops", needs=("gpu",))
def peak_half_tflops(timeline: RankTimeline) -> Value:
    """Dense peak of the device in 16 bits (bf16, on Volta and Turing fp16), from the vendor's data sheet."""
    return half_tflops(timeline)


@rank_fact("peak_fp32_tflops", unit="tflops", needs=("gpu",))
def peak_fp32_tflops(timeline: RankTimeline) -> Value:
    """Peak of the device's plain cores in fp32, from the vendor's data sheet."""
    peak = judged_peak(timeline)
    return peak if isinstance(peak, Unknown) else peak.fp32_tflops or Unknown("not in the device table")


@rank_fact("tensor_core_format", unit="text", needs=("gpu",), values=("bf16", "fp16"))
def tensor_core_format(timeline: RankTimeline) -> Value:
    """The 16-bit format to train in on the device's tensor cores: "bf16", on Volta and Turing "fp16"."""
    peak = judged_peak(timeline)
    if isinstance(peak, Unknown):
        return peak
    return "bf16" if peak.bf16_tflops else "fp16" if peak.fp16_tflops else Unknown("it has no tensor cores")


@rank_fact("peak_hbm_gbps", unit="gbps", needs=("gpu",))
def peak_hbm_gbps(timeline: RankTimeline) -> Value:
    """Bandwidth of the device's memory, from the vendor's data sheet."""
    peak = judged_peak(timeline)
    return peak if isinstance(peak, Unknown) else peak.hbm_gbps or Unknown("not in the device table")


@rank_fact("peak_link_gbps", unit="gbps", needs=("gpu",))
def peak_link_gbps(timeline: RankTimeline) -> Value:
    """One-way bandwidth of the device's links to its peers (NVLink, xGMI, else PCIe), from the data sheet.

    The machine may have fewer links: the trace does not record them.
    """
    peak = judged_peak(timeline)
    if isinstance(peak, Unknown):
        return peak
    return peak.link_gbps or unlisted(device_name(timeline))


def judged_kernels(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """Return the rows of the compute kernels that started in the analysed step, in time order."""
    window, trace, events = timeline.judged, timeline.trace, timeline.events
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    rows = trace.kind_rows_between(Kind.KERNEL, window.start_ns, window.end_ns)
    classes = events.classes[np.searchsorted(events.rows, rows)]
    found: npt.NDArray[np.intp] = rows[(trace.device[rows] == timeline.device) & (classes == COMPUTE)]
    return found


def _time_by_name(timeline: RankTimeline, rows: npt.NDArray[np.intp]) -> tuple[list[int], list[int]]:
    names, inverse = np.unique(timeline.trace.name[rows], return_inverse=True)
    times = np.zeros(names.size, dtype=np.int64)
    np.add.at(times, inverse, timeline.trace.dur_ns[rows])
    return names.tolist(), times.tolist()


def _format_times(timeline: RankTimeline) -> dict[tuple[str, bool | None], int]:
    """Return the summed time of the analysed step's matrix kernels by format and use of tensor cores."""
    found: dict[tuple[str, bool | None], int] = {}
    for name_id, time in zip(*_time_by_name(timeline, judged_kernels(timeline)), strict=True):
        if timeline.events.categories[name_id] in MATRIX:
            named = matrix_format(timeline.trace.names[name_id])
            if named is not None:
                key = (named.dtype, named.tensor_cores)
                found[key] = found.get(key, 0) + time
    return found


def _launches_of_step(timeline: RankTimeline) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return, per linked kernel of the analysed step whether the GPU waited, and the time since launch."""
    own, window = timeline.events.on(timeline.device), timeline.judged
    first, end = (0, 0) if window is None else np.searchsorted(own.start_ns, (window.start_ns, window.end_ns))
    chosen = own.kernels & own.linked & (own.classes == COMPUTE)
    wanted = first + np.flatnonzero(chosen[first:end])
    reach = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, own.end_ns[:end]))
    launched = own.launch_ns[wanted]
    return reach[wanted] <= launched, own.start_ns[wanted] - launched


@rank_fact("optimizer_kernels_per_step", unit="count", needs=("launches", "kernels", "host_ops"))
def optimizer_kernels_per_step(timeline: RankTimeline) -> Value:
    """Compute kernels that the optimizer launched and that ran in the median step."""
    rows = _optimizer_kernels(timeline)
    return rows if isinstance(rows, Unknown) else int(rows.size)


@rank_fact("optimizer_fused_frac", unit="fraction", needs=("launches", "kernels", "host_ops"))
def optimizer_fused_frac(timeline: RankTimeline) -> Value:
    """Share of the optimizer's kernels of the median step that update many tensors at once, by their names.

    Those of ``foreach=True`` and ``fused=True``, of fused optimizers of libraries, and of compiled ones.
    """
    rows = _optimizer_kernels(timeline)
    if isinstance(rows, Unknown):
        return rows
    if rows.size == 0:
        return Unknown("the optimizer of the step launches no kernel")
    fused = timeline.trace.named(lambda name: _FUSED.search(name) is not None)
    return float(fused[timeline.trace.name[rows]].mean())


_FUSED = re.compile(r"(?i)multi_?tensor|fused|foreach|^triton_")


def _optimizer_kernels(timeline: RankTimeline) -> npt.NDArray[np.intp] | Unknown:
    if timeline.phases is None or timeline.phases.of_events.size != timeline.events.rows.size:
        return Unknown("no phases of the step are known")
    rows = timeline.events.rows[timeline.phases.of_events == int(Phase.OPTIMIZER)]
    return intersection(rows, judged_kernels(timeline))


@rank_fact("peak_tf32_tflops", unit="tflops", needs=("gpu",))
def peak_tf32_tflops(timeline: RankTimeline) -> Value:
    """Dense peak of the device's tensor cores on fp32 inputs rounded to TF32, from the vendor's data sheet.

    Unknown before Ampere, which has no TF32.
    """
    peak = judged_peak(timeline)
    return peak if isinstance(peak, Unknown) else peak.tf32_tflops or Unknown("the device has no TF32")
