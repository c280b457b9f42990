"""From paths to a Diagnosis, in order: discover, read, measure each rank, settle, measure the run, judge.

This is the file to read first. Per-rank work is a pure function of one file; only digests travel.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import Failures, InputError, Limit
from tracedoc.executors.run import Lost, run_each
from tracedoc.facts.measure_run import Measurements, measure_run
from tracedoc.judge.budgets import judge_budgets, parse_budgets
from tracedoc.judge.compose import compose, run_info
from tracedoc.judge.expression import Expression
from tracedoc.judge.findings import evaluate
from tracedoc.judge.ledgered import concluded
from tracedoc.judge.overlaps import mended_in_turn
from tracedoc.judge.replayed import with_predictions
from tracedoc.judge.rule import Rule
from tracedoc.judge.rule_cache import choose, kept_rules
from tracedoc.ledger import Ledger
from tracedoc.predicted import PlanStep, ReplayReport, WhatIf, read_tried
from tracedoc.ranks.run_view import (
    RunView,
    build_run_view,
    ended_early,
    ranks_of_other_steps,
    ranks_without_steps,
    shared_steps,
    with_source_steps,
)
from tracedoc.ranks.source_step import SourceStep, read_source_step
from tracedoc.run.discover import Run, TraceFile, discover
from tracedoc.run.ending import ended_well, ending_limits
from tracedoc.run.hang import hang_limits
from tracedoc.run.job import Job, read_job
from tracedoc.run.remote import public_name
from tracedoc.run.settle import Candidate, Settled, settle
from tracedoc.step.codec import share
from tracedoc.step.rank_digest import LANE_RANKS, RankDigest, without_timeline
from tracedoc.topics import load_facts
from tracedoc.topics.capture.run import job_limits
from tracedoc.topics.straggler.causes import ranks_to_read
from tracedoc.units import format_ranges
from tracedoc.whatif.answer import what_if
from tracedoc.whatif.changes.registry import parse_request
from tracedoc.whatif.ledger import make_ledger
from tracedoc.worker import digest_file, kept_digest


class Options(msgspec.Struct, frozen=True):
    """What a caller may choose. ``steps`` is an inclusive range of step numbers.

    ``jobs`` is how many processes read; ``executor`` reads on other machines instead, as
    :data:`tracedoc.executors.clusters.WAYS` says. ``select`` and ``ignore`` hold rule ids or topics;
    ``strict`` turns damaged files into errors; ``max_bytes`` bounds the decompressed text of one file.
    ``cache`` keeps the digests of large files, and the rules, in the user's cache folder, and takes them from
    there.
    Without ``replay`` no fix is predicted, and gains are bounds. ``budgets`` are performance budgets to
    judge, as ``"step_ms <= 420"``.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    rule_directories: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    cycle: int | None = None
    jobs: int | None = None
    executor: str | None = None
    strict: bool = False
    max_bytes: int | None = None
    cache: bool = False
    replay: bool = True
    budgets: tuple[str, ...] = ()


class ProgressEvent(msgspec.Struct, frozen=True):
    """How far reading has come."""

    done_bytes: int
    total_bytes: int
    done_ranks: int
    total_ranks: int


Progress = Callable[[ProgressEvent], None]

Path = str | os.PathLike[str]


def diagnose(
    paths: Path | Sequence[Path],
    options: Options | None = None,
    *,
    progress: Progress | None = None,
) -> Diagnosis:
    """Return the diagnosis of the run in ``paths``: a folder or a file, or several; ``-`` is standard input.

    Raises :class:`InputError` where nothing can be answered, :class:`RuleError` for a wrong rule file.
    """
    chosen = options or Options()
    known = _known_rules(chosen)
    rules = choose(known, chosen.select, chosen.ignore)
    budgets = parse_budgets(chosen.budgets, load_facts())
    measured = measure(paths, chosen, progress=progress)
    left_out = [one for one in known if one not in rules]
    found = judge(measured, rules, replay=chosen.replay, budgets=budgets, left_out=left_out)
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return replace(found, tried=read_tried(pathlib.Path(named[0])) if len(named) == 1 else ())


def _known_rules(options: Options) -> tuple[Rule, ...]:
    if options.cache:
        return kept_rules(options.rule_directories)
    from tracedoc.judge.load import load_rules  # with YAML, which takes a while

    return load_rules(options.rule_directories)


def judge(
    measured: Measured,
    rules: Sequence[Rule],
    *,
    replay: bool = True,
    budgets: Sequence[Expression] = (),
    left_out: Sequence[Rule] = (),
) -> Diagnosis:
    """Return the diagnosis of what was measured, by ``rules``; those of ``left_out`` were not chosen."""
    measurements = measured.measurements
    judgement = evaluate(rules, measurements)
    run = run_info(measurements, measured.cycle, measured.cycles)
    ledger: Ledger | None = None
    report: ReplayReport | None = None
    plan: tuple[PlanStep, ...] = ()
    failures = Failures()
    if replay:
        ledger = failures.contain("the ledger", lambda: make_ledger(measurements.run), Ledger())
    judgement, found = failures.contain(
        "what the ledger decides",
        lambda: concluded(judgement, ledger or Ledger(), measurements, left_out),
        (judgement, ledger or Ledger()),
    )
    if ledger is not None:
        ledger = found
        judgement, report, plan = failures.contain(
            "the replay of fixes",
            lambda: with_predictions(judgement, measurements, found, run),
            (judgement, report, plan),
        )
        judgement, ledger = failures.contain(
            "what each finding saves beyond those before it",
            lambda: mended_in_turn(judgement, found, measurements),
            (judgement, found),
        )
    return compose(
        measurements,
        judgement,
        run,
        ledger=ledger,
        limits=(*measured.limits, *failures.limits),
        replay=report,
        plan=plan,
        budgets=judge_budgets(budgets, measurements.facts, ledger),
        rules_left_out=len(left_out),
    )


def predict(
    paths: Path | Sequence[Path], changes: Sequence[str] = (), options: Options | None = None
) -> WhatIf:
    """The step of the run in ``paths`` after changes, found by replaying it.

    A change is written as on the command line: ``"faster-link by=2"``. Without one, the answer holds the
    critical path, and how far each resource limits the step.

    Raises :class:`InputError` where nothing can be answered, :class:`ChangeError` for a wrong change.
    """
    requests = [parse_request(change) for change in changes]
    return what_if(measure(paths, options).measurements.run, requests)


class Measured(msgspec.Struct, frozen=True):
    """What :func:`measure` found: the facts, the limits of the capture, and its cycles.

    ``cycle`` is which of several captures of one run was measured, ``cycles`` are those that there are.
    """

    measurements: Measurements
    limits: tuple[Limit, ...]
    cycle: int | None
    cycles: tuple[int, ...]


def measure(
    paths: Path | Sequence[Path],
    options: Options | None = None,
    *,
    progress: Progress | None = None,
) -> Measured:
    """Measure the run in ``paths`` without judging it."""
    chosen = options or Options()
    listed = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    run = discover(listed)
    ranked, settled, unread = _read_ranks(run, chosen, progress)
    left_out = ranks_without_steps(ranked)
    shared = chosen.steps or shared_steps([one for one in ranked if one.rank not in left_out])
    if shared != chosen.steps:
        ranked, settled, unread = _read_ranks(run, replace(chosen, steps=shared), progress)
    seen, ranked = ranked, [digest for digest in ranked if digest.rank not in left_out]
    others = ranks_of_other_steps(seen)
    unknown = [_left_out(digest, other=digest.rank in others) for digest in seen if digest.rank in left_out]
    if chosen.steps is not None and not any(digest.steps for digest in ranked):
        raise InputError(
            f"no step of {chosen.steps[0]}-{chosen.steps[1]} is in these traces",
            "leave --steps out to see which steps were captured",
        )
    failures = Failures()
    job = failures.contain("what the manifest tells", lambda: read_job(run.manifest), Job())
    view = build_run_view(ranked, settled.world_size, job, left_out, shared)
    steps = failures.contain("the steps with Python stacks", lambda: _source_steps(view), {})
    view = with_source_steps(view, steps)
    hung = failures.contain("the flight recorder", lambda: hang_limits(listed, settled.world_size), ())
    ending = failures.contain("how the job ended", lambda: ending_limits(run.manifest), ())
    known = bool(ending) or ended_well(run.manifest)
    early = () if known else failures.contain("who ended early", lambda: ended_early(view), ())
    slower = failures.contain("the times around the capture", lambda: job_limits(view), ())
    limits = (
        *hung,
        *ending,
        *early,
        *run.limits,
        *settled.limits,
        *unread,
        *unknown,
        *_limits_of_ranks(seen),
        *view.matching.limits,
        *job.limits,
        *slower,
        *failures.limits,
    )
    return Measured(measure_run(view), tuple(dict.fromkeys(limits)), settled.cycle, settled.cycles)


def _left_out(digest: RankDigest, *, other: bool) -> Limit:
    if other:
        return Limit(
            "rank-left-out",
            f"rank {digest.rank} is left out: its steps {format_ranges([s.index for s in digest.steps])} are "
            "none of the others', its file may be of another run",
            "whether they wait for it is unknown, and all findings have low confidence",
        )
    why = "its file is cut off before" if digest.truncated else "its records end before"
    lost = {"lost-kernels": "kernels are missing in", "lost-thread": "what a host thread did is missing in"}
    why = next((lost[one.code] for one in digest.limits if one.code in lost), why)
    return Limit(
        "rank-left-out",
        f"rank {digest.rank} is left out: {why} a step that the others show is whole",
        "whether they wait for it is unknown, and all findings have low confidence",
    )


def _source_steps(view: RunView) -> dict[int, SourceStep]:
    """Return the steps with Python stacks that tell something of this run, by rank."""
    sources = view.job.sources
    found = {}
    for rank in ranks_to_read(view, sorted(sources)):
        with suppress(InputError):  # it only adds to what the traces say
            found[rank] = read_source_step(sources[rank])
    return found


def _read_ranks(
    run: Run, options: Options, progress: Progress | None
) -> tuple[list[RankDigest], Settled, list[Limit]]:
    """Digest every file and settle the ranks; the digests are in order of rank."""
    digests, unread = _read_all(run, options, progress)
    settled = settle([_candidate(file, digest) for file, digest in digests], options.cycle)
    by_path = {file.path: digest for file, digest in digests}
    ranked = [replace(by_path[file.path], rank=file.rank) for file in settled.files]
    return [*ranked[:LANE_RANKS], *map(without_timeline, ranked[LANE_RANKS:])], settled, unread


def _read_all(
    run: Run, options: Options, progress: Progress | None
) -> tuple[list[tuple[TraceFile, RankDigest]], list[Limit]]:
    """Digest every file; one that cannot be read costs that file only, unless it is the only one."""
    sizes = {file.path: file.size_bytes for file in run.files}
    outcomes: dict[str, RankDigest | InputError | Lost] = {}
    known: dict[Any, Any] = {}
    how: dict[str, Any] = {
        "steps": options.steps, "strict": options.strict, "max_bytes": options.max_bytes
    }  # fmt: skip
    for path in sizes if options.cache and options.executor is None else ():
        kept = kept_digest(path, **how)
        if kept is not None:
            outcomes[path] = share(kept, known)
    sizes = {path: size for path, size in sizes.items() if path not in outcomes}
    display = _Display(progress, sum(sizes.values()), len(run.files), len(outcomes))
    work = partial(digest_file, **how, cache=options.cache)
    on_bytes = display.bytes if progress is not None else None
    results = run_each(work, sizes, jobs=options.jobs, executor=options.executor, on_bytes=on_bytes)
    with closing(results):
        for path, outcome in results:
            if not isinstance(outcome, RankDigest) and (options.strict or len(run.files) == 1):
                raise _error(path, outcome)
            outcomes[path] = share(outcome, known) if isinstance(outcome, RankDigest) else outcome
            display.rank()
    digests, failed = [], []
    for file in run.files:
        outcome = outcomes[file.path]
        if isinstance(outcome, RankDigest):
            digests.append((file, outcome))
        else:
            failed.append((file.path, outcome))
    if not digests:
        raise _error(*failed[0])
    return digests, [_unread(path, outcome) for path, outcome in failed]


class _Display:
    """Turns what workers say into progress events."""

    def __init__(
        self, progress: Progress | None, total_bytes: int, total_ranks: int, done_ranks: int
    ) -> None:
        self._progress = progress
        self._now = ProgressEvent(0, total_bytes, done_ranks, total_ranks)

    def bytes(self, done: int) -> None:
        # A bar need not move more often than once a thousandth.
        if done - self._now.done_bytes > self._now.total_bytes / 1000:
            self._tell(replace(self._now, done_bytes=done))

    def rank(self) -> None:
        self._tell(replace(self._now, done_ranks=self._now.done_ranks + 1))

    def _tell(self, event: ProgressEvent) -> None:
        self._now = event
        if self._progress is not None:
            self._progress(event)


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
        span_ns=(digest.start_ns, max((step.end_ns for step in digest.steps), default=digest.start_ns)),
        communicates=len(digest.collectives) > 0,
    )


def _error(path: str, outcome: InputError | Lost) -> InputError:
    if isinstance(outcome, InputError):
        return outcome
    return InputError(
        f"{public_name(path)} was lost: {outcome.reason}", "read fewer files at once with --jobs"
    )


def _unread(path: str, outcome: InputError | Lost) -> Limit:
    if isinstance(outcome, InputError):
        return Limit("unread-file", outcome.message, "this file is left out; the others stand")
    return Limit(
        "lost-rank", f"{public_name(path)}: {outcome.reason}", "this file is left out; the others stand"
    )


def _limits_of_ranks(digests: Sequence[RankDigest]) -> Iterator[Limit]:
    """Yield the limits of all ranks; one that several ranks share is told once, with their numbers."""
    shared: dict[tuple[str, str, str], list[int]] = {}
    for digest in digests:
        for limit in digest.limits:
            if limit.source:
                shared.setdefault((limit.code, limit.words, limit.effect), []).append(digest.rank)
            else:
                yield Limit(limit.code, limit.words, limit.effect)
    for (code, words, effect), ranks in shared.items():
        if len(ranks) == len(digests) > 1:
            where = "every rank"
        else:
            where = f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}"
        yield Limit(code, f"{where}: {words}", effect)
