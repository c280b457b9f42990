"""The analysed step of one rank as a program: host calls, GPU events, and what each of them waits for."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.spans import Int64Array
from tracedoc.step.codec import decode, encode
from tracedoc.timeline.collective_table import NONE
from tracedoc.trace.distinct import is_among

Codes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int32]
Lags = npt.NDArray[np.signedinteger[Any]]
"""Nanoseconds, in 32 bits where they are few."""

UNKNOWN_SHARE = -1.0


_NARROW_LIMIT = 1 << 28


def narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers in 32 bits where they are so small that a few of them can be added there."""
    if values.dtype != np.int64 or values.size == 0:
        return values
    least, most = int(values.min()), int(values.max())
    return values.astype(np.int32) if max(-least, most) < _NARROW_LIMIT else values


class Call(IntEnum):
    """What a point of the host does."""

    LAUNCH = 0
    COPY = 1
    SYNC = 2
    ALLOCATION = 3
    INPUT = 4
    COMM = 5
    RANGE = 6  # begins or ends a range without any call


class Doing(IntEnum):
    """What a host does between two of its calls, beside launching."""

    HOOKS = 0  # hooks of sharded units
    OFFLOADED = 1  # an optimizer on the CPU, where parameters are offloaded
    LOADING = 2  # kernels and libraries are called for the first time
    COMPILING = 3
    COMPUTING = 4  # an operator computes on the CPU
    COLLECTING = 5  # Python collects garbage
    NOTHING = 6  # on a CPU: no operator runs, and nothing is waited for
    RECOMPUTING = 7  # on a CPU: activations are computed again
    DISPATCHING = 8  # gradients are clipped, or parameters updated, that are DTensors
    OUTSIDE = 9  # on a CPU: at operators outside backward passes and the optimizer
    BACKWARD = 10  # on a CPU: at operators of a backward pass
    BETWEEN = 11  # on a CPU: Python from one operator to the next
    DOUBLE = 12  # on a CPU: at operators on numbers of 64 bits
    UNTOUCHED = 13  # on a CPU: at rows of embedding tables that no sample of the step touches


class Group(IntEnum):
    """What a GPU event does, as far as changes tell events apart."""

    MATRIX = 0
    ATTENTION = 1
    POINTWISE = 2
    OPTIMIZER = 3
    COMMUNICATION = 4
    COPY_IN = 5
    COPY_OUT = 6
    COPY_OTHER = 7
    MEMSET = 8
    CAST = 9
    BUCKETS = 10  # gradients are brought into the buckets of DistributedDataParallel, or back


class Waste(IntEnum):
    """How the same could be computed in less time; the first that fits a kernel counts."""

    NONE = 0
    ATTENTION = 1  # by one fused kernel, which does scaling, mask and softmax while it multiplies
    LAYOUT = 2  # without changing the order of tensors for convolutions and back
    FP32 = 3  # on tensor cores
    SHAPES = 4  # with sizes that fit the tiles of matrix kernels
    FUSION = 5  # in one kernel for several that follow each other
    LOSS = 6  # with logits that are read and written once
    FP64 = 7  # with numbers of 32 bits
    UNTOUCHED = 8  # with gradients of those rows of embedding tables that samples touch


class Cause(IntEnum):
    """Why one thing waits for another, beside the order of a stream and the launch."""

    RECORDED = 0  # a Stream Wait Event, from the profiler's synchronisation records
    CROSS = 1  # an event of another stream ended right before an otherwise unexplained start
    ISSUE = 2  # a collective waits for the stream that it was called on
    ORDER = 3  # compute that started after a collective had ended: perhaps it waited for it
    SYNC = 4  # a call of the host returns when an event has ended
    COPY = 5  # a copy that blocks the host
    QUEUE = 6  # a launch that waits for room in the queue
    GATHER_ISSUE = 7  # ISSUE of a gather, which may have been called on a stream of its own
    DATA = 8  # an order that data demands: reduced gradients, gathered and updated parameters
    USE = 9  # compute that is launched next after a gather of no known unit: it may need what is gathered
    LIMIT = 10  # a gather is called when few are in flight, whether the host waits for that today or not
    ANSWER = 11  # a rank that was not captured answers no sooner after what is sent to it


Part = tuple[Cause, Int64Array, Int64Array, Int64Array]
"""Causes of one kind: their sources, their targets, and the lag of each in nanoseconds."""

TO_HOST = (Cause.SYNC, Cause.COPY, Cause.QUEUE, Cause.LIMIT)
"""Causes whose target is a point of the host, which returns then; all others delay an event's start."""


class Unplayable(msgspec.Struct, frozen=True):
    """Why a step has no program."""

    reason: str


class TooLong(Unplayable, frozen=True):
    """The step has more events than there is room for."""


class StepColumns(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What no change edits, of one rank or of all ranks; :class:`RankProgram` says what each column is."""

    kind: Codes
    part: Codes
    after_return: npt.NDArray[np.bool_]
    blocks: npt.NDArray[np.bool_]
    rejoin_from: Indices
    rejoin_to: Indices
    rejoin_lag: Lags
    point: Indices
    launch_lag: Lags
    gap: Lags
    delay: Lags
    stream: Codes
    group: Codes
    event_part: Codes
    cause_kind: Codes
    cause_from: Indices
    cause_to: Indices
    cause_lag: Lags
    cause_back: npt.NDArray[np.bool_]
    doing: Codes = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    doing_point: Indices = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    doing_ns: Lags = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    offload_event: Indices = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    waste: Codes = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    waste_event: Indices = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    waste_ns: Lags = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def at(self, doing: Doing) -> tuple[Indices, Lags]:
        """The points before which the host does something, in order, and for how many ns."""
        mine = self.doing == doing
        return self.doing_point[mine], self.doing_ns[mine]


class RankProgram(StepColumns, frozen=True, eq=False, kw_only=True):
    """One step of one rank. All times are nanoseconds; columns of one kind have one length.

    Points are calls of the host, all launching threads merged, in order of start: ``lag[i]`` from the start
    of point ``i - 1``, or from its return where ``after_return[i]``; that of point 0 is counted from the last
    point of the step before. A point whose ``blocks[i]`` returns ``own[i]`` after it may go on; until then it
    waits for the causes that point to it. ``rejoin_from``, ``rejoin_to`` and ``rejoin_lag`` say that a point
    also comes after the return of an earlier one of its thread. ``ready_lag[i]`` is, for a wait for a batch
    that loader workers make, the time since the batch before was ready; ``NONE`` for others. ``held[i]`` is
    how long a point that blocks took when it was measured.

    Events are those of the judged device, by stream and start: ``point[e]`` launched it (``NONE`` where
    unknown), and it starts ``launch_lag[e]`` after that point's start, ``gap[e]`` after the event before it
    on its stream has ended (both at the earliest), and ``delay[e]`` later than anything explains. It was
    measured to start ``began[e]`` after ``start_ns``.

    ``step_ns`` is the measured length of the step, ``span_ns`` the time from its first event to its last one;
    event ``opens`` is that first one, as what was ready earlier does not begin the step.
    ``start_ns`` is when the first call starts (without calls the first event), on the rank's own clock.
    The first and last point of a ``framed`` program are where the host's range of the step begins and ends:
    played once, the step is as long as from the one to the other, or to its last event.
    Events ``early_event`` are launched in the step before, by what ``early_point`` is there.
    ``cause_from`` are events, ``cause_to`` events or points (see :data:`TO_HOST`), ``cause_back`` tells that
    the source belongs to the step before. ``row[e]`` is the row of a collective in the rank's table.
    ``contention`` is by which share compute is slower beside communication (``UNKNOWN_SHARE`` where that
    cannot be measured), ``lead_ns`` by how much every launch was too early to hold its event up, 0 where one
    did. ``labels`` names the work behind the longest lags of the host, which precede the
    points ``label_at``. Of the lag before each point ``doing_point`` the host is at ``doing``
    (:class:`Doing`) for ``doing_ns``; such times may overlap. ``unit_event`` are the gathers and
    reductions of sharded units, ``unit_block`` the number of the block that each belongs to, the same on all
    ranks.
    ``offload_event`` are copies of what is offloaded. Events ``waste_event`` would save ``waste_ns`` if the
    same were computed another way (:class:`Waste`).
    """

    step: int
    step_ns: int
    span_ns: int
    start_ns: int
    periodic: bool
    is_cpu: bool
    lag: Lags
    own: Lags
    ready_lag: Lags
    held: Lags
    dur: Lags
    began: Lags
    row: Indices
    contention: float = UNKNOWN_SHARE
    framed: bool = False
    opens: int = 0
    lead_ns: int = 0
    early_event: Indices = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    early_point: Indices = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    labels: tuple[str, ...] = ()
    label_at: Indices = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    unit_event: Indices = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    unit_block: Indices = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))

    @property
    def points(self) -> int:
        """How many points of the host the step has."""
        return int(self.lag.size)

    @property
    def events(self) -> int:
        """How many GPU events the step has."""
        return int(self.dur.size)

    @property
    def fits_together(self) -> bool:
        """Whether columns of one kind have one length, and indices point to what is there."""
        columns = (
            (_OF_POINTS, self.points), (_OF_EVENTS, self.events), (_OF_CAUSES, self.cause_kind.size),
            (_OF_REJOINS, self.rejoin_from.size), (("early_event", "early_point"), self.early_event.size),
            (("doing", "doing_point", "doing_ns"), self.doing.size),
            (("unit_event", "unit_block"), self.unit_event.size),
            (("offload_event",), self.offload_event.size),
            (("waste", "waste_event", "waste_ns"), self.waste.size),
        )  # fmt: skip
        if any(getattr(self, name).shape != (size,) for names, size in columns for name in names):
            return False
        to_host = is_among(self.cause_kind, TO_HOST)
        if not 0 <= self.opens < max(self.events, 1):
            return False
        pointers = (
            (self.rejoin_from, 0, self.points), (self.rejoin_to, 0, self.points),
            (self.point, NONE, self.points), (self.cause_from, 0, self.events),
            (self.cause_to[to_host], 0, self.points), (self.cause_to[~to_host], 0, self.events),
            (self.early_event, 0, self.events), (self.early_point, 0, self.points),
            (self.doing_point, 0, self.points), (self.doing, 0, len(Doing)),
            (self.unit_event, 0, self.events), (self.offload_event, 0, self.events),
            (self.waste_event, 0, self.events), (self.waste, 0, len(Waste)),
            (self.row, NONE, 1 << 31), (self.cause_kind, 0, len(Cause)), (self.kind, 0, len(Call)),
            (self.group, 0, len(Group)),
        )  # fmt: skip
        return all(bool(((column >= least) & (column < most)).all()) for column, least, most in pointers)


_OF_POINTS = ("kind", "part", "lag", "after_return", "blocks", "own", "ready_lag", "held")
_OF_EVENTS = (
    "point", "launch_lag", "gap", "dur", "delay", "began", "stream", "group", "event_part", "row",
)  # fmt: skip
_OF_CAUSES = ("cause_kind", "cause_from", "cause_to", "cause_lag", "cause_back")
_OF_REJOINS = ("rejoin_from", "rejoin_to", "rejoin_lag")


NARROWED = (
    "lag", "own", "ready_lag", "held", "rejoin_lag", "launch_lag", "gap", "dur", "delay", "began",
    "cause_lag", "waste_ns",
)  # fmt: skip


class EncodedProgram(msgspec.Struct, frozen=True):
    """The program of one step of a rank, as bytes; ``step`` is its number."""

    step: int
    data: bytes

    @classmethod
    def of(cls, program: RankProgram) -> EncodedProgram:
        """Return a program encoded."""
        columns = {name: narrow(getattr(program, name)) for name in NARROWED}
        return cls(program.step, encode(replace(program, **columns)))

    def decoded(self) -> RankProgram:
        """Return the program; raises :class:`ValueError` where its columns do not fit together."""
        program = decode(self.data, RankProgram)
        if not program.fits_together:
            raise ValueError("the columns of this program do not fit together")
        return program
