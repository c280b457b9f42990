"""Recognise data parallelism: DDP, FSDP, DeepSpeed's ZeRO, DataParallel, and what is made by hand."""

from __future__ import annotations

from tracedoc.ranks.strategies.claim import (
    BACKWARD,
    Claim,
    below_world,
    gathers_in_backward,
    gathers_in_forward,
    is_large,
    may_be_large,
    per_step,
    sized,
)
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


def fsdp2(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return FSDP2 with whether units are freed after forward, and HSDP where shards are replicated."""
    if "fsdp2" not in signs.seen:
        return None
    forward, backward = gathers_in_forward(signs), gathers_in_backward(signs)
    evidence = ["FSDP:: annotations", *_counts(signs)]
    if signs.fsdp2_units:
        evidence.insert(1, f"{signs.fsdp2_units} unit{'s' if signs.fsdp2_units > 1 else ''}")
    replicas = signs.calls("all_reduce", site="fsdp-reduce")
    hybrid = replicas > 0 or _replicated(signs)
    if replicas:
        evidence.append(per_step(replicas, "all-reduce", "FSDP's reduction of gradients"))
    variant, sharding = "", "unknown"
    if signs.passes and backward:
        variant, sharding = "reshard after forward", "full"
    elif signs.passes and forward:
        sharding = "gradients"
        # The root is never freed after forward, so a single unit does not show the setting.
        variant = "no reshard after forward" if signs.fsdp2_units != 1 else "one unit"
    name = "FSDP2 HSDP" if hybrid else "FSDP2"
    return Claim(
        f"{name} ({variant})" if variant else name,
        "fsdp2",
        f"hybrid-{sharding}" if hybrid and sharding != "unknown" else sharding,
        "high",
        tuple(evidence),
    )


def fsdp1(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return FSDP1 with its sharding strategy, as far as the collectives show it."""
    if not signs.seen & {"fsdp1", "fsdp1_hook"}:
        return None
    forward, backward = gathers_in_forward(signs), gathers_in_backward(signs)
    scattered = signs.calls("reduce_scatter", *BACKWARD)
    evidence = [per_step(signs.count("fsdp1"), "FullyShardedDataParallel.forward range"), *_counts(signs)]
    across = _hybrid_reductions(signs, world_size)
    if across and scattered:
        evidence.append(per_step(across, "all-reduce", "backward over another group"))
        full = backward > 0
        name = "HYBRID_SHARD" if full else "_HYBRID_SHARD_ZERO2"
        return Claim(f"FSDP1 ({name})", "fsdp1", "hybrid-full" if full else "hybrid-gradients", "high",
                     tuple(evidence))  # fmt: skip
    if signs.passes and backward:
        return Claim("FSDP1 (FULL_SHARD)", "fsdp1", "full", "high", tuple(evidence))
    if signs.passes and forward and scattered:
        # The root is never freed after forward: alone, FULL_SHARD looks like SHARD_GRAD_OP.
        name = "one unit" if signs.count("fsdp1") == signs.passes else "SHARD_GRAD_OP"
        return Claim(f"FSDP1 ({name})", "fsdp1", "gradients", "high", tuple(evidence))
    reduced = signs.calls("all_reduce", *BACKWARD)
    if signs.passes and not forward and not scattered and reduced:
        evidence.append(per_step(reduced, "all-reduce", "backward"))
        return Claim("FSDP1 (NO_SHARD)", "fsdp1", "none", "high", tuple(evidence))
    return Claim("FSDP1", "fsdp1", "unknown", "high", tuple(evidence))


def _counts(signs: StrategySigns) -> list[str]:
    found = [
        (gathers_in_forward(signs), "all-gather", "forward"),
        (gathers_in_backward(signs), "all-gather", "backward"),
        (signs.calls("reduce_scatter", *BACKWARD), "reduce-scatter", "backward"),
    ]
    return [per_step(calls, what, where) for calls, what, where in found if calls]


def _replicated(signs: StrategySigns) -> bool:
    return any("repl" in description and size > 1 for description, size in signs.groups)


def _hybrid_reductions(signs: StrategySigns, world_size: int | None) -> int:
    """Return the all-reduces of gradients beside reduce-scatters: over replicas, if groups are recorded."""
    sharded = signs.select("reduce_scatter", *BACKWARD)
    reduced = [t for t in signs.select("all_reduce", *BACKWARD) if t.site != "functional"]
    if any(traffic.group_size for traffic in sharded):
        if not any(below_world(traffic, world_size) for traffic in sharded):
            return 0
    elif sum(t.calls for t in reduced) < sum(t.calls for t in sharded):
        return 0  # Groups are not recorded: one all-reduce for each reduce-scatter is required.
    return sum(traffic.calls for traffic in reduced if traffic.phase is not Phase.OTHER)


REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def zero3(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return ZeRO-3, which puts its hooks into the graph as operators of their own."""
    if "zero3" not in signs.seen:
        return None
    evidence = ["ZeRO-3 module hooks in the graph", *_traffic(signs)]
    return Claim(_offloaded("DeepSpeed ZeRO-3", signs), "zero-3", "full", "high", tuple(evidence))


def zero12(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return ZeRO-1 or ZeRO-2: parameters gathered after the optimizer, gradients reduced before it.

    ZeRO-2 reduces in every micro-batch, ZeRO-1 once for each step of the optimizer; with one micro-batch
    the two look alike. Where sizes were not recorded, as by old versions of torch, the place alone counts.
    """
    gathered = [t for t in signs.select("all_gather", Phase.OPTIMIZER) if may_be_large(t)]
    reduced = [t for t in signs.select(REDUCTIONS, *BACKWARD, Phase.OTHER) if may_be_large(t)]
    if not gathered or not reduced:
        return None
    evidence = [
        sized(gathered, "all-gather", "the optimizer"),
        sized(reduced, "reduction", "or after backward"),
        "no annotation of a wrapper",
    ]
    sure = any(map(is_large, gathered)) and any(map(is_large, reduced))
    confidence = "medium" if sure else "low"
    if not sure:
        evidence.append("their sizes were not recorded")
    if signs.passes > 1:
        evidence.append(f"gradients reduced in {signs.reducing} of {signs.passes} micro-batches")
    if signs.passes > 1 and signs.reducing == signs.passes:
        return Claim(_offloaded("ZeRO-2", signs), "zero-2", "gradients", confidence, tuple(evidence))
    if signs.passes > 1:
        return Claim(_offloaded("ZeRO-1", signs), "zero-1", "optimizer", confidence, tuple(evidence))
    evidence.append("one micro-batch a step: ZeRO-1 and ZeRO-2 look alike")
    return Claim(_offloaded("ZeRO-1 or ZeRO-2", signs), "zero-1-or-2", "optimizer", "low", tuple(evidence))


def _offloaded(name: str, signs: StrategySigns) -> str:
    return f"{name} with CPU offload" if "cpu_adam" in signs.seen else name


def _traffic(signs: StrategySigns) -> list[str]:
    found = [
        (signs.calls("all_gather", Phase.FORWARD), "all-gather", "forward"),
        (signs.calls("all_gather", *BACKWARD), "all-gather", "backward"),
        (signs.calls("reduce_scatter"), "reduce-scatter", ""),
    ]
    return [per_step(calls, what, where) for calls, what, where in found if calls]
