"""Resolve the declared strategy: check what traces suggest against the wrappers in the manifest."""

from __future__ import annotations

from msgspec.structs import replace

from tracedoc.ranks.strategies.claim import Claim
from tracedoc.run.job import Job

_FAMILIES = {
    "DDP": ("ddp", "none"),
    "FSDP1": ("fsdp1", "unknown"),
    "FSDP2": ("fsdp2", "unknown"),
    "DeepSpeed ZeRO-1": ("zero-1", "optimizer"),
    "DeepSpeed ZeRO-2": ("zero-2", "gradients"),
    "DeepSpeed ZeRO-3": ("zero-3", "full"),
}
"""Family and sharding of a wrapper; what FSDP shards depends on settings, which the trace shows."""


def resolve_strategy(claim: Claim, job: Job | None) -> Claim:
    """Return the claim with what the job's live objects add.

    They confirm the family that the traces suggest, and name one where the traces show none; where the two
    differ the traces count: a job may hold a wrapper that the captured steps do not use.
    """
    ranks = job.ranks if job is not None else ()
    declared = next((name for rank in ranks for name in rank.frameworks), "")
    if declared not in _FAMILIES:
        return claim
    family, sharding = _FAMILIES[declared]
    evidence = f"a live {declared} wrapper, by the manifest"
    if claim.family == family:
        return replace(claim, confidence="high", evidence=(*claim.evidence, evidence))
    if claim.family == "unknown":
        return Claim(declared, family, sharding, "high", (evidence,))
    return claim
