"""The steps of one rank as columns: what its digest keeps of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import msgspec
import numpy as np
from msgspec.structs import astuple, fields

from tracedoc.digest.packed_columns import PackedColumn
from tracedoc.spans import Int64Array
from tracedoc.timeline.activity import Budget


class StepDigest(msgspec.Struct, frozen=True, eq=False):
    """One step of one rank: its window on the rank's own clock, budget, idle causes and exposure."""

    index: int
    start_ns: int
    end_ns: int
    complete: bool
    budget: Budget
    idle_ns: Mapping[str, int]
    blocking_ns: int | None


class StepTable(Sequence[StepDigest]):
    """Steps in order; one is made anew when it is asked for.

    ``causes`` are those of :attr:`StepDigest.idle_ns`, the same in every step; all steps or none have a
    ``blocking_ns``.
    """

    __slots__ = ("_blocking", "_times", "_windows", "causes")

    def __init__(self, steps: Sequence[StepDigest] = ()) -> None:
        self.causes: tuple[str, ...] = tuple(steps[0].idle_ns) if steps else ()
        self._blocking = bool(steps) and steps[0].blocking_ns is not None
        self._windows = np.array([(s.index, s.start_ns, s.end_ns) for s in steps], dtype=np.int64)
        self._times = PackedColumn.of(np.array([_times(step) for step in steps], dtype=np.int64).ravel())

    def __len__(self) -> int:
        return len(self._windows)

    @overload
    def __getitem__(self, place: int) -> StepDigest: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[StepDigest]: ...

    def __getitem__(self, place: int | slice) -> StepDigest | Sequence[StepDigest]:
        if isinstance(place, slice):
            return tuple(self)[place]
        return self._step(self._windows[place].tolist(), self._rows()[place].tolist())

    def __iter__(self) -> Iterator[StepDigest]:
        return map(self._step, self._windows.tolist(), self._rows().tolist())

    def shared(self, names: Callable[[tuple[str, ...]], tuple[str, ...]]) -> StepTable:
        """Return the table with the names that others have too in place of its own."""
        table = StepTable()
        table.causes, table._blocking = names(self.causes), self._blocking
        table._windows, table._times = self._windows, self._times
        return table

    def _rows(self) -> Int64Array:
        return self._times.unpack().reshape(len(self), 2 + _PARTS + len(self.causes))

    def _step(self, window: list[int], times: list[int]) -> StepDigest:
        (index, start_ns, end_ns), (complete, blocking_ns, *rest) = window, times
        return StepDigest(
            index,
            start_ns,
            end_ns,
            complete=bool(complete),
            budget=Budget(*rest[:_PARTS]),
            idle_ns=dict(zip(self.causes, rest[_PARTS:], strict=True)),
            blocking_ns=blocking_ns if self._blocking else None,
        )


_PARTS = len(fields(Budget))


def _times(step: StepDigest) -> tuple[int, ...]:
    return (step.complete, step.blocking_ns or 0, *astuple(step.budget), *step.idle_ns.values())
