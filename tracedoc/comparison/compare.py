"""Two diagnoses become one comparison; three and more a series over their GPUs, or a history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from tracedoc.comparison.differences import (
    CollectiveChange,
    FactChange,
    FindingChange,
    KernelChange,
    Setting,
    are_related,
    collectives_that_changed,
    facts_that_moved,
    finding_changes,
    gpus,
    kernels_that_changed,
    limits_of,
    places_that_differ,
    settings_that_differ,
)
from tracedoc.comparison.step_change import StepChange, StepVerdict, same_capture, step_change, verdict_on
from tracedoc.comparison.waterfall import (
    Scaling,
    Waterfall,
    cause_waterfall,
    compared_budget,
    scaling_of,
    step_lengths,
    waterfall,
)
from tracedoc.diagnosis import BUDGET_PARTS, Diagnosis, RunInfo
from tracedoc.errors import InputError, Limit
from tracedoc.ledger import Range
from tracedoc.predicted import NotPredicted, Tried


class RunComparison(msgspec.Struct, frozen=True):
    """What changed from BASE to HEAD.

    ``verdict`` is about runs on the same number of GPUs; with ``scaling`` the question is another one, and
    it is ``None``. ``realised_ms`` is how much shorter the compared step became. ``base`` and ``head`` say
    which runs they are; their rates are those of the compared steps.
    """

    verdict: StepVerdict | None
    steps: StepChange | None
    waterfall: Waterfall
    scaling: Scaling | None
    realised_ms: float
    findings: tuple[FindingChange, ...]
    facts: tuple[FactChange, ...]
    kernels: tuple[KernelChange, ...]
    collectives: tuple[CollectiveChange, ...]
    settings: tuple[Setting, ...]
    places: tuple[Setting, ...]
    limits: tuple[Limit, ...]
    base: RunInfo
    head: RunInfo


def compare(
    base: Diagnosis,
    head: Diagnosis,
    *,
    scaling: str | None = None,
    samples_per_step: tuple[float, float] | None = None,
) -> RunComparison:
    """The changes from ``base`` to ``head``, with the verdict on them.

    ``scaling`` is "weak" (the same batch per GPU) or "strong" (the same batch in all); without it the
    arithmetic of the captures decides. ``samples_per_step`` are those of all GPUs of each side.

    Raises :class:`InputError` where a side has no step, the sides are swapped, or nothing tells how the work
    of different numbers of GPUs compares.
    """
    for name, side in (("BASE", base), ("HEAD", head)):
        if side.budget is None or side.budget.step_ms <= 0:
            raise InputError(f"{name} has no step to compare", "tracedoc diagnose says why")
    found = scaling_of(base, head, kind=scaling, samples=samples_per_step)
    work = found.work_frac if found is not None else 1.0
    parts = cause_waterfall(base, head, work) or waterfall(base, head, work)
    assert parts is not None
    steps, lengths = step_change(base, head), step_lengths(base, head)
    moved, settings = facts_that_moved(base, head), settings_that_differ(base, head)
    return RunComparison(
        verdict=verdict_on(
            steps, same_program=not moved and not settings, same_capture=same_capture(base, head)
        )
        if found is None
        else None,
        steps=steps,
        waterfall=parts,
        scaling=found,
        realised_ms=parts.ideal_ms - parts.measured_ms,
        findings=finding_changes(base, head),
        facts=moved,
        kernels=kernels_that_changed(base, head),
        collectives=collectives_that_changed(base, head),
        settings=settings,
        places=places_that_differ(base, head),
        limits=tuple(limits_of(base, head)),
        base=_in_step_of(base, lengths[0]),
        head=_in_step_of(head, lengths[1]),
    )


def _in_step_of(side: Diagnosis, compared_ms: float) -> RunInfo:
    """The run of a side, with the samples and tokens that it does in a second of compared steps."""
    run, share = side.run, (side.today_ms or 0.0) / compared_ms if compared_ms > 0 else 0.0
    return replace(
        run,
        name=side.name,
        samples_per_s=run.samples_per_s * share if run.samples_per_s and share else None,
        tokens_per_s=run.tokens_per_s * share if run.tokens_per_s and share else None,
    )


LEAST_BEND = 0.05
"""A curve bends where a step of it is less efficient than the one before it by this much."""

ONE_HOST = 8
"""Hosts seldom have more GPUs: beyond so many the network between hosts may decide."""


class Point(msgspec.Struct, frozen=True):
    """One run of a series: its step, and what its GPUs are worth.

    ``efficiency`` and ``speed_up`` are against the first run, ``step_efficiency`` against the run before it
    (1 for the first). ``gpu_time_ratio`` is how much more GPU time a unit of work takes than in the first.
    ``lost_to`` is the part of the step that grew most since the run before, "" where none did.
    """

    gpus: int
    step_ms: float
    efficiency: float
    step_efficiency: float
    speed_up: float
    gpu_time_ratio: float
    lost_to: str = ""
    lost_ms: float = 0.0
    samples_per_s: float | None = None
    gpu_hours: float | None = None


class Extrapolation(msgspec.Struct, frozen=True):
    """A step on more GPUs than any run has: predicted by replay, or bounded.

    ``step_ms`` is low, likely and high, ``None`` where it is not predicted for ``reason``; ``least_ms`` is
    what the step takes at least, and ``most_efficiency`` what follows from it.
    """

    gpus: int
    step_ms: Range | None
    efficiency: Range | None
    least_ms: float
    most_efficiency: float
    confidence: str = ""
    assumptions: tuple[str, ...] = ()
    reason: str = ""


class Series(msgspec.Struct, frozen=True):
    """Runs in order of their GPUs; ``kind`` is that of the scaling between the first and the last.

    ``bend`` is the number of GPUs at which the curve bends most, ``None`` where it does not. ``comparisons``
    are those of each run with the one before it, ``whole`` that of the last with the first.
    """

    kind: str
    evidence: str
    points: tuple[Point, ...]
    bend: int | None
    beyond: tuple[Extrapolation, ...]
    comparisons: tuple[RunComparison, ...]
    whole: RunComparison


def compare_series(
    runs: Sequence[Diagnosis],
    *,
    scaling: str | None = None,
    samples_per_step: Sequence[float] | None = None,
) -> Series:
    """Return the curve of three runs or more, in any order.

    ``scaling`` is as for :func:`~tracedoc.comparison.compare.compare`; ``samples_per_step`` are those of all
    GPUs of each run, in the order of ``runs``.

    Raises :class:`InputError` where a run has no step, two have as many GPUs, or nothing tells how the work
    of different numbers of GPUs compares.
    """
    samples = list(samples_per_step or [])
    if samples and len(samples) != len(runs):
        raise InputError(
            f"{len(samples)} numbers of samples were given for {len(runs)} runs",
            "give --samples-per-step one number for each run, in their order",
        )
    order = sorted(range(len(runs)), key=lambda place: gpus(runs[place]))
    sides = [runs[place] for place in order]
    given = [samples[place] for place in order] if samples else []
    for one, other in pairwise(sides):
        if gpus(one) == gpus(other):
            raise InputError(
                f"two of these runs have {gpus(one)} GPUs: a series has each number of GPUs once",
                "compare two runs on as many GPUs alone",
            )

    def pair(first: int, second: int) -> RunComparison:
        both = (given[first], given[second]) if given else None
        return compare(sides[first], sides[second], scaling=scaling, samples_per_step=both)

    last = len(sides) - 1
    against_first = [pair(0, place) for place in range(1, last + 1)]
    steps = [pair(place, place + 1) for place in range(last)]
    points = tuple(_points(against_first, steps))
    whole = against_first[-1]
    assert whole.scaling is not None
    return Series(
        kind=whole.scaling.kind,
        evidence=whole.scaling.evidence,
        points=points,
        bend=_bend(points),
        beyond=tuple(_beyond(sides[-1], points[-1], points[0], whole)),
        comparisons=tuple(steps),
        whole=whole,
    )


def _points(against_first: Sequence[RunComparison], steps: Sequence[RunComparison]) -> Iterator[Point]:
    start = against_first[0].scaling
    assert start is not None
    first_ms = against_first[0].waterfall.ideal_ms / start.work_frac
    yield Point(
        start.base_gpus, first_ms, 1.0, 1.0, 1.0, 1.0,
        samples_per_s=start.base_samples_per_s, gpu_hours=start.base_gpu_hours,
    )  # fmt: skip
    for found, step in zip(against_first, steps, strict=True):
        whole = found.scaling
        assert whole is not None
        assert step.scaling is not None
        part = max(step.waterfall.parts, key=lambda one: one.change_ms)
        yield Point(
            gpus=whole.head_gpus,
            step_ms=found.waterfall.measured_ms,
            efficiency=whole.efficiency,
            step_efficiency=step.scaling.efficiency,
            speed_up=whole.speed_up,
            gpu_time_ratio=whole.gpu_time_ratio,
            lost_to=part.label if part.change_ms > 0 else "",
            lost_ms=max(part.change_ms, 0.0),
            samples_per_s=whole.head_samples_per_s,
            gpu_hours=whole.head_gpu_hours,
        )


def _bend(points: Sequence[Point]) -> int | None:
    """The number of GPUs at which the efficiency of a step of the curve falls most."""
    falls = [
        (before.step_efficiency - after.step_efficiency, after.gpus) for before, after in pairwise(points)
    ]
    fall, count = max(falls, default=(0.0, 0))
    return count if fall >= LEAST_BEND else None


def _beyond(last: Diagnosis, point: Point, first: Point, whole: RunComparison) -> Iterator[Extrapolation]:
    """Yield the step on twice and four times as many GPUs as the last run has."""
    assert whole.scaling is not None
    budget = compared_budget(last)
    assert budget is not None
    predictions = last.replay.more_ranks if last.replay is not None else ()
    refused = last.replay.reason if last.replay is not None else "the diagnosis holds no replay"
    weak = whole.scaling.kind == "weak"
    for place, times in enumerate((2, 4)):
        answer = predictions[place] if place < len(predictions) else None
        # Of one batch for all, each GPU computes less; its gradients stay as many bytes.
        least = point.step_ms if weak else budget.compute_ms / times + budget.exposed_transfer_ms
        ideal = first.step_ms if weak else point.step_ms * point.efficiency / times
        count = point.gpus * times
        reason = ""
        if whole.scaling.kind == "other":
            reason, least = "the runs neither keep the batch of a GPU nor share one batch", 0.0
        elif not weak:
            reason = "smaller batches on each GPU change its kernels, which no replay shows"
        elif answer is None:
            reason = refused or "the diagnosis is older than these predictions"
        elif isinstance(answer, NotPredicted):
            reason = answer.reason
        elif count > ONE_HOST and len({rank.host for rank in last.ranks}) < 2:
            reason = "the GPUs to add may be on other hosts, and this capture shows no network between hosts"
        most = min(ideal / least, 1.0) if least > 0 else 1.0
        if reason or answer is None or isinstance(answer, NotPredicted):
            yield Extrapolation(count, None, None, least, most, reason=reason)
            continue
        low, likely, high = (max(ms * point.step_ms / _replayed(last), 1e-9) for ms in answer.step_ms)
        yield Extrapolation(
            gpus=count,
            step_ms=(low, likely, high),
            efficiency=(ideal / high, ideal / likely, ideal / low),
            least_ms=least,
            most_efficiency=most,
            confidence=answer.confidence,
            assumptions=answer.assumptions,
        )


def _replayed(last: Diagnosis) -> float:
    """Return the step that predictions start from; the compared one may be another rank's."""
    step_ms = last.replay.step_ms if last.replay is not None else None
    return step_ms or 1.0


class HistoryRun(msgspec.Struct, frozen=True):
    """One run: its step and its parts in milliseconds, and how it differs from the run before it.

    The step is that of the ledger where every run of the job has one, else the analysed step; the parts are
    those of the analysed step, in proportion. ``busy_frac`` is the share of the step in which the GPU
    computes. ``efficiency`` is against the run on fewest GPUs, ``None`` where nothing tells how their work
    compares. ``verdict`` is that of the comparison with the run before it, "" where there is none to compare
    with; ``fixed`` are the findings gone since then, with what was predicted, and ``realised_ms`` how much
    shorter the step became. ``cause`` is the id of the one that costs most, and ``cause_ms`` its share.
    ``problem`` says why a run has no step. Runs with one number of ``job`` may be of one job; those of others
    are not compared with them. ``tried`` are fixes that were tried on the job.
    """

    name: str
    gpus: int
    step_ms: float | None
    parts_ms: dict[str, float]
    busy_frac: float | None
    efficiency: float | None
    findings: tuple[str, ...]
    verdict: str = ""
    change_frac: float | None = None
    fixed: tuple[FindingChange, ...] = ()
    realised_ms: float | None = None
    cause: str = ""
    cause_ms: float | None = None
    problem: str = ""
    job: int = 1
    tried: tuple[Tried, ...] = ()


class History(msgspec.Struct, frozen=True):
    """Runs in their order; ``unread`` are entries of the folder that hold no run, with the reason."""

    folder: str
    runs: tuple[HistoryRun, ...]
    unread: tuple[tuple[str, str], ...] = ()


def history(
    folder: str,
    runs: Sequence[tuple[str, Diagnosis]],
    *,
    scaling: str | None = None,
    unread: Sequence[tuple[str, str]] = (),
) -> History:
    """Return the history of named diagnoses: job by job, in the order given."""
    jobs: list[list[tuple[str, Diagnosis]]] = []
    for run in runs:
        mine = next((job for job in jobs if are_related(job[0][1], run[1])), None)
        if mine is None:
            jobs.append([run])
        else:
            mine.append(run)
    found: list[HistoryRun] = []
    for number, job in enumerate(jobs, 1):
        fewest = min((one for _, one in job if one.budget is not None), key=gpus, default=None)
        by_ledger = all(one.ledger and one.ledger.step_ms > 0 for _, one in job if one.budget is not None)
        before: Diagnosis | None = None
        for name, diagnosis in job:
            comparison = _compared(before, diagnosis, scaling) if before is not None else None
            efficiency = _efficiency(fewest, diagnosis, scaling)
            told = _run(name, diagnosis, comparison, efficiency, by_ledger=by_ledger)
            found.append(replace(told, job=number))
            before = diagnosis
    return History(folder, tuple(found), tuple(unread))


def _compared(before: Diagnosis, after: Diagnosis, scaling: str | None) -> RunComparison | None:
    """The comparison of two runs; ``None`` for fewer GPUs than before, or where nothing can be compared."""
    if gpus(before) > gpus(after):
        return None
    try:
        return compare(before, after, scaling=scaling if gpus(before) != gpus(after) else None)
    except InputError:
        return None


def _efficiency(fewest: Diagnosis | None, diagnosis: Diagnosis, scaling: str | None) -> float | None:
    if fewest is None or gpus(fewest) == gpus(diagnosis):
        return None
    found = _compared(fewest, diagnosis, scaling)
    return found.scaling.efficiency if found is not None and found.scaling is not None else None


def _run(
    name: str,
    diagnosis: Diagnosis,
    comparison: RunComparison | None,
    efficiency: float | None,
    *,
    by_ledger: bool,
) -> HistoryRun:
    budget = compared_budget(diagnosis)
    findings = tuple(dict.fromkeys(one.rule_id for one in diagnosis.findings if one.topic != "capture"))
    if budget is None or budget.step_ms <= 0:
        problem = "no step to analyse"
        return HistoryRun(name, gpus(diagnosis), None, {}, None, None, findings, problem=problem)
    input_ms = budget.idle_causes_ms.get("input", 0.0)
    ledger = diagnosis.ledger
    step_ms = ledger.step_ms if by_ledger and ledger is not None else budget.step_ms
    largest = ledger.causes[:1] if ledger is not None else ()
    parts = {key: getattr(budget, field) for key, _, field in BUDGET_PARTS if key != "idle"}
    parts |= {"input": input_ms, "idle": budget.idle_ms - input_ms}
    run = HistoryRun(
        name=name,
        gpus=gpus(diagnosis),
        step_ms=step_ms,
        parts_ms={key: ms * step_ms / budget.step_ms for key, ms in parts.items()},
        busy_frac=budget.compute_ms / budget.step_ms,
        efficiency=efficiency,
        findings=findings,
        cause=largest[0].id if largest else "",
        cause_ms=largest[0].share_ms if largest else None,
        tried=diagnosis.tried,
    )
    if comparison is None or comparison.verdict is None:
        return run
    return replace(
        run,
        verdict=comparison.verdict.word,
        change_frac=comparison.steps.change_frac if comparison.steps else None,
        fixed=tuple(one for one in comparison.findings if one.state == "fixed"),
        realised_ms=comparison.realised_ms,
    )
