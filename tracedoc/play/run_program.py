"""The programs of all ranks as one: points, events and causes in common columns, collectives joined."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.ranks.bandwidth import SizeCurve
from tracedoc.spans import Int64Array
from tracedoc.step.program import TO_HOST, Cause, Group, Indices, Lags, RankProgram, StepColumns, narrow
from tracedoc.timeline.collective_table import NONE
from tracedoc.trace.distinct import is_among

Index = npt.NDArray[np.signedinteger[Any]]
Mask = npt.NDArray[np.bool_]


_IS_COMPUTE = np.ones(len(Group), dtype=bool)
_IS_COMPUTE[[Group.COMMUNICATION, Group.COPY_IN, Group.COPY_OUT, Group.COPY_OTHER]] = False


class Scenario(IntEnum):
    """How a capture is read where it leaves a choice."""

    FAST = 0
    LIKELY = 1
    SLOW = 2

    @property
    def opposite(self) -> Scenario:
        """The scenario at the other end: what is least in one is most in the other."""
        return Scenario(len(Scenario) - 1 - self)


class Split(msgspec.Struct, frozen=True, eq=False):
    """For each part of a run's collectives, in nanoseconds; one scenario.

    ``fixed_ns`` stays whatever is changed about bytes and links: latency, and time that may be waiting for
    ranks that were not captured. The rest of the transfer is in proportion to the bytes.
    """

    fixed_ns: Int64Array
    latency_ns: Int64Array


class CollectiveParts(msgspec.Struct, frozen=True, eq=False):
    """The collectives of all ranks, one entry for each rank's part, in order of rank and event.

    ``event`` is the part's GPU event, ``op`` its operation (``NONE`` where it is not matched),
    ``transfer_ns`` the time from the last rank's start to this part's end (of parts without an operation
    their length), ``nbytes`` the message (``NONE`` where unknown), ``kind`` indexes ``kinds``: the names of
    operations. ``group`` numbers the groups of ranks, whose sizes are
    ``group_sizes``, and whose links :class:`SizeCurve` describes. ``gradients`` tells which reduce gradients,
    ``extra`` which training does not need, ``complete`` which miss no rank's part. ``block`` is the block of
    a sharded unit, ``NONE`` for others. ``staged``: ranks that send and receive may be stages of a pipeline.
    ``splits`` say for each scenario what of the transfers stays when their bytes become fewer.
    """

    event: Index
    op: Int64Array
    transfer_ns: Int64Array
    nbytes: Int64Array
    kind: npt.NDArray[np.int32]
    group: npt.NDArray[np.int32]
    gradients: Mask
    extra: Mask
    complete: Mask
    block: npt.NDArray[np.int32]
    kinds: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()
    links: tuple[SizeCurve | None, ...] = ()
    staged: bool = True
    splits: tuple[Split, ...] = ()

    def named(self, *names: str) -> Mask:
        """Which parts are of operations of these names."""
        return np.array([one in names for one in self.kinds] or [False])[self.kind]

    @property
    def operations(self) -> int:
        """How many operations there are."""
        return int(self.op.max(initial=NONE)) + 1


class RankNotes(msgspec.Struct, frozen=True, eq=False):
    """What a :class:`RankProgram` says of itself beside its columns; fields are named as there."""

    step: int
    step_ns: int
    span_ns: int
    framed: bool
    opens: int
    is_cpu: bool
    lag_ns: int
    lead_ns: int
    contention: float
    label_at: Indices
    labels: tuple[str, ...]


class Layout(StepColumns, frozen=True, eq=False, kw_only=True, dict=True):
    """What no change edits: how points, events and causes of all ranks hang together.

    Columns are those of :class:`RankProgram`, one rank after the other, with indices into the whole.
    ``point_base`` and ``event_base`` are where the points and events of each rank begin, and where the last
    ones end. At the points ``batch_point`` the host waited ``batch_ns`` for a batch of loader workers.
    ``spare_cores`` are those that the operators of no rank use (:meth:`tracedoc.run.job.Job.spare_cores`).
    ``kept`` caches what many changes ask of it; a copy has its own.
    """

    ranks: tuple[int, ...]
    notes: tuple[RankNotes, ...]
    periodic: bool
    offset_ns: Int64Array
    point_base: Int64Array
    event_base: Int64Array
    batch_point: Index
    batch_ns: Int64Array
    joins: CollectiveParts
    spare_cores: int | None = None

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """The results of functions that are called :func:`once`."""
        return {}

    @property
    def points(self) -> int:
        """How many points of hosts there are."""
        return int(self.part.size)

    @property
    def events(self) -> int:
        """How many GPU events there are."""
        return int(self.stream.size)

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks compute on CPUs: then the host's time is the work itself."""
        return any(one.is_cpu for one in self.notes)

    @property
    def framed(self) -> Index:
        """The positions in ``ranks`` of ranks whose step is a range of the host."""
        return np.flatnonzero([one.framed for one in self.notes])

    @property
    def event_rank(self) -> Indices:
        """The position in ``ranks`` of each event's rank."""
        return np.repeat(np.arange(len(self.ranks), dtype=np.int32), np.diff(self.event_base))

    @property
    def point_rank(self) -> Indices:
        """The position in ``ranks`` of each point's rank."""
        return np.repeat(np.arange(len(self.ranks), dtype=np.int32), np.diff(self.point_base))

    @property
    def opens(self) -> Index:
        """The event with which the step of each rank begins."""
        return np.asarray(self.event_base[:-1] + [one.opens for one in self.notes])

    def rank_of_point(self, point: Index | int) -> Index:
        """Return the positions in ``ranks`` of the ranks that points belong to."""
        return np.asarray(np.searchsorted(self.point_base, point, side="right") - 1)

    def rank_of_event(self, event: Index | int) -> Index:
        """Return the positions in ``ranks`` of the ranks that events belong to."""
        return np.asarray(np.searchsorted(self.event_base, event, side="right") - 1)

    def lane(self, event: Index) -> Index:
        """Return a number for the stream and rank of each event."""
        return 256 * self.rank_of_event(event) + self.stream[event]

    @cached_property
    def computes(self) -> Mask:
        """Which events are compute: no copies and no communication; not to be written to."""
        return _IS_COMPUTE[self.group]

    @cached_property
    def to_host(self) -> Mask:
        """Which causes delay the return of a call; not to be written to."""
        return is_among(self.cause_kind, TO_HOST)

    def returns(self, causes: Mask) -> Mask:
        """Which points return when some causes, all of them to the host, are over."""
        found = np.zeros(self.points, dtype=bool)
        found[self.cause_to[causes]] = True
        return found


class AddedEdges(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Starts of events that a change ties to other things: ``target`` events wait for ``source``.

    A source is an event that must end, or where ``of_point`` a point that must be reached.
    """

    source: Index
    target: Index
    of_point: Mask
    lag_ns: Int64Array
    back: Mask

    @cached_property
    def shape(self) -> bytes:
        """What is tied to what, whatever the lags: equal for ties that only differ in them."""
        columns = (self.source, self.target, self.of_point, self.back)
        content = b"".join(np.ascontiguousarray(column).tobytes() for column in columns)
        return blake2b(content, digest_size=16).digest()


class RunProgram(msgspec.Struct, frozen=True, eq=False):
    """The program of a run: what changes edit, over a :class:`Layout` that they share.

    ``lag``, ``own`` and ``ready`` belong to points, ``dur`` and ``delay`` to events; ``transfer``, ``joined``
    and ``launched`` to the :class:`CollectiveParts`: one that is not joined waits for nobody, one that is not
    launched does not wait for the host. ``active`` tells which causes hold. ``contention`` is by which
    share compute is slower beside a transfer, ``scenario`` how the capture was read.
    """

    layout: Layout
    lag: Lags
    own: Lags
    ready: Lags
    dur: Lags
    delay: Lags
    transfer: Int64Array
    joined: Mask
    launched: Mask
    active: Mask
    extra: AddedEdges
    contention: float = 0.0
    scenario: Scenario = Scenario.LIKELY

    @property
    def split(self) -> Split:
        """What of the captured transfers stays when their bytes become fewer, in this scenario."""
        return self.layout.joins.splits[self.scenario]

    def played_once(self) -> RunProgram:
        """Return the program played once, from the times that were measured, instead of again and again."""
        return replace(self, layout=replace(self.layout, periodic=False))

    def edited(self, **columns: Any) -> RunProgram:
        """Return the program with other columns; those that are left alone stay the same arrays."""
        slim = {name: narrow(value) for name, value in columns.items() if name in _LONG}
        return replace(self, **{**columns, **slim})

    def tied(
        self,
        source: Index,
        target: Index,
        lag_ns: npt.ArrayLike,
        of_point: npt.ArrayLike = False,
        back: npt.ArrayLike = False,
    ) -> RunProgram:
        """Return the program with further :class:`AddedEdges`."""
        columns = zip(AddedEdges.__struct_fields__, (source, target, of_point, lag_ns, back), strict=True)
        known = {name: (getattr(self.extra, name), value) for name, value in columns}
        more = {
            name: np.concatenate((own, np.broadcast_to(np.asarray(value, dtype=own.dtype), source.shape)))
            for name, (own, value) in known.items()
        }
        return self.edited(extra=AddedEdges(**more))


BY_DEFAULT = np.ones(len(Cause), dtype=bool)
BY_DEFAULT[[Cause.ORDER, Cause.GATHER_ISSUE]] = False
"""Which causes hold where nothing speaks for the slow scenario."""


_LONG = ("lag", "own", "ready", "dur", "delay")
"""The columns of a program that have an entry for each point or event."""


class _Column:
    """Takes the values of one rank after the other into one array, which has room for ``ranks`` like the
    first: of many small ones the memory would stay taken. One value throughout takes no room at all."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._used = ranks, 0
        self._array: npt.NDArray[Any] = np.empty(0)

    def add(self, part: npt.NDArray[Any]) -> None:
        """Add values; the array gets the bits of the widest."""
        used = self._used + part.size
        if self._used == 0:
            self._array = np.empty(0, part.dtype)
        if self._is_even(part):
            self._array = np.broadcast_to(part[0], used)
        elif part.size:
            dtype = np.promote_types(self._array.dtype, part.dtype)
            if self._array.dtype != dtype or used > self._array.size or not self._array.flags.writeable:
                whole = np.empty(max(used + used // 4, self._ranks * part.size), dtype)
                whole[: self._used] = self.values()
                self._array = whole
            self._array[self._used : used] = part
        self._used = used

    def _is_even(self, part: npt.NDArray[Any]) -> bool:
        """Whether all values so far, and those of a part, are one."""
        if part.size == 0 or (self._used and self._array.flags.writeable):
            return False
        value = self._array[0] if self._used else part[0]
        return bool((part == value).all())

    def values(self) -> npt.NDArray[Any]:
        """Return all values so far."""
        return self._array[: self._used]


class Gathering:
    """Collects the programs of ranks one by one; what it holds of each is narrow."""

    def __init__(self, count: int) -> None:
        self._ranks: list[int] = []
        self._notes: list[RankNotes] = []
        self._columns = {name: _Column(count) for name in (*StepColumns.__struct_fields__, *_OF_PROGRAM)}
        self._early: list[tuple[Index, Index]] = []
        self._batches: list[tuple[Index, Int64Array]] = []
        self._points = [0]
        self._events = [0]
        self._periodic = True

    def add(self, rank: int, program: RankProgram) -> None:
        """Add the program of one more rank."""
        point, event = self._points[-1], self._events[-1]
        to_host = is_among(program.cause_kind, TO_HOST)
        moved = {
            "rejoin_from": program.rejoin_from + point,
            "rejoin_to": program.rejoin_to + point,
            "point": np.where(program.point < 0, program.point, program.point + point),
            "cause_from": program.cause_from + event,
            "cause_to": program.cause_to + np.where(to_host, point, event),
            "doing_point": program.doing_point + point,
            "offload_event": program.offload_event + event,
            "waste_event": program.waste_event + event,
        }
        for name, column in self._columns.items():
            column.add(narrow(moved[name] if name in moved else getattr(program, name)))
        self._early.append((program.early_event + event, program.early_point + point))
        waited = np.flatnonzero(program.ready_lag >= 0)
        self._batches.append((waited + point, program.held[waited].astype(np.int64)))
        self._ranks.append(rank)
        told = {name: getattr(program, name) for name in RankNotes.__struct_fields__ if name != "lag_ns"}
        self._notes.append(RankNotes(lag_ns=int(program.lag.sum()), **told))
        self._points.append(point + program.points)
        self._events.append(event + program.events)
        self._periodic &= program.periodic

    def joined(
        self, joins: CollectiveParts, offset_ns: Int64Array, spare_cores: int | None = None
    ) -> RunProgram:
        """Return all programs as one; ``offset_ns`` is when each begins, on a common clock."""
        whole = {name: column.values() for name, column in self._columns.items()}
        layout = Layout(
            ranks=tuple(self._ranks),
            notes=tuple(self._notes),
            periodic=self._periodic,
            offset_ns=offset_ns,
            point_base=np.array(self._points, dtype=np.int64),
            event_base=np.array(self._events, dtype=np.int64),
            batch_point=np.concatenate([point for point, _ in self._batches]),
            batch_ns=np.concatenate([waited for _, waited in self._batches]),
            joins=joins,
            spare_cores=spare_cores,
            **{name: whole[name] for name in StepColumns.__struct_fields__},
        )
        target = np.concatenate([event for event, _ in self._early]).astype(np.intp)
        every = np.ones(target.size, dtype=bool)
        return RunProgram(
            layout=layout,
            lag=whole["lag"],
            own=whole["own"],
            ready=whole["ready_lag"],
            dur=whole["dur"],
            delay=np.broadcast_to(np.int32(0), layout.events),
            transfer=joins.transfer_ns,
            joined=joins.op >= 0,
            launched=np.ones(joins.event.size, dtype=bool),
            active=BY_DEFAULT[layout.cause_kind],
            # Events that calls of the step before launch.
            extra=AddedEdges(
                source=np.concatenate([point for _, point in self._early]).astype(np.intp),
                target=target,
                of_point=every,
                lag_ns=layout.launch_lag[target].astype(np.int64),
                back=every & layout.periodic,
            ),
        )


_OF_PROGRAM = ("lag", "own", "ready_lag", "dur")
