"""Do the work of each rank: in this process, in processes of this machine, or on the workers of others.

What starts processes is imported where it is used: it takes longer than reading a small trace here.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from tracedoc.errors import InputError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_WORTH_RETURNING = 16 << 20  # after 100 MB of JSON 24 MB are free, after 4 MB it is 9
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, by malloc.h
_LARGEST_KEPT = 32 << 20  # glibc's upper limit
_MOST_KEPT = 1 << 30
_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


def share_what_is_loaded() -> None:
    """Have the cyclic collector leave alone what there is now.

    To walk an object writes to it, and a page that a forked process writes to is no longer its parent's.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.freeze()


def keep_until_given_back() -> None:
    """Have the allocator use again what was freed, until :func:`give_back`: for a process of tracedoc's own.

    Else glibc maps larger arrays anew and shrinks the heap, and the system clears the same pages again, one
    fault each, of microseconds in a virtual machine. Does nothing with other allocators (man 3 mallopt).
    """
    _call("mallopt", _MMAP_THRESHOLD, _LARGEST_KEPT)
    _call("mallopt", _TRIM_THRESHOLD, _MOST_KEPT)


def give_back() -> None:
    """Give freed memory back to the system; glibc would keep it, scattered, and take more for the next file.

    Not after small files: to take the same pages again would cost a tenth of the time that they do. Does
    nothing where the allocator has no ``malloc_trim`` (man 3 malloc_trim).
    """
    if _freed_bytes() >= _WORTH_RETURNING:
        _call("malloc_trim", 0)


def _freed_bytes() -> int:
    """The free bytes of the heap; where nobody says, as many as are worth returning."""
    ask = _mallinfo2()
    return int(ask().fordblks) if ask is not None else _WORTH_RETURNING


@cache
def _mallinfo2() -> Callable[[], Any] | None:
    """The function of glibc that tells the state of its heap, ``None`` before 2.33 (man 3 mallinfo2)."""
    import ctypes  # as numpy does

    class Mallinfo2(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2.split()]

    ask = getattr(_allocator(), "mallinfo2", None)
    if ask is not None:
        ask.restype = Mallinfo2
    return ask


def _call(name: str, *arguments: int) -> None:
    with suppress(AttributeError):
        getattr(_allocator(), name)(*arguments)


@cache
def _allocator() -> Any:
    """Return the C library, where it may be glibc."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    try:
        return ctypes.CDLL(None)
    except OSError:
        return None


Result = TypeVar("Result")
OnBytes = Callable[[int], None]
Work = Callable[[str, "OnBytes | None"], Result]
"""What is done with one path. It says how many bytes it has read since it last said so, where asked."""


class Lost(msgspec.Struct, frozen=True):
    """Stands for a result that never came, and says why: the worker was killed or out of memory."""

    reason: str


Outcomes = Generator[tuple[str, "Result | InputError | Lost"], None, None]


def user_error(error: BaseException, cause: BaseException | None) -> InputError:
    """The error as one that the user can mend; what is a bug is raised."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, ImportError):
        raise InputError(
            f"a worker cannot import what it needs: {error}",
            "install the same version of tracedoc, with the same extras, where the workers run",
        ) from error
    raise error from cause


_PRELOAD = ["tracedoc.worker"]
_one_start = threading.Lock()  # two threads would hide the script from each other


def usable_cores() -> int:
    """The number of cores this process may use; schedulers often give a job fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# In this process.


def here(work: Work[Result], paths: Sequence[str], on_bytes: OnBytes | None) -> Outcomes[Result]:
    """Yield what this process makes of each path; ``on_bytes`` is called with the bytes read so far."""
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
        del result
        give_back()


# In processes of this machine.


def in_processes(
    work: Work[Result], paths: Sequence[str], workers: int, on_bytes: OnBytes | None
) -> Outcomes[Result]:
    """Yield what processes make of each path.

    What a worker was lost with is read again at the end, each alone, where it has the memory to itself.
    """
    on_read = _sum_of_all(on_bytes) if on_bytes is not None else None
    suspects = []
    with closing(_by_team(work, paths, workers, on_read)) as outcomes:
        for path, outcome in outcomes:
            if isinstance(outcome, Lost):
                suspects.append(path)
            else:
                yield path, outcome
    for path in suspects:
        with closing(_by_team(work, [path], 1, on_read)) as outcomes:
            yield from outcomes


def _sum_of_all(on_bytes: OnBytes) -> Callable[[str, int], None]:
    """Return a function that takes the bytes of one path so far, and passes on those of all paths."""
    done: dict[str, int] = {}

    def on_read(path: str, count: int) -> None:
        done[path] = count
        on_bytes(sum(done.values()))

    return on_read


class _Member(msgspec.Struct):
    """A worker, and what it is at."""

    process: BaseProcess
    path: str


def _by_team(
    work: Work[Result], paths: Sequence[str], workers: int, on_read: Callable[[str, int], None] | None
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
                may_start = _start_worker(work, waiting, team, on_read is not None)
            if not team:
                yield from here(work, tuple(waiting), None)
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
                    if on_read is not None:
                        on_read(path, said)
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
    """End a worker that has nothing more to do, or no parent to do it for."""
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
    return user_error(error, InWorker(raised) if raised else None)


class InWorker(Exception):  # noqa: N818 - no failure of its own: it is shown as the cause of one
    """Says where in a worker an exception was raised, as the text of its traceback."""


def _start_method() -> str:
    """The way to start workers: the fastest that is safe in this process as it is now.

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


def _start_worker(
    work: Work[Result], waiting: deque[str], team: dict[Any, _Member], report_bytes: bool
) -> bool:
    """Start a worker with the next path; return false where the system allows no further process.

    A worker that is not forked would import the caller's script, which may call us again at its top level;
    and an interrupt as a worker begins is not for it.
    """
    import multiprocessing

    method = _start_method()
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    with _one_start, interrupts_wait(forked=method == "fork"):
        main = sys.modules["__main__"]
        if method != "fork":
            sys.modules["__main__"] = ModuleType("__main__")
        try:
            ours, its = context.Pipe()
            with closing(its):
                process = context.Process(target=_serve, args=(its, work, report_bytes), daemon=True)
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
def interrupts_wait(*, forked: bool) -> Iterator[None]:
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


def _serve(connection: Any, work: Work[Result], report_bytes: bool) -> None:
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

    share_what_is_loaded()
    keep_until_given_back()
    with suppress(EOFError, OSError):  # the parent has gone
        while True:
            path = connection.recv()
            count = 0
            try:
                said: tuple[Any, Exception | None, str] = work(path, add if report_bytes else None), None, ""
            except Exception as error:  # the parent distinguishes the user's mistakes from ours
                said = None, error, traceback.format_exc()
            connection.send(said)
            del said
            give_back()


def _end_with_parent() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# Where each run is read.


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
