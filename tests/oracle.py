"""Compute budgets and GPU step windows of a trace file by brute force, sharing no code with tracedoc.

Written from the definitions alone, with dictionaries, loops and exact integers, so that a mistake in the
fast code and a mistake here are unlikely to be the same. All times are integer nanoseconds.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

COMMUNICATION = re.compile(
    r"(?i)^nccl(Dev|Symk?Dev)?Kernel|ncclKernel_|rccl|^mscclpp|nvshmem|deep_ep|(one|two)ShotAllReduce"
    r"|cross_device_reduce|multimem_all_reduce|allreduce_.*_kernel"
)
UNFINISHED_NS = 1_000_000


@dataclass
class Window:
    """One step: where it begins and ends, and how its time splits."""

    index: int
    start_ns: int
    end_ns: int
    complete: bool
    budget: dict[str, int] = field(default_factory=dict)


@dataclass
class Answer:
    """What the oracle says of one file.

    ``capture`` is ``None`` where nothing ran on a GPU, ``steps`` where the file names no ``ProfilerStep``.
    """

    device: int | None
    capture: dict[str, int] | None
    steps: list[Window] | None


@dataclass
class _GpuEvent:
    start: int
    end: int
    what: str  # "compute" | "comm" | "copy"
    is_kernel: bool
    device: int
    stream: int
    correlation: int | None
    step: int | None = None


def solve(path: Path) -> Answer:
    """Return the capture budget and the steps of one trace file."""
    document = json.loads(_text(path), parse_float=lambda digits: digits)
    events = document["traceEvents"] if isinstance(document, dict) else document
    complete = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    gpu = _gpu_events(complete)
    if not gpu:
        return Answer(None, None, _cpu_steps(complete))
    device = _busiest_device(gpu)
    gpu = [event for event in gpu if event.device == device]
    first, last = min(event.start for event in gpu), max(event.end for event in gpu)
    return Answer(device, split(gpu_intervals(gpu), first, last), _gpu_steps(complete, gpu))


def split(intervals: Iterable[tuple[int, int, str]], start: int, end: int) -> dict[str, int]:
    """Return how ``[start, end)`` splits, walking from one edge to the next.

    An edge-to-edge piece is compute if any compute runs in it, else exposed communication if any
    communication does, else exposed copy, else idle. ``comm`` counts all pieces with communication.
    """
    edges: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for begin, finish, what in intervals:
        begin, finish = max(begin, start), min(finish, end)
        if begin < finish:
            edges[begin].append((what, 1))
            edges[finish].append((what, -1))
    running = {"compute": 0, "comm": 0, "copy": 0}
    total = {"step": end - start, "compute": 0, "exposed_comm": 0, "exposed_copy": 0, "idle": 0, "comm": 0}
    now = start
    for edge in [*sorted(edges), end]:
        piece = edge - now
        if running["compute"]:
            total["compute"] += piece
        elif running["comm"]:
            total["exposed_comm"] += piece
        elif running["copy"]:
            total["exposed_copy"] += piece
        else:
            total["idle"] += piece
        if running["comm"]:
            total["comm"] += piece
        for what, change in edges.get(edge, ()):
            running[what] += change
        now = edge
    return total


def gpu_intervals(gpu: Iterable[_GpuEvent]) -> list[tuple[int, int, str]]:
    """Return the events as ``(start, end, what)``."""
    return [(event.start, event.end, event.what) for event in gpu]


def _text(path: Path) -> bytes:
    raw = path.read_bytes()
    return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw


def _ns(microseconds: object) -> int:
    return int((Decimal(str(microseconds)) * 1000).to_integral_value())


def _start(event: dict[str, Any]) -> int:
    return _ns(event["ts"])


def _end(event: dict[str, Any]) -> int:
    return _ns(event["ts"]) + max(0, _ns(event.get("dur", 0)))


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _category(event: dict[str, Any]) -> str:
    return str(event.get("cat", "")).lower()


def _number(value: object) -> int | None:
    found = re.search(r"-?\d+", str(value))
    return int(found.group()) if found else None


def _gpu_events(complete: list[dict[str, Any]]) -> list[_GpuEvent]:
    in_a_record = _correlations_inside_collective_records(complete)
    found = []
    for event in complete:
        category, name = _category(event), str(event.get("name", ""))
        correlation = _number(_args(event).get("correlation"))
        if category == "kernel":
            what = "comm" if COMMUNICATION.search(name) else "compute"
        elif category in ("gpu_memset", "memset"):
            what = "compute"
        elif category in ("gpu_memcpy", "memcpy"):
            what = "comm" if "PtoP" in name or correlation in in_a_record else "copy"
        else:
            continue
        device = _number(_args(event).get("device", event.get("pid")))
        stream = _number(_args(event).get("stream", event.get("tid")))
        found.append(
            _GpuEvent(
                _start(event), _end(event), what, category == "kernel", device or 0, stream or 0, correlation
            )
        )
    return sorted(found, key=lambda event: event.start)


def _launches(complete: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    launches = {}
    for event in complete:
        correlation = _number(_args(event).get("correlation"))
        if _category(event) in ("cuda_runtime", "cuda_driver", "runtime") and correlation is not None:
            launches[correlation] = event
    return launches


def _correlations_inside_collective_records(complete: list[dict[str, Any]]) -> set[int]:
    records = [event for event in complete if event.get("name") == "record_param_comms"]
    by_thread = defaultdict(list)
    for record in records:
        by_thread[str(record.get("tid"))].append((_start(record), _end(record)))
    return {
        correlation
        for correlation, launch in _launches(complete).items()
        if any(begin <= _start(launch) < end for begin, end in by_thread.get(str(launch.get("tid")), ()))
    }


def _busiest_device(gpu: list[_GpuEvent]) -> int:
    def compute_ns(device: int) -> int:
        own = [event for event in gpu if event.device == device]
        return split(gpu_intervals(own), min(e.start for e in own), max(e.end for e in own))["compute"]

    return max(sorted({event.device for event in gpu}), key=compute_ns)


def host_steps(complete: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Return ``(index, start, end)`` of every host ``ProfilerStep`` range, in time order."""
    steps = []
    for event in complete:
        match = re.fullmatch(r"ProfilerStep#(\d+)", str(event.get("name", "")))
        if match and _category(event) in ("user_annotation", "operator", "cpu_op"):
            steps.append((int(match.group(1)), _start(event), _end(event)))
    return sorted(steps, key=lambda step: step[1])


def _gpu_steps(complete: list[dict[str, Any]], gpu: list[_GpuEvent]) -> list[Window] | None:
    steps = host_steps(complete)
    if not steps:
        return None
    launches = _launches(complete)
    by_stream = defaultdict(list)
    for event in gpu:
        by_stream[event.stream].append(event)
    for queue in by_stream.values():
        _assign_steps(queue, launches, steps)
    busy: dict[int, int] = defaultdict(int)
    for event in gpu:
        if event.is_kernel and event.what == "compute":
            busy[event.stream] += event.end - event.start
    if not busy:
        return []
    compute_stream = max(sorted(busy), key=lambda stream: busy[stream])
    begins = {}
    for event in by_stream[compute_stream]:
        if event.is_kernel and event.step is not None:
            begins.setdefault(event.step, event.start)
    ordered = sorted(begins.items(), key=lambda begin: begin[1])
    last_ns = max(_end(event) for event in complete if _category(event) != "trace")
    host_end = {index: end for index, _, end in steps}
    windows = []
    for (index, start), (_, end) in itertools.pairwise(ordered):
        finished = host_end[index] + UNFINISHED_NS < last_ns
        windows.append(Window(index, start, end, finished, split(gpu_intervals(gpu), start, end)))
    return (
        windows if any(window.complete for window in windows) else _lone_steps(complete, gpu, steps, last_ns)
    )


def _lone_steps(
    complete: list[dict[str, Any]], gpu: list[_GpuEvent], steps: list[tuple[int, int, int]], last_ns: int
) -> list[Window]:
    """Return the host ranges of steps whose GPU work lies inside them, where no following step tells more."""
    windows = []
    for index, begin, end in steps:
        own = [event for event in gpu if event.step == index]
        inside = [event for event in complete if begin <= _start(event) < end]
        backward = [_start(e) for e in inside if "evaluate_function" in str(e.get("name"))]
        updates = [_start(e) for e in inside if str(e.get("name")).startswith("Optimizer.step#")]
        finished = end + UNFINISHED_NS < last_ns or (backward and max(updates, default=0) > max(backward))
        if not own or not finished:
            continue
        first, last = min(event.start for event in own), max(event.end for event in own)
        before = [event.end for event in gpu if event.step != index and event.start < first]
        if begin <= first and last <= end and all(other <= begin for other in before):
            windows.append(Window(index, begin, end, True, split(gpu_intervals(gpu), begin, end)))
    return windows


def _assign_steps(
    queue: list[_GpuEvent], launches: dict[int, dict[str, Any]], steps: list[tuple[int, int, int]]
) -> None:
    linked = [position for position, event in enumerate(queue) if event.correlation in launches]
    for position in linked:
        correlation = queue[position].correlation
        assert correlation is not None
        moment = _start(launches[correlation])
        for index, begin, end in steps:
            if begin <= moment < end:
                queue[position].step = index
    if not linked:
        return
    for position in range(linked[0], len(queue)):
        if queue[position].correlation not in launches:
            later = [other for other in linked if other > position]
            earlier = [other for other in linked if other < position]
            queue[position].step = queue[later[0] if later else earlier[-1]].step


def _cpu_steps(complete: list[dict[str, Any]]) -> list[Window] | None:
    """Return the steps of a CPU run, each up to the next one's start.

    Compute is the leaf operators and the whole of the library operators (``aten::mm``) on the stepping
    threads, less the c10d operators inside them, which wait unless they call others, and less what lies in
    the ranges of a data loader or of compilation; communication is the ``gloo:*`` ranges.
    """
    steps = host_steps(complete)
    if not steps:
        return None
    stepping = {
        str(event.get("tid")) for event in complete if str(event.get("name", "")).startswith("ProfilerStep#")
    }
    intervals = []
    for thread in stepping:
        ops = [
            event for event in complete if _category(event) == "cpu_op" and str(event.get("tid")) == thread
        ]
        whole = [(_start(op), _end(op), name) for op in ops if _of_a_library(name := str(op.get("name", "")))]
        here = [
            event
            for event in complete
            if _category(event) in ("cpu_op", "user_annotation") and str(event.get("tid")) == thread
        ]
        named = sorted((_start(event), _end(event), str(event.get("name", ""))) for event in here)
        prepared = [(begin, end) for begin, end, name in named if _prepares(name)]
        waits = [(begin, end) for begin, end, name in named if _prepares(name) or name.startswith(ENQUEUES)]
        for found, holes in ((_leaves(ops), prepared), (whole, waits)):
            for begin, end, name in found:
                if not name.startswith(ENQUEUES):
                    intervals += [(*piece, "compute") for piece in _outside(begin, end, holes)]
    for event in complete:
        if str(event.get("name", "")).startswith("gloo:"):
            intervals.append((_start(event), _end(event), "comm"))
    last_ns = max((_end(event) for event in complete if _category(event) != "trace"), default=0)
    next_starts = [start for _, start, _ in steps[1:]]
    return [
        Window(index, start, until, end + UNFINISHED_NS < last_ns, split(intervals, start, until))
        for (index, start, end), until in zip(steps, [*next_starts, steps[-1][2]], strict=True)
    ]


ENQUEUES = ("c10d::", "_c10d_functional")


def _prepares(name: str) -> bool:
    begins = ("enumerate(Data", "_compile.compile_inner", "entire_frame_compile")
    return name.startswith(begins) or name.endswith("(dynamo_timed)") or name == "dynamo"


def _outside(begin: int, end: int, holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is left of an interval without the holes, which are in order of start."""
    pieces = []
    for start, until in holes:
        if start < end and until > begin:
            pieces.append((begin, start))
            begin = max(begin, until)
    return [(a, b) for a, b in [*pieces, (begin, end)] if a < b]


def _of_a_library(name: str) -> bool:
    found = re.match(r"([A-Za-z_]\w*)::", name)
    return found is not None and found[1] not in ("autograd", "torch", "c10d")


def _leaves(ops: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    spans = sorted(
        ((_start(op), _end(op), str(op.get("name", ""))) for op in ops), key=lambda s: (s[0], -s[1])
    )
    return [
        span
        for position, span in enumerate(spans)
        if position + 1 == len(spans) or spans[position + 1][0] >= span[1]
    ]
