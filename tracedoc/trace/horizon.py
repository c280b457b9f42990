"""Say until when a trace is known: what it shows of the time after that may lack events."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import is_among

LOST_SHARE = 0.02
"""More launches than this without a kernel: the profiler's buffers overflowed, or it saw one device only."""

TAIL_SHARE = 0.01
"""What is written at the end of a file is among so much of its events, in the order of the file."""

FEWEST_OF_TAIL = 16
"""... and among so many."""

_CALLS = (Kind.RUNTIME,)
_ON_GPU = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.SYNC)
_ON_HOST = (Kind.CPU_OP, Kind.ANNOTATION, Kind.PYTHON)

Int64Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def cut_at(
    kind: npt.NDArray[np.uint8], ts: Int64Array, thread: npt.NDArray[Any], *, peers: bool, named: bool = False
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
