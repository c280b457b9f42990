"""List how fast messages of each size travel, beside what their link should give."""

from __future__ import annotations

import numpy as np

from tracedoc.charts import ExpectedCurve, TransferRow, TransferSpeeds
from tracedoc.ranks.bandwidth import SizeCurve, transfers
from tracedoc.ranks.run_view import RunView

MOST_ROWS = 160
"""Rows listed, those that move most bytes."""

MOST_CURVES = 4


def transfer_table(run: RunView) -> TransferSpeeds | None:
    """Return the known transfers by operation, group size and message size; ``None`` without any."""
    found = transfers(run.matching, run.curves)
    if not found.operation.size:
        return None
    matching = run.matching
    sizes = np.array([group.size for group in matching.groups], dtype=np.int64)
    group = matching.group[found.operation]
    keys = np.stack([matching.op[found.operation], sizes[group], found.nbytes], axis=1)
    kinds, inverse = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    pieces = np.split(order, np.cumsum(np.bincount(inverse.ravel()))[:-1])
    rows = []
    for (op, ranks, nbytes), piece in zip(kinds.tolist(), pieces, strict=True):
        gbps, expected = found.gbps[piece], found.expected_gbps[piece]
        known = expected[~np.isnan(expected)]
        rows.append(
            TransferRow(
                op=matching.ops[op],
                ranks=ranks,
                nbytes=nbytes,
                calls=int(piece.size),
                low_gbps=float(gbps.min()),
                gbps=float(np.median(gbps)),
                high_gbps=float(gbps.max()),
                expected_gbps=float(np.median(known)) if known.size else None,
            )
        )
    largest = sorted(rows, key=lambda row: -row.calls * row.nbytes)[:MOST_ROWS]
    shown = {int(number) for number in np.unique(group)}
    curves = {
        (matching.groups[number].size, curve.peak_gbps): _sampled(matching.groups[number].size, curve)
        for number, curve in enumerate(run.curves)
        if number in shown and curve is not None and curve.peak_gbps is not None
    }
    return TransferSpeeds(
        rows=tuple(sorted(largest, key=lambda row: (row.op, row.ranks, row.nbytes))),
        curves=tuple(curves.values())[:MOST_CURVES],
        left_out=len(rows) - len(largest),
    )


def _sampled(ranks: int, curve: SizeCurve) -> ExpectedCurve:
    assert curve.peak_gbps is not None
    return ExpectedCurve(ranks, curve.peak_gbps, max(curve.table_half_bytes, curve.half_bytes))
