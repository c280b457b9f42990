"""Masks of names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tracedoc.testing import TraceBuilder
from tracedoc.trace.kineto import read_trace


def test_a_predicate_marks_names_and_there_may_be_none(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("gemm", 0, 1).kernel("relu", 2, 3).kernel("relu", 4, 5)
    trace = read_trace(builder.write(tmp_path / "rank-0.json"))
    rows = np.flatnonzero(trace.named(lambda name: name == "relu")[trace.name])
    assert [trace.row_name(row) for row in rows.tolist()] == ["relu", "relu"]
    assert replace(trace, names=()).named(str.isupper).tolist() == [False]
