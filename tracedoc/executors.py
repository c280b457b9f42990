"""Run the work of each rank somewhere: here, in a pool of processes, on Dask, or over MPI.

What starts processes is imported where it is used: it takes longer than reading a small trace here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tracedoc.errors import InputError

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future, ProcessPoolExecutor

Result = TypeVar("Result")
OnBytes = Callable[[int], None]
Work = Callable[[str, "OnBytes | None"], Result]
"""What is done with one path. It says how many bytes it has read since it last said so, where asked."""

WAYS = "dask://local, dask://HOST:PORT or mpi"
SMALL_BYTES = 4 << 20
"""Files that are smaller than this together are read in this process, unless a number of jobs is asked for:
starting workers takes up to 0.3 s, in which one process reads more than this."""

_PRELOAD = ["tracedoc.worker"]
_POLL_S = 0.1
_CONNECT_S = 10
_KILL_S = 0.2
_WINDOWS_MAX_WORKERS = 61


class Lost(msgspec.Struct, frozen=True):
    """Stands for a result that never came, and says why: the worker was killed or out of memory."""

    reason: str


Outcomes = Generator[tuple[str, "Result | InputError | Lost"], None, None]


def run_each(
    work: Work[Result],
    sizes: Mapping[str, int],
    *,
    jobs: int | None = None,
    executor: str | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Outcomes[Result]:
    """Do ``work`` for each path of ``sizes`` (stored bytes), the largest first; yield results as they come.

    ``executor`` is one of :data:`WAYS`; without it, ``jobs`` processes of this machine (one a core), or
    this very process where more would not pay. An :class:`InputError` that ``work`` raises is yielded and a
    worker that dies costs its own path only; other exceptions are bugs and are raised. ``on_bytes`` is told
    the bytes read so far, of all paths together. Close the iterator to stop: it leaves no process behind.
    """
    paths = sorted(sizes, key=lambda path: -sizes[path])
    if executor is not None:
        return _elsewhere(work, paths, sizes, jobs=jobs, executor=executor, on_bytes=on_bytes)
    workers = _workers_for(sizes, jobs)
    if workers <= 1:
        return _here(work, paths, on_bytes)
    return _in_pools(work, paths, workers, on_bytes)


def _workers_for(sizes: Mapping[str, int], jobs: int | None) -> int:
    """Return how many processes read these files; with 1 it is this one."""
    small = jobs is None and sum(sizes.values()) < SMALL_BYTES
    # Workers have no standard input.
    if small or "-" in sizes:
        return 1
    return min(jobs or usable_cores(), len(sizes))


def usable_cores() -> int:
    """Return how many cores this process may use; schedulers often give a job fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# In this process.


def _here(work: Work[Result], paths: Sequence[str], on_bytes: OnBytes | None) -> Outcomes[Result]:
    total = 0

    def add(count: int) -> None:
        nonlocal total
        total += count
        if on_bytes is not None:
            on_bytes(total)

    for path in paths:
        try:
            result: Result | InputError | Lost = work(path, add if on_bytes is not None else None)
        except InputError as error:
            result = error
        except MemoryError:
            result = Lost("there was not enough memory to read it")
        yield path, result


# In a pool of processes.


def _in_pools(
    work: Work[Result], paths: Sequence[str], workers: int, on_bytes: OnBytes | None
) -> Outcomes[Result]:
    """Yield what a pool of processes makes of each path.

    A worker that is killed breaks its whole pool, and which one it was is not told: what was being read at
    that time is read again at the end, each alone, where it has the memory to itself.
    """
    import multiprocessing
    from concurrent.futures import wait
    from concurrent.futures.process import BrokenProcessPool

    # One slot a path and one writer a slot: no lock that a killed worker could leave taken.
    counts = multiprocessing.RawArray("q", len(paths))
    slots = {path: slot for slot, path in enumerate(paths)}
    suspects: list[str] = []

    def one_pool(waiting: deque[str], size: int) -> Outcomes[Result]:
        method = _start_method()
        with _pool(size, method, counts) as pool:
            running: dict[Future[Result], str] = {}
            broken = False
            while running or (waiting and not broken):
                while waiting and not broken and len(running) < size:
                    try:
                        with _starting(method):
                            future = pool.submit(_in_worker, work, slots[waiting[0]], waiting[0])
                    except BrokenProcessPool:
                        broken = True
                    else:
                        running[future] = waiting.popleft()
                done, _ = wait(
                    running, timeout=_POLL_S if on_bytes is not None else None, return_when="FIRST_COMPLETED"
                )
                if on_bytes is not None:
                    on_bytes(sum(counts))
                for future in done:
                    path, error = running.pop(future), future.exception()
                    if isinstance(error, (BrokenProcessPool, MemoryError)):
                        broken = broken or isinstance(error, BrokenProcessPool)
                        suspects.append(path)
                    else:
                        outcome: Result | InputError = _result(future)
                        yield path, outcome

    waiting = deque(paths)
    while waiting:
        yield from one_pool(waiting, workers)
    for path in tuple(suspects):
        suspects.clear()
        yield from one_pool(deque([path]), 1)
        if suspects:
            yield path, Lost("the process that read it was killed or ran out of memory")


def _start_method() -> str:
    """Return how to start workers: the fastest way that is safe in this process as it is now.

    fork takes what is imported along, but also the locks that other threads hold, so it is for a process of
    one thread; native threads count. forkserver takes 0.2 s more; spawn imports all anew for each worker.
    """
    import multiprocessing

    if sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1:
        return "fork"
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@contextmanager
def _pool(workers: int, method: str, counts: MutableSequence[int]) -> Iterator[ProcessPoolExecutor]:
    if sys.platform == "win32":
        workers = min(workers, _WINDOWS_MAX_WORKERS)
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(counts,))
    try:
        yield pool
    except BaseException:
        # Python would wait for what is running, also at its own exit.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def _starting(method: str) -> Iterator[None]:
    """Keep new workers from what is not for them: the caller's script, and an interrupt as they begin.

    A worker that is not forked imports the script, which may call us again at its top level.
    """
    main = sys.modules["__main__"]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if sys.platform != "win32" else None
    if method != "fork":
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


_counts: MutableSequence[int] = []


def _begin_worker(counts: MutableSequence[int]) -> None:
    global _counts
    _counts = counts
    # Ctrl-C reaches the whole process group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _in_worker(work: Work[Result], slot: int, path: str) -> Result:
    _counts[slot] = 0

    def add(count: int) -> None:
        _counts[slot] += count

    return work(path, add)


# On workers that something else has started.


def _elsewhere(
    work: Work[Result],
    paths: Sequence[str],
    sizes: Mapping[str, int],
    *,
    jobs: int | None,
    executor: str,
    on_bytes: OnBytes | None,
) -> Outcomes[Result]:
    if "-" in sizes:
        raise InputError("standard input cannot be read by other workers", "leave --executor out")
    if executor == "mpi":
        opened = _mpi()
    elif executor.startswith("dask://") and executor != "dask://":
        opened = _dask(executor.removeprefix("dask://"), min(jobs or usable_cores(), len(paths)))
    else:
        raise InputError(f"there is no executor {executor!r}", f"use {WAYS}")
    return _on_workers(opened, work, paths, sizes, on_bytes)


class _Workers(msgspec.Struct, frozen=True):
    """An executor, and the exceptions by which it says that a worker was lost."""

    executor: Executor
    losses: tuple[type[BaseException], ...]


def _on_workers(
    opened: Any, work: Work[Result], paths: Sequence[str], sizes: Mapping[str, int], on_bytes: OnBytes | None
) -> Outcomes[Result]:
    from concurrent.futures import as_completed

    total = 0
    with opened as workers:
        running = {workers.executor.submit(work, path, None): path for path in paths}
        for future in as_completed(running):
            path = running.pop(future)  # it keeps its result for as long as it is kept
            total += sizes[path]
            if on_bytes is not None:
                on_bytes(total)
            if isinstance(future.exception(), workers.losses):
                yield path, Lost("the worker that read it was lost or ran out of memory")
            else:
                yield path, _result(future)


def _result(future: Future[Result]) -> Result | InputError:
    error = future.exception()
    if isinstance(error, InputError):
        return error
    if isinstance(error, ImportError):
        raise InputError(
            f"a worker cannot import what it needs: {error}",
            "install the same version of tracedoc, with the same extras, where the workers run",
        ) from error
    return future.result()


@contextmanager
def _dask(address: str, workers: int) -> Iterator[_Workers]:
    try:
        import distributed
    except ImportError as error:
        raise InputError(f"--executor dask:// needs Dask: {error}", "pip install 'tracedoc[dask]'") from None
    losses = (
        distributed.scheduler.KilledWorker,
        distributed.comm.CommClosedError,
        distributed.client.FutureCancelledError,
        MemoryError,
    )
    cluster = None
    try:
        if address == "local":
            cluster = distributed.LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=50
            )
        client = distributed.Client(cluster or f"tcp://{address}", timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(f"dask://{address} does not answer: {error}", "check the address") from None
    try:
        # A pure task of the same name may be answered by what another client of the cluster asked before.
        yield _Workers(client.get_executor(pure=False), losses)
    except BaseException:
        if cluster is not None:
            _end_cluster_now(cluster)
        client.close(timeout=_KILL_S)
        raise
    else:
        client.close()
    finally:
        if cluster is not None:
            cluster.close()


def _end_cluster_now(cluster: Any) -> None:
    import asyncio

    # Closing the cluster would first let workers end what they are at.
    async def kill() -> None:
        await asyncio.gather(*(nanny.close(timeout=_KILL_S) for nanny in list(cluster.workers.values())))

    cluster.sync(kill)


_job: list[_Workers] = []


@contextmanager
def mpi_job() -> Iterator[None]:
    """Let the first process of an MPI job go on alone; the others work for it, and end here with it.

    Without it the processes part where reading begins, and what goes wrong before that goes wrong in each.
    """
    with _mpi() as workers:
        _job.append(workers)
        try:
            yield
        finally:
            _job.clear()


@contextmanager
def _mpi() -> Iterator[_Workers]:
    """Yield the other processes of this MPI job; those themselves work, and end here when all is done."""
    if _job:
        yield _job[0]
        return
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:
        raise InputError(f"--executor mpi needs MPI: {error}", "pip install 'tracedoc[mpi]'") from None
    if MPI.COMM_WORLD.Get_size() < 2:
        raise InputError(
            "--executor mpi found no other MPI process",
            "start it with: mpiexec -n 8 tracedoc diagnose PATH... --executor mpi",
        )
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is not None:
            yield _Workers(executor, (MemoryError,))
    if executor is None:
        raise SystemExit(0)
