"""From the ideal step to the measured one, in signed parts that add up to the difference exactly."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tracedoc.diagnosis import Budget, Diagnosis, KernelRow

_HOST = ("launch", "optimizer", "dispatch", "python", "sync", "allocator", "compile", "gc", "profiler")
_SAME_CALLS = 0.02
"""A kernel counts as the same on both sides if its calls differ by no more than this share."""


class Part(msgspec.Struct, frozen=True):
    """One part of the step: what it should take, what it takes, and the difference, in milliseconds.

    ``evidence`` says in words what was seen on the two sides.
    """

    key: str
    label: str
    ideal_ms: float
    measured_ms: float
    change_ms: float
    evidence: str = ""


class Waterfall(msgspec.Struct, frozen=True):
    """``ideal_ms`` plus the changes of all parts is ``measured_ms``; parts come in the order of the budget.

    ``work_frac`` is the work of a GPU of HEAD as a share of that of a GPU of BASE: 1 where they do the same.
    """

    ideal_ms: float
    measured_ms: float
    work_frac: float
    parts: tuple[Part, ...]


def waterfall(base: Diagnosis, head: Diagnosis, work_frac: float = 1.0) -> Waterfall | None:
    """Return how BASE's analysed step, less or more work per GPU considered, becomes HEAD's.

    ``None`` where a side has no budget.
    """
    if base.budget is None or head.budget is None:
        return None
    return Waterfall(
        ideal_ms=base.budget.step_ms * work_frac,
        measured_ms=head.budget.step_ms,
        work_frac=work_frac,
        parts=tuple(_parts(base, head, base.budget, head.budget, work_frac)),
    )


def _parts(base: Diagnosis, head: Diagnosis, before: Budget, after: Budget, work: float) -> Iterator[Part]:
    slower, words = _same_kernels(base.detail.kernels, head.detail.kernels, work)
    more = after.compute_ms - before.compute_ms * work - slower
    yield Part("slower-kernels", "compute: the same kernels, slower or faster", 0.0, slower, slower, words)
    rest = after.compute_ms - slower
    yield Part("compute", "compute: more, fewer or other kernels", before.compute_ms * work, rest, more)
    for key, label, name in (
        ("transfer", "exposed transfer", "exposed_transfer_ms"),
        ("wait", "waiting for peers", "exposed_wait_ms"),
        ("pipeline", "waiting in the pipeline", "pipeline_wait_ms"),
        ("unsplit", "exposed communication (transfer or waiting)", "exposed_comm_unsplit_ms"),
        ("copy", "exposed copies and offload", "exposed_copy_ms"),
    ):
        more = getattr(after, name) > getattr(before, name) * work
        words = _last_ranks(head if more else base) if key in ("wait", "unsplit") else ""
        yield _of(key, label, getattr(before, name) * work, getattr(after, name), words)
    groups = (("input", "input", ("input",)), ("host", "host and launches", _HOST))
    rest_before, rest_after = before.idle_ms * work, after.idle_ms
    for key, label, causes in groups:
        ideal, measured = _causes(before, causes) * work, _causes(after, causes)
        rest_before, rest_after = rest_before - ideal, rest_after - measured
        yield _of(key, label, ideal, measured)
    yield _of("idle", "other idle time", rest_before, rest_after)


def _of(key: str, label: str, ideal: float, measured: float, evidence: str = "") -> Part:
    return Part(key, label, ideal, measured, measured - ideal, evidence)


def _causes(budget: Budget, causes: tuple[str, ...]) -> float:
    return sum(budget.idle_causes_ms.get(cause, 0.0) for cause in causes)


def _same_kernels(
    before: tuple[KernelRow, ...], after: tuple[KernelRow, ...], work: float
) -> tuple[float, str]:
    """Return by how much kernels of the same name and number take longer, and which one most of all."""
    known = {row.name: row for row in before if row.category != "communication"}
    changes = [
        (row.time_ms - known[row.name].time_ms * work, row)
        for row in after
        if row.name in known and abs(row.calls - known[row.name].calls) <= _SAME_CALLS * row.calls
    ]
    if not changes:
        return 0.0, ""
    total = sum(change for change, _ in changes)
    change, row = max(changes, key=lambda pair: abs(pair[0]))
    was = known[row.name].time_ms * work
    return total, f"most of it {row.name}: {was:.3g} -> {row.time_ms:.3g} ms" if change else ""


def _last_ranks(side: Diagnosis) -> str:
    """Return which rank came last most often, where one did in most operations."""
    last: dict[str, int] = {}
    for row in side.detail.collectives:
        for rank, count in row.last_arrivals.items():
            last[rank] = last.get(rank, 0) + count
    if not last:
        return ""
    rank = max(last, key=lambda one: last[one])
    share = last[rank] / sum(last.values())
    return f"rank {rank} arrives last in {100 * share:.0f} % of the collectives" if share >= 0.5 else ""
