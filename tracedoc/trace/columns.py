"""A Trace: the events of one rank as numpy columns, sorted by start time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.errors import TraceLimit
from tracedoc.spans import Spans
from tracedoc.trace.compact import Coded, Sparse
from tracedoc.trace.distinct import RowLookup, distinct, is_among


class Kind(IntEnum):
    """What an event is, whatever its vendor or torch version called the category."""

    CPU_OP = 0
    ANNOTATION = 1  # host ranges: record_function, ProfilerStep, nccl:*, gloo:*
    RUNTIME = 2  # CUDA/HIP runtime and driver calls on the host
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    SYNC = 6  # cuda_sync, cuda_event: how streams wait, never work
    GPU_ANNOTATION = 7
    PYTHON = 8  # python_function: kept only where the reader was asked to, all or long ones
    OVERHEAD = 9
    INSTANT = 10
    ACCELERATOR = 11  # device activity that tracedoc does not understand (MTIA, HPU, profiler ranges)


class Thread(msgspec.Struct, frozen=True):
    """One host thread (or one GPU row) that events name with ``pid``/``tid``."""

    pid: str
    tid: str
    name: str = ""


class Device(msgspec.Struct, frozen=True):
    """One entry of ``deviceProperties``; every visible device is listed, not only those used."""

    index: int
    name: str
    memory_bytes: int | None = None
    compute_major: int | None = None
    compute_minor: int | None = None
    multiprocessors: int | None = None


class ProcessGroup(msgspec.Struct, frozen=True):
    """One process group that this rank belongs to, from ``distributedInfo``."""

    name: str
    description: str
    ranks: tuple[int, ...]
    size: int


class CollectiveArgs(msgspec.Struct, frozen=True):
    """The arguments of one collective, as a kernel or a ``record_param_comms`` carries them.

    ``name`` is c10d's (``allreduce``, ``_allgather_base``, ``broadcast``, ``wait``...). Element counts
    are ``None`` where absent. ``group_ranks`` is empty where the list is missing or was shortened
    ("[0, 1, ..., 511]"). ``seq`` is c10d's number within the group.
    """

    name: str
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str = ""
    group_name: str = ""
    group_ranks: tuple[int, ...] = ()
    group_size: int | None = None
    seq: int | None = None
    src_rank: int | None = None
    dst_rank: int | None = None


class Shapes(msgspec.Struct, frozen=True):
    """``Input Dims`` and ``Input type`` of one operator: nested lists of int, and type names.

    ``values`` are its ``Concrete Inputs`` as texts, of sends, receives and convolutions alone. ``strides``
    are its ``Input Strides``, in elements as PyTorch has them; older versions record none.
    """

    dims: tuple[object, ...]
    types: tuple[str, ...]
    values: tuple[str, ...] = ()
    strides: tuple[object, ...] = ()


class ShapeTable(Mapping[int, Shapes]):
    """The shapes of operators by row: those of ``rows[i]`` are ``kinds[kind[i]]``."""

    def __init__(
        self, rows: npt.NDArray[np.int32], kind: npt.NDArray[np.int32], kinds: tuple[Shapes, ...]
    ) -> None:
        self._rows, self.kind, self.kinds = rows, kind, kinds

    @property
    def rows(self) -> npt.NDArray[np.intp]:
        """The rows of the operators, ascending."""
        return self._rows.astype(np.intp)

    @classmethod
    def empty(cls) -> ShapeTable:
        """The table of a trace without shapes."""
        return cls(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), ())

    def __getitem__(self, row: int) -> Shapes:
        place = int(np.searchsorted(self._rows, row))
        if place == self._rows.size or self._rows[place] != row:
            raise KeyError(row)
        found: Shapes = self.kinds[int(self.kind[place])]
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows.tolist())

    def __len__(self) -> int:
        return int(self._rows.size)

    def until(self, count: int) -> ShapeTable:
        """The table of the rows below ``count``."""
        first = slice(int(np.searchsorted(self._rows, count)))
        return ShapeTable(self._rows[first], self.kind[first], self.kinds)


class TraceInfo(msgspec.Struct, frozen=True):
    """What the file says about itself, apart from its events."""

    source: str
    rank: int | None = None
    world_size: int | None = None
    backend: str = ""
    host: str = ""
    devices: tuple[Device, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    group_count: int | None = None
    has_shapes: bool = False
    has_memory: bool = False
    vendor: str = ""  # "nvidia", "amd", or "" where nothing in the file shows it
    reader: str = ""  # what read it: "native" or "python"
    truncated: bool = False
    known_until_ns: int | None = None  # of a file that is cut off: behind it events may be missing


class MemoryCounters(msgspec.Struct, frozen=True, eq=False):
    """The allocator's counters of device memory, where memory was recorded, in time order.

    After the event in row ``rows[i]``, on device ``device[i]``, ``allocated[i]`` bytes are in tensors and
    ``reserved[i]`` bytes are held by the allocator; ``NO_ID`` where the event does not say.
    """

    rows: npt.NDArray[np.intp]
    device: npt.NDArray[np.int64]
    allocated: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]


class SyncRecords(msgspec.Struct, frozen=True, eq=False):
    """What the profiler recorded of streams and of the host waiting (``cuda_sync``), in time order.

    ``rows`` are the records that wait for an event: ``Stream Wait Event``, where the stream that
    ``Trace.stream`` gives waits, and ``Event Sync``, where the host does. ``wait_on_stream[i]`` is the stream
    on which that event was recorded, ``record_correlation[i]`` the correlation id of the call that did;
    ``NO_ID`` where the record does not say. The correlation id of the record is that of the waiting call.
    """

    rows: npt.NDArray[np.intp]
    wait_on_stream: npt.NDArray[np.int64]
    record_correlation: npt.NDArray[np.int64]


Few = TypeVar("Few", MemoryCounters, SyncRecords)


def _until(table: Few, count: int) -> Few:
    """What a table says of the rows below ``count``."""
    first = slice(int(np.searchsorted(table.rows, count)))
    return type(table)(*(getattr(table, name)[first] for name in table.__struct_fields__))


Int64Column = npt.NDArray[np.int64]
NarrowColumn = npt.NDArray[np.signedinteger[Any]]
"""Numbers and ids in the narrowest type that holds them all: widen them before you add or shift them."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The complete events ("ph": "X") of one rank, as columns of one length, sorted by ``ts_ns``.

    ``ts_ns`` is exact: integer nanoseconds since the Unix epoch where the file allows it
    (``baseTimeNanoseconds`` added, or absolute timestamps), else since the file's own origin.
    ``dur_ns`` is never negative. ``name`` indexes ``names``; ``thread`` indexes ``threads``.
    ``device`` and ``stream`` are ``NO_ID`` for host events. ``correlation`` links a launch to its GPU
    events; ``external_id`` links GPU events to operators. ``nbytes`` is the size of a copy on the GPU.
    Flow events and counters are not kept; instants are kept as ``Kind.INSTANT`` with duration 0 only
    where they carry a category. ``collectives`` and ``shapes`` are keyed by row. ``grid`` indexes ``grids``,
    the launch grids of kernels; ``NO_ID`` where an event does not say.
    ``syncs`` is ``None`` where no wait for an event was recorded.

    An event takes some 30 bytes: all but times is as narrow as the values of this trace allow, where an event
    was (thread, device, stream, grid) is one code, and sizes are kept of copies alone. ``column[rows]`` is an
    array in any case.
    """

    info: TraceInfo
    ts_ns: Int64Column
    dur_ns: Int64Column
    name: NarrowColumn
    kind: npt.NDArray[np.uint8]
    device: Coded
    stream: Coded
    thread: Coded
    correlation: NarrowColumn
    external_id: NarrowColumn
    nbytes: Sparse
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    grid: Coded
    collectives: dict[int, CollectiveArgs] = field(default_factory=dict)
    shapes: ShapeTable = field(default_factory=ShapeTable.empty)
    limits: tuple[TraceLimit, ...] = ()
    grids: tuple[tuple[int, ...], ...] = ()
    memory: MemoryCounters | None = None
    syncs: SyncRecords | None = None
    _end_ns: Int64Column | None = field(default=None, init=False, repr=False)
    _kept_lookup: RowLookup | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return int(self.ts_ns.size)

    @property
    def end_ns(self) -> Int64Column:
        """Where each event ends; not to be written to."""
        if self._end_ns is None:  # asked for hundreds of times
            ends = self.ts_ns + self.dur_ns
            ends.flags.writeable = False
            object.__setattr__(self, "_end_ns", ends)
            return ends
        return self._end_ns

    @property
    def _lookup(self) -> RowLookup:
        if self._kept_lookup is None:
            lookup = RowLookup(self.kind, self.name, len(self.names))
            object.__setattr__(self, "_kept_lookup", lookup)
            return lookup
        return self._kept_lookup

    def until(self, end_ns: int) -> Trace:
        """The trace as if recording had ended at ``end_ns``: what was open then ends there."""
        count = int(np.searchsorted(self.ts_ns, end_ns))
        if count == len(self) and (count == 0 or int(self.end_ns.max()) <= end_ns):
            return self
        return replace(
            self,
            ts_ns=self.ts_ns[:count],
            name=self.name[:count],
            kind=self.kind[:count],
            correlation=self.correlation[:count],
            external_id=self.external_id[:count],
            device=self.device.first(count),
            stream=self.stream.first(count),
            thread=self.thread.first(count),
            grid=self.grid.first(count),
            dur_ns=np.minimum(self.dur_ns[:count], end_ns - self.ts_ns[:count]),
            nbytes=self.nbytes.first(count),
            collectives={row: args for row, args in self.collectives.items() if row < count},
            shapes=self.shapes.until(count),
            memory=self.memory and _until(self.memory, count),
            syncs=self.syncs and _until(self.syncs, count),
        )

    def rows(self, *kinds: Kind) -> npt.NDArray[np.intp]:
        """Return the rows of the given kinds, in time order; not to be written to."""
        return self._lookup.of_kinds(kinds)

    def kind_rows_between(self, kind: Kind, start_ns: int, end_ns: int) -> npt.NDArray[np.intp]:
        """Return the rows of a kind that start in ``[start_ns, end_ns)``, in time order."""
        first, last = np.searchsorted(self.ts_ns, (start_ns, end_ns))
        return np.asarray(np.flatnonzero(self.kind[first:last] == int(kind)) + first)

    def is_kind(self, *kinds: Kind) -> npt.NDArray[np.bool_]:
        """Tell of each event whether it is of one of the kinds; several times as fast as ``np.isin``."""
        return self._lookup.is_kind(kinds)

    def named(self, matches: Callable[[str], object]) -> npt.NDArray[np.bool_]:
        """Tell of each name in ``names`` whether it matches; indexed by ``name``, it tells so of each event.

        Where there are no names, the mask has one place, so that it can be indexed.
        """
        return np.array([bool(matches(name)) for name in self.names] or [False], dtype=bool)

    def rows_named(self, matches: Callable[[str], object], *kinds: Kind) -> npt.NDArray[np.intp]:
        """Return the rows of matching names, in time order: those of some kinds, or of all without one."""
        return self.rows_of_names(self.named(matches), *kinds)

    def rows_of_names(self, chosen: npt.NDArray[np.bool_], *kinds: Kind) -> npt.NDArray[np.intp]:
        """Return the rows of the names that ``chosen`` marks, as :meth:`named` does, in time order."""
        return self._lookup.of_names(chosen, kinds)

    def rows_by_first(
        self, tests: Iterable[Callable[[str], object]], *kinds: Kind
    ) -> list[npt.NDArray[np.intp]]:
        """The rows of the names that each test fits and none before it, in time order."""
        left, found = np.ones(max(len(self.names), 1), dtype=bool), []
        for fits in tests:
            mine = left & self.named(fits)
            left &= ~mine
            found.append(self.rows_of_names(mine, *kinds))
        return found

    def spans(self, rows: npt.NDArray[np.integer] | list[int]) -> Spans:
        """When any of some events lasts."""
        return Spans.of(self.ts_ns[rows], self.end_ns[rows])

    def named_among(
        self, rows: npt.NDArray[np.intp], matches: Callable[[str], object]
    ) -> npt.NDArray[np.bool_]:
        """Tell of each of some rows whether its name matches; names of other events are not asked about."""
        used = distinct(self.name[rows]).tolist()
        return is_among(self.name[rows], [name for name in used if matches(self.names[name])])

    def row_name(self, row: int) -> str:
        """Return the name of the event in ``row``."""
        return self.names[int(self.name[row])]
