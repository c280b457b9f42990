"""What of each kernel's time would go if the same were computed another way, and how."""

from __future__ import annotations

import re
from math import sqrt

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.spans import Spans
from tracedoc.step.device import tensor_speedup
from tracedoc.step.nodes import DeviceEvents, device_events
from tracedoc.step.program import Codes, Group, Lags, RankProgram, Waste
from tracedoc.step.untouched import over_tables
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.trace.kernels import MATRIX, KernelCategory, matrix_format
from tracedoc.values import Unknown, once

Mask = npt.NDArray[np.bool_]

_LAYOUT = re.compile(r"(?i)nchwTo|nhwcTo|batched_transpose")
"""Kernels by which convolutions change the order of their tensors."""

_CONTIGUOUS = "aten::contiguous"

_LOSS = frozenset(
    {
        "aten::cross_entropy_loss",
        "aten::_log_softmax",
        "aten::_log_softmax_backward_data",
        "aten::nll_loss_forward",
        "aten::nll_loss_backward",
        "aten::nll_loss2d_forward",
        "aten::nll_loss2d_backward",
    }
)
"""Operators of a cross entropy, and of its backward pass."""

HALF_PRECISION = 3.0
"""Matrix products in 16 bits are so many times as fast as in fp32 where reading and writing limit them."""


def likely_speedup(most: float, limited: float) -> float:
    """How many times as fast products likely are: between the ``most`` and what ``limited`` ones are."""
    return round(sqrt(max(most, 1.0) * max(min(most, limited), 1.0)), 1)


LOSS_AGAIN = 1 / 2
"""Of a cross entropy, what a fused one saves. Log-softmax reads and writes the logits; the backward pass
writes rows of zeros, reads two tensors and writes the gradient: six times. Fused it is three times."""

HALF_AS_WIDE = 1 / 2
"""Of work on numbers of 64 bits, what 32 bits save: half of the bytes, and twice as many fit into a register.
On GPUs for gaming, which multiply these up to 64 times as fast, it is more."""

_CHAINED = (
    KernelCategory.ELEMENTWISE,
    KernelCategory.NORMALISATION,
    KernelCategory.SOFTMAX,
    KernelCategory.REDUCTION,
    KernelCategory.COPY,
    KernelCategory.QUANTISATION,
)
"""What a compiler makes one kernel of."""

READ_AGAIN, WRITTEN = 1 / 3, 1 / 6
"""Of a kernel in a chain, the time to read what the one before wrote: one of three tensors, if it has two
inputs. That one writes it in vain half of the time: else the backward pass needs it."""


class WasteTable(msgspec.Struct, frozen=True, eq=False):
    """What kernels of a device would save: why, and ns of each event; ``NONE`` and 0 of others."""

    why: Codes
    ns: Lags


@once
def find_waste(timeline: RankTimeline) -> WasteTable:
    """What the events of the device would save: of several ways that fit the first of :class:`Waste`."""
    trace, device = timeline.trace, device_events(timeline)
    kernels = (trace.kind[device.rows] == int(Kind.KERNEL)) & (device.group != Group.COMMUNICATION)
    doubles = _parts(trace, double_operators(trace))
    saved = {
        Waste.UNTOUCHED: _untouched(timeline, device),
        Waste.FP64: np.where(launched_within(trace, doubles, device.launch_rows), HALF_AS_WIDE, 0.0),
        Waste.ATTENTION: np.where(
            launched_within(trace, attention_parts(trace), device.launch_rows), 1.0, 0.0
        ),
        Waste.LAYOUT: _reordered(timeline, device),
        Waste.LOSS: np.where(launched_within(trace, _losses(trace), device.launch_rows), LOSS_AGAIN, 0.0),
        Waste.FP32: _plain(timeline, device, kernels),
        Waste.SHAPES: _misfit(timeline, device),
        Waste.FUSION: _chains(timeline, device, kernels),
    }
    why, share = np.zeros(kernels.size, dtype=np.uint8), np.zeros(kernels.size)
    for waste, part in saved.items():
        mine = (why == Waste.NONE) & (part > 0) & kernels
        why[mine], share[mine] = waste, part[mine]
    return WasteTable(why, np.rint(share * (device.end_ns - device.start_ns)).astype(np.int64))


def judged_waste_ms(timeline: RankTimeline, waste: Waste) -> float:
    """What the kernels of the analysed step would save in one way, in ms of their summed time."""
    if timeline.judged is None or timeline.device is None:
        return 0.0
    table, starts = find_waste(timeline), device_events(timeline).start_ns
    inside = slice(*np.searchsorted(starts, (timeline.judged.start_ns, timeline.judged.end_ns)).tolist())
    return int(table.ns[inside][table.why[inside] == waste].sum()) / 1e6


def _reordered(timeline: RankTimeline, device: DeviceEvents) -> npt.NDArray[np.float64]:
    """All of what kernels take that only reorder a tensor: for a convolution, or to make it contiguous.

    By their names, by the operator around them, or by the strides of what is copied.
    """
    trace, work = timeline.trace, timeline.work
    calls = trace.rows_named(_CONTIGUOUS.__eq__, Kind.CPU_OP)
    copied = launched_within(
        trace, (trace.ts_ns[calls], trace.end_ns[calls], trace.thread[calls]), device.launch_rows
    )
    if work is not None and work.operators.reorders.any():
        operators = work.operators
        copied |= is_among(work.of(device.rows)[0], operators.rows[operators.reorders])
    return np.where(copied | trace.named_among(device.rows, is_reordering), 1.0, 0.0)


def _untouched(timeline: RankTimeline, device: DeviceEvents) -> npt.NDArray[np.float64]:
    """The share that kernels take for rows of embedding tables that no sample of a step touches."""
    found = np.zeros(device.rows.size)
    for share, rows in over_tables(timeline):
        mine = launched_within(timeline.trace, _parts(timeline.trace, rows), device.launch_rows)
        found = np.where(mine, np.maximum(found, share), found)
    return found


def _losses(trace: Trace) -> HostParts:
    """The host's time in operators of a cross entropy that is not fused, in both passes."""
    rows = trace.rows_named(_LOSS.__contains__, Kind.CPU_OP)
    if not trace.named_among(rows, lambda name: "nll_loss" in name).any():
        rows = rows[:0]  # a log-softmax for something else
    return _parts(trace, rows)


def _parts(trace: Trace, rows: Rows) -> HostParts:
    return trace.ts_ns[rows], trace.end_ns[rows], trace.thread[rows]


def double_operators(trace: Trace) -> Rows:
    """The operators that were given a tensor of 64-bit floats; numbers of Python have no dimensions."""
    wide = [
        any(one == "double" and bool(size) for one, size in zip(kind.types, kind.dims, strict=False))
        for kind in trace.shapes.kinds
    ]
    of_kind: Mask = np.array(wide, dtype=bool)
    rows: Rows = trace.shapes.rows[of_kind[trace.shapes.kind]]
    return rows


def with_waste(program: RankProgram, table: WasteTable, events: npt.NDArray[np.intp]) -> RankProgram:
    """Return a program with what its ``events``, of those of the device, would save."""
    wasted = np.flatnonzero(table.ns[events] > 0)
    return replace(
        program,
        waste=table.why[events[wasted]],
        waste_event=wasted.astype(np.int32),
        waste_ns=table.ns[events[wasted]],
    )


def is_reordering(name: str) -> bool:
    """True for a kernel that reorders tensors for a convolution, by its name."""
    return _LAYOUT.search(name) is not None


HostParts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.integer]]
"""Stretches of the host's time: starts, ends, and threads."""

_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::bmm.out"})

_SINGLE = frozenset(
    {"aten::mm", "aten::addmm", "aten::addmm_", "aten::_scaled_mm", "aten::mv", "aten::addmv"}
)

_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax", "aten::_softmax_backward_data"})


ATTENTION_OPERATORS = _BATCHED | _SINGLE | _SOFTMAX
"""Operators by which attention in parts is known."""


def attention_parts(trace: Trace) -> HostParts:
    """The host's time between the first and the second product of each attention that is not fused.

    An attention is a softmax whose nearest matrix products on its thread are both batched.
    """
    kinds = np.zeros(len(trace.names) + 1, dtype=np.int8)
    for index, name in enumerate(trace.names):
        kinds[index] = 1 if name in _BATCHED else 2 if name in _SINGLE else 3 if name in _SOFTMAX else 0
    rows = trace.rows_of_names(kinds[:-1] > 0, Kind.CPU_OP)
    rows = rows[np.lexsort((trace.ts_ns[rows], trace.thread[rows]))]
    kind, thread = kinds[trace.name[rows]], trace.thread[rows]
    middle = np.flatnonzero(kind == 3)
    middle = middle[(middle > 0) & (middle < rows.size - 1)]
    before, after = middle - 1, middle + 1
    whole = (kind[before] == 1) & (kind[after] == 1)
    whole &= (thread[before] == thread[middle]) & (thread[after] == thread[middle])
    chosen = middle[whole]
    return trace.end_ns[rows[chosen - 1]], trace.ts_ns[rows[chosen + 1]], thread[chosen]


def launched_within(trace: Trace, parts: HostParts, calls: Rows) -> Mask:
    """Which calls of the host are made within some stretches; ``NO_ROW`` is none."""
    starts, ends, threads = parts
    inside = np.zeros(calls.size, dtype=bool)
    if not threads.size:
        return inside
    linked = np.flatnonzero(calls != NO_ROW)
    launched, thread_of = trace.ts_ns[calls[linked]], trace.thread[calls[linked]]
    for thread in distinct(threads).tolist():
        between = Spans.of(starts[threads == thread], ends[threads == thread])
        inside[linked] |= (thread_of == thread) & (between.covered_ns(launched, launched + 1) > 0)
    return inside


def _plain(timeline: RankTimeline, device: DeviceEvents, kernels: Mask) -> npt.NDArray[np.float64]:
    """The share of fp32 products off the tensor cores that these would likely save.

    Products with a vector read each number once, and tensor cores would not help.
    """
    ratio = tensor_speedup(timeline)
    if isinstance(ratio, Unknown) or ratio <= 1:
        return np.zeros(kernels.size)
    categories = timeline.events.categories
    plain = np.zeros(len(timeline.trace.names) + 1, dtype=bool)
    for name_id, category in categories.items():
        plain[name_id] = category in MATRIX and is_plain(timeline.trace.names[name_id])
    saved = 1.0 - 1.0 / likely_speedup(ratio, HALF_PRECISION)
    return np.where(kernels & plain[timeline.trace.name[device.rows]], saved, 0.0)


def is_plain(name: str) -> bool:
    """True for a product of matrices that surely runs off the tensor cores in fp32, by its kernel's name."""
    found = matrix_format(name)
    plain = found is not None and found.tensor_cores is False and found.dtype in ("fp32", "")
    return plain and "gemv" not in name and "dot_kernel" not in name


def _misfit(timeline: RankTimeline, device: DeviceEvents) -> npt.NDArray[np.float64]:
    """The share that products whose sizes fit no tile would save at the rate of those that fit."""
    none, work = np.zeros(device.rows.size), timeline.work
    if work is None or not work.operators.misfit.any():
        return none
    operator, (flops, _) = work.of(device.rows)[0], work.work_of(device.rows)
    place = np.minimum(np.searchsorted(work.operators.rows, operator), work.operators.rows.size - 1)
    known = (operator != NO_ROW) & work.operators.is_matrix[place]
    misfit = known & work.operators.misfit[place]
    fitting = known & ~misfit
    length = np.maximum(device.end_ns - device.start_ns, 1)
    if not misfit.any() or flops[fitting].sum() < flops[misfit].sum():
        return none
    rate = np.nan_to_num(flops) / length
    order = np.flatnonzero(fitting)[np.argsort(rate[fitting], kind="stable")]
    done = np.cumsum(flops[order])
    usual = rate[order[np.searchsorted(done, done[-1] / 2)]]  # half of the work is done at this rate or less
    return np.where(misfit, np.clip(1.0 - rate / usual, 0.0, 1.0), 0.0)


def _chains(timeline: RankTimeline, device: DeviceEvents, kernels: Mask) -> npt.NDArray[np.float64]:
    """The share that kernels save which follow each other on a stream and go over tensors of one size."""
    trace, saved = timeline.trace, np.zeros(device.rows.size)
    chained = np.zeros(len(trace.names) + 1, dtype=bool)
    for name_id, category in timeline.events.categories.items():
        # Inductor has fused what it could.
        chained[name_id] = category in _CHAINED and not trace.names[name_id].startswith("triton_")
    mine = kernels & chained[trace.name[device.rows]]
    sizes = np.array([np.prod(grid) if grid else 0 for grid in trace.grids] + [0], dtype=np.int64)
    blocks = sizes[trace.grid[device.rows]]
    before = device.before
    follows = mine & (before >= 0)
    follows &= mine[before] & (device.part[before] == device.part)
    follows &= (blocks > 1) & (blocks[before] == blocks)
    saved[follows] += READ_AGAIN
    np.add.at(saved, before[follows], WRITTEN)
    return saved
