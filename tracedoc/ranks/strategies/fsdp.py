"""Recognise FSDP, the wrapper class (FSDP1) and ``fully_shard`` (FSDP2), with what they shard."""

from __future__ import annotations

from tracedoc.ranks.strategies.claim import (
    BACKWARD,
    Claim,
    below_world,
    gathers_in_backward,
    gathers_in_forward,
    per_step,
)
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.strategy_signs import StrategySigns


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
