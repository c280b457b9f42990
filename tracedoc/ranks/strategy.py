"""Decide the strategy of a run from the signs of its ranks: families in order, what else runs beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from tracedoc.errors import failure
from tracedoc.ranks.strategy_kinds import (
    WRAPPED,
    Claim,
    by_hand,
    context_parallel,
    data_parallel,
    ddp,
    exchange,
    fsdp1,
    fsdp2,
    is_large,
    megatron,
    pipeline,
    tensor_parallel,
    zero3,
    zero12,
)
from tracedoc.run.job import Job
from tracedoc.timeline.strategy_signs import StrategySigns

Recogniser = Callable[[StrategySigns, "int | None"], "Claim | None"]

WRAPPERS: tuple[Recogniser, ...] = (fsdp2, fsdp1, megatron, zero3, ddp, zero12, data_parallel)
"""In order: the first that a run shows gives the strategy its name."""

BESIDE: tuple[Recogniser, ...] = (tensor_parallel, pipeline, exchange, context_parallel)
"""What may run beside a wrapper, or alone."""

NOT_RECOGNISED = "not recognised"


def decide(signs: Sequence[StrategySigns], world_size: int | None) -> Claim:
    """Return the strategy of a run; "not recognised" where its traces do not show one."""
    merged = merge(signs)
    failed: list[str] = []
    claim = _decided(signs, merged, world_size, failed)
    if failed:
        claim = replace(claim, confidence="low", evidence=(*claim.evidence, *failed))
    return claim


def _decided(
    signs: Sequence[StrategySigns], merged: StrategySigns, world_size: int | None, failed: list[str]
) -> Claim:
    claim = next((one for one in _claims(WRAPPERS, merged, world_size, failed)), None)
    if world_size == 1 or (world_size is None and not merged.collectives):
        if claim is not None and (claim.family == "data-parallel" or world_size is None):
            return replace(claim, confidence=claim.confidence if world_size is None else "high")
        return _single(claim, world_size)
    beside = list(_claims(BESIDE, merged, world_size, failed))
    if claim is not None and claim.family == "megatron":
        beside = []  # Its groups already show how the model is split.
    if claim is None and beside:
        claim, beside = beside[0], beside[1:]
    claim = claim or next(_claims((by_hand,), merged, world_size, failed), None) or _unknown(merged)
    if beside:
        names = list(dict.fromkeys(found.name for found in beside))
        evidence = tuple(word for found in beside for word in found.evidence)
        claim = replace(
            claim, name=f"{claim.name} with {' and '.join(names)}", evidence=(*claim.evidence, *evidence)
        )
    return _tempered(claim, signs, world_size)


def merge(signs: Sequence[StrategySigns]) -> StrategySigns:
    """Return the signs of all ranks as one: counts of the first whole rank, all that any rank has seen."""
    if not signs:
        return StrategySigns()
    best = next((one for one in signs if one.whole and one.passes), signs[0])
    counted: Counter[str] = Counter()
    for one in signs:
        for mark, count in one.marks:
            counted[mark] = max(counted[mark], count)
    return replace(
        best,
        seen=frozenset().union(*(one.seen for one in signs)),
        marks=tuple(sorted(counted.items())),
        groups=tuple(sorted({group for one in signs for group in one.groups})),
        alternations=max(one.alternations for one in signs),
        recomputes=any(one.recomputes for one in signs),
        collectives=sum(one.collectives for one in signs),
    )


def _claims(
    recognisers: Sequence[Recogniser], signs: StrategySigns, world_size: int | None, failed: list[str]
) -> Iterator[Claim]:
    """Yield what each recogniser makes of the signs. One that fails is noted, and makes nothing of them."""
    for recognise in recognisers:
        try:
            claim = recognise(signs, world_size)
        except Exception as error:
            name = recognise.__name__
            failed.append(f"whether it is {name} is not known: {failure(name, error)}")
        else:
            if claim is not None:
                yield claim


def _single(claim: Claim | None, world_size: int | None) -> Claim:
    known = world_size == 1
    evidence = ["world size 1" if known else "no collectives and no world size in the trace"]
    if claim is not None:
        evidence.append(f"wrapped in {claim.name}, which has nobody to talk to")
    return Claim("single process", "single", "none", "high" if known else "low", tuple(evidence))


def _unknown(signs: StrategySigns) -> Claim:
    if not signs.collectives:
        evidence = "several processes, and no collective in the traces"
    elif not any(is_large(t) or t.largest is None for t in signs.traffic):
        evidence = "only small collectives: nothing seen here synchronises gradients"
    else:
        evidence = "no annotation of a known wrapper"
    return Claim(NOT_RECOGNISED, "unknown", "unknown", "low", (evidence,))


def _tempered(claim: Claim, signs: Sequence[StrategySigns], world_size: int | None) -> Claim:
    """Lower the confidence where the ranks' marks differ, or no rank's step was captured whole."""
    if claim.confidence != "high":
        return claim
    marks = [one.seen & WRAPPED for one in signs]
    if len(set(marks)) > 1:
        return replace(
            claim, confidence="medium", evidence=(*claim.evidence, "not every rank shows the same wrapper")
        )
    return claim


_FAMILIES = {
    "DDP": ("ddp", "none"),
    "FSDP1": ("fsdp1", "unknown"),
    "FSDP2": ("fsdp2", "unknown"),
    "DeepSpeed ZeRO-1": ("zero-1", "optimizer"),
    "DeepSpeed ZeRO-2": ("zero-2", "gradients"),
    "DeepSpeed ZeRO-3": ("zero-3", "full"),
}
"""Family and sharding of a wrapper; what FSDP shards depends on settings, which the trace shows."""


def resolve_strategy(claim: Claim, job: Job) -> Claim:
    """Return the claim with what the job's live objects add.

    They confirm the family that the traces suggest, and name one where the traces show none; where the two
    differ the traces count: a job may hold a wrapper that the captured steps do not use.
    """
    declared = next((name for rank in job.ranks for name in rank.frameworks), "")
    if declared not in _FAMILIES:
        return claim
    family, sharding = _FAMILIES[declared]
    evidence = f"a live {declared} wrapper, by the manifest"
    if claim.family == family:
        return replace(claim, confidence="high", evidence=(*claim.evidence, evidence))
    if claim.family == "unknown":
        return Claim(declared, family, sharding, "high", (evidence,))
    return claim
