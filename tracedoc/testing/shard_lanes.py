"""What a framework that shards parameters writes around the launches that lanes draw."""

from __future__ import annotations

from typing import Final

import msgspec

STRATEGIES: Final = ("fsdp1", "fsdp2", "zero3")
SHARDED_LANES: Final = ("allgather", "reducescatter", "compute", "host")
"""Lanes that can belong to a unit."""

ZERO3_OPERATOR: Final = "LinearFunctionForZeroStage3"


class UnitUse(msgspec.Struct, frozen=True):
    """One interval of a lane that belongs to a unit; ``unit`` "root" has no name in FSDP2."""

    lane: str
    unit: str
    backward: bool
    prefetch: bool

    @property
    def thread(self) -> str:
        """The host thread that launches it."""
        return "autograd" if self.backward else "main"


def ranges_around(strategy: str, use: UnitUse) -> tuple[str, ...]:
    """Return the names of the ranges around a launch, the outermost first; ZeRO-3 writes none."""
    if strategy == "fsdp1":
        return _fsdp1(use)
    if strategy == "fsdp2":
        return _fsdp2(use)
    return ()


def _fsdp1(use: UnitUse) -> tuple[str, ...]:
    prefix = "FullyShardedDataParallel."
    if use.lane == "reducescatter":
        return (f"{prefix}_post_backward_hook",)
    hook = f"{prefix}_pre_backward_hook" if use.backward else f"{prefix}_pre_forward"
    fetch = f"{prefix}_pre_backward_prefetch" if use.backward else f"{prefix}_pre_forward_prefetch"
    return (hook, fetch) if use.prefetch else (hook,)


def _fsdp2(use: UnitUse) -> tuple[str, ...]:
    label = "" if use.unit == "root" else f" ({use.unit})"
    way = "backward" if use.backward else "forward"
    if use.lane == "reducescatter":
        return (f"FSDP::post_backward_reduce{label}",)
    if use.lane != "allgather":
        return (f"FSDP::pre_{way}{label}",)
    hook = f"FSDP::{way}_prefetch for {use.unit}" if use.prefetch else f"FSDP::pre_{way}{label}"
    return hook, f"FSDP::all_gather{label}"


def unit_of_part(pattern: str, part: int, parts: int, *, backward: bool) -> str:
    """Return the unit of one of ``parts`` intervals: ``*`` counts up in forward and down in backward."""
    return pattern.replace("*", str(parts - 1 - part if backward else part))
