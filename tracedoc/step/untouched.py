"""Operators that go over whole embedding tables of which a step touches few rows."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import Rows
from tracedoc.timeline.operator_calls import Call, call_of
from tracedoc.timeline.operator_work import work_of
from tracedoc.timeline.phases import Phase
from tracedoc.trace.columns import Kind
from tracedoc.values import once

LOOKUPS = frozenset({"aten::embedding", "aten::_embedding_bag"})
DENSE = frozenset({"aten::embedding_dense_backward", "aten::_embedding_bag_dense_backward"})
"""Operators that write a gradient with a row for each row of a table."""

Table = tuple[int, ...]
"""The rows and columns of an embedding table."""


@once
def untouched_tables(timeline: RankTimeline) -> dict[Table, float]:
    """Tables with dense gradients, and the share of their rows that no sample of a step touches, at least.

    Each number that is looked up in a table of these sizes may touch a row of its own. A table of the size of
    a matrix that is multiplied may be that matrix, whose gradient has no zeros.
    """
    trace = timeline.trace
    shapes, rows = trace.shapes, trace.shapes.rows
    if not trace.named_among(rows, DENSE.__contains__).any() or not timeline.windows:
        return {}
    looked_up: Counter[Table] = Counter()
    multiplied: set[Table] = set()
    widths: set[int] = set()
    called = Counter(zip(trace.name[rows].tolist(), shapes.kind.tolist(), strict=True))
    for (index, kind), count in called.items():
        name, call = trace.names[index], call_of(shapes.kinds[kind])
        first, numbers = call.tensor(0), call.tensor(1)
        if first is None or not first.extents:
            continue
        if name in LOOKUPS and numbers is not None:
            looked_up[first.extents] += count * numbers.elements
        elif name in DENSE:
            widths.add(first.extents[-1])
        elif (work := work_of(name, shapes.kinds[kind])) is not None and work.is_matrix:
            multiplied |= {one for tensor in call.tensors for one in (tensor.extents, tensor.extents[::-1])}
    touched = {table: count / (len(timeline.windows) * table[0]) for table, count in looked_up.items()}
    return {
        table: 1.0 - share
        for table, share in touched.items()
        if share < 1.0 and table[-1] in widths and table not in multiplied
    }


@once
def over_tables(timeline: RankTimeline) -> tuple[tuple[float, Rows], ...]:
    """Operators of backward passes and optimizers by the share of their time that untouched rows take."""
    tables, trace, phases = untouched_tables(timeline), timeline.trace, timeline.phases
    if not tables or phases is None:
        return ()
    shares = np.array([_share(tables, kind) for kind in map(call_of, trace.shapes.kinds)])
    rows = trace.shapes.rows[shares[trace.shapes.kind] > 0]
    rows = rows[(trace.kind[rows] == int(Kind.CPU_OP)) & ~trace.named_among(rows, LOOKUPS.__contains__)]
    late = phases.host_spans(Phase.BACKWARD) | phases.host_spans(Phase.OPTIMIZER)
    rows = rows[late.covered_ns(trace.ts_ns[rows], trace.ts_ns[rows] + 1) > 0]
    of_row = shares[trace.shapes.kind[np.searchsorted(trace.shapes.rows, rows)]]
    return tuple((share, rows[of_row == share]) for share in np.unique(of_row).tolist())


def _share(tables: dict[Table, float], call: Call) -> float:
    tensors = call.tensors
    elements = sum(one.elements for one in tensors)
    return sum(tables.get(one.extents, 0.0) * one.elements for one in tensors) / max(elements, 1)


def untouched_spans(timeline: RankTimeline) -> Spans:
    """When operators on a CPU are at rows that no sample touches: a share of each, from its start on."""
    trace, found = timeline.trace, Spans.empty()
    for share, rows in over_tables(timeline):
        lasts = np.rint(share * (trace.end_ns[rows] - trace.ts_ns[rows])).astype(np.int64)
        found = found | Spans.of(trace.ts_ns[rows], trace.ts_ns[rows] + lasts)
    return found
