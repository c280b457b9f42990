"""The ways to spread model states over GPUs, as a table."""

from __future__ import annotations

import msgspec


class Strategy(msgspec.Struct, frozen=True):
    """What is split over the GPUs, and by which framework.

    ``split`` holds of ``parameters``, ``gradients`` and ``optimizer`` what each GPU has only a share of.
    ``gathers`` keeps fp32 shards and gathers a 16-bit copy: of the whole model until its backward pass
    (``whole``), or unit by unit (``unit``). ``hybrid`` splits over ``over`` nodes only, and repeats that.
    ``kept_in_node`` keeps what forward gathered split over the node. ``alone`` is for one GPU, where it
    serves to offload; ``variant`` is named only where it is the fastest of its family.
    """

    id: str
    title: str
    family: str  # "ddp" | "fsdp" | "deepspeed"
    split: frozenset[str] = frozenset()
    gathers: str = ""  # "" | "whole" | "unit"
    hybrid: bool = False
    over: float = 1.0
    kept_in_node: bool = False
    alone: bool = False
    variant: bool = False


_GRADIENTS = frozenset({"gradients", "optimizer"})
_ALL = frozenset({"parameters", "gradients", "optimizer"})

STRATEGIES = {
    s.id: s
    for s in (
        Strategy("single", "one GPU", "ddp"),
        Strategy("single-fsdp", "FSDP on one GPU", "fsdp", _ALL, gathers="unit", alone=True),
        Strategy("single-zero-2", "DeepSpeed ZeRO-2 on one GPU", "deepspeed", _GRADIENTS, alone=True),
        Strategy(
            "single-zero-3", "DeepSpeed ZeRO-3 on one GPU", "deepspeed", _ALL, gathers="unit", alone=True
        ),
        Strategy("ddp", "DDP", "ddp"),
        Strategy("zero-redundancy", "DDP + ZeRO-1 optimizer", "ddp", frozenset({"optimizer"})),
        Strategy("shard-grad-op", "FSDP SHARD_GRAD_OP", "fsdp", _ALL, gathers="whole"),
        Strategy("full-shard", "FSDP FULL_SHARD", "fsdp", _ALL, gathers="unit"),
        Strategy("hsdp", "FSDP HYBRID_SHARD", "fsdp", _ALL, gathers="unit", hybrid=True),
        Strategy(
            "hsdp-half", "FSDP HYBRID_SHARD over half a node", "fsdp", _ALL, gathers="unit", hybrid=True,
            over=0.5, variant=True,
        ),
        Strategy(
            "hsdp-2", "FSDP HYBRID_SHARD over 2 nodes", "fsdp", _ALL, gathers="unit", hybrid=True, over=2,
            variant=True,
        ),
        Strategy(
            "full-shard-node", "FSDP FULL_SHARD, resharded to a node", "fsdp", _ALL, gathers="unit",
            kept_in_node=True, variant=True,
        ),
        Strategy("zero-1", "DeepSpeed ZeRO-1", "deepspeed", frozenset({"optimizer"})),
        Strategy("zero-2", "DeepSpeed ZeRO-2", "deepspeed", _GRADIENTS),
        Strategy("zero-3", "DeepSpeed ZeRO-3", "deepspeed", _ALL, gathers="unit"),
    )
}  # fmt: skip
"""Every strategy by id. FSDP has no ZeRO-1; DDP with ZeroRedundancyOptimizer is PyTorch's."""


def shards(strategy: Strategy, gpus: int, nodes: int) -> int:
    """Return over how many GPUs a strategy splits what it splits."""
    if not strategy.split:
        return 1
    return int(gpus // nodes * strategy.over) if strategy.hybrid else gpus


def possible(gpus: int, nodes: int) -> tuple[Strategy, ...]:
    """Return the strategies that mean something on so many GPUs."""
    if gpus == 1:
        return tuple(s for s in STRATEGIES.values() if s.alone or s.id == "single")
    several = (s for s in STRATEGIES.values() if not s.alone and s.id != "single")
    return tuple(s for s in several if _splits_evenly(s, gpus // nodes, nodes))


def _splits_evenly(strategy: Strategy, gpus_per_node: int, nodes: int) -> bool:
    """Return whether a strategy is one of its own: a node's part has to be one, and to be repeated."""
    if strategy.kept_in_node:
        return nodes > 1 and gpus_per_node > 1
    if not strategy.hybrid:
        return True
    if strategy.over < 1:
        return gpus_per_node >= 4 and gpus_per_node % 2 == 0
    return gpus_per_node > 1 and nodes > strategy.over and nodes % int(strategy.over) == 0
