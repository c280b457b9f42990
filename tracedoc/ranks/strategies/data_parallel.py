"""Recognise replicas of a whole model: DDP, with or without a sharded optimizer, DataParallel, by hand."""

from __future__ import annotations

from tracedoc.ranks.strategies.claim import BACKWARD, Claim, is_large, per_step, sized
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.strategy_signs import StrategySigns


def ddp(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return DDP, or DDP with ``ZeroRedundancyOptimizer``."""
    if "ddp" not in signs.seen:
        return None
    evidence = [per_step(signs.count("ddp"), "DistributedDataParallel.forward range")]
    reduced = signs.calls(("all_reduce", "reduce_scatter"), *BACKWARD)
    confidence = "high"
    if reduced:
        evidence.append(per_step(reduced, "all-reduce", "backward"))
        known = [t for t in signs.select("all_reduce", *BACKWARD) if t.largest is not None]
        if known and not any(is_large(t) for t in known):
            evidence.append("none of them is large: little is trained, or gradients travel otherwise")
    else:
        confidence = "medium"
        evidence.append("no all-reduce of its gradients is in the trace")
    if "zero_redundancy" in signs.seen:
        evidence.append("Optimizer.step#ZeroRedundancyOptimizer.step")
        return Claim(
            "DDP with ZeroRedundancyOptimizer", "zero-redundancy-optimizer", "optimizer", confidence,
            tuple(evidence),
        )  # fmt: skip
    return Claim("DDP", "ddp", "none", confidence, tuple(evidence))


def data_parallel(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return ``torch.nn.DataParallel``: one process that drives several GPUs."""
    if "data_parallel" not in signs.seen:
        return None
    return Claim("DataParallel", "data-parallel", "none", "high", ("DataParallel.forward",))


def by_hand(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return data parallelism without a known wrapper: gradients reduced, nothing gathered or exchanged."""
    reduced = [
        t for t in signs.select(("all_reduce", "reduce"), *BACKWARD, Phase.OTHER) if t.site != "functional"
    ]
    others = signs.calls(("all_gather", "reduce_scatter", "all_to_all", "send", "recv", "send_recv"))
    if not any(is_large(t) for t in reduced) or others or signs.calls("all_reduce", Phase.FORWARD):
        return None
    return Claim(
        "data parallel, no known wrapper", "unknown", "none", "low",
        (
            sized(reduced, "all-reduce", "or after backward"),
            "no annotation of a wrapper: by hand, Horovod, or ZeRO-0",
        ),
    )  # fmt: skip
