"""How work scales over GPUs, and the way from the ideal step to the measured one, in signed parts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tracedoc.comparison.differences import flop_of, gpus
from tracedoc.diagnosis import Budget, BudgetLocation, Diagnosis
from tracedoc.errors import InputError
from tracedoc.ledger import CAUSE_WORDS, Ledger, LedgerCause
from tracedoc.tables import KernelRow
from tracedoc.units import format_bytes, format_ranges

_SAME_CALLS = 0.02
"""A kernel counts as the same on both sides if its calls differ by no more than this share."""

_LEAST_COST = 0.02
"""A rank that costs the others this share of the step is one that they wait for."""

_OF_BUDGET = (
    ("compute", "compute", "compute_ms"),
    ("communication", "exposed communication", "exposed_comm_ms"),
    ("copy", "exposed copies and offload", "exposed_copy_ms"),
    ("idle", "idle time", "idle_ms"),
)
"""The parts into which every budget splits exactly, whatever its capture can tell apart."""


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
    ``base_at`` and ``head_at`` say which rank's step each side is; ``by_cause`` that parts are causes of the
    ledger, whose key is the cause's id, and the steps the mean captured ones.
    """

    ideal_ms: float
    measured_ms: float
    work_frac: float
    parts: tuple[WaterfallPart, ...]
    base_at: BudgetLocation | None = None
    head_at: BudgetLocation | None = None
    by_cause: bool = False


def waterfall(base: Diagnosis, head: Diagnosis, work_frac: float = 1.0) -> Waterfall | None:
    """The parts by which BASE's analysed step, at HEAD's work per GPU, becomes HEAD's.

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
    waits_more = head if after.exposed_comm_ms > before.exposed_comm_ms * work else base
    evidence = {
        "compute": kernel_words(base, head, work),
        "communication": "; ".join(filter(None, (transfer_words(base, head), waiting_words(waits_more)))),
        "copy": offload_words(base, head),
        "idle": workers_words(base, head),
    }
    for key, label, name in _OF_BUDGET:
        yield _of(key, label, getattr(before, name) * work, getattr(after, name), evidence[key])


def _kernels(side: Diagnosis) -> dict[str, KernelRow]:
    """The kernels that compute, by name."""
    return {row.name: row for row in side.detail.kernels if row.category != "communication"}


def kernel_words(base: Diagnosis, head: Diagnosis, work: float) -> str:
    """Which kernels differ between two runs, where both list theirs."""
    old, new = _kernels(base), _kernels(head)
    if not old or not new:
        return ""
    words = (_same_kernels(old, new, work), _other_kernels(old, new, work))
    return "; ".join(filter(None, words))


def _of(key: str, label: str, ideal: float, measured: float, evidence: str = "") -> WaterfallPart:
    return WaterfallPart(key, label, ideal, measured, measured - ideal, evidence)


def _same_kernels(old: dict[str, KernelRow], new: dict[str, KernelRow], work: float) -> str:
    """The kernel that changed most of those with one name and as many calls on both sides."""
    changes = [
        (row.time_ms - old[name].time_ms * work, name)
        for name, row in new.items()
        if name in old and _as_many(old[name], row)
    ]
    change, name = max(changes, key=lambda pair: abs(pair[0]), default=(0.0, ""))
    if not change:
        return ""
    was, now = old[name].time_ms * work, new[name].time_ms
    return f"most of it {name}: {was:.3g} -> {now:.3g} ms"


def _other_kernels(old: dict[str, KernelRow], new: dict[str, KernelRow], work: float) -> str:
    """The numbers of the kernels that are not the same, and the category that changed most."""
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


def compared_budget(diagnosis: Diagnosis) -> Budget | None:
    """Return the budget whose parts are compared; ``None`` where the run has none.

    That is the run's own, unless it is the step of the rank that all others wait for: there the wait shows as
    whatever made the rank late, and on every other rank as waiting. Then it is the lower median of those.
    """
    own = diagnosis.budget
    if own is None or own.at is None or own.at.rank != late_rank(diagnosis):
        return own
    others = [rank.budget for rank in diagnosis.ranks if rank.rank != own.at.rank and rank.budget]
    others.sort(key=lambda budget: budget.step_ms)
    return others[(len(others) - 1) // 2] if others else own


def late_rank(diagnosis: Diagnosis) -> int | None:
    """Return the rank that the others wait for longest, ``None`` where they hardly wait for any."""
    if diagnosis.budget is None:
        return None
    costs = diagnosis.numbers("straggler_cost_ms")
    rank = max(filter(str.isdecimal, costs), key=costs.__getitem__, default="")
    return int(rank) if rank and costs[rank] >= _LEAST_COST * diagnosis.budget.step_ms else None


def transfer_words(base: Diagnosis, head: Diagnosis) -> str:
    """The differences of the collective with most exposed time: calls, bytes, bandwidth."""
    before, after = ({(row.op, row.dtype): row for row in side.detail.collectives} for side in (base, head))
    exposed = {
        kind: max(side[kind].exposed_ms for side in (before, after) if kind in side)
        for kind in (*before, *after)
    }
    if not exposed:
        return ""
    kind = max(exposed, key=exposed.__getitem__)
    rows = (before.get(kind), after.get(kind))
    calls = [f"{row.calls_per_step:.3g}" if row else "0" for row in rows]
    words = [f"{kind[0]}: {calls[0]} -> {calls[1]} a step"]
    if all(row is None or row.bytes_per_step for row in rows):
        sizes = [format_bytes(float(row.bytes_per_step or 0) if row else 0.0) for row in rows]
        words.append(f"{sizes[0]} -> {sizes[1]}")
    rates = [f"{row.busbw_gbps:.3g}" for row in rows if row is not None and row.busbw_gbps]
    if len(rates) == 2:
        words.append(f"{rates[0]} -> {rates[1]} GB/s")
    return ", ".join(words)


def waiting_words(side: Diagnosis) -> str:
    """The rank that the others wait for, or that arrived last most often, in words."""
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


def workers_words(base: Diagnosis, head: Diagnosis) -> str:
    """The loaders' workers on both sides, where both know them."""
    old, new = (side.value("loader_workers") for side in (base, head))
    return f"loader workers: {old} -> {new}" if old is not None and new is not None else ""


def offload_words(base: Diagnosis, head: Diagnosis) -> str:
    """Return the bytes that offloading moves, where a side moves any."""
    sizes = [side.number("offloaded_bytes_per_step") or 0.0 for side in (base, head)]
    return f"offloaded: {format_bytes(sizes[0])} -> {format_bytes(sizes[1])} a step" if any(sizes) else ""


def cause_waterfall(base: Diagnosis, head: Diagnosis, work_frac: float = 1.0) -> Waterfall | None:
    """The causes by which BASE's mean step, at HEAD's work per GPU, becomes HEAD's.

    ``None`` where a side has no ledger.
    """
    before, after = base.ledger, head.ledger
    if before is None or after is None or before.step_ms <= 0 or after.step_ms <= 0:
        return None
    return Waterfall(
        ideal_ms=before.step_ms * work_frac,
        measured_ms=after.step_ms,
        work_frac=work_frac,
        parts=tuple(_cause_parts(base, head, before, after, work=work_frac)),
        by_cause=True,
    )


def step_lengths(base: Diagnosis, head: Diagnosis) -> tuple[float, float]:
    """The steps that are compared, in ms: the mean ones where both sides have a ledger, else the analysed."""
    if (fall := cause_waterfall(base, head)) is not None:
        return fall.ideal_ms, fall.measured_ms
    before, after = compared_budget(base), compared_budget(head)
    return (before.step_ms if before is not None else 0.0), (after.step_ms if after is not None else 0.0)


def _cause_parts(
    base: Diagnosis, head: Diagnosis, before: Ledger, after: Ledger, *, work: float
) -> Iterator[WaterfallPart]:
    """Yield compute at its rate, what each cause costs, and what is not explained."""
    rest = [side.ideal_ms - side.unexplained_ms for side in (before, after)]
    kernels = kernel_words(base, head, work)
    yield _of("compute", "compute at its rate", rest[0] * work, rest[1], kernels)
    old, new = ({one.id: one for one in side.causes} for side in (before, after))
    known = [cause for cause in CAUSE_WORDS if cause in old or cause in new]
    for cause in dict.fromkeys((*known, *old, *new)):
        ideal, measured = (side[cause].share_ms if cause in side else 0.0 for side in (old, new))
        ideal *= work
        more = measured > ideal
        seen = (new if more else old).get(cause)
        words = [_where(seen)] if seen is not None else []
        words.append(_evidence(cause, base, head, more=more))
        label = CAUSE_WORDS.get(cause, cause)
        yield _of(cause, label, ideal, measured, "; ".join(filter(None, words)))
    yield _of("unexplained", "unexplained", before.unexplained_ms * work, after.unexplained_ms, "")


def _where(cause: LedgerCause) -> str:
    ranks = f"rank{'s' * (len(cause.ranks) > 1)} {format_ranges(cause.ranks)}" if cause.ranks else ""
    return ", ".join(filter(None, (ranks, cause.place)))


def _evidence(cause: str, base: Diagnosis, head: Diagnosis, *, more: bool) -> str:
    """What else differs between the sides that speaks of a cause; "" for nothing."""
    family = cause.partition(".")[0]
    if family == "ranks":
        return waiting_words(head if more else base)
    if cause == "host.offload":
        return offload_words(base, head)
    words = {"link": transfer_words, "input": workers_words}.get(family)
    return words(base, head) if words is not None else ""


_SAME_WORK = 0.1
"""How far the arithmetic of a GPU may be from that of a kind of scaling."""


class Scaling(msgspec.Struct, frozen=True):
    """From ``base_gpus`` to ``head_gpus``: ``kind`` is "weak", "strong" or "other", ``evidence`` says why.

    ``efficiency`` is the ideal step over the measured one, ``speed_up`` how much more work is done in a
    second, at most ``head_gpus / base_gpus`` if nothing is lost. ``gpu_time_ratio`` is how much more GPU time
    a unit of work takes than on BASE's GPUs. Samples per second, and GPU-hours for a million samples, are
    known where samples were given.
    """

    base_gpus: int
    head_gpus: int
    kind: str
    evidence: str
    work_frac: float
    efficiency: float
    speed_up: float
    gpu_time_ratio: float
    base_samples_per_s: float | None = None
    head_samples_per_s: float | None = None
    base_gpu_hours: float | None = None
    head_gpu_hours: float | None = None


def scaling_of(
    base: Diagnosis,
    head: Diagnosis,
    *,
    kind: str | None,
    samples: tuple[float, float] | None,
) -> Scaling | None:
    """The scaling of the work; ``None`` for runs on the same number of GPUs without a word about it.

    Raises :class:`InputError` where the sides are swapped, or nothing tells whether the GPUs share the work.
    """
    before, after = gpus(base), gpus(head)
    if before == after and kind is None and samples is None:
        return None
    if before > after:
        raise InputError(
            f"BASE has {before} GPUs and HEAD {after}: the sides are swapped",
            "name the run on fewer GPUs first",
        )
    if samples is not None:
        work, evidence = (samples[1] / after) / (samples[0] / before), "samples per step were given"
    elif kind is not None:
        work, evidence = (1.0 if kind == "weak" else before / after), "as told"
    else:
        work, evidence = _from_captures(base, head)
    steps = step_lengths(base, head)
    faster = steps[0] / steps[1] if steps[1] > 0 else 0.0
    return Scaling(
        base_gpus=before,
        head_gpus=after,
        kind=_name_of(work, before / after),
        evidence=evidence,
        work_frac=work,
        efficiency=faster * work,
        speed_up=faster * work * after / before,
        gpu_time_ratio=1 / (faster * work) if faster * work > 0 else 0.0,
        base_samples_per_s=_samples_per_s(samples[0], steps[0]) if samples else None,
        head_samples_per_s=_samples_per_s(samples[1], steps[1]) if samples else None,
        base_gpu_hours=_gpu_hours(samples[0], steps[0], before) if samples else None,
        head_gpu_hours=_gpu_hours(samples[1], steps[1], after) if samples else None,
    )


def _samples_per_s(samples: float, step_ms: float) -> float | None:
    """Return the samples that all GPUs train in a second."""
    return 1000 * samples / step_ms if step_ms > 0 else None


def _gpu_hours(samples: float, step_ms: float, gpus: int) -> float:
    """Return the hours of one GPU that a million samples take."""
    return gpus * step_ms / 3.6e6 * 1e6 / samples


def _name_of(work: float, shared: float) -> str:
    if abs(work - 1.0) <= _SAME_WORK:
        return "weak"
    return "strong" if abs(work / shared - 1.0) <= _SAME_WORK else "other"


def _from_captures(base: Diagnosis, head: Diagnosis) -> tuple[float, str]:
    """Return the work of a GPU of HEAD as a share of one of BASE: by arithmetic, else by the loaders."""
    before, after = flop_of(base), flop_of(head)
    if before is not None and after is not None:
        ratio = after / before
        return _work(ratio, base, head), f"a GPU does {ratio:.2f} times the arithmetic of a step"
    before, after = _batch(base), _batch(head)
    if before is None or after is None:
        raise InputError(
            "nothing in these captures tells whether the GPUs share one batch or have one each",
            "add --scaling weak (the same batch per GPU), --scaling strong (the same global batch), or"
            " --samples-per-step BASE,HEAD",
        )
    return _work(after / before, base, head), f"batches of {before:.0f} and {after:.0f} samples on a GPU"


def _work(ratio: float, base: Diagnosis, head: Diagnosis) -> float:
    """Return a ratio as exactly that of weak or strong scaling where it is near one of them."""
    shared = gpus(base) / gpus(head)
    if abs(ratio - 1.0) <= _SAME_WORK:
        return 1.0
    return shared if abs(ratio / shared - 1.0) <= _SAME_WORK else ratio


def _batch(diagnosis: Diagnosis) -> float | None:
    """Return the samples of a GPU's step: the batch of its loader, in each of its micro-batches."""
    batch = diagnosis.run.settings.get("batch size of the loader", "")
    if not batch.isdecimal() or not 0 < int(batch) < 10**9:
        return None
    parts = diagnosis.number("micro_batches")
    return float(batch) * (parts if parts is not None and parts > 0 else 1)
