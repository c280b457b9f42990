"""Run the work of each rank somewhere: here, in a pool of processes, on Dask, or over MPI.

What starts processes is imported where it is used: it takes longer than reading a small trace here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from tracedoc.errors import InputError

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future
    from multiprocessing.process import BaseProcess

Result = TypeVar("Result")
OnBytes = Callable[[int], None]
Work = Callable[[str, "OnBytes | None"], Result]
"""What is done with one path. It says how many bytes it has read since it last said so, where asked."""

WAYS = "dask://local, dask://HOST:PORT or mpi"
SMALL_BYTES = 4 << 20
"""Files that are smaller than this together are read in this process, unless a number of jobs is asked for:
starting workers takes up to 0.3 s, in which one process reads more than this."""

_PRELOAD = ["tracedoc.worker"]
_CONNECT_S = 10
_KILL_S = 0.2
_WINDOWS_MAX_WORKERS = 61
_INTERRUPTED = 130  # 128 + SIGINT
_one_start = threading.Lock()  # two threads would hide the script from each other


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
    return _in_processes(work, paths, workers, on_bytes)


def _workers_for(sizes: Mapping[str, int], jobs: int | None) -> int:
    """Return how many processes read these files; with 1 it is this one."""
    small = jobs is None and sum(sizes.values()) < SMALL_BYTES
    # Workers have no standard input.
    if small or "-" in sizes:
        return 1
    most = _WINDOWS_MAX_WORKERS if sys.platform == "win32" else len(sizes)
    return min(jobs or usable_cores(), len(sizes), most)


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


# In processes of this machine.


def _in_processes(
    work: Work[Result], paths: Sequence[str], workers: int, on_bytes: OnBytes | None
) -> Outcomes[Result]:
    """Yield what processes make of each path.

    What a worker was lost with is read again at the end, each alone, where it has the memory to itself.
    """
    told = _sum_of_all(on_bytes) if on_bytes is not None else None
    suspects = []
    with closing(_by_team(work, paths, workers, told)) as outcomes:
        for path, outcome in outcomes:
            if isinstance(outcome, Lost):
                suspects.append(path)
            else:
                yield path, outcome
    for path in suspects:
        with closing(_by_team(work, [path], 1, told)) as outcomes:
            yield from outcomes


def _sum_of_all(on_bytes: OnBytes) -> Callable[[str, int], None]:
    """Return what is told the bytes of each path so far, and tells those of all."""
    done: dict[str, int] = {}

    def told(path: str, count: int) -> None:
        done[path] = count
        on_bytes(sum(done.values()))

    return told


class _Member(msgspec.Struct):
    """A worker, and what it is at."""

    process: BaseProcess
    path: str


def _by_team(
    work: Work[Result], paths: Sequence[str], workers: int, told: Callable[[str, int], None] | None
) -> Outcomes[Result]:
    """Yield what some processes make of each path; :class:`Lost` for one whose process ended over it.

    Each has a connection of its own, which ends where the process ends: whatever moment it is killed at,
    nothing waits for the rest of what it was saying, and only its own path is lost.
    """
    import multiprocessing
    from multiprocessing.connection import wait

    # Workers of multiprocessing.Pool may start none.
    may_start = not multiprocessing.current_process().daemon
    waiting, team = deque(paths), dict[Any, _Member]()
    try:
        while waiting or team:
            while may_start and waiting and len(team) < workers:
                may_start = _start_worker(work, waiting, team, told is not None)
            if not team:
                yield from _here(work, tuple(waiting), None)
                return
            for connection in cast("list[Any]", wait(team)):
                member = team[connection]
                path = member.path
                try:
                    said = connection.recv()
                except (EOFError, OSError):
                    _end(connection, team)
                    yield path, Lost("the process that read it was killed or ran out of memory")
                    continue
                if isinstance(said, int):
                    if told is not None:
                        told(path, said)
                    continue
                if waiting:
                    member.path = waiting.popleft()
                    with suppress(OSError):  # that it has ended meanwhile shows when it is listened to
                        connection.send(member.path)
                else:
                    _end(connection, team)
                yield path, _outcome(*said)
    finally:
        # Before anything is waited for: a worker that is at something could take long.
        for member in team.values():
            member.process.kill()
        for connection in tuple(team):
            _end(connection, team)


def _end(connection: Any, team: dict[Any, _Member]) -> None:
    """End a worker that has nothing more to do, or nobody to do it for."""
    process = team[connection].process
    process.kill()
    process.join()
    del team[connection]
    connection.close()


def _outcome(result: Any, error: Exception | None, raised: str) -> Any:
    """Return the result of work, or how it failed; raise what is a bug."""
    if error is None:
        return result
    if isinstance(error, MemoryError):
        return Lost("there was not enough memory to read it")
    return _user_error(error, InWorker(raised) if raised else None)


class InWorker(Exception):  # noqa: N818 - no failure of its own: it is shown as the cause of one
    """Tells where in a worker an exception was raised, as the text of its traceback."""


def _start_method() -> str:
    """Return how to start workers: the fastest way that is safe in this process as it is now.

    fork takes what is imported along, but also the locks that other threads hold, so it is for a process of
    one thread; native threads count. forkserver takes 0.2 s more; spawn imports all anew for each worker.
    """
    import multiprocessing

    if sys.platform == "linux" and _native_threads() == 1:
        return "fork"
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _native_threads() -> int | None:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # not every sandbox shows it
        return None


def _start_worker(work: Work[Result], waiting: deque[str], team: dict[Any, _Member], told: bool) -> bool:
    """Start a worker with the next path; return false where the system allows no further process.

    A worker that is not forked would import the caller's script, which may call us again at its top level;
    and an interrupt as a worker begins is not for it.
    """
    import multiprocessing

    method = _start_method()
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    with _one_start, _interrupts_wait(forked=method == "fork"):
        main = sys.modules["__main__"]
        if method != "fork":
            sys.modules["__main__"] = ModuleType("__main__")
        try:
            ours, its = context.Pipe()
            with closing(its):
                process = context.Process(target=_serve, args=(its, work, told), daemon=True)
                process.start()
            team[ours] = _Member(process, waiting.popleft())
            with suppress(OSError):
                ours.send(team[ours].path)
        except (OSError, EOFError):
            return False
        finally:
            sys.modules["__main__"] = main
    return True


@contextmanager
def _interrupts_wait(*, forked: bool) -> Iterator[None]:
    """Have an interrupt wait, and not reach processes that are started meanwhile, forked or anew."""
    if sys.platform == "win32":
        yield
        return
    if not forked:
        # When it starts it lets interrupts through again.
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _serve(connection: Any, work: Work[Result], told: bool) -> None:
    """Do what the parent asks for, one path after the other, until it ends this process."""
    # Ctrl-C reaches the whole process group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(RuntimeError):  # the system may allow no further thread
        threading.Thread(target=_end_with_parent, daemon=True).start()
    count = 0

    def add(more: int) -> None:
        nonlocal count
        count += more
        connection.send(count)

    with suppress(EOFError, OSError):  # the parent has gone
        while True:
            path = connection.recv()
            count = 0
            try:
                said: tuple[Any, Exception | None, str] = work(path, add if told else None), None, ""
            except Exception as error:  # the parent tells the user's mistakes from ours
                said = None, error, traceback.format_exc()
            connection.send(said)


def _end_with_parent() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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
    return future.result() if error is None else _user_error(error, error.__cause__)


def _user_error(error: BaseException, cause: BaseException | None) -> InputError:
    """Return what the user can mend; raise what is a bug."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, ImportError):
        raise InputError(
            f"a worker cannot import what it needs: {error}",
            "install the same version of tracedoc, with the same extras, where the workers run",
        ) from error
    raise error from cause


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
            with _interrupts_wait(forked=False):  # half a cluster cannot be ended in peace
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
    world = MPI.COMM_WORLD
    if world.Get_size() < 2:
        raise InputError(
            "--executor mpi found no other MPI process",
            "start it with: mpiexec -n 8 tracedoc diagnose PATH... --executor mpi",
        )
    ends = partial(_interrupt_ends_job, world)
    with ends(), MPICommExecutor(world, root=0) as executor, ends():
        if executor is not None:
            yield _Workers(executor, (MemoryError,))
    if executor is None:
        raise SystemExit(0)


@contextmanager
def _interrupt_ends_job(world: Any) -> Iterator[None]:
    """End all processes of an MPI job where its first one is interrupted; they would wait for each other."""
    if world.Get_rank() > 0 and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except BaseException as error:
        # The command line has made words of it already.
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
            world.Abort(_INTERRUPTED)
        raise
