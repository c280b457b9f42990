"""A table of collectives as small as it travels, and as it is kept for many ranks at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.digest.packed_columns import PackedColumn
from tracedoc.spans import Int64Array
from tracedoc.timeline.collective_table import NO_TIME, CollectiveKind, CollectiveTable

_KIND, _STEP, _APART, _LENGTH, _LEAD, _EXPOSED, _NBYTES, _SEQ, _HELD = range(9)


class PackedTable(CollectiveTable):
    """A :class:`CollectiveTable` whose columns are packed; one is unpacked anew whenever it is asked for.

    Of starts the distances are kept, of ends and launches those from the start.
    """

    __slots__ = ("_columns", "_first_ns", "_no_lead_ns")
    _columns: tuple[PackedColumn, ...]
    _first_ns: int
    _no_lead_ns: int  # stands for the lead of a launch that was not captured

    def __init__(
        self,
        kinds: tuple[CollectiveKind, ...],
        kind: npt.NDArray[np.int32],
        step: npt.NDArray[np.int32],
        start_ns: Int64Array,
        end_ns: Int64Array,
        launch_ns: Int64Array,
        exposed_ns: Int64Array,
        nbytes: Int64Array,
        seq: Int64Array,
        held: npt.NDArray[np.uint8],
    ) -> None:
        known = launch_ns != NO_TIME
        lead = np.where(known, start_ns - launch_ns, 0)
        no_lead_ns = int(lead.min(initial=0)) - 1
        lead = np.where(known, lead, no_lead_ns)
        columns = (kind, step, np.diff(start_ns), end_ns - start_ns, lead, exposed_ns, nbytes, seq, held)
        first_ns = int(start_ns[0]) if start_ns.size else 0
        _fill(self, kinds, tuple(PackedColumn.of(column) for column in columns), first_ns, no_lead_ns)

    @classmethod
    def of_table(cls, table: CollectiveTable) -> PackedTable:
        """Return a table packed."""
        return cls(
            table.kinds,
            table.kind,
            table.step,
            table.start_ns,
            table.end_ns,
            table.launch_ns,
            table.exposed_ns,
            table.nbytes,
            table.seq,
            table.held,
        )

    def shared(
        self,
        kinds: Callable[[tuple[CollectiveKind, ...]], tuple[CollectiveKind, ...]],
        column: Callable[[PackedColumn], PackedColumn],
    ) -> PackedTable:
        """Return the table with what others have alike in place of its own: kinds, and every column."""
        return _rebuilt(
            kinds(self.kinds), tuple(map(column, self._columns)), self._first_ns, self._no_lead_ns
        )

    def __len__(self) -> int:
        return self._columns[_KIND].size

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self.kinds, self._columns, self._first_ns, self._no_lead_ns)

    @property
    def kind(self) -> npt.NDArray[np.int32]:
        """Index of the kind of each row."""
        return self._columns[_KIND].unpack().astype(np.int32)

    @property
    def step(self) -> npt.NDArray[np.int32]:
        """Number of the step of each row."""
        return self._columns[_STEP].unpack().astype(np.int32)

    @property
    def start_ns(self) -> Int64Array:
        """When each kernel starts."""
        starts = np.empty(len(self), dtype=np.int64)
        starts[:1] = self._first_ns
        starts[1:] = self._columns[_APART].unpack()
        return np.cumsum(starts, out=starts)

    @property
    def end_ns(self) -> Int64Array:
        """When each kernel ends."""
        return self.start_ns + self._columns[_LENGTH].unpack()

    @property
    def launch_ns(self) -> Int64Array:
        """When each was launched."""
        lead = self._columns[_LEAD].unpack()
        return np.where(lead == self._no_lead_ns, NO_TIME, self.start_ns - lead)

    @property
    def exposed_ns(self) -> Int64Array:
        """The part of each with no compute beside it."""
        return self._columns[_EXPOSED].unpack()

    @property
    def nbytes(self) -> Int64Array:
        """The payload of each."""
        return self._columns[_NBYTES].unpack()

    @property
    def seq(self) -> Int64Array:
        """The sequence number of each."""
        return self._columns[_SEQ].unpack()

    @property
    def held(self) -> npt.NDArray[np.uint8]:
        """What kept each from starting earlier."""
        return self._columns[_HELD].unpack().astype(np.uint8)


def _rebuilt(
    kinds: tuple[CollectiveKind, ...], columns: tuple[PackedColumn, ...], first_ns: int, no_lead_ns: int
) -> PackedTable:
    table = PackedTable.__new__(PackedTable)
    _fill(table, kinds, columns, first_ns, no_lead_ns)
    return table


def _fill(
    table: PackedTable,
    kinds: tuple[CollectiveKind, ...],
    columns: tuple[PackedColumn, ...],
    first_ns: int,
    no_lead_ns: int,
) -> None:
    for name, value in (
        ("kinds", kinds),
        ("_columns", columns),
        ("_first_ns", first_ns),
        ("_no_lead_ns", no_lead_ns),
    ):
        object.__setattr__(table, name, value)  # as the generated code of a frozen dataclass does
