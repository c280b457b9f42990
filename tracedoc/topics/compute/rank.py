"""Facts of one rank about its kernels: what they compute, in which format, and what makes them longer."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.step.device import device_rates, is_before_ampere, judged_peak, tensor_speedup
from tracedoc.step.kernel_times import judged_kernels, kernel_times
from tracedoc.step.program import Waste
from tracedoc.step.untouched import untouched_spans
from tracedoc.step.untouched import untouched_tables as tables_with_shares
from tracedoc.step.waste import (
    ATTENTION_OPERATORS,
    HALF_AS_WIDE,
    HALF_PRECISION,
    HostParts,
    attention_parts,
    double_operators,
    is_plain,
    is_reordering,
    judged_waste_ms,
    launched_within,
    likely_speedup,
)
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.topics.step.rank import host_step, in_step
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import distinct, median, places_by_value
from tracedoc.trace.kernels import MATRIX, KernelCategory, kernel_category, matrix_format
from tracedoc.trace.vocabulary import updates_in_backward_pass
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value, needed, once

KNOWN_SHARE = 0.80
"""The format must be known of this share of the matrix kernels' time."""

_NO_KERNEL = Unknown("the step holds no compute kernel")

_NO_MATRIX = Unknown("the step holds no matrix product, convolution or attention kernel")


@rank_fact(unit="fraction", needs=("gpu", "kernels"))
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


@rank_fact(unit="ms", needs=("gpu", "kernels"))
def plain_matrix_ms(timeline: RankTimeline) -> float | Unknown:
    """Summed time of the median step's matrix kernels that surely run off the tensor cores, in fp32.

    Products with a vector are left out: they read each number once, and tensor cores would not help.
    """
    rows = judged_kernels(timeline)
    if rows.size == 0:
        return _NO_KERNEL
    total = 0
    for name_id, time in zip(*_time_by_name(timeline, rows), strict=True):
        plain = timeline.events.categories[name_id] in MATRIX and is_plain(timeline.trace.names[name_id])
        total += time if plain else 0
    return total / 1e6


@rank_fact(unit="ratio", needs=("gpu",))
def half_precision_speedup(timeline: RankTimeline) -> Value:
    """How many times as fast matrix products in fp32, off the tensor cores, likely are in 16 bits.

    The geometric mean of three times, which reading and writing leave of larger ratios, and of what the
    device's rates say, if that is more.
    """
    return _speedup(timeline, HALF_PRECISION, 1.0)


@rank_fact(unit="ratio", needs=("gpu",))
def tf32_speedup(timeline: RankTimeline) -> Value:
    """The same for TF32: of twice, and of half of the rate in 16 bits."""
    return _speedup(timeline, 2.0, 0.5)


def _speedup(timeline: RankTimeline, limited: float, of_half_rate: float) -> float:
    ratio = tensor_speedup(timeline)
    return limited if isinstance(ratio, Unknown) else likely_speedup(ratio * of_half_rate, limited)


@rank_fact(unit="bool", needs=("gpu",))
def has_tensor_cores(timeline: RankTimeline) -> Value:
    """Whether the device has tensor cores (matrix cores), by the device table or its compute capability."""
    peak, ratio = judged_peak(timeline), tensor_speedup(timeline)
    if isinstance(peak, Unknown):
        return peak if isinstance(ratio, Unknown) else True
    return bool(peak.bf16_tflops or peak.fp16_tflops)


@rank_fact(unit="text", needs=("gpu", "kernels"))
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


KNOWN_WORK = 0.70
"""The work must be known of kernels with this share of the time."""


@rank_fact(unit="ms", needs=("gpu", "kernels"))
def fusable_ms(timeline: RankTimeline) -> Value:
    """What kernels of the median step would likely save if those that follow each other were one.

    Counted are kernels that only read and write (elementwise, norms, softmax, sums, copies), follow each
    other on one stream in one phase, and have as many thread blocks: each a third of its time, for what it
    reads that the one before has just written, and a sixth of that one's.
    """
    return judged_waste_ms(timeline, Waste.FUSION)


@rank_fact(unit="ms", needs=("kernels", "shapes"))
def double_ms(timeline: RankTimeline) -> Value:
    """What work on 64-bit floats in the median step would save with 32 bits: half of its time.

    That is the time of kernels whose operator was given a tensor of them, on a CPU of the operators.
    """
    if not timeline.is_cpu:
        return judged_waste_ms(timeline, Waste.FP64)
    window, activity = timeline.judged, timeline.activity
    if window is None or activity is None:
        return 0.0
    spans = timeline.trace.spans(double_operators(timeline.trace)) & activity.compute
    return HALF_AS_WIDE * spans.clip(window.start_ns, window.end_ns).total_ns / 1e6


@rank_fact(unit="ms", needs=("kernels", "shapes"))
def untouched_rows_ms(timeline: RankTimeline) -> Value:
    """What backward passes and optimizers of the median step take for embedding rows that no sample touches.

    That is the time of kernels, on a CPU of the operators, that go over whole tables with dense gradients,
    by the share of rows that were not looked up. Tables of the size of a matrix that is multiplied do not
    count.
    """
    if not timeline.is_cpu:
        return judged_waste_ms(timeline, Waste.UNTOUCHED)
    window, activity = timeline.judged, timeline.activity
    if window is None or activity is None:
        return 0.0
    spans = untouched_spans(timeline) & activity.compute
    return spans.clip(window.start_ns, window.end_ns).total_ns / 1e6


@rank_fact(unit="text", needs=("shapes",))
def untouched_tables(timeline: RankTimeline) -> Value:
    """The largest embedding table with a dense gradient, and how many of its rows a step touches at most."""
    tables = tables_with_shares(timeline)
    if not tables:
        return "none"
    largest = max(tables, key=lambda table: (prod(table), table))
    touched = format_percent(1.0 - tables[largest])
    return f"{largest[0]:,} rows of {prod(largest[1:]):,}, of which a step touches {touched} at most"


@rank_fact(unit="ms", needs=("gpu", "kernels"))
def layout_ms(timeline: RankTimeline) -> Value:
    """Summed time of the median step's kernels that only reorder tensors.

    That is for convolutions, and back, and copies that ``contiguous`` makes.
    """
    return judged_waste_ms(timeline, Waste.LAYOUT)


@rank_fact(unit="ms", needs=("gpu", "kernels"))
def loss_ms(timeline: RankTimeline) -> Value:
    """What the median step's cross entropy would save if it were fused: half of its kernels' time.

    Counted are kernels that log-softmax, NLL loss and what is around them launch, in both passes. They read
    and write the logits six times, a fused one three times.
    """
    return judged_waste_ms(timeline, Waste.LOSS)


@rank_fact(unit="ms", needs=("gpu", "kernels"))
def convolution_layout_ms(timeline: RankTimeline) -> Value:
    """Summed time of the median step's kernels that reorder tensors for convolutions, and back, by name."""
    rows = judged_kernels(timeline)
    chosen = rows[timeline.trace.named_among(rows, is_reordering)]
    return int(timeline.trace.dur_ns[chosen].sum()) / 1e6


@rank_fact(unit="ms", needs=("gpu", "kernels", "shapes", "launches"))
def misfit_ms(timeline: RankTimeline) -> Value:
    """What the median step's 16-bit products of which a size is no multiple of 8 save at the usual rate.

    That is the rate at which half of the arithmetic of the products whose sizes fit is done, or at less.
    """
    return judged_waste_ms(timeline, Waste.SHAPES)


@rank_fact(unit="fraction", needs=("gpu", "kernels", "shapes", "launches"))
def reached_frac(timeline: RankTimeline) -> Value:
    """How much of what the device reaches in practice the median step's compute kernels reach.

    The time that their work takes at the rates of the device over the time that they take: for each call of
    an operator the longer of its arithmetic at what the best products reach, and of its bytes at what copies
    reach. At the least: where what it reaches is known as a range, it counts as reaching the most. Unknown
    where the work is known of kernels with less than 70 % of the time, and for devices of which nothing is.
    """
    return _reached(timeline, 0)


@rank_fact(unit="fraction", needs=("gpu", "kernels", "shapes", "launches"))
def reached_most_frac(timeline: RankTimeline) -> Value:
    """The same at the most: where the device reaches the least of its range."""
    return _reached(timeline, 1)


def _reached(timeline: RankTimeline, end: int) -> Value:
    needed(device_rates(timeline))
    found = kernel_times(timeline)
    total, known = int(found.length_ns.sum()), ~np.isnan(found.least_ns[end])
    if total == 0:
        return _NO_KERNEL
    with_work = int(found.length_ns[known].sum())
    if with_work < KNOWN_WORK * total:
        return Unknown(f"the work is known of kernels with {format_percent(with_work / total)} of the time")
    return min(float(found.least_ns[end, known].sum()) / max(with_work, 1), 1.0)


@rank_fact(unit="text", needs=("gpu",), values=("bf16", "fp16"))
def tensor_core_format(timeline: RankTimeline) -> Value:
    """The 16-bit format to train in on the device's tensor cores: "bf16", on Volta and Turing "fp16"."""
    peak, ratio = judged_peak(timeline), tensor_speedup(timeline)
    if isinstance(peak, Unknown):
        return peak if isinstance(ratio, Unknown) else "fp16" if is_before_ampere(timeline) else "bf16"
    return "bf16" if peak.bf16_tflops else "fp16" if peak.fp16_tflops else Unknown("it has no tensor cores")


def _time_by_name(timeline: RankTimeline, rows: npt.NDArray[np.intp]) -> tuple[list[int], list[int]]:
    names, inverse = np.unique(timeline.trace.name[rows], return_inverse=True)
    times = np.zeros(names.size, dtype=np.int64)
    np.add.at(times, inverse, timeline.trace.dur_ns[rows])
    return names.tolist(), times.tolist()


@once
def _format_times(timeline: RankTimeline) -> dict[tuple[str, bool | None], int]:
    """The summed time of the analysed step's matrix kernels by format and use of tensor cores."""
    found: dict[tuple[str, bool | None], int] = {}
    for name_id, time in zip(*_time_by_name(timeline, judged_kernels(timeline)), strict=True):
        if timeline.events.categories[name_id] in MATRIX:
            named = matrix_format(timeline.trace.names[name_id])
            if named is not None:
                key = (named.dtype, named.tensor_cores)
                found[key] = found.get(key, 0) + time
    return found


@rank_fact(unit="tflops", needs=("gpu",))
def peak_tf32_tflops(timeline: RankTimeline) -> Value:
    """Dense peak of the device's tensor cores on fp32 inputs rounded to TF32, from the vendor's data sheet.

    Unknown before Ampere, which has no TF32.
    """
    return needed(judged_peak(timeline)).tf32_tflops or Unknown("the device has no TF32")


# -- attention in parts


@rank_fact(unit="count", needs=("host_ops",))
def unfused_attention_calls(timeline: RankTimeline) -> Value:
    """Softmaxes of the median step between two batched matrix products, both passes: attention in parts."""
    return len(needed(_parts(timeline))[0])


@rank_fact(
    unit="ms",
    needs=("host_ops", "kernels"),
    interval="softmax, mask and copies between the matrix products of attention",
)
def unfused_attention_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Compute time of the median step between the two matrix products of an attention that is not fused.

    Counted are the kernels (in a CPU trace the operators) that the host launched after the first product and
    before the second: scaling, mask, softmax, dropout, changes of type. A fused kernel does them while
    it multiplies. Unknown in compiled code, whose operators have no names.
    """
    step, found = needed(in_step(timeline)), needed(_parts(timeline))
    starts, ends, threads = found
    trace, events = timeline.trace, timeline.events
    if timeline.is_cpu:
        spans = Spans.empty()
        for thread in distinct(threads).tolist():
            mine = threads == thread
            spans = spans | Spans.of(starts[mine], ends[mine])
        return spans & step.compute
    mine = np.flatnonzero((events.classes == COMPUTE) & events.linked & (events.device == timeline.device))
    mine = mine[launched_within(trace, found, events.launch_rows[mine])]
    return Spans.of(events.start_ns[mine], events.end_ns[mine]).clip(step.start_ns, step.end_ns)


def _parts(timeline: RankTimeline) -> HostParts | Unknown:
    """The attentions in parts of the analysed step."""
    step, trace = needed(host_step(timeline)), timeline.trace
    starts, ends, threads = attention_parts(trace)
    mine = (starts >= step.start_ns) & (starts < step.end_ns)
    called = trace.ts_ns[trace.rows_named(ATTENTION_OPERATORS.__contains__, Kind.CPU_OP)]
    compiled = not ((called >= step.start_ns) & (called < step.end_ns)).any() and (
        trace.named(lambda name: name.startswith("Torch-Compiled")).any()
    )
    return (
        Unknown("compiled code names no operators") if compiled else (starts[mine], ends[mine], threads[mine])
    )


@rank_fact(unit="bool", needs=("kernels",))
def computes_attention(timeline: RankTimeline) -> Value:
    """Whether the trace names an attention: fused kernels or operators, or one in parts."""
    names = timeline.trace.names
    fused = any("dot_product" in name or kernel_category(name) is KernelCategory.ATTENTION for name in names)
    return fused or attention_parts(timeline.trace)[0].size > 0


@rank_fact(unit="bool", needs=("host_ops",))
def has_batch_norm(timeline: RankTimeline) -> Value:
    """Whether an operator of batch normalisation is in the trace."""
    return any(name.startswith("aten::") and "batch_norm" in name for name in timeline.trace.names)


@rank_fact(unit="bool", needs=("host_ops",))
def updates_in_backward(timeline: RankTimeline) -> Value:
    """Whether embeddings are updated inside the backward pass, as those of FBGEMM and TorchRec are."""
    return any(updates_in_backward_pass(name) for name in timeline.trace.names)


# -- beside communication


FEWEST_CALLS = 3
"""A kind of kernel is compared where it ran so often with and so often without communication beside it."""

FEWEST_KINDS = 3
"""So many kinds: one alone may hold matrices of several depths, which its grid does not show."""

MOST_SPREAD = 1.15
"""Calls without communication that differ by more among themselves (90 % over 10 %) are of several shapes."""

NOT_COMPARED = Unknown("no three kinds of matrix kernels ran both with and without communication beside them")


@rank_fact(unit="ratio", needs=("gpu", "kernels", "collectives"))
def contention_ratio(timeline: RankTimeline) -> Value:
    """How many times as long a matrix kernel takes while communication runs beside it: median over kinds.

    A kind is a name, a launch grid and a phase. Compared are medians of the calls that communication covers
    to 90 % and of those that it does not touch, three of each; kinds whose untouched calls differ among
    themselves are left out, and three kinds are needed.
    """
    return float(median(needed(_compared(timeline))[0]))


@rank_fact(unit="ms", needs=("gpu", "kernels", "collectives"))
def contention_ms(timeline: RankTimeline) -> Value:
    """How much longer the median step's matrix kernels beside communication take than the same without it.

    Of the kinds of ``contention_ratio``: for each covered call its length less the median of untouched ones.
    """
    return max(needed(_compared(timeline))[1], 0) / 1e6


@once
def _compared(timeline: RankTimeline) -> tuple[npt.NDArray[np.float64], int] | Unknown:
    """The ratio of each kind, and by how many ns the analysed step's covered calls are longer in all."""
    trace, events, activity, window = timeline.trace, timeline.events, timeline.activity, timeline.judged
    if activity is None or window is None:
        return NOT_COMPARED
    is_matrix = np.zeros(len(trace.names), dtype=bool)
    for name, category in events.categories.items():
        is_matrix[name] = category in MATRIX
    mine = (events.classes == COMPUTE) & (events.device == timeline.device) & events.kernels
    mine &= is_matrix[trace.name[events.rows]]
    rows, starts = events.rows[mine], events.start_ns[mine]
    phase = timeline.phases.of_events[mine] if timeline.phases is not None else np.zeros(rows.size, np.uint8)
    lengths = trace.dur_ns[rows]
    covered = activity.comm.covered_ns(starts, events.end_ns[mine])
    beside, alone = covered >= 0.9 * lengths, covered == 0
    of_grid = trace.name[rows].astype(np.int64) * (len(trace.grids) + 1) + trace.grid[rows] + 1
    kind = of_grid * (np.iinfo(np.uint8).max + 1) + phase
    compared = np.flatnonzero(beside | alone)
    ratios, longer = [], 0
    judged = (starts >= window.start_ns) & (starts < window.end_ns)
    for _, places in places_by_value(kind[compared]):
        of_kind = compared[places]
        with_comm, without = of_kind[beside[of_kind]], np.sort(lengths[of_kind[alone[of_kind]]])
        if with_comm.size < FEWEST_CALLS or without.size < FEWEST_CALLS:
            continue
        low, high = without[without.size // 10], without[-1 - without.size // 10]
        if high > MOST_SPREAD * max(low, 1):
            continue
        usual = int(without[without.size // 2])
        ratios.append(float(median(lengths[with_comm])) / max(usual, 1))
        longer += int((lengths[with_comm[judged[with_comm]]] - usual).sum())
    return (np.array(ratios), longer) if len(ratios) >= FEWEST_KINDS else NOT_COMPARED
