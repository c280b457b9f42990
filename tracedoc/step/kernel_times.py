"""The compute kernels of the analysed step, against what their work takes on the device, and in groups."""

from __future__ import annotations

import re
from bisect import bisect_right

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.step.device import Floats, device_rates
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.timeline.operator_calls import Call, Tensor, call_of
from tracedoc.timeline.phases import Phase
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import is_among
from tracedoc.trace.kernels import MATRIX, KernelCategory, matrix_format
from tracedoc.values import Unknown, once

SMALL_NS = 5_000
"""A kernel this short takes half of its time for being started and ended, and for the gap before it."""

ON_THEIR_OWN = (
    KernelCategory.GEMM,
    KernelCategory.CONVOLUTION,
    KernelCategory.ATTENTION,
    KernelCategory.OPTIMIZER,
)
"""Kernels that stay kernels of their own, as short as they are, when the operators around them are fused;
those of fused optimizers are in one already."""

_OF_TYPE = {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}


class KernelTimes(msgspec.Struct, frozen=True, eq=False):
    """Compute kernels, in order of start.

    ``operator`` is the row of the call that launched each where its work is known, else ``NO_ROW``; ``flops``
    ``nbytes`` are a kernel's share of that work, ``least_ns`` its share of the time that the work takes at
    what the device reaches in practice at the most, and at the least: two rows of a column each, NaN where
    the work, a type or the device is not known.
    """

    rows: Rows
    length_ns: Int64Array
    operator: Rows
    flops: Floats
    nbytes: Floats
    least_ns: Floats


@once
def judged_kernels(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """The rows of the compute kernels that started in the analysed step, in time order."""
    window, trace, events = timeline.judged, timeline.trace, timeline.events
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    rows = trace.kind_rows_between(Kind.KERNEL, window.start_ns, window.end_ns)
    classes = events.classes[np.searchsorted(events.rows, rows)]
    found: npt.NDArray[np.intp] = rows[(trace.device[rows] == timeline.device) & (classes == COMPUTE)]
    return found


def small_kernel_rows(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    """Those of :func:`judged_kernels` that are small, and follow a small one on their stream.

    Fused, each is one with the kernel before it. Without those of :data:`ON_THEIR_OWN`.
    """
    rows = judged_kernels(timeline)
    trace, categories = timeline.trace, timeline.events.categories
    alone = np.array([number for number, one in categories.items() if one in ON_THEIR_OWN], dtype=np.int64)
    small = (trace.dur_ns[rows] < SMALL_NS) & ~is_among(trace.name[rows], alone)
    order = np.argsort(trace.stream[rows], kind="stable")
    rows, small = rows[order], small[order]
    behind = small[1:] & small[:-1] & (trace.stream[rows[1:]] == trace.stream[rows[:-1]])
    return np.sort(rows[1:][behind])


@once
def kernel_times(timeline: RankTimeline) -> KernelTimes:
    """The kernels of the analysed step with their work."""
    return times_of(timeline, judged_kernels(timeline))


def times_of(timeline: RankTimeline, rows: Rows) -> KernelTimes:
    """Some compute kernels of the analysed device with their work."""
    length = timeline.trace.dur_ns[rows]
    unknown = np.full(rows.size, np.nan)
    if timeline.work is None:
        never = np.stack((unknown, unknown))
        return KernelTimes(rows, length, np.full(rows.size, NO_ROW), unknown, unknown, never)
    operator, share = timeline.work.of(rows)
    flops, nbytes = timeline.work.work_of(rows)
    return KernelTimes(rows, length, operator, flops, nbytes, _least(timeline, rows, operator, share))


def _least(timeline: RankTimeline, rows: Rows, operator: Rows, share: Floats) -> Floats:
    """The time of each kernel's share of its call's work at what the device reaches at most and at least."""
    least, rates, work = np.full((2, rows.size), np.nan), device_rates(timeline), timeline.work
    known = np.flatnonzero(operator != NO_ROW)
    if isinstance(rates, Unknown) or work is None or not known.size:
        return least
    calls, call_of = np.unique(operator[known], return_inverse=True)
    place = np.searchsorted(work.operators.rows, calls)
    longest = np.zeros(calls.size, dtype=np.intp)
    order = np.argsort(share[known], kind="stable")
    longest[call_of[order]] = rows[known][order]
    # Before Ampere fp32 is no format of tensor cores: 16 bits are.
    faster = "tf32" if rates[0].matrix["tf32"] else "fp16"
    formats = [
        _format(timeline, call, kernel, faster) if is_matrix else ""
        for call, kernel, is_matrix in zip(
            calls.tolist(), longest.tolist(), work.operators.is_matrix[place].tolist(), strict=True
        )
    ]
    for row, reached in enumerate(rates):
        whole = reached.least_ns(work.operators.flops[place], work.operators.nbytes[place], formats)
        least[row, known] = whole[call_of] * share[known]
    return least


def _format(timeline: RankTimeline, call: int, kernel: int, faster: str) -> str:
    """The format in which a call multiplies, or could: by its longest kernel, else by its inputs' types.

    Products in fp32 count in the ``faster`` format that tensor cores take them in.
    """
    named = matrix_format(timeline.trace.row_name(kernel))
    if named is not None and named.dtype:
        return faster if named.dtype == "fp32" else named.dtype
    types = [one.removeprefix("c10::").lower() for one in timeline.trace.shapes[call].types]
    return next((_OF_TYPE[one] for one in types if one in _OF_TYPE), "unknown")


NOT_KNOWN = -1.0
"""Stands for a rate, or a time that is lost, which is not known."""


def rates_by_name(timeline: RankTimeline, names: npt.NDArray[np.integer]) -> tuple[Floats, Floats, Floats]:
    """TFLOP/s, GB/s, and ms lost of the analysed step's compute kernels of some names, which ascend.

    They are of the kernels whose work is known; ``NOT_KNOWN`` where there is none. What is lost has two
    rows: at the least, and at the most.
    """
    found = kernel_times(timeline)
    if not found.rows.size:
        return (*(np.full(names.size, NOT_KNOWN),) * 2, np.full((2, names.size), NOT_KNOWN))
    place = np.searchsorted(names, timeline.trace.name[found.rows])

    def summed(column: Floats, known: npt.NDArray[np.bool_]) -> Floats:
        kept = np.flatnonzero(known)
        sums = np.bincount(place[kept], weights=column[kept], minlength=names.size)
        return np.asarray(sums, dtype=np.float64)

    length = found.length_ns.astype(np.float64)
    sized, moved, rated = (~np.isnan(column) for column in (found.flops, found.nbytes, found.least_ns[0]))
    with np.errstate(invalid="ignore", divide="ignore"):
        tflops = summed(found.flops, sized) / summed(length, sized) / 1e3
        gbps = summed(found.nbytes, moved) / summed(length, moved)
        taken = summed(length, rated)
        needed = np.stack([summed(one, rated) for one in found.least_ns[::-1]])
        lost = np.where(taken > 0, np.maximum(taken - needed, 0.0) / 1e6, np.nan)
    tflops, gbps, lost = (np.nan_to_num(column, nan=NOT_KNOWN) for column in (tflops, gbps, lost))
    return tflops, gbps, lost


OUTSIDE = -1
"""Stands for a kernel that is in no layer."""

FEWEST_REPEATS, FEWEST_PRODUCTS = 3, 2
"""So many layers make a stack, and so many products a layer: fewer repeat by chance."""

MOST_PRODUCTS = 1024
"""Layers of more products than this are not looked for."""


def find_layers(timeline: RankTimeline, places: Rows) -> Int64Array:
    """The layer of each of some events that compute, in order of start; ``OUTSIDE`` of those in none.

    A layer is what repeats in one pass: the same products, convolutions and attention in the same order, by
    their kernels' names and grids. It reaches from its first one to that of the next. Layers are numbered
    from 0 in the order of the forward pass; the backward pass has the last one first, and is left out unless
    it has as many. What is recomputed belongs to the layer whose backward pass follows.
    """
    trace, events, phases = timeline.trace, timeline.events, timeline.phases
    rows = events.rows[places]
    what = trace.name[rows].astype(np.int64) * (len(trace.grids) + 1) + trace.grid[rows] + 1
    named = np.zeros(len(trace.names) + 1, dtype=bool)
    for name_id, category in events.categories.items():
        named[name_id] = category in MATRIX
    products = named[trace.name[rows]]
    part = phases.of_events[places] if phases is not None else np.full(rows.size, Phase.FORWARD)
    found = np.full(rows.size, OUTSIDE, dtype=np.int64)
    forward = np.flatnonzero(products & (part == Phase.FORWARD))
    backward = np.flatnonzero(products & (part == Phase.BACKWARD))
    numbers, reverse = repeated(what[forward]), repeated(what[backward])
    if (last := numbers.max(initial=OUTSIDE)) != reverse.max(initial=OUTSIDE):
        reverse[:] = OUTSIDE
    reverse = np.where(reverse == OUTSIDE, OUTSIDE, last - reverse)
    for phase, begins, layers in (
        (Phase.FORWARD, forward, np.concatenate(([OUTSIDE], numbers))),
        (Phase.BACKWARD, backward, np.concatenate(([OUTSIDE], reverse))),
        (Phase.RECOMPUTE, backward, np.concatenate((reverse, [OUTSIDE]))),
    ):
        mine = np.flatnonzero(part == phase)
        found[mine] = layers[np.searchsorted(begins, mine, side="right")]
    return found


def repeated(what: npt.NDArray[np.integer]) -> Int64Array:
    """Which repetition of the stretch that repeats most each element is in; ``OUTSIDE`` of others.

    Of several stretches whose repetitions cover as much the shortest counts. Where other things interrupt the
    repetitions they begin anew, as for each micro-batch.
    """
    best, span, period = [(0, 0)], 0, 1
    for length in range(FEWEST_PRODUCTS, min(what.size // FEWEST_REPEATS, MOST_PRODUCTS) + 1):
        runs = _runs(what, length)
        longest = max((count * length for _, count in runs), default=0)
        if longest > span:
            best, span, period = runs, longest, length
    numbers = np.full(what.size, OUTSIDE, dtype=np.int64)
    for begin, count in best:
        numbers[begin : begin + count * period] = np.arange(count * period) // period
    return numbers


def _runs(what: npt.NDArray[np.integer], length: int) -> list[tuple[int, int]]:
    """Where a stretch of a length repeats: its begin, and how many there are."""
    alike = np.concatenate(([False], what[length:] == what[:-length], [False]))
    begin, end = np.flatnonzero(alike[1:] != alike[:-1]).reshape(-1, 2).T
    count = (end - begin) // length + 1
    return [(int(begin[one]), int(count[one])) for one in np.flatnonzero(count >= FEWEST_REPEATS)]


class KernelGroup(msgspec.Struct, frozen=True):
    """Kernels and memsets of the analysed step that have something in common.

    ``time_ms`` is their part of the compute of the budget: of time in which several run, the one that began
    first has it, so all groups add up to it. Of ``known_ms`` of the kernels' own length the work is known:
    rates and what follows are of these (``None`` where there are none, or the device is not known). Reached
    is the time that their work takes at what the device reaches in practice over theirs, and lost what they
    take beyond it; at the least and at the most, as far as that is known of the device.
    """

    name: str
    calls: int
    time_ms: float
    known_ms: float
    tflops: float | None
    gbps: float | None
    reached_least_frac: float | None
    reached_most_frac: float | None
    lost_least_ms: float | None
    lost_most_ms: float | None


def kernel_groups(timeline: RankTimeline, by: str) -> list[KernelGroup]:
    """The compute of the analysed step by what kernels have in common, those with most time lost first.

    By module the trace must have been read with its Python functions.
    """
    places, own_ns = _parts(timeline)
    found = times_of(timeline, timeline.events.rows[places])
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(_NAMED[by](timeline, found, places)):
        groups.setdefault(name, []).append(place)
    rows = [_group(found, own_ns, name, np.array(places)) for name, places in groups.items()]
    return sorted(rows, key=lambda one: (-(one.lost_most_ms or 0.0), -one.time_ms, one.name))


def _parts(timeline: RankTimeline) -> tuple[Rows, Int64Array]:
    """The places of the events that compute in the analysed step, in order, and ns of each.

    Of time in which several run, the one that began first has it: together they are the budget's compute.
    """
    window, events = timeline.judged, timeline.events
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int64)
    inside = (events.start_ns < window.end_ns) & (events.end_ns > window.start_ns)
    places = np.flatnonzero(inside & (events.classes == COMPUTE) & (events.device == timeline.device))
    places = places[np.argsort(events.start_ns[places], kind="stable")]
    start = np.maximum(events.start_ns[places], window.start_ns)
    end = np.minimum(events.end_ns[places], window.end_ns)
    covered = np.concatenate(([window.start_ns], np.maximum.accumulate(end)[:-1])) if end.size else end
    return places, np.maximum(end - np.maximum(start, covered), 0)


def _group(found: KernelTimes, own_ns: Int64Array, name: str, places: npt.NDArray[np.intp]) -> KernelGroup:
    length, flops, nbytes, least, most = (
        column[places].astype(np.float64)
        for column in (found.length_ns, found.flops, found.nbytes, *found.least_ns)
    )
    sized, rated = ~np.isnan(flops), ~np.isnan(least)
    known, moved = float(length[sized].sum()), ~np.isnan(nbytes)
    taken = float(length[rated].sum())
    needed = [float(one[rated].sum()) for one in (least, most)]
    reached: list[float | None] = [min(one / taken, 1.0) if taken else None for one in needed]
    lost: list[float | None] = [max(taken - one, 0.0) / 1e6 if taken else None for one in reversed(needed)]
    return KernelGroup(
        name=name,
        calls=places.size,
        time_ms=float(own_ns[places].sum()) / 1e6,
        known_ms=known / 1e6,
        tflops=float(flops[sized].sum()) / known / 1e3 if known else None,
        gbps=float(nbytes[moved].sum()) / float(length[moved].sum()) if length[moved].any() else None,
        reached_least_frac=reached[0],
        reached_most_frac=reached[1],
        lost_least_ms=lost[0],
        lost_most_ms=lost[1],
    )


def _by_operator(timeline: RankTimeline, found: KernelTimes, places: Rows) -> list[str]:
    trace, named = timeline.trace, []
    written: dict[int, str] = {}
    for row, call in zip(found.rows.tolist(), found.operator.tolist(), strict=True):
        if call == NO_ROW:
            category = timeline.events.categories.get(int(trace.name[row]))
            named.append("(memset)" if category is None else f"({category.value}, no shapes)")
        else:
            shapes = trace.shapes[call]
            if id(shapes) not in written:  # calls that are alike share theirs
                written[id(shapes)] = _written(call_of(shapes))
            named.append(f"{trace.row_name(call)} {written[id(shapes)]}")
    return named


def _written(call: Call) -> str:
    """The shapes of a call's tensors, but of those without dimensions."""
    texts = []
    for one in call.arguments:
        if isinstance(one, Tensor):
            texts += [str(one)] if one.extents else []
        elif one:
            texts.append(f"[{','.join(map(str, one))}]")
    return " ".join(texts)


def _by_kernel(timeline: RankTimeline, found: KernelTimes, places: Rows) -> list[str]:
    return [timeline.trace.row_name(row) for row in found.rows.tolist()]


def _by_phase(timeline: RankTimeline, found: KernelTimes, places: Rows) -> list[str]:
    phases = timeline.phases
    if phases is None:
        return ["(no backward pass was captured)"] * places.size
    return [Phase(code).name.lower() for code in phases.of_events[places].tolist()]


def _by_module(timeline: RankTimeline, found: KernelTimes, places: Rows) -> list[str]:
    """The unit of FSDP2, else the layer, of each kernel, and the kind of the innermost module around it.

    Backward passes run in no module, and most captures show none: then it is the unit or the layer alone.
    """
    trace, calls = timeline.trace, timeline.events.launch_rows[places]
    modules = trace.rows_named(lambda name: name.startswith(_MODULE), Kind.PYTHON)
    layers, units = find_layers(timeline, places), _units(trace, calls)
    named = []
    for call, layer, unit in zip(calls.tolist(), layers.tolist(), units, strict=True):
        numbered = unit or ("" if layer == OUTSIDE or any(units) else f"layer {layer}")
        near = modules[: np.searchsorted(trace.ts_ns[modules], trace.ts_ns[call], side="right")]
        held = near[(trace.end_ns[near] > trace.ts_ns[call]) & (trace.thread[near] == trace.thread[call])]
        kind = _kind_of_module(trace.row_name(int(held[-1]))) if call != NO_ROW and held.size else ""
        named.append(", ".join(one for one in (numbered, kind) if one) or "(in no module)")
    return named


_UNIT = re.compile(r"FSDP::(pre|post)_(?:forward|backward)\w* \((.+)\)")


def _units(trace: Trace, calls: Rows) -> list[str]:
    """The unit of FSDP2 between whose hooks each kernel is launched, "" where there is none.

    A unit reaches from where its first hook of a pass begins to where its last one ends.
    """
    hooks = trace.rows_named(lambda name: _UNIT.match(name) is not None, Kind.ANNOTATION)
    edges: dict[int, list[tuple[int, str]]] = {}
    for row in hooks.tolist():
        hook = _UNIT.match(trace.row_name(row))
        mine = edges.setdefault(int(trace.thread[row]), [])
        if hook is not None:
            mine.append((int(trace.ts_ns[row]), hook[2]))
            mine += [(int(trace.end_ns[row]), "")] if hook[1] == "post" else []
    for mine in edges.values():
        mine.sort()
    named = []
    for call in calls.tolist():
        mine = edges.get(int(trace.thread[call]), []) if call != NO_ROW else []
        before = bisect_right(mine, int(trace.ts_ns[call]), key=lambda edge: edge[0])
        named.append(mine[before - 1][1] if before else "")
    return named


_MODULE = "nn.Module: "


def _kind_of_module(name: str) -> str:
    """``Block`` of ``nn.Module: Block_3``: modules of a kind are numbered in order."""
    return name.removeprefix(_MODULE).rstrip("0123456789").removesuffix("_")


_NAMED = {"operator": _by_operator, "module": _by_module, "kernel": _by_kernel, "phase": _by_phase}
