"""The programs of all ranks as one: points, events and causes in common columns, collectives joined."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.replay.rank.program import NONE, TO_HOST, Cause, Codes, Group, RankProgram
from tracedoc.spans import Int64Array

Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


_IS_COMPUTE = np.ones(len(Group), dtype=bool)
_IS_COMPUTE[[Group.COMMUNICATION, Group.COPY_IN, Group.COPY_OUT, Group.COPY_OTHER]] = False


class Reading(IntEnum):
    """How a capture is read where it leaves a choice."""

    FAST = 0
    LIKELY = 1
    SLOW = 2


class Joins(msgspec.Struct, frozen=True, eq=False):
    """The collectives of all ranks, one entry for each rank's part, in order of rank and event.

    ``event`` is the part's GPU event, ``op`` its operation (``NONE`` where it is not matched),
    ``transfer_ns`` the time from the last rank's start to this part's end (of parts without an operation
    their length), ``nbytes`` the message (``NONE`` where unknown), ``kind`` indexes ``kinds``: the names of
    operations. ``group`` numbers the groups of ranks, whose sizes are
    ``group_sizes``. ``gradients`` tells which reduce gradients, ``complete`` which miss no rank's part.
    """

    event: Index
    op: Int64Array
    transfer_ns: Int64Array
    nbytes: Int64Array
    kind: npt.NDArray[np.int32]
    group: npt.NDArray[np.int32]
    gradients: Mask
    complete: Mask
    kinds: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()

    @property
    def operations(self) -> int:
        """How many operations there are."""
        return int(self.op.max(initial=NONE)) + 1


class Layout(msgspec.Struct, frozen=True, eq=False):
    """What no change edits: how points, events and causes of all ranks hang together.

    Columns are those of :class:`RankProgram`, one rank after the other, with indices into the whole.
    ``point_rank`` and ``event_rank`` are positions in ``ranks``; ``lane`` numbers each stream of each rank.
    """

    ranks: tuple[int, ...]
    programs: tuple[RankProgram, ...]
    periodic: bool
    offset_ns: Int64Array
    point_base: Int64Array
    event_base: Int64Array
    point_rank: Index
    event_rank: Index
    kind: Codes
    part: Codes
    after_return: Mask
    blocks: Mask
    rejoin_from: Index
    rejoin_to: Index
    rejoin_lag: Int64Array
    point: Index
    launch_lag: Int64Array
    gap: Int64Array
    lane: Index
    group: Codes
    event_part: Codes
    cause_kind: Codes
    cause_from: Index
    cause_to: Index
    cause_lag: Int64Array
    cause_back: Mask
    joins: Joins

    @property
    def computes(self) -> Mask:
        """Which events are compute: no copies and no communication."""
        return _IS_COMPUTE[self.group]

    @property
    def to_host(self) -> Mask:
        """Which causes delay the return of a call."""
        return np.isin(self.cause_kind, TO_HOST)


class Extra(msgspec.Struct, frozen=True, eq=False):
    """Starts of events that a change ties to other things: ``target`` events wait for ``source``.

    A source is an event that must end, or where ``of_point`` a point that must be reached.
    """

    source: Index
    target: Index
    of_point: Mask
    lag_ns: Int64Array
    back: Mask

    @classmethod
    def none(cls) -> Extra:
        """Return no ties."""
        index, mask = np.empty(0, dtype=np.intp), np.empty(0, dtype=bool)
        return cls(index, index, mask, np.empty(0, dtype=np.int64), mask)


class RunProgram(msgspec.Struct, frozen=True, eq=False):
    """The program of a run: what changes edit, over a :class:`Layout` that they share.

    ``lag``, ``own`` and ``ready`` belong to points, ``dur`` and ``delay`` to events; ``transfer``, ``joined``
    and ``launched`` to the parts of :class:`Joins`: a part that is not joined waits for nobody, one that is
    not launched does not wait for the host. ``active`` tells which causes hold. ``contention`` is by which
    share compute is slower beside a transfer, ``reading`` how the capture was read.
    """

    layout: Layout
    lag: Int64Array
    own: Int64Array
    ready: Int64Array
    dur: Int64Array
    delay: Int64Array
    transfer: Int64Array
    joined: Mask
    launched: Mask
    active: Mask
    extra: Extra
    contention: float = 0.0
    reading: Reading = Reading.LIKELY

    def edited(self, **columns: object) -> RunProgram:
        """Return the program with other columns; those that are left alone stay the same arrays."""
        return replace(self, **columns)


BY_DEFAULT = np.ones(len(Cause), dtype=bool)
BY_DEFAULT[[Cause.ORDER, Cause.GATHER_ISSUE]] = False
"""Which causes hold where nothing speaks for the slow reading."""


def join_programs(
    ranks: Sequence[int], programs: Sequence[RankProgram], joins: Joins, offset_ns: Int64Array
) -> RunProgram:
    """Return the programs of ``ranks`` as one; ``offset_ns`` is when each begins, on a common clock."""
    points = np.array([0, *np.cumsum([program.points for program in programs])], dtype=np.int64)
    events = np.array([0, *np.cumsum([program.events for program in programs])], dtype=np.int64)

    def all_of(name: str, base: Int64Array | None = None) -> Any:
        found = [getattr(program, name) for program in programs]
        if base is not None:
            found = [
                np.where(one < 0, NONE, one + start) for one, start in zip(found, base[:-1], strict=True)
            ]
            return np.concatenate(found).astype(np.intp)
        return np.concatenate(found)

    targets = []
    for number, program in enumerate(programs):
        to_host = np.isin(program.cause_kind, TO_HOST)
        targets.append(program.cause_to + np.where(to_host, points[number], events[number]))
    lanes = [program.stream.astype(np.intp) + 256 * number for number, program in enumerate(programs)]
    counts = np.diff(points), np.diff(events)
    layout = Layout(
        ranks=tuple(ranks),
        programs=tuple(programs),
        periodic=all(program.periodic for program in programs),
        offset_ns=offset_ns,
        point_base=points,
        event_base=events,
        point_rank=np.repeat(np.arange(len(programs)), counts[0]),
        event_rank=np.repeat(np.arange(len(programs)), counts[1]),
        kind=all_of("kind"),
        part=all_of("part"),
        after_return=all_of("after_return"),
        blocks=all_of("blocks"),
        rejoin_from=all_of("rejoin_from", points),
        rejoin_to=all_of("rejoin_to", points),
        rejoin_lag=all_of("rejoin_lag"),
        point=all_of("point", points),
        launch_lag=all_of("launch_lag"),
        gap=all_of("gap"),
        lane=np.concatenate(lanes),
        group=all_of("group"),
        event_part=all_of("event_part"),
        cause_kind=all_of("cause_kind"),
        cause_from=all_of("cause_from", events),
        cause_to=np.concatenate(targets).astype(np.intp),
        cause_lag=all_of("cause_lag"),
        cause_back=all_of("cause_back"),
        joins=joins,
    )
    delay = all_of("delay")
    return RunProgram(
        layout=layout,
        lag=all_of("lag"),
        own=all_of("own"),
        ready=all_of("ready_lag"),
        dur=all_of("dur"),
        delay=np.zeros_like(delay),
        transfer=joins.transfer_ns,
        joined=joins.op >= 0,
        launched=np.ones(joins.event.size, dtype=bool),
        active=BY_DEFAULT[layout.cause_kind],
        extra=_early(layout, programs),
    )


def _early(layout: Layout, programs: Sequence[RankProgram]) -> Extra:
    """Return the ties of events to the calls of the step before that launch them."""
    bases = zip(programs, layout.event_base, layout.point_base, strict=False)
    found = [(one.early_event + event, one.early_point + point) for one, event, point in bases]
    target = np.concatenate([event for event, _ in found]).astype(np.intp)
    every = np.ones(target.size, dtype=bool)
    return Extra(
        source=np.concatenate([point for _, point in found]).astype(np.intp),
        target=target,
        of_point=every,
        lag_ns=layout.launch_lag[target],
        back=every & layout.periodic,
    )


def measured_delay(program: RunProgram) -> Int64Array:
    """Return what the causes leave unexplained of each event's start."""
    return np.concatenate([one.delay for one in program.layout.programs])
