"""A slow, obvious reader of Kineto JSON to check the fast one against."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import numpy as np

from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.vocabulary import event_kind

HOST = {Kind.CPU_OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON, Kind.OVERHEAD, Kind.INSTANT}


def nanoseconds(value: Any) -> int:
    return int((Decimal(value) * 1000).to_integral_value())


def number(value: Any) -> int:
    if isinstance(value, str):
        digits = value.split()[-1] if value.split() else ""
        return int(digits) if digits.isdigit() else -1
    return -1 if value is None else int(value)


def reference_rows(text: str, *, python_functions: bool = False) -> list[tuple[Any, ...]]:
    """Return (ts, dur, name, kind, device, stream, pid, tid, correlation, external id, bytes), by ts."""
    document = json.loads(text, parse_float=Decimal)
    events = document if isinstance(document, list) else document["traceEvents"]
    base = 0 if isinstance(document, list) else document.get("baseTimeNanoseconds", 0)
    rows = []
    for event in events:
        if event.get("ph") not in ("X", "i") or "cat" not in event:
            continue
        kind = event_kind(event["cat"], event["name"])
        if kind is None or (kind is Kind.PYTHON and not python_functions):
            continue
        args = event.get("args") or {}
        on_host = kind in HOST
        correlation = number(args.get("correlation", -1))
        rows.append(
            (
                nanoseconds(event["ts"]) + (0 if event["ts"] > 10**15 else base),
                max(0, nanoseconds(event.get("dur", 0))),
                event["name"],
                int(kind),
                -1 if on_host else number(args.get("device", event["pid"])),
                -1 if on_host else number(args.get("stream", event["tid"])),
                str(event["pid"]),
                str(event["tid"]),
                correlation if correlation > 0 else -1,
                number(args.get("External id", args.get("external id", -1))),
                -1 if on_host else number(args.get("bytes", -1)),
            )
        )
    return sorted(rows, key=lambda row: row[0])


def rows_of(trace: Trace) -> list[tuple[Any, ...]]:
    """Return the same tuples from the columns."""
    assert (np.diff(trace.ts_ns) >= 0).all()
    threads = [trace.threads[i] for i in trace.thread.tolist()]
    return list(
        zip(
            trace.ts_ns.tolist(),
            trace.dur_ns.tolist(),
            [trace.names[i] for i in trace.name.tolist()],
            trace.kind.tolist(),
            trace.device.tolist(),
            trace.stream.tolist(),
            [thread.pid for thread in threads],
            [thread.tid for thread in threads],
            trace.correlation.tolist(),
            trace.external_id.tolist(),
            trace.nbytes.tolist(),
            strict=True,
        )
    )
