"""Choose where the work of each rank is done, and yield what comes of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from tracedoc.executors.local import here, in_processes, usable_cores
from tracedoc.executors.work import Outcomes, Result, Work

SMALL_BYTES = 4 << 20
"""Files that are smaller than this together are read in this process, unless a number of jobs is asked for:
starting workers takes up to 0.3 s, in which one process reads more than this."""

_WINDOWS_MAX_WORKERS = 61


def run_each(
    work: Work[Result],
    sizes: Mapping[str, int],
    *,
    jobs: int | None = None,
    executor: str | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Outcomes[Result]:
    """Do ``work`` for each path of ``sizes`` (stored bytes), the largest first; yield results as they come.

    ``executor`` is one of :data:`tracedoc.executors.clusters.WAYS`; without it, ``jobs`` processes of this
    machine (one a core), or this very process where more would not pay. An :class:`InputError` that ``work``
    raises is yielded and a worker that dies costs its own path only; other exceptions are bugs and are
    raised. ``on_bytes`` is called with the bytes read so far, of all paths together. Close the iterator to
    stop: it leaves no process behind.
    """
    paths = sorted(sizes, key=lambda path: -sizes[path])
    if executor is not None:
        from tracedoc.executors.clusters import on_cluster

        return on_cluster(work, paths, sizes, jobs=jobs, executor=executor, on_bytes=on_bytes)
    workers = _workers_for(sizes, jobs)
    if workers <= 1:
        return here(work, paths, on_bytes)
    return in_processes(work, paths, workers, on_bytes)


def _workers_for(sizes: Mapping[str, int], jobs: int | None) -> int:
    """The number of processes that read these files; 1 is this one."""
    small = jobs is None and sum(sizes.values()) < SMALL_BYTES
    # Workers have no standard input.
    if small or "-" in sizes:
        return 1
    most = _WINDOWS_MAX_WORKERS if sys.platform == "win32" else len(sizes)
    return min(jobs or usable_cores(), len(sizes), most)
