"""From paths to a Diagnosis, in order: discover, read, measure each rank, settle, measure the run, judge.

This is the file to read first. Per-rank work is a pure function of one file; only digests travel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import tracedoc.facts  # noqa: F401  fills the catalogue
from tracedoc.compose import compose
from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import InputError, Limit
from tracedoc.facts.digest import RankDigest
from tracedoc.facts.measure import Measurements, measure_rank, measure_run
from tracedoc.facts.view import build_view
from tracedoc.rules.engine import evaluate
from tracedoc.rules.load import load_rules
from tracedoc.rules.selection import choose
from tracedoc.run.discover import Run, TraceFile, discover
from tracedoc.run.settle import Candidate, format_ranks, settle
from tracedoc.timeline.build import build_timeline
from tracedoc.trace.kineto import read_trace


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may choose. ``steps`` is an inclusive range of step numbers; ``jobs`` worker processes.

    ``select`` and ``ignore`` hold rule ids or topics; ``strict`` turns damaged files into errors;
    ``max_bytes`` bounds the decompressed text of one file.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    rule_directories: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    cycle: int | None = None
    jobs: int | None = None
    strict: bool = False
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far reading has come."""

    done_bytes: int
    total_bytes: int
    done_ranks: int
    total_ranks: int


Progress = Callable[[ProgressEvent], None]


def diagnose(
    paths: Sequence[str | os.PathLike[str]],
    options: Options | None = None,
    *,
    progress: Progress | None = None,
) -> Diagnosis:
    """Return the diagnosis of the run in ``paths`` (files, directories, or ``-`` for standard input).

    Raises :class:`InputError` where nothing can be answered, :class:`RuleError` for a wrong rule file.
    """
    chosen = options or Options()
    rules = choose(load_rules(chosen.rule_directories), chosen.select, chosen.ignore)
    measurements, limits, cycles = measure(paths, chosen, progress=progress)
    judgement = evaluate(rules, measurements)
    return compose(measurements, judgement, limits=limits, cycle=cycles.cycle, cycles=cycles.cycles)


@dataclass(frozen=True, slots=True)
class Cycles:
    """Which of several captures of one run was judged, and which there are."""

    cycle: int | None
    cycles: tuple[int, ...]


def measure(
    paths: Sequence[str | os.PathLike[str]],
    options: Options | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[Measurements, tuple[Limit, ...], Cycles]:
    """Return the facts of the run in ``paths``, the limits of the capture, and its cycles."""
    chosen = options or Options()
    run = discover([os.fspath(path) for path in paths])
    digests, failures = _read_all(run, chosen, progress)
    if not digests:
        raise (
            failures[0]
            if failures
            else InputError("no trace could be read", "name a trace or a folder of traces")
        )
    candidates = [_candidate(file, digest) for file, digest in digests]
    settled = settle(candidates, chosen.cycle)
    by_path = {file.path: digest for file, digest in digests}
    ranked = [replace(by_path[file.path], rank=file.rank) for file in settled.files]
    if chosen.steps is not None and not any(digest.steps for digest in ranked):
        raise InputError(
            f"no step of {chosen.steps[0]}-{chosen.steps[1]} is in these traces",
            "leave --steps out to see which steps were captured",
        )
    view = build_view(ranked, settled.world_size)
    limits = (
        *run.limits,
        *settled.limits,
        *(_unread(failure) for failure in failures),
        *_limits_of_ranks(view.digests),
        *view.matching.limits,
    )
    return measure_run(view), _merged(limits), Cycles(settled.cycle, settled.cycles)


def digest_file(
    path: str, steps: tuple[int, int] | None, strict: bool, max_bytes: int | None = None
) -> RankDigest:
    """Read one trace and return its digest: the whole work of one worker."""
    stream = sys.stdin.buffer if path == "-" else None
    trace = read_trace(path, stream=stream, strict=strict, max_bytes=max_bytes)
    return measure_rank(
        build_timeline(trace, steps=steps), rank=-1 if trace.info.rank is None else trace.info.rank
    )


def _read_all(
    run: Run, options: Options, progress: Progress | None
) -> tuple[list[tuple[TraceFile, RankDigest]], list[InputError]]:
    """Digest every file; a file that cannot be read costs that file only, unless it is the only one."""
    total = sum(file.size_bytes for file in run.files)
    done_bytes = done_ranks = 0
    digests: dict[str, RankDigest] = {}
    failures: list[InputError] = []
    with _workers(len(run.files), options.jobs) as submit:
        largest_first = sorted(run.files, key=lambda file: -file.size_bytes)
        futures = {
            submit(
                partial(digest_file, max_bytes=options.max_bytes), file.path, options.steps, options.strict
            ): file
            for file in largest_first
        }
        for future in as_completed(futures):
            file = futures[future]
            try:
                digests[file.path] = future.result()
            except InputError as error:
                if options.strict or len(run.files) == 1:
                    raise
                failures.append(error)
            done_bytes += file.size_bytes
            done_ranks += 1
            if progress is not None:
                progress(ProgressEvent(done_bytes, total, done_ranks, len(run.files)))
    return [(file, digests[file.path]) for file in run.files if file.path in digests], failures


Submit = Callable[[Callable[..., RankDigest], str, "tuple[int, int] | None", bool], "Future[RankDigest]"]


@contextmanager
def _workers(files: int, jobs: int | None) -> Iterator[Submit]:
    """Yield a submit function: in this process for one file or one job, else a pool of processes."""
    workers = min(jobs or os.cpu_count() or 1, files)
    if workers <= 1:
        yield _submit_here
        return
    executor: Executor = ProcessPoolExecutor(max_workers=workers)
    try:
        yield executor.submit
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def _submit_here(
    work: Callable[..., RankDigest], path: str, steps: tuple[int, int] | None, strict: bool
) -> Future[RankDigest]:
    future: Future[RankDigest] = Future()
    try:
        future.set_result(work(path, steps, strict))
    except InputError as error:
        future.set_exception(error)
    return future


def _candidate(file: TraceFile, digest: RankDigest) -> Candidate:
    return Candidate(
        path=file.path,
        file_rank=digest.rank if digest.rank >= 0 else None,
        manifest_rank=file.manifest_rank,
        name_rank=file.rank_hint,
        world_size=digest.world_size,
        first_step=digest.first_step,
        order_hint=file.order_hint,
        group_hint=file.group_hint,
        backend=digest.backend,
    )


def _unread(error: InputError) -> Limit:
    return Limit("unread-file", error.message, "this file is left out; the others stand")


def _limits_of_ranks(digests: Sequence[RankDigest]) -> Iterator[Limit]:
    """Yield the limits of all ranks; one that several ranks share is told once, with their numbers."""
    shared: dict[tuple[str, str, str], list[int]] = {}
    for digest in digests:
        for limit in digest.limits:
            words = limit.message.removeprefix(f"{digest.source}: ")
            if words == limit.message:
                yield limit
            else:
                shared.setdefault((limit.code, words, limit.effect), []).append(digest.rank)
    for (code, words, effect), ranks in shared.items():
        if len(ranks) == len(digests) > 1:
            where = "every rank"
        else:
            where = f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
        yield Limit(code, f"{where}: {words}", effect)


def _merged(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Return the limits once each, in order."""
    return tuple(dict.fromkeys(limits))
