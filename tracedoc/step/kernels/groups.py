"""The compute of the analysed step by what kernels have in common: operator, module, kernel or phase."""

from __future__ import annotations

import re
from bisect import bisect_right

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array
from tracedoc.step.kernels.layers import OUTSIDE, find_layers
from tracedoc.step.kernels.times import KernelTimes, times_of
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.timeline.operators.calls import Call, Tensor, call_of
from tracedoc.timeline.phases import Phase
from tracedoc.trace.columns import Kind, Trace


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


BY = ("operator", "module", "kernel", "phase")
"""What kernels may have in common."""


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
