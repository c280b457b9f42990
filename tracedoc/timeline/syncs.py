"""Find the calls in which the host waits for the GPU, what called them, and what each costs the GPU."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans, in_order
from tracedoc.timeline.activity import GpuEvents, is_library
from tracedoc.timeline.lags import CLOCKS_NS
from tracedoc.timeline.launches import Rows
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, union
from tracedoc.trace.vocabulary import RuntimeRole

LOOKBACK = 48
"""An operator that causes a sync began at most this many events before it on its thread: such operators
contain a copy and a few views, not work of their own."""

NOTHING_FOLLOWS = np.iinfo(np.int64).max

SPELLINGS: dict[str, str] = {
    "aten::item": ".item()",
    "aten::_local_scalar_dense": ".item()",
    "aten::is_nonzero": "if tensor:",
    "aten::equal": "torch.equal()",
    "aten::nonzero": "nonzero() or indexing with a mask",
    "aten::masked_select": "masked_select() or indexing with a mask",
    "aten::index": "indexing with a mask",
    "aten::index_put_": "assignment with a mask",
    "aten::_unique2": "torch.unique()",
    "aten::unique_dim": "torch.unique()",
    "aten::unique_consecutive": "torch.unique_consecutive()",
    "aten::repeat_interleave": "repeat_interleave() without output_size",
    "aten::bincount": "torch.bincount()",
    "aten::to": ".cpu() or .to('cpu')",
    "aten::_to_copy": ".cpu() or .to('cpu')",
    "aten::copy_": "a copy to the host",
    "cudaDeviceSynchronize": "torch.cuda.synchronize()",
    "hipDeviceSynchronize": "torch.cuda.synchronize()",
    "cudaStreamSynchronize": "stream.synchronize()",
    "hipStreamSynchronize": "stream.synchronize()",
    "cudaEventSynchronize": "event.synchronize()",
    "hipEventSynchronize": "event.synchronize()",
}
"""How the operator, or with no operator around it the call, is usually written in Python."""


class Syncs(msgspec.Struct, frozen=True, eq=False):
    """The waits of the launching threads, in time order within each thread.

    One entry is a wait with no kernel launched inside it: ``.item()`` copies and then synchronises, and both
    calls are one wait. ``rows`` are the longest calls; ``blocked_ns`` is the time inside calls. ``at_ns`` is
    when the GPU ran out of work, or where it did not, when the wait ended. ``idle_ns`` is what the wait cost
    the GPU: idle time after everything launched before had ended, until the next kernel launched after the
    wait starts, and no more of it than the host was blocked (without the wait, that kernel is launched so
    much earlier). Time in which the loader is waited for or memory is allocated does not count. ``idle`` is
    the union but for what the host pauses meanwhile, ``calls`` the time inside the blocking calls.
    """

    rows: Rows
    start_ns: Int64Array
    end_ns: Int64Array
    blocked_ns: Int64Array
    at_ns: Int64Array
    idle_ns: Int64Array
    idle: Spans
    calls: Spans

    @classmethod
    def none(cls) -> Syncs:
        """Return the waits of a trace without any."""
        empty = np.empty(0, dtype=np.int64)
        return cls(
            np.empty(0, dtype=np.intp), empty, empty, empty, empty, empty, Spans.empty(), Spans.empty()
        )


def find_syncs(
    trace: Trace, events: GpuEvents, device: int, idle: Spans, other: Spans, pauses: Spans
) -> Syncs:
    """Return the waits for ``device`` with their cost; time in ``other`` has another cause before them."""
    rows = _blocking_rows(trace, events)
    if rows.size == 0:
        return Syncs.none()
    rows, opens = _waits(trace, events, rows)
    first = np.flatnonzero(opens)
    starts = trace.ts_ns[rows]
    ends = starts + trace.dur_ns[rows]
    start = starts[first]
    end = np.maximum.reduceat(ends, first)
    blocked = np.add.reduceat(ends - starts - other.covered_ns(starts, ends), first)
    drained, following = _around(events.on(device), end)
    dry = np.maximum(drained, start)
    costs = (drained <= end + CLOCKS_NS) & (following > dry) & (following != NOTHING_FOLLOWS)
    free = idle - other
    until, launching = np.where(costs, following, dry), free - pauses
    waited = np.minimum(launching.covered_ns(dry, until), blocked)
    return Syncs(
        rows=_longest(trace, rows, first),
        start_ns=start,
        end_ns=end,
        blocked_ns=blocked,
        at_ns=np.where(costs, dry, end),
        idle_ns=np.minimum(free.covered_ns(dry, until), blocked),
        idle=Spans.of(dry, _time_of_share(launching, dry, waited)) & launching,
        calls=Spans.of(starts, ends),
    )


def launching_threads(trace: Trace, events: GpuEvents) -> npt.NDArray[np.int32]:
    """Return the host threads that launch kernels; without kernels those that launch copies."""
    kernels = events.kernels & events.linked
    return trace.thread.distinct(events.launch_rows[kernels if kernels.any() else events.linked])


def _blocking_rows(trace: Trace, events: GpuEvents) -> Rows:
    """Return the calls of launching threads in which the host waits for the GPU, in no order.

    A copy to the host blocks where its call returns only when the copy has ended: always in ``cudaMemcpy``,
    and in ``cudaMemcpyAsync`` to pageable memory. Copies from the host count as input.
    """
    rows = trace.rows_named(lambda name: vocabulary.runtime_role(name) is RuntimeRole.SYNC, Kind.RUNTIME)
    copies = np.flatnonzero((events.kinds == int(Kind.MEMCPY)) & events.linked)
    down = trace.named_among(events.rows[copies], lambda name: vocabulary.copy_kind(name).direction == "DtoH")
    calls, copied = events.launch_rows[copies[down]], events.rows[copies[down]]
    waited = trace.end_ns[calls] >= trace.end_ns[copied]
    rows = union(rows, calls[waited])
    return np.asarray(rows[trace.thread.among(launching_threads(trace, events), rows)], dtype=np.intp)


def _waits(trace: Trace, events: GpuEvents, rows: Rows) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return the blocking calls by thread and time, and which of them begin a wait."""
    rows = rows[np.lexsort((trace.ts_ns[rows], trace.thread[rows]))]
    working = events.working & events.linked
    launches, launch_ns = events.launch_rows[working], events.launch_ns[working]
    opens = np.ones(rows.size, dtype=bool)
    for thread in distinct(trace.thread[rows]):
        mine = np.flatnonzero(trace.thread[rows] == thread)
        launched = in_order(launch_ns[trace.thread.among([thread], launches)])
        before = np.searchsorted(launched, trace.ts_ns[rows[mine]])
        opens[mine[1:]] = before[1:] != before[:-1]
    return rows, opens


def _around(own: GpuEvents, end: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The end of all that was launched before each wait's end, and the start of the next kernel, in ns.

    An event without a launch counts as launched when it starts; ``NOTHING_FOLLOWS`` where no kernel follows.
    """
    order = np.argsort(own.launch_ns, kind="stable")
    launched = own.launch_ns[order]
    reach = np.maximum.accumulate(own.end_ns[order])
    ahead = np.minimum.accumulate(np.where(own.working, own.start_ns, NOTHING_FOLLOWS)[order[::-1]])[::-1]
    place = np.searchsorted(launched, end, side="left")
    drained = np.where(place > 0, reach[np.maximum(place - 1, 0)], np.iinfo(np.int64).min // 2)
    following = np.where(place < launched.size, ahead[np.minimum(place, launched.size - 1)], NOTHING_FOLLOWS)
    return drained, following


def _time_of_share(spans: Spans, start: Int64Array, amount: Int64Array) -> Int64Array:
    """The time at which ``amount`` nanoseconds of ``spans`` have passed since ``start``."""
    if len(spans) == 0:
        return start
    lengths = spans.ends - spans.starts
    passed = np.concatenate(([0], np.cumsum(lengths)))
    wanted = spans.covered_ns(np.full(start.size, int(spans.starts[0])), start) + amount
    index = np.clip(np.searchsorted(passed, wanted, side="left") - 1, 0, len(spans) - 1)
    return np.asarray(spans.starts[index] + wanted - passed[index], dtype=np.int64)


def _longest(trace: Trace, rows: Rows, first: npt.NDArray[np.intp]) -> Rows:
    """Return the longest call of each wait."""
    group = np.repeat(np.arange(first.size), np.diff(np.append(first, rows.size)))
    order = np.lexsort((trace.dur_ns[rows], group))
    return np.asarray(rows[order[np.append(first[1:], rows.size) - 1]], dtype=np.intp)


Names = tuple[int, ...]
"""Names of ranges around a call, from the outermost on, as numbers in ``Trace.names``."""


class WaitCause(msgspec.Struct, frozen=True):
    """What caused a wait: an operator (else the call itself), the call, the range and line around it.

    ``line`` is the innermost Python frame outside torch that the capture holds, as ``train.py(42): log``:
    the function's first line; "" without stacks.
    """

    operator: str
    call: str
    where: str
    line: str = ""


def wait_causes(trace: Trace, rows: Rows) -> list[WaitCause]:
    """The cause of each wait whose call is in ``rows``.

    The operator is the outermost one of a library around the call; the range the innermost annotation
    that a person or a framework set (not the step itself).
    """
    around = (_enclosing(trace, rows, kind) for kind in (Kind.CPU_OP, Kind.ANNOTATION, Kind.PYTHON))
    found: dict[tuple[int, Names, Names, Names], WaitCause] = {}
    # Most waits are of few kinds, which stand in the same ranges.
    keys = list(zip(trace.name[rows].tolist(), *around, strict=True))
    for key in dict.fromkeys(keys):
        call, *names = key
        found[key] = _wait_cause(trace.names[call], *([trace.names[name] for name in held] for held in names))
    return [found[key] for key in keys]


def _wait_cause(call: str, operators: list[str], ranges: list[str], frames: list[str]) -> WaitCause:
    library = [name for name in operators if is_library(name)]
    shown = [name for name in ranges if not vocabulary.is_step(name) and not name.startswith(("nccl:", "##"))]
    operator = library[0] if library else (operators[-1] if operators else call)
    calling = (name for name in reversed(frames) if ".py(" in name)
    line = next((name for name in calling if not vocabulary.works_for_the_model(name)), "")
    return WaitCause(operator, call, shown[-1] if shown else "", line)


def _enclosing(trace: Trace, inner: Rows, kind: Kind) -> list[Names]:
    """Return for each row the names of the last ranges of a kind on its thread that hold its start."""
    found: list[Names] = [()] * inner.size
    ends = trace.end_ns
    threads = trace.thread[inner]
    for thread in distinct(threads):
        mine = np.flatnonzero(threads == thread)
        starts = trace.ts_ns[inner[mine]]
        outer = _ranges_before(trace, kind, int(thread), (int(starts.min()), int(starts.max())))
        if outer.size == 0:
            continue
        last = np.searchsorted(trace.ts_ns[outer], starts, side="right")
        reach = last[:, None] - np.arange(LOOKBACK, 0, -1)[None, :]
        holder = outer[np.maximum(reach, 0)]
        holds = (reach >= 0) & (ends[holder] > starts[:, None])
        names = trace.name[holder[holds]].tolist()
        bounds = np.append(0, np.cumsum(holds.sum(axis=1))).tolist()
        for position, (begin, end) in zip(mine.tolist(), pairwise(bounds), strict=True):
            found[position] = tuple(names[begin:end])
    return found


def _ranges_before(trace: Trace, kind: Kind, thread: int, times: tuple[int, int]) -> Rows:
    """The ranges of a thread that start between two times, and :data:`LOOKBACK` before, if there are."""
    first, end = (int(row) for row in np.searchsorted(trace.ts_ns, times, side="right"))
    begin, size = first, 16 * LOOKBACK
    while True:
        begin = max(begin - size, 0)
        of_kind = np.flatnonzero(trace.kind[begin:end] == int(kind)) + begin
        here: Rows = of_kind[trace.thread[of_kind] == thread]
        if begin == 0 or int(np.searchsorted(here, first)) >= LOOKBACK:
            return here
        size *= 4
