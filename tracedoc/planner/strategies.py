"""The ways to spread model states over GPUs, as a table."""

from __future__ import annotations

import msgspec


class Strategy(msgspec.Struct, frozen=True):
    """What is split over the GPUs, and by which framework.

    ``split`` holds of ``parameters``, ``gradients`` and ``optimizer`` what each GPU has only a share of.
    ``gathers`` keeps fp32 shards and gathers a 16-bit copy: of the whole model until its backward pass
    (``whole``), or unit by unit (``unit``). ``hybrid`` splits inside a node only. ``alone`` is for one GPU,
    where it serves to offload.
    """

    id: str
    title: str
    family: str  # "ddp" | "fsdp" | "deepspeed"
    split: frozenset[str] = frozenset()
    gathers: str = ""  # "" | "whole" | "unit"
    hybrid: bool = False
    alone: bool = False


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
        Strategy("zero-1", "DeepSpeed ZeRO-1", "deepspeed", frozenset({"optimizer"})),
        Strategy("zero-2", "DeepSpeed ZeRO-2", "deepspeed", _GRADIENTS),
        Strategy("zero-3", "DeepSpeed ZeRO-3", "deepspeed", _ALL, gathers="unit"),
    )
}
"""Every strategy by id. FSDP has no ZeRO-1; DDP with ZeroRedundancyOptimizer is PyTorch's."""


def shards(strategy: Strategy, gpus: int, nodes: int) -> int:
    """Return over how many GPUs a strategy splits what it splits."""
    if not strategy.split:
        return 1
    return gpus // nodes if strategy.hybrid else gpus


def possible(gpus: int, nodes: int) -> tuple[Strategy, ...]:
    """Return the strategies that mean something on so many GPUs."""
    if gpus == 1:
        return tuple(s for s in STRATEGIES.values() if s.alone or s.id == "single")
    several = (s for s in STRATEGIES.values() if not s.alone and s.id != "single")
    return tuple(s for s in several if not s.hybrid or (nodes > 1 and gpus > nodes))
