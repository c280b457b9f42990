"""Build the Kineto trace of one rank by hand, event by event, for tests of rules and of the reader.

Times are milliseconds since an arbitrary instant that all builders share; negative ones are fine. What
:meth:`TraceBuilder.to_json` returns has the shape that torch.profiler writes, and goes through the real
reader: one microsecond with three decimals a timestamp, launches linked to kernels by correlation,
collective arguments on NCCL kernels and on their ``record_param_comms``.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from tracedoc.testing.document import (
    DEVICES_A_HOST,
    DTYPE_BYTES,
    INPUT_TYPE,
    KERNEL_ARGUMENT,
    KERNEL_DTYPE,
    OPERATIONS,
    Document,
    Event,
    Layout,
    Operation,
    collective_arguments,
    gloo_shapes,
    gloo_values,
    render,
)

GEMM_KERNEL: Final = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
DEFAULT_LEAD_MS: Final = 0.01
"""How long before its start a kernel is launched where nothing else is said."""

_BASE_TIME_NS: Final = 1_767_225_600_000_000_000
_COMPUTE_STREAM: Final = 7
_COPY_STREAM: Final = 16
_COMM_STREAM: Final = 20


class _Launch(msgspec.Struct):
    """Host events that all start where the launch does; ``start_ns`` is resolved when the file is made."""

    thread: str
    requested_ns: int
    latest_ns: int
    slot_ns: int
    events: list[tuple[str, str, int, dict[str, object]]] = msgspec.field(default_factory=list)


class _How(msgspec.Struct, frozen=True):
    """On which stream GPU work runs, and when which thread launches it; unlinked work has no launch."""

    stream: int
    launch_ms: float | None
    thread: str
    linked: bool = True


Around = list[tuple[str, str, dict[str, object]]]
"""The host events around a launch, the outermost first: name, category, arguments."""

_KERNEL_ARGUMENTS: Final = {
    "registers per thread": 128, "shared memory": 0, "blocks per SM": 1.0, "warps per SM": 4.0,
    "grid": [132, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 6,
}  # fmt: skip


class TraceBuilder:
    """Collect the events of one rank; every method that adds some returns the builder itself.

    ``device=None`` makes a CPU trace: there are no GPU events, and :meth:`collective` writes gloo's.
    Launches that would overlap on one thread follow each other, but never come after their kernel.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        host: str = "node0",
        device: str | None = "NVIDIA H100 80GB HBM3",
        backend: str | None = None,
        layout: Layout = "current",
        base_time_ns: int = _BASE_TIME_NS,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        pid = 10_000 + 100 * rank
        self._file = Document(
            layout, base_time_ns, rank=rank, world_size=world_size, host=host, device=device,
            backend=backend or ("nccl" if device else "gloo"), pid=pid, ordinal=rank % DEVICES_A_HOST,
            groups={"0": tuple(range(world_size))}, threads={"main": pid},
        )  # fmt: skip
        self._launches: list[_Launch] = []
        self._sequence: dict[str, int] = {}
        self._external_id = 0
        self._correlation = 100

    # Host side ------------------------------------------------------------------------------------

    def step(self, index: int, start_ms: float, end_ms: float) -> TraceBuilder:
        """Add the host range ``ProfilerStep#index``."""
        return self.host(f"ProfilerStep#{index}", start_ms, end_ms, category="user_annotation")

    def host(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        *,
        thread: str = "main",
        category: Literal["cpu_op", "user_annotation", "python_function"] = "cpu_op",
        dims: Sequence[object] | None = None,
        types: Sequence[str] | None = None,
        values: Sequence[str] = (),
    ) -> TraceBuilder:
        """Add an operator or a range on a host thread: "main", "autograd" or a name of its own."""
        args: dict[str, object] = {
            "External id": self._next_external_id(),
            **self._shapes(dims, types, values),
        }
        self._host_event(category, name, thread, _ns(start_ms), _ns(end_ms) - _ns(start_ms), args=args)
        return self

    def loader(self, start_ms: float, end_ms: float, *, workers: int = 0) -> TraceBuilder:
        """Add the wait for the next batch of a DataLoader."""
        iterator = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
        return self.host(
            f"enumerate(DataLoader)#{iterator}.__next__", start_ms, end_ms, category="user_annotation"
        )

    def optimizer(self, start_ms: float, end_ms: float, name: str = "AdamW") -> TraceBuilder:
        """Add the host range of an optimizer's ``step``."""
        return self.host(f"Optimizer.step#{name}.step", start_ms, end_ms, category="user_annotation")

    def backward(
        self, start_ms: float, end_ms: float, *, node: str = "MmBackward0", thread: str | None = None
    ) -> TraceBuilder:
        """Add an autograd node: on the autograd thread, or on the main thread of a CPU trace."""
        on = thread or ("autograd" if self._file.device else "main")
        start, duration = _ns(start_ms), _ns(end_ms) - _ns(start_ms)
        for name in (f"autograd::engine::evaluate_function: {node}", node):
            args: dict[str, object] = {"External id": self._next_external_id(), "Sequence number": 1}
            self._host_event("cpu_op", name, on, start, duration, args=args | {"Fwd thread id": 1})
        return self

    def runtime(self, name: str, start_ms: float, end_ms: float, *, thread: str = "main") -> TraceBuilder:
        """Add a runtime call that starts no GPU work: ``cudaMalloc``, ``cudaStreamSynchronize``..."""
        args: dict[str, object] = {
            "External id": self._external_id, "cbid": 0, "correlation": self._next_correlation(),
        }  # fmt: skip
        duration = _ns(end_ms) - _ns(start_ms)
        self._host_event("cuda_runtime", name, thread, _ns(start_ms), duration, args=args)
        return self

    # GPU side -------------------------------------------------------------------------------------

    def kernel(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        *,
        stream: int = _COMPUTE_STREAM,
        launch_ms: float | None = None,
        linked: bool = True,
        thread: str = "main",
        op: str = "aten::mm",
        dims: Sequence[object] | None = None,
        types: Sequence[str] | None = None,
        strides: Sequence[object] = (),
        within: Sequence[str] = (),
        grid: Sequence[int] = (132, 1, 1),
    ) -> TraceBuilder:
        """Add a kernel, the call that launched it, and the operator ``op`` around that call.

        ``launch_ms`` is when the call starts (10 us before the kernel unless given). An unlinked kernel
        has no launch in the file, like an early one. ``within`` are ranges around it, outermost first.
        """
        around: Around = [(range_name, "user_annotation", {}) for range_name in within]
        around.append((op, "cpu_op", self._shapes(dims, types, strides=strides)))
        how = _How(stream, launch_ms, thread, linked)
        self._kernel(name, "cudaLaunchKernel", start_ms, end_ms, how, around, {"grid": list(grid)})
        return self

    def copy(
        self,
        direction: Literal["HtoD", "DtoH", "DtoD", "PtoP"],
        start_ms: float,
        end_ms: float,
        nbytes: int = 1 << 20,
        *,
        pageable: bool = False,
        stream: int | None = None,
        launch_ms: float | None = None,
        thread: str = "main",
    ) -> TraceBuilder:
        """Add a copy and its ``cudaMemcpyAsync``, which blocks to the end for pageable memory."""
        host_side = "Pageable" if pageable else "Pinned"
        ends = {"HtoD": (host_side, "Device"), "DtoH": ("Device", host_side)}
        source, target = ends.get(direction, ("Device", "Device"))
        how = _How(_COPY_STREAM if stream is None else stream, launch_ms, thread)
        self._transfer(
            "gpu_memcpy", f"Memcpy {direction} ({source} -> {target})", "cudaMemcpyAsync", "aten::copy_",
            start_ms, end_ms, nbytes, how, blocks=pageable,
        )  # fmt: skip
        return self

    def memset(
        self,
        start_ms: float,
        end_ms: float,
        nbytes: int = 1 << 20,
        *,
        launch_ms: float | None = None,
    ) -> TraceBuilder:
        """Add a memset and its ``cudaMemsetAsync``."""
        self._transfer(
            "gpu_memset", "Memset (Device)", "cudaMemsetAsync", "aten::zero_", start_ms, end_ms, nbytes,
            _How(_COMPUTE_STREAM, launch_ms, "main"), blocks=False,
        )  # fmt: skip
        return self

    def gpu_annotation(
        self, name: str, start_ms: float, end_ms: float, *, stream: int = _COMPUTE_STREAM
    ) -> TraceBuilder:
        """Add the shadow of a host range on a stream, 1 ns wider on both sides as Kineto writes it."""
        args: dict[str, object] = {"External id": self._external_id}
        self._gpu_event("gpu_user_annotation", name, stream, _ns(start_ms) - 1, _ns(end_ms) + 1, args=args)
        return self

    def collective(
        self,
        op: str,
        start_ms: float,
        end_ms: float,
        *,
        nbytes: int = 16 << 20,
        dtype: str = "BFloat16",
        group: str = "0",
        ranks: Sequence[int] | None = None,
        stream: int = _COMM_STREAM,
        launch_ms: float | None = None,
        linked: bool = True,
        thread: str = "main",
        seq: int | None = None,
        peer: int | None = None,
        within: Sequence[str] = (),
    ) -> TraceBuilder:
        """Add one rank's part of a collective: operator, ``record_param_comms``, annotation, kernel.

        ``op`` is one of :data:`OPERATIONS`. ``nbytes`` is the whole message: what an all-gather puts out
        and what a reduce-scatter takes in. ``ranks`` are the members of ``group`` (all ranks unless
        given). ``seq`` counts up within the group unless given. ``peer`` is the other end of a send or
        receive. ``within`` are names of ranges around the operator. In a CPU trace the interval is that of
        ``gloo:*`` on its own thread.
        """
        if op not in OPERATIONS:
            raise ValueError(f"unknown collective {op!r}; known: {', '.join(OPERATIONS)}")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        members = self._members(group, ranks)
        number = seq if seq is not None else self._sequence.get(group, 0) + 1
        self._sequence[group] = number
        operation = OPERATIONS[op]
        elements = nbytes // DTYPE_BYTES[dtype]
        share = elements // len(members)
        in_elements = share if operation.scatter == "in" else elements
        out_elements = share if operation.scatter == "out" else elements
        if self._file.device is None:
            self._gloo(
                operation, start_ms, end_ms, in_elements, out_elements,
                dtype=dtype, launch_ms=launch_ms, within=within,
                values=gloo_values(members, peer),
            )  # fmt: skip
            return self
        arguments = collective_arguments(
            operation, in_elements, out_elements, dtype=dtype, group=group, members=members, seq=number
        )
        if op in ("send", "recv"):
            other = peer if peer is not None else next((m for m in members if m != self.rank), self.rank)
            arguments |= {"Src Rank": self.rank, "Dst Rank": other} if op == "send" else {
                "Src Rank": other, "Dst Rank": self.rank,
            }  # fmt: skip
            annotation = "nccl:" + operation.annotation.format(rank=self.rank, peer=other)
        else:
            annotation = f"nccl:{operation.annotation}"
        record = {
            **arguments, "Rank": self.rank, "Global rank start": members[0],
            "Global rank stride": members[1] - members[0] if len(members) > 1 else 1,
        }  # fmt: skip
        kernel = operation.kernel.format(dtype=KERNEL_DTYPE[dtype]) + KERNEL_ARGUMENT
        around: Around = [
            *((name, "user_annotation", {}) for name in within),
            (operation.operator, "cpu_op", {}),
            ("record_param_comms", "cpu_op", record),
            (annotation, "user_annotation", {}),
        ]
        how = _How(stream, launch_ms, thread, linked)
        self._kernel(kernel, "cudaLaunchKernelExC", start_ms, end_ms, how, around, arguments)
        if linked:
            self.gpu_annotation(annotation, start_ms, end_ms, stream=stream)
        return self

    # The file -------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the trace as JSON text, one event a line, in order of start."""
        events = [*self._file.events, *self._settled_launches()]
        for name in ("correlation", "External id"):
            events = _numbered_in_order(events, name)
        return render(replace(self._file, events=events))

    def write(self, path: str | Path) -> Path:
        """Write the trace to ``path`` (gzip if it ends in ``.gz``: equal builders give equal bytes)."""
        target = Path(path)
        text = self.to_json().encode()
        target.write_bytes(gzip.compress(text, 9, mtime=0) if target.suffix == ".gz" else text)
        return target

    # Inside ---------------------------------------------------------------------------------------

    def _kernel(
        self, name: str, call: str, start_ms: float, end_ms: float, how: _How, around: Around,
        extra: dict[str, object],
    ) -> None:  # fmt: skip
        start, end = _ns(start_ms), _ns(end_ms)
        args = {"queued": 0, **self._place(how), **_KERNEL_ARGUMENTS}
        if how.linked:
            # Kineto: the launch carries the id of the innermost cpu_op around it.
            args = {"External id": self._launch(call, self._correlation, start, how, around), **args}
        self._gpu_event("kernel", name, how.stream, start, end, args=args | extra)

    def _transfer(
        self, category: str, name: str, call: str, op: str, start_ms: float, end_ms: float, nbytes: int,
        how: _How, *, blocks: bool,
    ) -> None:  # fmt: skip
        start, end = _ns(start_ms), _ns(end_ms)
        place, until = self._place(how), end if blocks else None
        around: Around = [(op, "cpu_op", {})]
        args: dict[str, object] = {
            "External id": self._launch(call, self._correlation, start, how, around, until_ns=until),
            **place, "bytes": nbytes, "memory bandwidth (GB/s)": round(nbytes / max(end - start, 1), 3),
        }  # fmt: skip
        self._gpu_event(category, name, how.stream, start, end, args=args)

    def _place(self, how: _How) -> dict[str, object]:
        """Where a GPU event runs, under a new correlation id."""
        correlation = self._next_correlation()
        return {"device": self._file.ordinal, "context": 1, "stream": how.stream, "correlation": correlation}

    def _launch(
        self, call: str, correlation: int, start_ns: int, how: _How, around: Around, *,
        until_ns: int | None = None,
    ) -> int:  # fmt: skip
        """Remember the host side of one GPU event; return the external id of its innermost operator."""
        self._file.streams.add(how.stream)
        self._tid(how.thread)
        requested = start_ns - _ns(DEFAULT_LEAD_MS) if how.launch_ms is None else _ns(how.launch_ms)
        if requested > start_ns:
            raise ValueError(f"launched at {requested / 1e6} ms, after its start at {start_ns / 1e6} ms")
        call_ns = 2000 if until_ns is None else max(until_ns - requested, 2000)
        launch = _Launch(how.thread, requested, start_ns, slot_ns=2000 + 500 * len(around))
        operator_id = 0
        for depth, (name, category, extra) in enumerate(around):
            external_id = self._next_external_id()
            if category == "cpu_op":
                operator_id = external_id
            width = call_ns + 500 * (len(around) - depth)
            launch.events.append((category, name, width, {"External id": external_id, **extra}))
        args: dict[str, object] = {"External id": operator_id, "cbid": 211, "correlation": correlation}
        launch.events.append(("cuda_runtime", call, call_ns, args))
        self._launches.append(launch)
        return operator_id

    def _settled_launches(self) -> list[Event]:
        free: dict[str, int] = {}
        events: list[Event] = []
        for launch in sorted(self._launches, key=lambda one: one.requested_ns):
            at = max(launch.requested_ns, free.get(launch.thread, launch.requested_ns))
            at = min(at, launch.latest_ns)
            free[launch.thread] = at + launch.slot_ns
            tid = self._file.threads[launch.thread]
            events.extend(
                Event(category, name, self._file.pid, tid, at, width, args)
                for category, name, width, args in launch.events
            )
        return events

    def _gloo(
        self, operation: Operation, start_ms: float, end_ms: float, in_elements: int, out_elements: int, *,
        dtype: str, launch_ms: float | None, within: Sequence[str], values: Sequence[str],
    ) -> None:  # fmt: skip
        dims, types = gloo_shapes(operation, in_elements, out_elements, dtype=dtype)
        called = start_ms if launch_ms is None else launch_ms
        for name in within:
            self.host(name, called, called + 0.001, category="user_annotation")
        self.host(operation.operator, called, called + 0.001, dims=dims, types=types, values=values)
        # Send and receive run on the thread that calls them; the rest alternates between two loops.
        loop = "main" if operation.gloo in ("send", "recv") else f"gloo{sum(self._sequence.values()) % 2}"
        self.host(
            f"gloo:{operation.gloo}", start_ms, end_ms, thread=loop, category="user_annotation",
            dims=[[in_elements]], types=[INPUT_TYPE[dtype]],
        )  # fmt: skip

    def _members(self, group: str, ranks: Sequence[int] | None) -> tuple[int, ...]:
        known = self._file.groups.get(group)
        if ranks is None:
            if known is None:
                raise ValueError(f"group {group!r} is new: say which ranks it has")
            return known
        members = tuple(ranks)
        if known is not None and known != members:
            raise ValueError(f"group {group!r} has the ranks {list(known)}, not {list(members)}")
        self._file.groups[group] = members
        return members

    def _shapes(
        self,
        dims: Sequence[object] | None,
        types: Sequence[str] | None,
        values: Sequence[str] = (),
        strides: Sequence[object] = (),
    ) -> dict[str, object]:
        if dims is None:
            return {}
        self._file.has_shapes = True
        found = {"Input Dims": list(dims), "Input type": list(types or ["float"] * len(dims))}
        found |= {"Input Strides": list(strides)} if strides else {}
        return found | ({"Concrete Inputs": list(values)} if values else {})

    def _host_event(
        self,
        category: str,
        name: str,
        thread: str,
        start_ns: int,
        duration_ns: int,
        *,
        args: dict[str, object],
    ) -> None:
        if duration_ns < 0:
            raise ValueError(f"{name} ends before it starts")
        self._file.events.append(
            Event(category, name, self._file.pid, self._tid(thread), start_ns, duration_ns, args)
        )

    def _gpu_event(
        self, category: str, name: str, stream: int, start_ns: int, end_ns: int, *, args: dict[str, object]
    ) -> None:
        if self._file.device is None:
            raise ValueError(f"{name}: a trace without a device has no GPU events")
        if end_ns < start_ns:
            raise ValueError(f"{name} ends before it starts")
        self._file.streams.add(stream)
        self._file.events.append(
            Event(category, name, self._file.ordinal, stream, start_ns, end_ns - start_ns, args)
        )

    def _tid(self, thread: str) -> int:
        return self._file.threads.setdefault(thread, self._file.pid + len(self._file.threads))

    def _next_external_id(self) -> int:
        self._external_id += 1
        return self._external_id

    def _next_correlation(self) -> int:
        self._correlation += 1
        return self._correlation


def _numbered_in_order(events: Sequence[Event], name: str) -> list[Event]:
    """The events with their numbers of one kind given in the order of time, as profilers do; 0 stays."""
    first: dict[int, int] = {}
    for one in events:
        number = one.args.get(name)
        if isinstance(number, int) and number:
            first[number] = min(first.get(number, one.start_ns), one.start_ns)
    ordered = sorted(first, key=lambda number: (first[number], number))
    new = dict(zip(ordered, sorted(first), strict=True))
    return [
        replace(one, args={**one.args, name: new[number]}) if (number := one.args.get(name)) in new else one
        for one in events
    ]


def _ns(ms: float) -> int:
    return round(ms * 1e6)
