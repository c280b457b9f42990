"""From the ideal step to the measured one, in signed parts that add up to the difference exactly."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import Budget, BudgetLocation, CollectiveRow, Diagnosis, KernelRow, RankReport
from tracedoc.idle_causes import WORDS
from tracedoc.units import format_bytes, format_ms

_HOST = ("launch", "optimizer", "dispatch", "python", "sync", "allocator", "compile", "gc", "profiler")
_SPLIT_ALIKE = 0.1
"""Transfer and waiting are compared where as much of them is split on both sides, but for this share."""

_LEAST_UNSPLIT = 0.02
"""Less than this share of the step that is not split moves no other part by more."""

_SAME_CALLS = 0.02
"""A kernel counts as the same on both sides if its calls differ by no more than this share."""

_OF_BUDGET = (
    ("transfer", "exposed transfer", "exposed_transfer_ms"),
    ("wait", "waiting for peers", "exposed_wait_ms"),
    ("pipeline", "waiting in the pipeline", "pipeline_wait_ms"),
    ("unsplit", "exposed communication (transfer or waiting)", "exposed_comm_unsplit_ms"),
    ("copy", "exposed copies and offload", "exposed_copy_ms"),
)


class WaterfallPart(msgspec.Struct, frozen=True):
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
    ``base_at`` and ``head_at`` say which rank's step each side is.
    """

    ideal_ms: float
    measured_ms: float
    work_frac: float
    parts: tuple[WaterfallPart, ...]
    base_at: BudgetLocation | None = None
    head_at: BudgetLocation | None = None


def waterfall(base: Diagnosis, head: Diagnosis, work_frac: float = 1.0) -> Waterfall | None:
    """Return how BASE's analysed step, less or more work per GPU considered, becomes HEAD's.

    A side whose analysed step is that of a straggler is seen from a rank that waits for it
    (:func:`compared_budget`). ``None`` where a side has no budget.
    """
    before, after = compared_budget(base), compared_budget(head)
    if before is None or after is None:
        return None
    return Waterfall(
        ideal_ms=before.step_ms * work_frac,
        measured_ms=after.step_ms,
        work_frac=work_frac,
        parts=tuple(_parts(base, head, before, after, work_frac)),
        base_at=before.at,
        head_at=after.at,
    )


def _parts(
    base: Diagnosis, head: Diagnosis, before: Budget, after: Budget, work: float
) -> Iterator[WaterfallPart]:
    yield from _compute(base, head, before, after, work=work)
    if _split_unlike(before, after):
        # What one side cannot separate is no change of either part.
        before, after = _joined(before), _joined(after)
    for key, label, name in _OF_BUDGET:
        ideal, measured = getattr(before, name) * work, getattr(after, name)
        yield _of(key, label, ideal, measured, _words(key, base, head, more=measured > ideal))
    rest_before, rest_after = before.idle_ms * work, after.idle_ms
    for key, label, causes in (("input", "input", ("input",)), ("host", "host and launches", _HOST)):
        ideal, measured = _causes(before, causes) * work, _causes(after, causes)
        rest_before, rest_after = rest_before - ideal, rest_after - measured
        words = workers_words(base, head) if key == "input" else idle_words(before, after, causes)
        yield _of(key, label, ideal, measured, words)
    named = {*_HOST, "input"}
    others = tuple(cause for cause in {**before.idle_causes_ms, **after.idle_causes_ms} if cause not in named)
    yield _of("idle", "other idle time", rest_before, rest_after, idle_words(before, after, others))


def _compute(
    base: Diagnosis, head: Diagnosis, before: Budget, after: Budget, *, work: float
) -> Iterator[WaterfallPart]:
    """Yield compute, split by what is known of both analysed steps: kernels by name, recomputation."""
    known = before is base.budget and after is head.budget
    known = known and bool(base.detail.kernels) and bool(head.detail.kernels)
    if not known:
        yield _of("compute", "compute", before.compute_ms * work, after.compute_ms)
        return
    slower, words = _same_kernels(base.detail.kernels, head.detail.kernels, work)
    yield WaterfallPart(
        "slower-kernels", "compute: the same kernels, slower or faster", 0.0, slower, slower, words
    )
    again_before, again_after = _recomputed(base) * work, _recomputed(head)
    if bool(again_before) != bool(again_after):
        # Kernels that only one side runs again have other numbers of calls: they are not among the same.
        yield _of("recompute", "compute: recomputation", again_before, again_after)
    else:
        again_before = again_after = 0.0
    ideal = before.compute_ms * work - again_before
    rest = after.compute_ms - slower - again_after
    words = _other_kernels(base.detail.kernels, head.detail.kernels, work)
    yield WaterfallPart("compute", "compute: more, fewer or other kernels", ideal, rest, rest - ideal, words)


def _split_unlike(before: Budget, after: Budget) -> bool:
    """Return whether one side separates transfer from waiting and the other does not, where it matters."""
    unknown = max(before.exposed_comm_unsplit_ms, after.exposed_comm_unsplit_ms)
    matters = unknown > _LEAST_UNSPLIT * max(before.step_ms, after.step_ms)
    return matters and abs(_unsplit_share(before) - _unsplit_share(after)) > _SPLIT_ALIKE


def _unsplit_share(budget: Budget) -> float:
    """Return how much of the exposed communication is not split; that of none counts as split."""
    both = budget.exposed_transfer_ms + budget.exposed_wait_ms + budget.exposed_comm_unsplit_ms
    return budget.exposed_comm_unsplit_ms / both if both > 0 else 0.0


def _joined(budget: Budget) -> Budget:
    """Return a budget whose transfer and waiting are one."""
    both = budget.exposed_transfer_ms + budget.exposed_wait_ms + budget.exposed_comm_unsplit_ms
    return replace(budget, exposed_transfer_ms=0.0, exposed_wait_ms=0.0, exposed_comm_unsplit_ms=both)


def _words(key: str, base: Diagnosis, head: Diagnosis, *, more: bool) -> str:
    if key == "transfer":
        return transfer_words(base, head)
    if key == "copy":
        return offload_words(base, head)
    return waiting_words(head if more else base) if key in ("wait", "unsplit") else ""


def _of(key: str, label: str, ideal: float, measured: float, evidence: str = "") -> WaterfallPart:
    return WaterfallPart(key, label, ideal, measured, measured - ideal, evidence)


def _causes(budget: Budget, causes: tuple[str, ...]) -> float:
    return sum(budget.idle_causes_ms.get(cause, 0.0) for cause in causes)


def _recomputed(side: Diagnosis) -> float:
    return sum(row.compute_ms for row in side.detail.phases if row.phase == "recompute")


def _same_kernels(
    before: tuple[KernelRow, ...], after: tuple[KernelRow, ...], work: float
) -> tuple[float, str]:
    """Return by how much kernels of the same name and number take longer, and which one most of all."""
    known = {row.name: row for row in before if row.category != "communication"}
    changes = [
        (row.time_ms - known[row.name].time_ms * work, row)
        for row in after
        if row.name in known and _as_many(known[row.name], row)
    ]
    if not changes:
        return 0.0, ""
    total = sum(change for change, _ in changes)
    change, row = max(changes, key=lambda pair: abs(pair[0]))
    was = known[row.name].time_ms * work
    return total, f"most of it {row.name}: {was:.3g} -> {row.time_ms:.3g} ms" if change else ""


def _other_kernels(before: tuple[KernelRow, ...], after: tuple[KernelRow, ...], work: float) -> str:
    """Return how the number of kernels that are not the same changed, and which kind of them most."""
    old = {row.name: row for row in before if row.category != "communication"}
    new = {row.name: row for row in after if row.category != "communication"}
    same = {name for name in old.keys() & new.keys() if _as_many(old[name], new[name])}
    times: dict[str, float] = {}
    calls = [0, 0]
    for place, (side, share) in enumerate(((old, -work), (new, 1.0))):
        for name, row in side.items():
            if name not in same:
                times[row.category] = times.get(row.category, 0.0) + share * row.time_ms
                calls[place] += row.calls
    if not times or calls == [0, 0]:
        return ""
    category = max(times, key=lambda one: abs(times[one]))
    return f"{calls[0]} -> {calls[1]} such kernels, most of it {category}"


def _as_many(old: KernelRow, new: KernelRow) -> bool:
    return abs(new.calls - old.calls) <= _SAME_CALLS * new.calls


_LEAST_COST = 0.1
"""A rank that costs the others this share of the step is one that they wait for."""


def compared_budget(diagnosis: Diagnosis) -> Budget | None:
    """Return the budget whose parts are compared; ``None`` where the run has none.

    That is the run's own, unless it is the step of the rank that all others wait for: there the wait shows as
    whatever made the rank late, and on every other rank as waiting. Then it is the lower median of those.
    """
    own = diagnosis.budget
    if own is None or own.at is None or own.at.rank != late_rank(diagnosis):
        return own
    others = [rank for rank in diagnosis.ranks if rank.rank != own.at.rank and rank.budget is not None]
    others.sort(key=_step_ms)
    return others[(len(others) - 1) // 2].budget if others else own


def late_rank(diagnosis: Diagnosis) -> int | None:
    """Return the rank that the others wait for longest, ``None`` where they hardly wait for any."""
    if diagnosis.budget is None:
        return None
    costs = diagnosis.numbers("straggler_cost_ms")
    rank = max(filter(str.isdecimal, costs), key=costs.__getitem__, default="")
    return int(rank) if rank and costs[rank] >= _LEAST_COST * diagnosis.budget.step_ms else None


def _step_ms(rank: RankReport) -> float:
    return rank.budget.step_ms if rank.budget is not None else 0.0


_LEAST_SHARE = 0.01
"""Causes of idle time below this share of the longer step are not named."""


def transfer_words(base: Diagnosis, head: Diagnosis) -> str:
    """Return how the collective with most exposed time differs: calls, bytes, bandwidth."""
    before = {_kind(row): row for row in base.detail.collectives}
    after = {_kind(row): row for row in head.detail.collectives}
    kinds = sorted(
        {*before, *after}, key=lambda kind: -max(_exposed(before.get(kind)), _exposed(after.get(kind)))
    )
    if not kinds:
        return ""
    old, new = before.get(kinds[0]), after.get(kinds[0])
    words = [f"{kinds[0][0]}: {_calls(old)} -> {_calls(new)} a step"]
    if (old is None or old.bytes_per_step) and (new is None or new.bytes_per_step):
        words.append(f"{format_bytes(_bytes(old))} -> {format_bytes(_bytes(new))}")
    if old is not None and new is not None and old.busbw_gbps and new.busbw_gbps:
        words.append(f"{old.busbw_gbps:.3g} -> {new.busbw_gbps:.3g} GB/s")
    return ", ".join(words)


def waiting_words(side: Diagnosis) -> str:
    """Return which rank the others wait for, or who arrived last most often."""
    late = late_rank(side)
    shares: dict[str, int] = {}
    for row in side.detail.collectives:
        for rank, count in row.last_arrivals.items():
            shares[rank] = shares.get(rank, 0) + count
    total = sum(shares.values())
    rank = str(late) if late is not None else max(shares, key=lambda one: shares[one], default="")
    words = []
    if total and 2 * shares.get(rank, 0) >= total:
        words.append(f"rank {rank} arrives last in {100 * shares[rank] / total:.0f} % of the collectives")
    elif late is not None:
        words.append(f"most of it for rank {late}")
    place = side.facts.get("straggler_code")
    code = place.values.get(str(late)) if place is not None and late is not None else None
    if isinstance(code, str) and code not in ("", "none"):
        words.append(f"it is late in {code}")
    return "; ".join(words)


def idle_words(before: Budget, after: Budget, causes: tuple[str, ...]) -> str:
    """Return the causes of idle time that changed, with their time on both sides."""
    least = _LEAST_SHARE * max(before.step_ms, after.step_ms)
    pairs = [(one, before.idle_causes_ms.get(one, 0.0), after.idle_causes_ms.get(one, 0.0)) for one in causes]
    pairs = [pair for pair in pairs if abs(pair[2] - pair[1]) >= least]
    pairs.sort(key=lambda pair: -abs(pair[2] - pair[1]))
    return ", ".join(
        f"{WORDS[one].idle if one in WORDS else one}: {format_ms(old)} -> {format_ms(new)}"
        for one, old, new in pairs[:2]
    )


def workers_words(base: Diagnosis, head: Diagnosis) -> str:
    """Return how many workers the loaders have, where both sides know it."""
    old, new = (side.facts.get("loader_workers") for side in (base, head))
    if old is None or new is None or old.value is None or new.value is None:
        return ""
    return f"loader workers: {old.value} -> {new.value}"


def offload_words(base: Diagnosis, head: Diagnosis) -> str:
    """Return the bytes that offloading moves, where a side moves any."""
    sizes = [side.number("offloaded_bytes_per_step") or 0.0 for side in (base, head)]
    return f"offloaded: {format_bytes(sizes[0])} -> {format_bytes(sizes[1])} a step" if any(sizes) else ""


def _kind(row: CollectiveRow) -> tuple[str, str]:
    return row.op, row.dtype


def _exposed(row: CollectiveRow | None) -> float:
    return row.exposed_ms if row is not None else 0.0


def _bytes(row: CollectiveRow | None) -> float:
    return float(row.bytes_per_step or 0) if row is not None else 0.0


def _calls(row: CollectiveRow | None) -> str:
    return f"{row.calls_per_step:.3g}" if row is not None else "0"
