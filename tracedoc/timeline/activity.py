"""Split the time of one device into compute, communication, copy and idle, exactly."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.launches import NO_ROW, Launches, Rows, enclosing_rows
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among, union
from tracedoc.trace.kernels import KernelCategory, is_rocm_copy_kernel, kernel_category

COMPUTE, COMMUNICATION, COPY = 0, 1, 2

WRAPPER_NAMESPACES = frozenset(
    {"autograd", "torch", "c10d", "_c10d_functional", "_c10d_functional_autograd", "FSDP"}
)
"""Namespaces of operators that only call others or enqueue work: their own time is not arithmetic."""


class Budget(msgspec.Struct, frozen=True):
    """The exact split of one window: compute + exposed_comm + exposed_copy + idle = window, in ns.

    Compute is the union of compute kernels and memsets; exposed communication is communication minus
    compute; exposed copy is copies minus both; idle is the rest. ``comm_ns`` is all communication.
    """

    window_ns: int
    compute_ns: int
    exposed_comm_ns: int
    exposed_copy_ns: int
    idle_ns: int
    comm_ns: int


class Activity(msgspec.Struct, frozen=True, eq=False):
    """What one device did over the whole capture, as disjoint sets of time.

    ``compute``, ``exposed_comm``, ``exposed_copy`` are pairwise disjoint; ``comm`` and ``copy`` overlap
    them. ``start_ns`` and ``end_ns`` are those of the first and last event of the device. ``busy`` is the
    union of all.
    """

    compute: Spans
    comm: Spans
    copy: Spans
    exposed_comm: Spans
    exposed_copy: Spans
    start_ns: int
    end_ns: int
    busy: Spans

    def within(self, start_ns: int, end_ns: int) -> Activity:
        """What it did in ``[start_ns, end_ns)``."""
        names = ("compute", "comm", "copy", "exposed_comm", "exposed_copy", "busy")
        clipped = {name: getattr(self, name).clip(start_ns, end_ns) for name in names}
        return replace(self, start_ns=start_ns, end_ns=end_ns, **clipped)

    def budget(self, start_ns: int, end_ns: int) -> Budget:
        """Return the split of ``[start_ns, end_ns)``: all activity in it, whichever step launched it."""
        return self.budgets([start_ns], [end_ns])[0]

    def budgets(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> list[Budget]:
        """Return :meth:`budget` of each window ``[starts[i], ends[i])``."""
        begins, stops = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        length = np.maximum(stops - begins, 0)
        compute, comm, exposed_comm, exposed_copy = (
            spans.covered_ns(begins, stops)
            for spans in (self.compute, self.comm, self.exposed_comm, self.exposed_copy)
        )
        idle = length - compute - exposed_comm - exposed_copy
        columns = (length, compute, exposed_comm, exposed_copy, idle, comm)
        return [Budget(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class GpuEvents(msgspec.Struct, frozen=True, eq=False):
    """The GPU events of one trace in order of start, as columns of one length.

    ``rows`` and ``launch_rows`` are those of :class:`Launches`, ``classes`` are ``COMPUTE``,
    ``COMMUNICATION`` or ``COPY``; ``launch_ns`` is when the host launched the event, its own start where that
    is not known. ``categories`` are those of kernels, by the number of their name.
    """

    rows: Rows
    launch_rows: Rows
    classes: npt.NDArray[np.int8]
    categories: Mapping[int, KernelCategory]
    kinds: npt.NDArray[np.uint8]
    device: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32]
    start_ns: Int64Array
    end_ns: Int64Array
    launch_ns: Int64Array

    def on(self, device: int | None) -> GpuEvents:
        """Return the events of one device."""
        mine = self.device == device
        if mine.all():
            return self
        columns = (name for name in self.__struct_fields__ if name != "categories")
        return replace(self, **{name: getattr(self, name)[mine] for name in columns})

    @property
    def linked(self) -> npt.NDArray[np.bool_]:
        """Which events have a launch."""
        return np.asarray(self.launch_rows != NO_ROW, dtype=np.bool_)

    @property
    def kernels(self) -> npt.NDArray[np.bool_]:
        """Which events are kernels."""
        return np.asarray(self.kinds == int(Kind.KERNEL), dtype=np.bool_)

    @property
    def working(self) -> npt.NDArray[np.bool_]:
        """Which events are kernels or memsets."""
        return np.asarray(self.kernels | (self.kinds == int(Kind.MEMSET)), dtype=np.bool_)


def classify_gpu_events(trace: Trace, launches: Launches) -> GpuEvents:
    """Return the class of every GPU event.

    Peer-to-peer copies, and copies launched inside the record of a collective (collectives on copy
    engines), are communication; ROCm's copy kernels are copies; memsets are compute.
    """
    rows = launches.gpu_rows
    kinds = trace.kind[rows]
    names = trace.name[rows]
    used = distinct(names)
    categories: dict[int, KernelCategory] = {}
    kernel_class = np.zeros(len(trace.names), dtype=np.int8)
    copy_class = np.full(len(trace.names), COPY, dtype=np.int8)
    for name_id in used.tolist():
        name = trace.names[name_id]
        categories[name_id] = kernel_category(name)
        if categories[name_id] is KernelCategory.COMMUNICATION:
            kernel_class[name_id] = COMMUNICATION
        elif is_rocm_copy_kernel(name):
            kernel_class[name_id] = COPY
    for name_id in distinct(names[kinds == int(Kind.MEMCPY)]).tolist():
        if vocabulary.copy_kind(trace.names[name_id]).direction == "PtoP":
            copy_class[name_id] = COMMUNICATION
    classes = np.where(kinds == int(Kind.MEMCPY), copy_class[names], kernel_class[names]).astype(np.int8)
    classes[kinds == int(Kind.MEMSET)] = COMPUTE
    copies = np.flatnonzero((classes == COPY) & (launches.launch_rows != NO_ROW))
    if copies.size:
        records = collective_records(trace)
        inside = enclosing_rows(trace, records, launches.launch_rows[copies]) != NO_ROW
        classes[copies[inside]] = COMMUNICATION
    starts, calls = trace.ts_ns[rows], launches.launch_rows
    return GpuEvents(
        rows=rows,
        launch_rows=calls,
        classes=classes,
        categories=categories,
        kinds=kinds,
        device=trace.device[rows],
        stream=trace.stream[rows],
        start_ns=starts,
        end_ns=starts + trace.dur_ns[rows],
        launch_ns=np.where(calls != NO_ROW, trace.ts_ns[calls], starts) if rows.size else starts,
    )


def collective_records(trace: Trace) -> Rows:
    """Return the rows of ``record_param_comms``, the host's record of each collective."""
    return trace.rows_named(lambda name: name == "record_param_comms", Kind.CPU_OP)


def device_activity(events: GpuEvents, device: int) -> Activity:
    """The activity of ``device``, from all of its events."""
    own = events.on(device)
    by_class = (own.classes == one for one in (COMPUTE, COMMUNICATION, COPY))
    return combine_activity(
        *(Spans.of(own.start_ns[mine], own.end_ns[mine]) for mine in by_class),
        start_ns=int(own.start_ns[0]),
        end_ns=int(own.end_ns.max()),
        busy=Spans.of(own.start_ns, own.end_ns),
    )


def combine_activity(
    compute: Spans, comm: Spans, copy: Spans, *, start_ns: int, end_ns: int, busy: Spans
) -> Activity:
    """Return the activity with its exposed parts; ``busy`` is the union of the three."""
    exposed_comm = comm - compute
    exposed_copy = (copy - compute) - comm
    return Activity(compute, comm, copy, exposed_comm, exposed_copy, start_ns, end_ns, busy)


def busiest_device(events: GpuEvents) -> int:
    """Return the device with most compute; with no compute at all, the one with most events."""
    devices = distinct(events.device).tolist()
    if len(devices) == 1:
        return int(devices[0])
    lengths = np.where(events.classes == COMPUTE, events.end_ns - events.start_ns, 0)
    best = max(
        devices,
        key=lambda device: (
            int(lengths[events.device == device].sum()),
            int((events.device == device).sum()),
        ),
    )
    return int(best)


def compute_stream(events: GpuEvents, device: int) -> int | None:
    """Return the stream of ``device`` with most compute-kernel time, ``None`` without compute kernels."""
    mine = (events.device == device) & (events.classes == COMPUTE) & events.kernels
    if not mine.any():
        return None
    lengths = events.end_ns - events.start_ns
    streams = distinct(events.stream[mine])
    if streams.size == 1:
        return int(streams[0])
    total = np.bincount(np.searchsorted(streams, events.stream[mine]), weights=lengths[mine])
    return int(streams[np.argmax(total)])


def computes_on_cpu(trace: Trace) -> bool:
    """Whether operators compute on the CPU, in a trace without launches.

    Some operators exist there alone. On CPUs each product of matrices resolves conjugates, on GPUs only that
    of a factor that is one. Where calls of the runtime were recorded, and none launches, no product ran on
    a GPU; in a file that is cut off launches may be missing.
    """
    if trace.rows_named(vocabulary.is_cpu_operator, Kind.CPU_OP).size:
        return True
    products = trace.rows_named(vocabulary.is_product, Kind.CPU_OP)
    if not products.size:
        return False
    if trace.is_kind(Kind.RUNTIME).any() and trace.info.known_until_ns is None:
        return True
    resolving = trace.rows_named(lambda name: name == "aten::resolve_conj", Kind.CPU_OP)
    return bool(is_among(products, enclosing_rows(trace, products, resolving)).all())


def cpu_activity(trace: Trace, stepping_threads: npt.NDArray[np.int32]) -> Activity:
    """Return the activity of a CPU/gloo trace.

    Compute is the union of the operators that work on the stepping threads: library operators
    (``aten::addmm``) as a whole, and every other operator that holds no operator. Nodes of the backward graph
    and wrappers only call others, and the c10d operators enqueue or wait: a library operator that waits for a
    collective inside (tensor parallelism) does not compute meanwhile, while what a c10d operator calls
    (gloo's reduce-scatter copies its input first) does. Operators with which a data loader makes samples on
    the training thread do not count either, nor compilation and the operators that it traces: on a GPU both
    leave the device idle. Communication is the union of the ``gloo:*`` ranges on any thread.
    """
    stepping = is_among(trace.thread, stepping_threads)
    rows = np.flatnonzero((trace.kind == int(Kind.CPU_OP)) & stepping)
    enqueues = trace.named(_only_enqueues)
    prepares = trace.named(_only_prepares)
    library = trace.named(is_library_operator)
    leaves = leaf_rows(trace, rows)
    working = union(leaves, rows[library[trace.name[rows]]])
    working, leaves = (one[~(enqueues | prepares)[trace.name[one]]] for one in (working, leaves))
    waiting = rows[enqueues[trace.name[rows]]]
    preparing = np.empty(0, dtype=np.intp)
    if prepares.any():
        ranges = trace.is_kind(Kind.CPU_OP, Kind.ANNOTATION) & stepping & prepares[trace.name]
        preparing = np.flatnonzero(ranges)
    gloo = gloo_rows(trace)
    starts, ends = trace.ts_ns, trace.end_ns
    compute = Spans.empty()
    for thread in distinct(trace.thread[working]).tolist():
        works, waits, calls, prepared = (
            Spans.of(starts[mine], ends[mine])
            for one in (working, waiting, leaves, preparing)
            for mine in [one[trace.thread[one] == thread]]
        )
        compute = compute | (((works - waits) | calls) - prepared)
    comm = Spans.of(starts[gloo], ends[gloo])
    host = trace.rows(Kind.CPU_OP, Kind.ANNOTATION)
    first = int(starts[host].min()) if host.size else 0
    last = int(ends[host].max()) if host.size else 0
    return combine_activity(compute, comm, Spans.empty(), start_ns=first, end_ns=last, busy=compute | comm)


def gloo_rows(trace: Trace) -> Rows:
    """Return the rows of the ``gloo:*`` ranges, in which the transfers really happen."""
    return trace.rows_named(vocabulary.gloo_op, Kind.ANNOTATION)


def leaf_rows(trace: Trace, rows: Rows) -> Rows:
    """Return those of ``rows`` (in time order) in which no other of them on the same thread starts."""
    order = np.lexsort((-trace.dur_ns[rows], trace.ts_ns[rows], trace.thread[rows]))
    rows = rows[order]
    if rows.size == 0:
        return rows
    leaf = np.ones(rows.size, dtype=bool)
    same_thread = trace.thread[rows[1:]] == trace.thread[rows[:-1]]
    leaf[:-1] = ~(same_thread & (trace.ts_ns[rows[1:]] < trace.ts_ns[rows[:-1]] + trace.dur_ns[rows[:-1]]))
    return np.sort(rows[leaf], kind="stable")


def is_library(name: str) -> bool:
    """True for an operator of a library (``aten::item``), not for one that only holds others."""
    namespace, separator, _ = name.partition("::")
    return bool(separator) and namespace not in WRAPPER_NAMESPACES


def is_library_operator(name: str) -> bool:
    """True for an operator of a library that came through the dispatcher."""
    return is_library(name) and name.partition("::")[0].isidentifier()


def _only_prepares(name: str) -> bool:
    return bool(vocabulary.data_loader(name) or vocabulary.is_compile_range(name))


def _only_enqueues(name: str) -> bool:
    return name.startswith(("c10d::", "_c10d_functional"))
