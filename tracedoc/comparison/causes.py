"""Which causes grew between two runs that both have a ledger: a waterfall whose parts are causes."""

from __future__ import annotations

from collections.abc import Iterator

from tracedoc.comparison.waterfall import (
    Waterfall,
    WaterfallPart,
    compared_budget,
    kernel_words,
    offload_words,
    transfer_words,
    waiting_words,
    workers_words,
)
from tracedoc.diagnosis import Diagnosis
from tracedoc.ledger import CAUSE_WORDS, Ledger, LedgerCause
from tracedoc.units import format_ranges


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
        parts=tuple(_parts(base, head, before, after, work=work_frac)),
        by_cause=True,
    )


def step_lengths(base: Diagnosis, head: Diagnosis) -> tuple[float, float]:
    """The steps that are compared, in ms: the mean ones where both sides have a ledger, else the analysed."""
    if (fall := cause_waterfall(base, head)) is not None:
        return fall.ideal_ms, fall.measured_ms
    before, after = compared_budget(base), compared_budget(head)
    return (before.step_ms if before is not None else 0.0), (after.step_ms if after is not None else 0.0)


def _parts(
    base: Diagnosis, head: Diagnosis, before: Ledger, after: Ledger, *, work: float
) -> Iterator[WaterfallPart]:
    """Yield compute at its rate, what each cause costs, and what is not explained."""
    rest = [side.ideal_ms - side.unexplained_ms for side in (before, after)]
    kernels = kernel_words(base, head, work)
    yield _part("compute", "compute at its rate", rest[0] * work, rest[1], kernels)
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
        yield _part(cause, label, ideal, measured, "; ".join(filter(None, words)))
    yield _part("unexplained", "unexplained", before.unexplained_ms * work, after.unexplained_ms, "")


def _part(key: str, label: str, ideal: float, measured: float, evidence: str) -> WaterfallPart:
    return WaterfallPart(key, label, ideal, measured, measured - ideal, evidence)


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
