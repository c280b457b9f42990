"""What a capture shows of the job."""

from __future__ import annotations

from pathlib import Path

from tests.topics.small_runs import (
    steps,
    values,
)
from tracedoc.testing import TraceBuilder


def test_graphs_are_counted_by_their_launches(tmp_path: Path) -> None:
    assert values(tmp_path, steps(TraceBuilder(), 100, 200, 300))["cuda_graph_launches"] == 0
    builder = steps(TraceBuilder(), 100, 200, 300)
    for start in (100, 200, 300):
        builder.runtime("cudaGraphLaunch", start + 32, start + 32.1)
        builder.runtime("cudaGraphLaunch", start + 34, start + 34.1)
    assert values(tmp_path, builder)["cuda_graph_launches"] == 2
