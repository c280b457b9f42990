"""Write the events of one rank as the JSON file that Kineto writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

Layout = Literal["current", "absolute", "array"]
"""How the file states time: relative to ``baseTimeNanoseconds``, as Unix time, or as Unix time in a
bare JSON array without any metadata (early 2021 and before)."""

DEVICES_A_HOST: Final = 8

_ORIGIN_NS: Final = 1_000_000_000_000  # time 0 of the builder, after the base: leaves room for negative times

_DEVICE_PROPERTIES: Final[dict[str, tuple[int, int, int, int]]] = {
    # name contains: memory bytes, compute major, compute minor, multiprocessors
    "V100": (16_945_512_448, 7, 0, 80),
    "A100": (85_049_999_360, 8, 0, 108),
    "H100": (84_929_347_584, 9, 0, 132),
    "H200": (150_055_550_976, 9, 0, 132),
    "B200": (191_500_000_000, 10, 0, 148),
    "RTX 3060": (12_487_294_976, 8, 6, 28),
    "": (84_929_347_584, 0, 0, 132),
}


class Event(msgspec.Struct, frozen=True):
    """One complete event ("ph": "X"), in nanoseconds since the builder's time 0."""

    category: str
    name: str
    pid: int
    tid: int
    start_ns: int
    duration_ns: int
    args: dict[str, object]


class Document(msgspec.Struct, frozen=True):
    """Everything that the file of one rank states. ``threads`` maps names to thread ids."""

    layout: Layout
    base_time_ns: int
    rank: int
    world_size: int
    host: str
    device: str | None
    backend: str
    pid: int
    ordinal: int
    has_shapes: bool
    groups: Mapping[str, tuple[int, ...]]
    streams: tuple[int, ...]
    threads: Mapping[str, int]
    events: Sequence[Event]


def render(document: Document) -> str:
    """Return the trace as JSON text, one event a line, in order of start."""
    events = sorted(document.events, key=lambda event: event.start_ns)
    offset = _ORIGIN_NS if document.layout == "current" else _ORIGIN_NS + document.base_time_ns
    first = min((e.start_ns for e in events), default=0) + offset
    last = max((e.start_ns + e.duration_ns for e in events), default=0) + offset
    lines = [_complete(e, offset) for e in events]
    lines.append(
        f'{{"ph": "X", "cat": "Trace", "ts": {_us(first)}, "dur": {_us(last - first)}, "pid": "Spans",'
        ' "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)", "args": {"Op count": 0}}'
    )
    lines.extend(_metadata_events(document, first))
    for name, pid, tid, at in (
        ("Iteration Start: PyTorch Profiler", "Traces", "Trace PyTorch Profiler", first),
        ("Record Window End", "", "", last),
    ):
        lines.append(
            f'{{"ph": "i", "s": "g", "name": "{name}", "pid": "{pid}", "tid": "{tid}", "ts": {_us(at)}}}'
        )
    body = "[\n" + ",\n".join(lines) + "\n]"
    if document.layout == "array":
        return body + "\n"
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in _header(document).items())
    return f'{{\n{head}"traceEvents": {body},\n"traceName": "rank-{document.rank}.json"\n}}\n'


def _header(document: Document) -> dict[str, object]:
    header: dict[str, object] = {"schemaVersion": 1, "deviceProperties": _device_properties(document)}
    if document.device is not None:
        header["cuda_runtime_version"] = 12080
    if document.has_shapes:
        header["record_shapes"] = 1
    if document.world_size > 1:
        configuration = "cuda:nccl" if document.backend == "nccl" else "cpu:gloo,cuda:gloo"
        distributed: dict[str, object] = {
            "backend": document.backend, "rank": document.rank, "world_size": document.world_size,
            "pg_count": len(document.groups),
            "pg_config": [
                {
                    "pg_name": name, "pg_desc": "default_pg" if name == "0" else name,
                    "backend_config": configuration, "pg_size": len(ranks), "ranks": list(ranks),
                }
                for name, ranks in document.groups.items()
            ],
        }  # fmt: skip
        if document.backend == "nccl":
            distributed["nccl_version"] = "2.27.5"
        header["distributedInfo"] = distributed
    header["host_name"] = document.host
    header["tracedoc_synthetic"] = True
    header["displayTimeUnit"] = "ms"
    if document.layout == "current":
        header["baseTimeNanoseconds"] = document.base_time_ns
    return header


def _device_properties(document: Document) -> list[dict[str, object]]:
    if document.device is None:
        return []
    known = (value for key, value in _DEVICE_PROPERTIES.items() if key in str(document.device))
    memory, major, minor, multiprocessors = next(known)
    return [
        {
            "id": index, "name": document.device, "totalGlobalMem": memory, "computeMajor": major,
            "computeMinor": minor, "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
            "regsPerBlock": 65536, "warpSize": 32, "sharedMemPerBlock": 49152, "numSms": multiprocessors,
        }
        for index in range(min(document.world_size, DEVICES_A_HOST))
    ]  # fmt: skip


def _metadata_events(document: Document, at_ns: int) -> list[str]:
    named: list[tuple[str, int, int, str, str]] = [
        ("process_name", document.pid, 0, "name", "python3"),
        ("process_labels", document.pid, 0, "labels", "CPU"),
    ]
    if document.device is not None:
        named.append(("process_name", document.ordinal, 0, "name", "python3"))
        named.append(("process_labels", document.ordinal, 0, "labels", f"GPU {document.ordinal}"))
    for stream in sorted(document.streams):
        named.append(("thread_name", document.ordinal, stream, "name", f"stream {stream} "))
    known = {"main": "python3", "autograd": f"pt_autograd_{document.ordinal}"}
    known |= {"gloo0": "pt_gloo_runloop", "gloo1": "pt_gloo_runloop"}
    for thread, tid in document.threads.items():
        named.append(
            ("thread_name", document.pid, tid, "name", f"thread {tid} ({known.get(thread, thread)})")
        )
    return [
        f'{{"ph": "M", "name": "{name}", "ts": {_us(at_ns)}, "pid": {pid}, "tid": {tid},'
        f' "args": {json.dumps({key: value})}}}'
        for name, pid, tid, key, value in named
    ]


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _complete(event: Event, offset_ns: int) -> str:
    return (
        f'{{"ph": "X", "cat": "{event.category}", "name": {json.dumps(event.name)}, "pid": {event.pid},'
        f' "tid": {event.tid}, "ts": {_us(event.start_ns + offset_ns)}, "dur": {_us(event.duration_ns)},'
        f' "args": {json.dumps(event.args)}}}'
    )
