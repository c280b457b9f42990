"""Two diagnoses become one comparison."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from tracedoc.comparison.differences import (
    CollectiveChange,
    FactChange,
    FindingChange,
    KernelChange,
    Scaling,
    Setting,
    collectives_that_changed,
    facts_that_moved,
    finding_changes,
    kernels_that_changed,
    limits_of,
    places_that_differ,
    scaling_of,
    settings_that_differ,
)
from tracedoc.comparison.step_change import StepChange, StepVerdict, same_capture, step_change, verdict_on
from tracedoc.comparison.waterfall import Waterfall, cause_waterfall, step_lengths, waterfall
from tracedoc.diagnosis import Diagnosis, RunInfo
from tracedoc.errors import InputError, Limit


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
