"""Say what of a file can be believed: until when it is known, in which unit, and what stands in it twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracedoc.errors import InputError
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.units import format_ms

LOST_SHARE = 0.02
"""More launches than this without a kernel: the profiler's buffers overflowed, or it saw one device only."""

TAIL_SHARE = 0.01
"""What is written at the end of a file is among so much of its events, in the order of the file."""

FEWEST_OF_TAIL = 16
"""... and among so many."""

FEWEST_HOST_CALLS = 1_000
"""Of fewer calls of the host, the shortest say nothing about the unit."""

LONG_CALL_NS = 100_000
"""The shortest tenth of a real host's calls ends below: at 0.1 to 17 us in what was captured so far."""

SHORT_CALL_NS = 100
"""No real host does half of its calls in less: the medians seen were 0.8 us and more."""

BACK_NS = 1_000_000
"""A clock that goes back by less changes no order that matters; recorders disagree by some microseconds."""

BACK_SHARE = 0.01
"""Numbers of which a larger share goes back in time, and more than one, were not given in the order of the
calls."""

FEWEST_ORDERED = 8
"""Of eight times in any order one in 160 goes back just once (the Eulerian numbers: 247 of 40,320)."""

FEWEST_DOUBLED = 100
"""A file in which fewer events stand twice, ids and all, was not joined: such events may be alike."""

_CALLS = (Kind.RUNTIME,)
_ON_GPU = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.SYNC)
_ON_HOST = (Kind.CPU_OP, Kind.ANNOTATION, Kind.PYTHON)

Int64Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def cut_at(
    kind: npt.NDArray[np.uint8], ts: Int64Array, thread: npt.NDArray[Any], *, peers: bool, named: bool
) -> int:
    """The time in ns until which a file is known that is cut off; events are in the order of the file.

    Profilers write one kind of events after the other: operators thread by thread, then calls and kernels.
    What was still being written at the cut is known until its last events; what was written before that is
    whole; what would have followed is unknown from its beginning. ``peers`` tells that other processes take
    part: then a file of one thread only lacks those that communicate. ``named``: the file names a thread of
    the host of which it holds no event, and nothing is known of what that did.
    """
    if named:
        return int(ts.min())
    known = np.iinfo(np.int64).max
    tail = np.zeros(ts.size, dtype=bool)
    tail[-max(int(ts.size * TAIL_SHARE), FEWEST_OF_TAIL) :] = True
    for kinds in (_CALLS, _ON_GPU, _ON_HOST):
        mine = is_among(kind, [int(one) for one in kinds])
        if not (mine & tail).any():
            continue
        times = ts[mine]
        known = min(known, int(times[-max(int(times.size * TAIL_SHARE), FEWEST_OF_TAIL) :].min()))
        if kinds is _ON_HOST:
            back = int((np.maximum.accumulate(times) - times).max())
            alone = peers and bool((thread[mine] == thread[mine][0]).all())
            known = int(ts.min()) if alone else min(known, int(times.max()) - back)
    return known


def kernels_end(launched: Int64Array, missing: Mask) -> int | None:
    """When the first kernel was launched of those missing at the end, in ns; ``None`` where they are few.

    ``launched`` are the times of all launches in order, ``missing`` tells which have no kernel. Kernels that
    are missing between others were lost; from some launch on they are missing because their recording ended.
    """
    if launched.size == 0:
        return None
    # Of all places to end: as few as possible are missing before it, and present after it.
    wrong = np.concatenate(([0], np.cumsum(missing))) + np.concatenate((np.cumsum(~missing[::-1])[::-1], [0]))
    end = int(wrong.argmin())
    return int(launched[end]) if launched.size - end > LOST_SHARE * launched.size else None


def went_back(ts: Int64Array, ids: npt.NDArray[np.integer]) -> tuple[int, int] | None:
    """The time to which a thread's clock went back first, and by how much, in ns; ``None`` if it did not.

    ``ts`` is when its calls start, ascending, and ``ids`` the numbers that they got one after the other.
    """
    if (ids[1:] > ids[:-1]).all():
        return None
    called = ts[np.argsort(ids, kind="stable")]
    back = called[:-1] - called[1:]
    places = np.flatnonzero(back > BACK_NS)
    if not places.size or (places.size > BACK_SHARE * ts.size and not _is_set_back(called, places)):
        return None
    return int(called[places + 1].min()), int(back[places].max())


def _is_set_back(called: Int64Array, places: npt.NDArray[np.intp]) -> bool:
    """Whether calls in the order of their numbers go back in time once, and it is no chance.

    So few of them may lack an order, and no single one out of order must explain it.
    """
    if places.size > 1 or called.size < FEWEST_ORDERED:
        return False
    before, after = np.split(called, places + 1)
    return int((before > after.min()).sum()) > 1 and int((after < before.max()).sum()) > 1


def check_unit(path: str, kind: npt.NDArray[np.uint8], ts: Int64Array, dur: Int64Array) -> None:
    """Raise :class:`InputError` where times cannot be microseconds: no call is short, or most are too short.

    Nanoseconds are whole numbers; whole microseconds may be zero.
    """
    calls = np.flatnonzero((kind == int(Kind.RUNTIME)) | (kind == int(Kind.CPU_OP)))
    if calls.size < FEWEST_HOST_CALLS:
        return
    lengths = dur[calls]
    if 2 * np.count_nonzero(lengths < SHORT_CALL_NS) >= calls.size and (middle := median(lengths)) > 0:
        raise InputError(
            f"{path} seems to have its times in milliseconds: half of its operators and calls "
            f"would take less than {middle:.0f} ns",
            "trace files have microseconds: multiply every ts and dur by 1,000, or export it again",
        )
    tenth = calls.size // 10
    short = np.count_nonzero(lengths <= LONG_CALL_NS) > tenth
    if not short and not (lengths % 1_000).any() and not (ts[calls] % 1_000).any():
        raise InputError(
            f"{path} seems to have its times in nanoseconds: the shortest tenth of its operators and calls "
            f"would take {format_ms(int(np.partition(lengths, tenth)[tenth]) / 1e6)}",
            "trace files have microseconds: divide every ts and dur by 1,000, or export it again",
        )


def without_length(lengths: Int64Array, names: npt.NDArray[Any]) -> Mask:
    """Which kernels have length 0 because theirs is not known; ``names`` are numbers of names.

    No kernel takes no time. Of times in whole microseconds 0 stands for less than one; not where a kernel of
    that name takes two or more whenever it takes any, and not where none in the trace takes any.
    """
    none: Mask = lengths == 0
    if not none.any() or none.all() or (lengths % 1_000).any():
        return none
    never = np.iinfo(np.int64).max
    shortest = np.full(int(names.max()) + 1, never)
    np.minimum.at(shortest, names[~none], lengths[~none])
    least = shortest[names]
    return np.asarray(none & (least > 1_000) & (least < never))


def first_of_each(
    ordered_ts: Int64Array,
    places: npt.NDArray[np.intp],
    *,
    said: Sequence[npt.NDArray[np.integer]],
    ids: Sequence[npt.NDArray[np.integer]],
) -> npt.NDArray[np.bool_]:
    """Which events stand for the first time; in order of start.

    ``said`` and ``ids`` are all else of them: of the i-th event, what stands at ``places[i]``.
    """
    first = np.ones(ordered_ts.size, dtype=np.bool_)
    same = np.flatnonzero(ordered_ts[1:] == ordered_ts[:-1])
    if same.size < FEWEST_DOUBLED:
        return first
    rows = distinct(np.concatenate((same, same + 1)))
    columns = [*(column[places[rows]] for column in (*said, *ids)), ordered_ts[rows]]
    order = np.lexsort(columns)
    alike = np.ones(max(rows.size - 1, 0), dtype=np.bool_)
    for column in columns:
        alike &= np.diff(column[order]) == 0
    again = rows[order][1:][alike]
    known = np.zeros(again.size, dtype=np.bool_)
    for column in ids:
        known |= column[places[again]] > 0
    if int(known.sum()) >= FEWEST_DOUBLED:
        first[again] = False
    return first
