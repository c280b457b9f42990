"""Recover the sharded units of one rank: which parameters each all-gather of FSDP or ZeRO-3 brings, and when.

FSDP2 names its units. FSDP1 and ZeRO-3 do not: there a unit is a place in the order of the forward pass, and
the gathers of the backward pass are found again by their size, from the last unit to the first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.activity import COMMUNICATION, GpuEvents, gloo_rows
from tracedoc.timeline.collective_table import CollectiveOp
from tracedoc.timeline.collectives import gloo_calls
from tracedoc.timeline.launches import NO_ROW, Rows, enclosing_rows
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Shapes, Trace
from tracedoc.trace.distinct import difference, distinct, is_among, medians_by_value, places_by_value
from tracedoc.trace.frameworks import FSDP2, ZERO3, is_zero3_mark, shard_hook
from tracedoc.trace.metadata import element_count

FORWARD, BACKWARD, RECOMPUTE = 0, 1, 2
PHASES = ("forward", "backward", "recompute")
"""Names of the passes, by their number. Recompute is a forward hook inside the backward pass."""

NO_STEP = -1
UNKNOWN_SIZE = -1
NO_TIME = int(np.iinfo(np.int64).min)
NOT_PARAMETERS = frozenset({"Long", "Int", "Bool"})
"""Element types of control messages, never of parameters."""

FEWEST_ELEMENTS = 256
"""Where no range marks gathers of parameters (ZeRO-3), smaller ones are metrics, not parameters."""

ROOT = "(root)"

Int64 = npt.NDArray[np.int64]


class ShardCalls(msgspec.Struct, frozen=True, eq=False):
    """The all-gathers, or the reduce-scatters, of sharded parameters: one entry a call, in order of launch.

    ``unit`` indexes :attr:`Units.names`; ``phase`` is the pass; ``step`` the step's number or ``NO_STEP``.
    ``prefetched``: launched from a range that fetches ahead. ``elements`` and ``nbytes`` are those of the
    whole unit, ``UNKNOWN_SIZE`` where not recorded. ``start_ns`` and ``end_ns`` are those of the kernel.
    ``hook_ns`` is when the host enters the hook after which the unit is used, ``NO_TIME`` where no hook
    shows it. ``row`` is the call's place among the rank's collectives.
    """

    unit: npt.NDArray[np.int32]
    phase: npt.NDArray[np.int8]
    step: Int64
    prefetched: npt.NDArray[np.bool_]
    launch_ns: Int64
    start_ns: Int64
    end_ns: Int64
    stream: Int64
    elements: Int64
    nbytes: Int64
    hook_ns: Int64
    row: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return int(self.unit.size)


class Units(msgspec.Struct, frozen=True, eq=False):
    """The sharded units of one rank and every call that moves their parameters or gradients.

    ``framework`` is "FSDP2", "FSDP1" or "ZeRO-3"; ``named``: whether ``names`` are those of modules
    (else they are places in the forward pass). ``hooks`` is when the host is inside the framework's own
    ranges, empty for ZeRO-3, which writes none.
    """

    framework: str
    named: bool
    names: tuple[str, ...]
    gathers: ShardCalls
    reductions: ShardCalls
    hooks: Spans


class _Calls(msgspec.Struct, frozen=True, eq=False):
    """Collectives of one rank with the host row that launched each; in order of launch."""

    operations: tuple[CollectiveOp, ...]
    launch_rows: Rows
    places: npt.NDArray[np.int32]  # among the rank's collectives

    def subset(self, wanted: npt.NDArray[np.bool_]) -> _Calls:
        return _Calls(
            tuple(o for o, keep in zip(self.operations, wanted.tolist(), strict=True) if keep),
            self.launch_rows[wanted],
            self.places[wanted],
        )


class _Ranges(msgspec.Struct, frozen=True, eq=False):
    """Rows of the hooks by role, in time order, and of the nodes of the backward graph."""

    framework: str
    by_role: dict[str, Rows]
    backward_nodes: Rows
    backward_threads: npt.NDArray[np.int32]  # those that run nodes, but no steps and no optimizer

    def rows(self, *roles: str) -> Rows:
        found = [self.by_role[role] for role in roles if role in self.by_role]
        return np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.intp)


def find_units(
    trace: Trace, events: GpuEvents, device: int | None, collectives: Iterable[CollectiveOp]
) -> Units | None:
    """Return the sharded units of one rank, ``None`` where the trace shows no FSDP and no ZeRO-3.

    ``device`` is ``None`` for a CPU trace. Calls whose launch is not in the trace belong to no unit and are
    left out.
    """
    ranges = _hook_ranges(trace)
    if ranges is None:
        return None
    calls = _launched(trace, events, device, collectives)
    ops = np.array([o.op for o in calls.operations], dtype=object)
    dtypes = np.array([o.dtype in NOT_PARAMETERS for o in calls.operations], dtype=bool)
    gathers = calls.subset((ops == "all_gather") & ~dtypes)
    reductions = calls.subset((ops == "reduce_scatter") & ~dtypes)
    gather_ranges, reduce_ranges = _launching_ranges(trace, ranges, gathers, reductions)
    if ranges.framework != ZERO3:
        kept = gather_ranges != NO_ROW
        gathers, gather_ranges = gathers.subset(kept), gather_ranges[kept]
        kept = reduce_ranges != NO_ROW
        reductions, reduce_ranges = reductions.subset(kept), reduce_ranges[kept]
    else:
        gathers = gathers.subset(
            np.array([not 0 <= _elements(o) < FEWEST_ELEMENTS for o in gathers.operations], dtype=bool)
        )
    if not gathers.operations:
        return None
    phase, prefetched = _phases(trace, ranges, gathers.launch_rows)
    names, unit, reduced = _named_units(trace, ranges, gather_ranges, reduce_ranges)
    named = len(names) > 1
    if not named:
        places = _Places(trace, ranges, gathers, phase)
        unit, reduced = places.gathered(), places.reduced(reductions)
        names = tuple(f"unit {k}" for k in range(places.count))
    gathered = replace(_columns(trace, gathers, unit), phase=phase, prefetched=prefetched)
    return Units(
        framework=ranges.framework,
        named=named,
        names=names,
        gathers=replace(gathered, hook_ns=_using_hooks(trace, ranges, names if named else (), gathered)),
        reductions=_columns(trace, reductions, reduced),
        hooks=trace.spans(ranges.rows(*ranges.by_role)),
    )


def _hook_ranges(trace: Trace) -> _Ranges | None:
    """Return the hooks of the one framework that shards here: of several, the one with most ranges."""
    found: dict[str, dict[str, list[Rows]]] = {}
    counts: dict[str, int] = {}
    hooks = [shard_hook(name) for name in trace.names]
    marked = trace.rows_of_names(np.array([hook is not None for hook in hooks], dtype=bool), Kind.ANNOTATION)
    for index, places in places_by_value(trace.name[marked]):
        if (hook := hooks[index]) is not None:
            found.setdefault(hook.framework, {}).setdefault(hook.role, []).append(marked[places])
            counts[hook.framework] = counts.get(hook.framework, 0) + int(places.size)
    if counts:
        framework = max(counts, key=lambda one: (counts[one], one))
        by_role = {role: np.sort(np.concatenate(rows)) for role, rows in found[framework].items()}
    elif trace.rows_named(is_zero3_mark, Kind.CPU_OP, Kind.ANNOTATION).size:
        framework, by_role = ZERO3, {}
    else:
        return None
    backward = trace.rows_named(vocabulary.is_backward_node, Kind.CPU_OP, Kind.ANNOTATION)
    training = trace.rows_named(vocabulary.is_of_loop, Kind.CPU_OP, Kind.ANNOTATION)
    threads = difference(trace.thread.distinct(backward), trace.thread.distinct(training))
    return _Ranges(framework, by_role, backward, threads)


def _launched(
    trace: Trace, events: GpuEvents, device: int | None, collectives: Iterable[CollectiveOp]
) -> _Calls:
    """Return the collectives whose launch is in the trace, in order of launch."""
    listed = list(collectives)
    if device is None:
        rows = gloo_rows(trace)
        calls = gloo_calls(trace, rows)
        launched = {place: calls[row] for place, row in enumerate(rows.tolist()) if row in calls}
    else:
        wanted = np.flatnonzero((events.classes == COMMUNICATION) & (events.device == device))
        keys = zip(events.start_ns[wanted].tolist(), events.stream[wanted].tolist(), strict=True)
        launch_of = dict(zip(keys, events.launch_rows[wanted].tolist(), strict=True))
        launched = {
            place: row
            for place, o in enumerate(listed)
            if (row := launch_of.get((o.start_ns, o.stream), NO_ROW)) != NO_ROW
        }
    places = sorted(launched, key=lambda place: (int(trace.ts_ns[launched[place]]), launched[place]))
    operations = [listed[place] for place in places]
    if device is None:
        operations = [
            _sized(o, trace.shapes.get(launched[p])) for o, p in zip(operations, places, strict=True)
        ]
    rows = np.array([launched[place] for place in places], dtype=np.intp)
    return _Calls(tuple(operations), rows, np.array(places, dtype=np.int32))


def _sized(operation: CollectiveOp, shapes: Shapes | None) -> CollectiveOp:
    """Return the operation with the size from its c10d operator: gloo's range holds one shard only.

    ``_allgather_base_`` takes ``[[out], [in], ...]``, ``_reduce_scatter_base_`` the same.
    """
    if operation.nbytes is not None or shapes is None or len(shapes.dims) < 2 or len(shapes.types) < 2:
        return operation
    side = shapes.dims[0 if operation.op == "all_gather" else 1]
    size = vocabulary.dtype_bytes(shapes.types[0])
    if not isinstance(side, (list, tuple)) or not side or size is None:
        return operation
    if not all(isinstance(extent, int) for extent in side):
        return operation
    elements = element_count(prod(side))
    return operation if elements is None else replace(operation, nbytes=elements * size)


def _launching_ranges(
    trace: Trace, ranges: _Ranges, gathers: _Calls, reductions: _Calls
) -> tuple[Rows, Rows]:
    """Return for each gather and each reduction the hook that launched it, or ``NO_ROW``."""
    reduce_rows = enclosing_rows(trace, ranges.rows("reduce"), reductions.launch_rows)
    if ranges.framework == FSDP2:
        return enclosing_rows(trace, ranges.rows("gather"), gathers.launch_rows), reduce_rows
    found = np.full(len(gathers.operations), NO_ROW, dtype=np.intp)
    for role in ("pre_forward", "pre_backward", "reduce", "forward_prefetch", "backward_prefetch"):
        held = enclosing_rows(trace, ranges.rows(role), gathers.launch_rows)
        found = np.where(held != NO_ROW, held, found)
    return found, reduce_rows


def _phases(
    trace: Trace, ranges: _Ranges, launch_rows: Rows
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.bool_]]:
    """Return the pass of each gather, and whether a hook launched it ahead of its unit."""

    def inside(*roles: str) -> npt.NDArray[np.bool_]:
        held = [enclosing_rows(trace, ranges.rows(role), launch_rows) != NO_ROW for role in roles]
        return np.asarray(np.logical_or.reduce(held), dtype=np.bool_)

    in_node = _inside_any(trace, ranges.backward_nodes, launch_rows)
    forward = inside("pre_forward", "forward_prefetch")
    on_thread = is_among(trace.thread[launch_rows], ranges.backward_threads)
    backward = inside("pre_backward", "backward_prefetch", "reduce") | in_node | on_thread
    phase = np.where(forward & in_node, RECOMPUTE, np.where(~forward & backward, BACKWARD, FORWARD))
    return phase.astype(np.int8), inside("forward_prefetch", "backward_prefetch")


def _inside_any(trace: Trace, outer: Rows, inner: Rows) -> npt.NDArray[np.bool_]:
    """Mask over inner rows: those that start inside some outer range on their thread; ranges may nest."""
    found = np.zeros(inner.size, dtype=np.bool_)
    for thread in distinct(trace.thread[inner]).tolist():
        rows = outer[trace.thread[outer] == thread]
        mine = trace.thread[inner] == thread
        spans = trace.spans(rows)
        starts = trace.ts_ns[inner[mine]]
        found[mine] = spans.covered_ns(starts, starts + 1) > 0
    return found


def _named_units(
    trace: Trace, ranges: _Ranges, gather_ranges: Rows, reduce_ranges: Rows
) -> tuple[tuple[str, ...], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the names that FSDP2 gives, in order of first use, and the unit of each call.

    No names at all (FSDP1, ZeRO-3, FSDP2 before its ranges had names) give fewer than two.
    """
    if ranges.framework != FSDP2:
        none = np.empty(0, dtype=np.int32)
        return (), none, none

    gathered = [_unit_name(trace, row) for row in gather_ranges.tolist()]
    names = tuple(dict.fromkeys(gathered))
    index = {name: number for number, name in enumerate(names)}
    reduced = [index.get(_unit_name(trace, row), -1) for row in reduce_ranges.tolist()]
    return names, np.array([index[n] for n in gathered], np.int32), np.array(reduced, np.int32)


class _Places:
    """Units of a framework that writes no names: places in the order of the longest forward pass."""

    def __init__(self, trace: Trace, ranges: _Ranges, gathers: _Calls, phase: npt.NDArray[np.int8]) -> None:
        self._sizes = [_elements(o) for o in gathers.operations]
        self._phase = phase
        self._passes = _passes(trace, ranges, gathers, phase)
        forward = [p for p in self._passes if phase[p[0]] == FORWARD]
        model = max(forward, key=len, default=max(self._passes, key=len))
        ordered = model if forward else model[::-1]
        self._model = [self._sizes[i] for i in ordered]

    @property
    def count(self) -> int:
        """How many units there are, those included that only a backward pass gathers."""
        return len(self._model)

    def gathered(self) -> npt.NDArray[np.int32]:
        """Return the unit of each gather."""
        unit = np.zeros(len(self._sizes), dtype=np.int32)
        for members in self._passes:
            down = self._phase[members[0]] != FORWARD
            for member, place in zip(
                members, self._walk([self._sizes[i] for i in members], down), strict=True
            ):
                unit[member] = place
        return unit

    def reduced(self, reductions: _Calls) -> npt.NDArray[np.int32]:
        """Return the unit of each reduction: those of a step go from the last unit to the first; else -1."""
        unit = np.full(len(reductions.operations), -1, dtype=np.int32)
        steps = np.array(
            [NO_STEP if o.step is None else o.step for o in reductions.operations], dtype=np.int64
        )
        known = set(self._model)
        for _, places in places_by_value(steps):
            mine = [i for i in places.tolist() if _elements(reductions.operations[i]) in known]
            sizes = [_elements(reductions.operations[i]) for i in mine]
            unit[mine] = self._walk(sizes, down=True)
        return unit

    def _walk(self, sizes: Sequence[int], down: bool) -> list[int]:
        """Return the place of each size, going through the model in one direction and round its end."""
        places_of: dict[int, list[int]] = {}
        for number, size in enumerate(self._model):
            places_of.setdefault(size, []).append(number)
        found: list[int] = []
        place = len(self._model) if down else -1
        for size in sizes:
            places = places_of.setdefault(size, [])
            if places:
                # The last of them stands before the first, and the first behind the last.
                following = bisect_left(places, place) - 1 if down else bisect_right(places, place)
                place = places[following % len(places)]
                found.append(place)
            else:
                places.append(len(self._model))
                found.append(len(self._model))
                self._model.append(size)
        return found


def _passes(trace: Trace, ranges: _Ranges, gathers: _Calls, phase: npt.NDArray[np.int8]) -> list[list[int]]:
    """Split the gathers into passes: a step, another phase or a backward pass between begins a new one."""
    nodes = np.sort(trace.ts_ns[ranges.backward_nodes])
    launches = trace.ts_ns[gathers.launch_rows]
    seen = np.searchsorted(nodes, launches)
    passes: list[list[int]] = [[0]]
    for i in range(1, launches.size):
        same = phase[i] == phase[i - 1] and gathers.operations[i].step == gathers.operations[i - 1].step
        if same and (phase[i] != FORWARD or seen[i] == seen[i - 1]):
            passes[-1].append(i)
        else:
            passes.append([i])
    return passes


def _elements(operation: CollectiveOp) -> int:
    """Return the elements of the whole message; FSDP2 gathers parameters of mixed types as bytes."""
    size = vocabulary.dtype_bytes(operation.dtype)
    return operation.nbytes // size if operation.nbytes is not None and size else UNKNOWN_SIZE


def _columns(trace: Trace, calls: _Calls, unit: npt.NDArray[np.int32]) -> ShardCalls:
    operations = calls.operations

    def column(values: Sequence[int]) -> Int64:
        return np.array(values, dtype=np.int64)

    return ShardCalls(
        unit=unit,
        phase=np.full(len(operations), BACKWARD, dtype=np.int8),
        step=column([NO_STEP if o.step is None else o.step for o in operations]),
        prefetched=np.zeros(len(operations), dtype=np.bool_),
        launch_ns=trace.ts_ns[calls.launch_rows],
        start_ns=column([o.start_ns for o in operations]),
        end_ns=column([o.end_ns for o in operations]),
        stream=column([o.stream for o in operations]),
        elements=column([_elements(o) for o in operations]),
        nbytes=column([UNKNOWN_SIZE if o.nbytes is None else o.nbytes for o in operations]),
        hook_ns=np.full(len(operations), NO_TIME, dtype=np.int64),
        row=calls.places,
    )


def _using_hooks(trace: Trace, ranges: _Ranges, names: tuple[str, ...], calls: ShardCalls) -> Int64:
    """The time at which the host enters the hook of the unit that each gather brings, in ns.

    With names it is the unit's next hook of that pass to end. Without, it is the hook that launches the
    gather, or, for one that is fetched ahead, the next to begin.
    """
    found = np.full(len(calls), NO_TIME, dtype=np.int64)
    for role, in_pass in (
        ("pre_forward", calls.phase != BACKWARD),
        ("pre_backward", calls.phase == BACKWARD),
    ):
        rows = ranges.rows(role)
        if rows.size == 0:
            continue
        if not names:
            held = _next_hook(trace, rows, calls.launch_ns, calls.prefetched)
            found[in_pass] = held[in_pass]
            continue
        number_of = {name: number for number, name in enumerate(names)}
        owner = np.array([number_of.get(_unit_name(trace, row), -1) for row in rows.tolist()], np.int64)
        rows_of = {number: rows[places] for number, places in places_by_value(owner)}
        mine = np.flatnonzero(in_pass)
        for number, places in places_by_value(calls.unit[mine]):
            if number in rows_of:
                own, at = rows_of[number], calls.launch_ns[mine[places]]
                found[mine[places]] = _next_hook(trace, own, at, np.zeros(at.size, bool))
    return found


def _next_hook(trace: Trace, rows: Rows, launch_ns: Int64, skip: npt.NDArray[np.bool_]) -> Int64:
    """Return the start of the first hook to end after each launch, or in ``skip`` to begin after it."""
    starts, ends = trace.ts_ns[rows], trace.ts_ns[rows] + trace.dur_ns[rows]
    index = np.where(
        skip,
        np.searchsorted(starts, launch_ns, side="right"),
        np.searchsorted(np.maximum.accumulate(ends), launch_ns, side="right"),
    )
    return np.where(index < rows.size, starts[np.minimum(index, rows.size - 1)], NO_TIME)


def _unit_name(trace: Trace, row: int) -> str:
    hook = shard_hook(trace.row_name(row))
    return (hook.unit if hook is not None else "") or ROOT


def block_of(name: str) -> str:
    """Return the block that a unit belongs to: its name up to the first number (``model.layers.3``).

    Names without a number are blocks of their own.
    """
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return name if numbered is None else ".".join(parts[: numbered + 1])


def unit_bytes(units: Units) -> npt.NDArray[np.float64]:
    """Return the gathered size of each unit, NaN where it is not recorded or the unit is never gathered."""
    return _per_unit(units, units.gathers.nbytes)


def unit_elements(units: Units) -> npt.NDArray[np.float64]:
    """Return the elements of each unit, padding included; NaN where they are not recorded."""
    return _per_unit(units, units.gathers.elements)


def _per_unit(units: Units, values: Int64Array) -> npt.NDArray[np.float64]:
    found = np.full(len(units.names), np.nan)
    unit, medians = medians_by_value(units.gathers.unit, values)
    found[unit] = medians
    found[units.gathers.unit[values == UNKNOWN_SIZE]] = np.nan
    return found
