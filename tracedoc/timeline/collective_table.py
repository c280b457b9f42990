"""The collectives of one rank as columns: what travels between processes, and what is matched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans

NONE = -1
"""Stands in integer columns for what is not recorded."""

NO_TIME = int(np.iinfo(np.int64).min)
"""Stands in columns of times for an instant that is not known."""


class StartDelay(IntEnum):
    """What kept a kernel on the device from starting earlier."""

    UNKNOWN = 0
    """It was launched long before it started, and nothing ended right before it."""
    LAUNCH = 1
    """It started as soon as it was launched."""
    COMPUTE = 2
    """It started when a compute kernel had ended."""
    COMMUNICATION = 3
    """It started when the operation before it on its stream had ended."""


START_DELAYS = tuple(StartDelay)


class CollectiveOp(msgspec.Struct, frozen=True):
    """One collective as one rank saw it: a row of a :class:`CollectiveTable`.

    ``nbytes`` is the payload S of nccl-tests (the full buffer), ``None`` where sizes are not recorded.
    ``group`` holds the ranks, empty where they are not recorded. ``start_ns`` and ``end_ns`` are those of
    the kernel (of the ``gloo:*`` range on CPU): waiting for the peers is inside. ``step`` is the step's
    number, ``None`` before the first one. ``exposed_ns`` is the part with no compute beside it. ``peer`` is
    the other end of a send or receive, the root of a broadcast or reduce, where it is recorded.
    """

    op: str
    group: tuple[int, ...]
    group_name: str
    group_size: int | None
    nbytes: int | None
    dtype: str
    seq: int | None
    stream: int
    start_ns: int
    end_ns: int
    launch_ns: int | None
    step: int | None
    exposed_ns: int = 0
    peer: int | None = None
    held: StartDelay = StartDelay.UNKNOWN


class CollectiveKind(msgspec.Struct, frozen=True):
    """What many collectives of a rank have in common; the fields are those of :class:`CollectiveOp`."""

    op: str
    group: tuple[int, ...]
    group_name: str
    group_size: int | None
    dtype: str
    stream: int
    peer: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveTable:
    """The collectives of one rank in order of start, as columns of one length.

    ``kind`` indexes ``kinds``. ``launch_ns`` is ``NO_TIME`` where the launch was not captured; ``step``,
    ``seq`` and ``nbytes`` are ``NONE`` where unknown. ``held`` holds :class:`StartDelay`. Iterating and
    indexing give :class:`CollectiveOp` rows.
    """

    kinds: tuple[CollectiveKind, ...]
    kind: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    start_ns: Int64Array
    end_ns: Int64Array
    launch_ns: Int64Array
    exposed_ns: Int64Array
    nbytes: Int64Array
    seq: Int64Array
    held: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, operations: Sequence[CollectiveOp]) -> CollectiveTable:
        """Return the table of ``operations``, ordered by start."""
        listed = sorted(operations, key=lambda o: o.start_ns)
        kinds: dict[CollectiveKind, int] = {}
        kind = [
            kinds.setdefault(
                CollectiveKind(o.op, o.group, o.group_name, o.group_size, o.dtype, o.stream, o.peer),
                len(kinds),
            )
            for o in listed
        ]
        return cls(
            kinds=tuple(kinds),
            kind=np.array(kind, dtype=np.int32),
            step=np.array([NONE if o.step is None else o.step for o in listed], dtype=np.int32),
            start_ns=_int64(o.start_ns for o in listed),
            end_ns=_int64(o.end_ns for o in listed),
            launch_ns=_int64(NO_TIME if o.launch_ns is None else o.launch_ns for o in listed),
            exposed_ns=_int64(o.exposed_ns for o in listed),
            nbytes=_int64(NONE if o.nbytes is None else o.nbytes for o in listed),
            seq=_int64(NONE if o.seq is None else o.seq for o in listed),
            held=np.array([o.held for o in listed], dtype=np.uint8),
        )

    @classmethod
    def empty(cls) -> CollectiveTable:
        """Return the table without rows."""
        return cls.of(())

    def __len__(self) -> int:
        return int(self.start_ns.size)

    def __getitem__(self, row: int) -> CollectiveOp:
        return next(iter(self.take(np.array([row], dtype=np.intp))))

    def __iter__(self) -> Iterator[CollectiveOp]:
        _, *columns = self.__slots__
        for kind, step, start, end, launch, exposed, nbytes, seq, held in zip(
            *(getattr(self, name).tolist() for name in columns), strict=True
        ):
            common = self.kinds[kind]
            yield CollectiveOp(
                common.op,
                common.group,
                common.group_name,
                common.group_size,
                None if nbytes == NONE else nbytes,
                common.dtype,
                None if seq == NONE else seq,
                common.stream,
                start,
                end,
                None if launch == NO_TIME else launch,
                None if step == NONE else step,
                exposed,
                common.peer,
                START_DELAYS[held],
            )

    @property
    def stream(self) -> Int64Array:
        """The stream (the thread on CPU) of each row."""
        return np.array([kind.stream for kind in self.kinds] or [0], dtype=np.int64)[self.kind]

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> CollectiveTable:
        """Return the table of some rows (positions in order, or a mask)."""
        _, *columns = self.__slots__
        return CollectiveTable(self.kinds, *(getattr(self, name)[rows] for name in columns))

    def in_window(self, start_ns: int, end_ns: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that run at some time in ``[start_ns, end_ns)``."""
        return np.asarray((self.end_ns > start_ns) & (self.start_ns < end_ns))

    def is_op(self, *ops: str) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows whose operation is one of ``ops``."""
        wanted = np.array([kind.op in ops for kind in self.kinds], dtype=bool)
        return wanted[self.kind] if wanted.size else np.zeros(len(self), dtype=bool)

    def with_kinds(
        self, kinds: tuple[CollectiveKind, ...], kind: npt.NDArray[np.int32] | None = None
    ) -> CollectiveTable:
        """Return the same rows with ``kinds`` in place of theirs, and with which each row is of, if given."""
        return replace(self, kinds=kinds, kind=self.kind if kind is None else kind)

    def with_exposure(self, exposed: Spans) -> CollectiveTable:
        """Return the table with ``exposed_ns`` filled in from the rank's exposed communication."""
        return replace(self, exposed_ns=exposed.covered_ns(self.start_ns, self.end_ns))


def boundaries(*columns: npt.NDArray[np.generic]) -> npt.NDArray[np.intp]:
    """The begins of runs of equal rows in sorted columns of one length, and that length at the end."""
    size = columns[0].size
    if size == 0:
        return np.zeros(1, dtype=np.intp)
    change = np.zeros(size, dtype=bool)
    change[0] = True
    for column in columns:
        change[1:] |= column[1:] != column[:-1]
    return np.append(np.flatnonzero(change), size)


def by_rank(positions: npt.NDArray[np.integer], ranks: int) -> list[npt.NDArray[np.intp]]:
    """Return for each of ``ranks`` positions the places at which it stands, in order."""
    order = np.argsort(positions, kind="stable")
    edges = np.searchsorted(positions[order], np.arange(ranks + 1)).tolist()
    return [order[begin:end] for begin, end in pairwise(edges)]


def _int64(values: Iterable[int]) -> Int64Array:
    return np.fromiter(values, dtype=np.int64)
