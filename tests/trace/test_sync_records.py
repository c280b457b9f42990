"""What the profiler records of waits between streams is kept: who waits, for which stream, and since when."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.compact import NO_ID
from tracedoc.trace.kineto import read_trace

REAL = Path(__file__).parents[3] / "shared/traces/format_variants/event_sync_trace.json.gz"


def sync(name: str, ts: float, stream: int, **args: Any) -> dict[str, Any]:
    args = {"cuda_sync_kind": name, **args, "stream": stream, "device": 0, "context": 1}
    return {
        "ph": "X",
        "cat": "cuda_sync",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": ts,
        "dur": 1,
        "args": args,
    }


def wait(ts: float, stream: int, on: Any, recorded_by: Any, correlation: int) -> dict[str, Any]:
    return sync(
        "Stream Wait Event", ts, stream, wait_on_stream=on, wait_on_cuda_event_record_corr_id=recorded_by,
        wait_on_cuda_event_id=9, correlation=correlation,
    )  # fmt: skip


def read(events: list[dict[str, Any]]) -> Trace:
    return read_trace("t.json", stream=io.BytesIO(json.dumps(events).encode()))


def test_waits_are_kept_in_time_order():
    trace = read(
        [wait(30, 20, 7, 50, 51), sync("Context Sync", 20, -1, correlation=49), wait(10, 7, 24, 40, 41)]
    )
    assert trace.syncs is not None
    assert trace.syncs.wait_on_stream.tolist() == [24, 7]
    assert trace.syncs.record_correlation.tolist() == [40, 50]
    assert trace.stream[trace.syncs.rows].tolist() == [7, 20]
    assert trace.correlation[trace.syncs.rows].tolist() == [41, 51]


def test_an_event_that_was_never_recorded_is_no_id():
    trace = read([wait(10, 7, -1, -1, 41), wait(20, 7, "x", None, 42), wait(30, 7, "x", 1e30, 43)])
    assert trace.syncs is not None
    assert trace.syncs.wait_on_stream.tolist() == [NO_ID, NO_ID]
    assert trace.syncs.record_correlation.tolist() == [NO_ID, NO_ID]


def test_a_trace_without_records_has_none():
    assert read([sync("Context Sync", 20, -1, correlation=49)]).syncs is None


@pytest.mark.skipif(not REAL.exists(), reason="the real traces are not here")
def test_a_real_trace_says_which_stream_waits_for_which():
    trace = read_trace(str(REAL))
    assert trace.syncs is not None
    named = [trace.row_name(row) for row in trace.syncs.rows.tolist()]
    waiting = named.index("Stream Wait Event")
    row = trace.syncs.rows[waiting]
    assert trace.stream[row] == 24
    assert trace.syncs.wait_on_stream[waiting] == 20
    recorded = np.flatnonzero(
        (trace.correlation == trace.syncs.record_correlation[waiting]) & (trace.kind == int(Kind.RUNTIME))
    )
    assert [trace.row_name(r) for r in recorded.tolist()] == ["cudaEventRecord"]
