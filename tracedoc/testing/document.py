"""What torch, NCCL, gloo and sharding frameworks write, and the JSON file of one rank as Kineto writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal

import msgspec

DTYPE_BYTES: Final = {
    "Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip
KERNEL_DTYPE: Final = {
    "Float": "f32", "BFloat16": "bf16", "Half": "f16", "Double": "f64",
    "Long": "i64", "Int": "i32", "Byte": "u8", "Char": "i8", "Bool": "u8",
}  # fmt: skip
INPUT_TYPE: Final = {
    "Float": "float", "BFloat16": "c10::BFloat16", "Half": "c10::Half", "Double": "double",
    "Long": "long int", "Int": "int", "Byte": "unsigned char", "Char": "signed char", "Bool": "bool",
}  # fmt: skip


class Operation(msgspec.Struct, frozen=True):
    """The names that one collective has in each layer of the stack."""

    collective: str  # c10d's internal name, in "Collective name"
    operator: str  # the dispatcher's operator on the calling thread
    annotation: str  # what follows "nccl:"
    gloo: str  # what follows "gloo:"
    kernel: str  # with {dtype}
    scatter: Literal["", "in", "out"] = ""  # which side holds only this rank's share


KERNEL_ARGUMENT: Final = "(ncclDevKernelArgsStorage<4096ul>)"
OPERATIONS: Final[dict[str, Operation]] = {
    "allreduce": Operation(
        "allreduce", "c10d::allreduce_", "all_reduce", "all_reduce",
        "ncclDevKernel_AllReduce_Sum_{dtype}_RING_LL",
    ),
    "allgather": Operation(
        "_allgather_base", "c10d::_allgather_base_", "_all_gather_base", "all_gather",
        "ncclDevKernel_AllGather_RING_LL", "in",
    ),
    "reducescatter": Operation(
        # gloo implements reduce-scatter on its all-reduce, and names it so.
        "_reduce_scatter_base", "c10d::_reduce_scatter_base_", "_reduce_scatter_base", "all_reduce",
        "ncclDevKernel_ReduceScatter_Sum_{dtype}_RING_LL", "out",
    ),
    "broadcast": Operation(
        "broadcast", "c10d::broadcast_", "broadcast", "broadcast", "ncclDevKernel_Broadcast_RING_LL"
    ),
    "reduce": Operation(
        "reduce", "c10d::reduce_", "reduce", "reduce", "ncclDevKernel_Reduce_Sum_{dtype}_RING_LL"
    ),
    "alltoall": Operation(
        "all_to_all", "c10d::alltoall_base_", "all_to_all", "all_to_all", "ncclDevKernel_SendRecv"
    ),
    "send": Operation("send", "c10d::send", "send {rank}->{peer}", "send", "ncclDevKernel_SendRecv"),
    "recv": Operation("recv", "c10d::recv_", "recv {rank}<-{peer}", "recv", "ncclDevKernel_SendRecv"),
    "barrier": Operation(
        "allreduce", "c10d::barrier", "all_reduce_barrier", "barrier",
        "ncclDevKernel_AllReduce_Sum_{dtype}_RING_LL",
    ),
}  # fmt: skip
"""Every collective that :meth:`TraceBuilder.collective` knows, by its short name."""


def collective_arguments(
    operation: Operation,
    in_elements: int,
    out_elements: int,
    *,
    dtype: str,
    group: str,
    members: Sequence[int],
    seq: int,
) -> dict[str, object]:
    """The arguments of a collective on its NCCL kernel and its ``record_param_comms`` alike."""
    listed: list[object] = list(members)
    if len(members) > 30:  # Kineto shortens long lists
        listed = [*members[:29], "...", members[-1]]
    return {
        "Collective name": operation.collective,
        "In msg nelems": in_elements,
        "Out msg nelems": out_elements,
        "Group size": len(members),
        "dtype": dtype,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": group,
        "Process Group Description": "default_pg" if group == "0" else group,
        "Process Group Ranks": f"[{', '.join(map(str, listed))}]",
        "Seq": seq,
    }


def gloo_shapes(
    operation: Operation, in_elements: int, out_elements: int, *, dtype: str
) -> tuple[list[object], list[str]]:
    """Return ``Input Dims`` and ``Input type`` of the c10d operator of a collective on gloo."""
    kind = INPUT_TYPE[dtype]
    if operation.scatter:
        return [[out_elements], [in_elements], [], [], []], [kind, kind, "", "Scalar", "Scalar"]
    return [[[in_elements]], [], [], [], [], []], ["TensorList", "", "", "", "Scalar", "Scalar"]


def gloo_values(members: Sequence[int], peer: int | None) -> tuple[str, ...]:
    """Return the ``Concrete Inputs`` of a send or receive on gloo: the other rank within the group."""
    return ("", "", str(members.index(peer)), "0") if peer is not None and peer in members else ()


STRATEGIES: Final = ("fsdp1", "fsdp2", "zero3")
SHARDED_LANES: Final = ("allgather", "reducescatter", "compute", "host")
"""Lanes that can belong to a unit."""

ZERO3_OPERATOR: Final = "LinearFunctionForZeroStage3"


class UnitUse(msgspec.Struct, frozen=True):
    """One interval of a lane that belongs to a unit; ``unit`` "root" has no name in FSDP2."""

    lane: str
    unit: str
    backward: bool
    prefetch: bool

    @property
    def thread(self) -> str:
        """The host thread that launches it."""
        return "autograd" if self.backward else "main"


def ranges_around(strategy: str, use: UnitUse) -> tuple[str, ...]:
    """Return the names of the ranges around a launch, the outermost first; ZeRO-3 writes none."""
    if strategy == "fsdp1":
        return _fsdp1(use)
    if strategy == "fsdp2":
        return _fsdp2(use)
    return ()


def _fsdp1(use: UnitUse) -> tuple[str, ...]:
    prefix = "FullyShardedDataParallel."
    if use.lane == "reducescatter":
        return (f"{prefix}_post_backward_hook",)
    hook = f"{prefix}_pre_backward_hook" if use.backward else f"{prefix}_pre_forward"
    fetch = f"{prefix}_pre_backward_prefetch" if use.backward else f"{prefix}_pre_forward_prefetch"
    return (hook, fetch) if use.prefetch else (hook,)


def _fsdp2(use: UnitUse) -> tuple[str, ...]:
    label = "" if use.unit == "root" else f" ({use.unit})"
    way = "backward" if use.backward else "forward"
    if use.lane == "reducescatter":
        return (f"FSDP::post_backward_reduce{label}",)
    if use.lane != "allgather":
        return (f"FSDP::pre_{way}{label}",)
    hook = f"FSDP::{way}_prefetch for {use.unit}" if use.prefetch else f"FSDP::pre_{way}{label}"
    return hook, f"FSDP::all_gather{label}"


def unit_of_part(pattern: str, part: int, parts: int, *, backward: bool) -> str:
    """Return the unit of one of ``parts`` intervals: ``*`` counts up in forward and down in backward."""
    return pattern.replace("*", str(parts - 1 - part if backward else part))


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


class Document(msgspec.Struct):
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
    groups: dict[str, tuple[int, ...]]
    threads: dict[str, int]
    streams: set[int] = msgspec.field(default_factory=set)
    events: list[Event] = msgspec.field(default_factory=list)
    has_shapes: bool = False


def render(document: Document) -> str:
    """Return the trace as JSON text, one event a line, in order of start."""
    events = _numbered(sorted(document.events, key=lambda event: event.start_ns))
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


def _numbered(events: Sequence[Event]) -> list[Event]:
    """The events with external ids in the order in which operators start, as a profiler gives them."""
    called = [one for one in events if one.category in ("cpu_op", "user_annotation", "python_function")]
    given = dict.fromkeys(one.args.get("External id", 0) for one in called)
    numbers = {was: number for number, was in enumerate(given, 1)}
    return [
        msgspec.structs.replace(one, args=one.args | {"External id": numbers.get(one.args["External id"], 0)})
        if "External id" in one.args
        else one
        for one in events
    ]


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


@lru_cache(maxsize=4096)
def _quoted(name: str) -> str:
    """A name as JSON: few names make up most of a trace."""
    return json.dumps(name)


def _complete(event: Event, offset_ns: int) -> str:
    args = msgspec.json.format(msgspec.json.encode(event.args), indent=0)
    return (
        f'{{"ph": "X", "cat": "{event.category}", "name": {_quoted(event.name)}, "pid": {event.pid},'
        f' "tid": {event.tid}, "ts": {_us(event.start_ns + offset_ns)}, "dur": {_us(event.duration_ns)},'
        f' "args": {args.decode()}}}'
    )
