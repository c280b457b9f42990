"""Settle the strategy that traces suggest by the wrappers that were alive, as the manifest tells."""

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
"""Family and sharding of a wrapper; what FSDP shards depends on settings that the trace shows better."""


def resolve_strategy(claim: Claim, job: Job | None) -> Claim:
    """Return the claim with what the job's live objects add.

    They confirm the family that the traces suggest, and name one where the traces show none; where both
    differ the traces stand, for a job may hold a wrapper that the captured steps do not use.
    """
    told = next((name for rank in job.ranks for name in rank.frameworks), None) if job is not None else None
    if told not in _FAMILIES:
        return claim
    family, sharding = _FAMILIES[told]
    evidence = f"a live {told} wrapper, says the manifest"
    if claim.family == family:
        return replace(claim, confidence="high", evidence=(*claim.evidence, evidence))
    if claim.family == "unknown":
        return Claim(told, family, sharding, "high", (evidence,))
    return claim
