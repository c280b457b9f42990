"""Facts about attention that runs as separate matrix products and softmax kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import distinct
from tracedoc.values import Unknown, Value

_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::bmm.out"})
_SINGLE = frozenset(
    {"aten::mm", "aten::addmm", "aten::addmm_", "aten::_scaled_mm", "aten::mv", "aten::addmv"}
)
_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax", "aten::_softmax_backward_data"})


@rank_fact(unit="count", needs=("host_ops",))
def unfused_attention_calls(timeline: RankTimeline) -> Value:
    """Softmaxes of the median step between two batched matrix products, both passes: attention in parts."""
    found = _parts(timeline)
    return found if isinstance(found, Unknown) else len(found[0])


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
    window, activity = timeline.judged, timeline.activity
    if window is None or activity is None:
        return NO_STEP
    found = _parts(timeline)
    if isinstance(found, Unknown):
        return found
    starts, ends, threads = found
    trace, events = timeline.trace, timeline.events
    if timeline.is_cpu:
        spans = Spans.empty()
        for thread in distinct(threads).tolist():
            mine = threads == thread
            spans = spans | Spans.of(starts[mine], ends[mine])
        return (spans & activity.compute).clip(window.start_ns, window.end_ns)
    if threads.size == 0:
        return Spans.empty()
    mine = np.flatnonzero((events.classes == COMPUTE) & events.linked & (events.device == timeline.device))
    launched, thread_of = events.launch_ns[mine], trace.thread[events.launch_rows[mine]]
    inside = np.zeros(mine.size, dtype=bool)
    for thread in distinct(threads).tolist():
        between = Spans.of(starts[threads == thread], ends[threads == thread])
        inside |= (thread_of == thread) & (between.covered_ns(launched, launched + 1) > 0)
    mine = mine[inside]
    return Spans.of(events.start_ns[mine], events.end_ns[mine]).clip(window.start_ns, window.end_ns)


_Parts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.integer]]


def _parts(timeline: RankTimeline) -> _Parts | Unknown:
    """Return the host time from the first to the second product of each attention, and its thread.

    An attention is a softmax whose nearest matrix products on its thread are both batched, in one step.
    """
    step, trace = timeline.judged_host_step, timeline.trace
    if step is None:
        return NO_STEP
    kinds = np.zeros(len(trace.names), dtype=np.int8)
    for index, name in enumerate(trace.names):
        kinds[index] = 1 if name in _BATCHED else 2 if name in _SINGLE else 3 if name in _SOFTMAX else 0
    rows = trace.rows_of_names(kinds > 0, Kind.CPU_OP)
    rows = rows[(trace.ts_ns[rows] >= step.start_ns) & (trace.ts_ns[rows] < step.end_ns)]
    if rows.size == 0 and timeline.trace.named(lambda name: name.startswith("Torch-Compiled")).any():
        return Unknown("compiled code names no operators")
    rows = rows[np.lexsort((trace.ts_ns[rows], trace.thread[rows]))]
    kind, thread = kinds[trace.name[rows]], trace.thread[rows]
    middle = np.flatnonzero(kind == 3)
    middle = middle[(middle > 0) & (middle < rows.size - 1)]
    before, after = middle - 1, middle + 1
    whole = (kind[before] == 1) & (kind[after] == 1)
    whole &= (thread[before] == thread[middle]) & (thread[after] == thread[middle])
    chosen = middle[whole]
    return trace.end_ns[rows[chosen - 1]], trace.ts_ns[rows[chosen + 1]], thread[chosen]
