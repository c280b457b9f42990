"""Find the c10d operator that issued each gloo transfer: gloo runs them later, on threads of its own."""

from __future__ import annotations

from collections import defaultdict

from tracedoc.timeline.launches import Rows
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace


def gloo_calls(trace: Trace, rows: Rows) -> dict[int, int]:
    """Return, for each ``gloo:*`` range in ``rows``, the row of the c10d operator that issued it.

    They are matched by order, within each kind whose counts agree; a range of another kind is left out.
    gloo runs a reduce-scatter as an all-reduce.
    """
    calls: dict[str, list[int]] = defaultdict(list)
    for row in trace.rows_named(lambda name: name.startswith("c10d::"), Kind.CPU_OP).tolist():
        op = vocabulary.collective_op(trace.row_name(row))
        if op is not None:
            calls["all_reduce" if op == "reduce_scatter" else op].append(row)
    shown: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        shown[vocabulary.gloo_op(trace.row_name(row)) or "unknown"].append(row)
    return {
        row: call
        for name, listed in shown.items()
        if len(calls[name]) == len(listed)
        for row, call in zip(listed, calls[name], strict=True)
    }
