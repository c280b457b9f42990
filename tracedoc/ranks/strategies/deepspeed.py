"""Recognise ZeRO as DeepSpeed runs it: it annotates nothing, so its operators and collectives decide."""

from __future__ import annotations

from tracedoc.ranks.strategies.claim import BACKWARD, Claim, is_large, per_step, sized
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.strategy_signs import StrategySigns, Traffic

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
    gathered = [t for t in signs.select("all_gather", Phase.OPTIMIZER) if _may_be_large(t)]
    reduced = [t for t in signs.select(REDUCTIONS, *BACKWARD, Phase.OTHER) if _may_be_large(t)]
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
    return Claim(_offloaded("ZeRO-1 or ZeRO-2", signs), "zero-1", "optimizer", "low", tuple(evidence))


def _may_be_large(traffic: Traffic) -> bool:
    return traffic.largest is None or is_large(traffic)


def _offloaded(name: str, signs: StrategySigns) -> str:
    return f"{name} with CPU offload" if "cpu_adam" in signs.seen else name


def _traffic(signs: StrategySigns) -> list[str]:
    found = [
        (signs.calls("all_gather", Phase.FORWARD), "all-gather", "forward"),
        (signs.calls("all_gather", *BACKWARD), "all-gather", "backward"),
        (signs.calls("reduce_scatter"), "reduce-scatter", ""),
    ]
    return [per_step(calls, what, where) for calls, what, where in found if calls]
