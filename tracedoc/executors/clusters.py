"""Do the work on processes that something else has started: the workers of Dask, or of an MPI job."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tracedoc.errors import InputError, how_to_install
from tracedoc.executors.run import (
    Lost,
    OnBytes,
    Outcomes,
    Result,
    Work,
    interrupts_wait,
    usable_cores,
    user_error,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

WAYS = "dask://local, dask://HOST:PORT or mpi"

_CONNECT_S = 10
_KILL_S = 0.2
_INTERRUPTED = 130  # 128 + SIGINT


def on_cluster(
    work: Work[Result],
    paths: Sequence[str],
    sizes: Mapping[str, int],
    *,
    jobs: int | None,
    executor: str,
    on_bytes: OnBytes | None,
) -> Outcomes[Result]:
    """Yield what the workers of ``executor`` (one of :data:`WAYS`) make of each path, as it comes.

    ``jobs`` are the workers of a cluster that is started here. ``on_bytes`` is called with the stored
    bytes of the paths that are done. Raises :class:`InputError` where there are no such workers.
    """
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
    return future.result() if error is None else user_error(error, error.__cause__)


@contextmanager
def _dask(address: str, workers: int) -> Iterator[_Workers]:
    try:
        import distributed
    except ImportError as error:
        raise InputError(f"--executor dask:// needs Dask: {error}", how_to_install("dask")) from None
    losses = (
        distributed.scheduler.KilledWorker,
        distributed.comm.CommClosedError,
        distributed.client.FutureCancelledError,
        MemoryError,
    )
    cluster = None
    try:
        if address == "local":
            with interrupts_wait(forked=False):  # half a cluster cannot be ended in peace
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
        raise InputError(f"--executor mpi needs MPI: {error}", how_to_install("mpi")) from None
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
