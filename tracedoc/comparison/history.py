"""The runs of a folder one after the other: steps, efficiency, findings, and what fixes were worth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from tracedoc.comparison.compare import RunComparison, compare
from tracedoc.comparison.differences import FindingChange
from tracedoc.comparison.scaling import gpus
from tracedoc.comparison.waterfall import compared_budget
from tracedoc.diagnosis import BUDGET_PARTS, Diagnosis
from tracedoc.errors import InputError


class HistoryRun(msgspec.Struct, frozen=True):
    """One run: its step and its parts in milliseconds, and how it differs from the run before it.

    ``busy_frac`` is the share of the step in which the GPU computes. ``efficiency`` is against the run on
    fewest GPUs, ``None`` where nothing tells how their work compares. ``verdict`` is that of the comparison
    with the run before it, "" where there is none to compare with; ``fixed`` are the findings gone since
    then, with what was predicted, and ``realised_ms`` how much shorter the step became. ``cause`` is the id
    of the one that costs most, and ``cause_ms`` its share. ``problem`` says why a run has no step.
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
    """Return the history of named diagnoses, in the order given."""
    fewest = min((one for _, one in runs if one.budget is not None), key=gpus, default=None)
    comparisons = [None, *(_compared(before, after, scaling) for (_, before), (_, after) in pairwise(runs))]
    return History(
        folder,
        tuple(
            _run(name, diagnosis, comparison, _efficiency(fewest, diagnosis, scaling))
            for (name, diagnosis), comparison in zip(runs, comparisons, strict=True)
        ),
        tuple(unread),
    )


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
    name: str, diagnosis: Diagnosis, comparison: RunComparison | None, efficiency: float | None
) -> HistoryRun:
    budget = compared_budget(diagnosis)
    findings = tuple(dict.fromkeys(one.rule_id for one in diagnosis.findings if one.topic != "capture"))
    if budget is None or budget.step_ms <= 0:
        problem = "no step to analyse"
        return HistoryRun(name, gpus(diagnosis), None, {}, None, None, findings, problem=problem)
    input_ms = budget.idle_causes_ms.get("input", 0.0)
    largest = diagnosis.ledger.causes[:1] if diagnosis.ledger is not None else ()
    run = HistoryRun(
        name=name,
        gpus=gpus(diagnosis),
        step_ms=budget.step_ms,
        parts_ms={key: getattr(budget, field) for key, _, field in BUDGET_PARTS if key != "idle"}
        | {"input": input_ms, "idle": budget.idle_ms - input_ms},
        busy_frac=budget.compute_ms / budget.step_ms,
        efficiency=efficiency,
        findings=findings,
        cause=largest[0].id if largest else "",
        cause_ms=largest[0].share_ms if largest else None,
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
