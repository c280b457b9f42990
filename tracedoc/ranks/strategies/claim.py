"""A recognised strategy: its name, its confidence, and the evidence for it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tracedoc.timeline.phases import Phase
from tracedoc.timeline.strategy_signs import StrategySigns, Traffic
from tracedoc.units import format_bytes

BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
"""Recomputation runs inside the backward pass."""

GRADIENT_BYTES = 65_536
"""A collective below this size may carry a loss, a norm or a flag; parameters and gradients are larger."""

FAMILIES = (
    "ddp",
    "fsdp1",
    "fsdp2",
    "zero-1",
    "zero-2",
    "zero-1-or-2",
    "zero-3",
    "zero-redundancy-optimizer",
    "data-parallel",
    "tensor-parallel",
    "pipeline",
    "megatron",
    "single",
    "unknown",
)


class Claim(msgspec.Struct, frozen=True):
    """A strategy that one family recognises.

    ``family`` is one of :data:`FAMILIES`. ``sharding`` says what the ranks split: "none", "optimizer",
    "gradients" (and optimizer), "full" (parameters too), each with "hybrid-" before it where replicas of
    shard groups exist, or "unknown". ``confidence`` is "high", "medium" or "low".
    """

    name: str
    family: str
    sharding: str
    confidence: str
    evidence: tuple[str, ...]


def per_step(calls: int, what: str, where: str = "") -> str:
    """Return evidence in words: ``9 all-gathers a step in backward``; a count of one is singular."""
    return f"{calls} {what}{'s' if calls != 1 else ''} a step{f' in {where}' if where else ''}"


def is_large(traffic: Traffic) -> bool:
    """Whether a kind of collective carries parameters or gradients; False for unknown sizes."""
    return traffic.largest is not None and traffic.largest >= GRADIENT_BYTES


def may_be_large(traffic: Traffic) -> bool:
    """Whether a kind of collective carries parameters or gradients, or its size is not known."""
    return traffic.largest is None or is_large(traffic)


def sized(traffic: Sequence[Traffic], what: str, where: str = "") -> str:
    """Return evidence in words with the size: ``2 all-reduces a step, the largest of 24 MiB``."""
    largest = max((t.largest for t in traffic if t.largest is not None), default=None)
    shown = per_step(sum(t.calls for t in traffic), what, where)
    return shown if largest is None else f"{shown}, the largest of {format_bytes(largest)}"


def below_world(traffic: Traffic, world_size: int | None) -> bool:
    """Whether a kind of collective surely runs over a part of the ranks only."""
    return traffic.group_size is not None and world_size is not None and 1 < traffic.group_size < world_size


def gathers_in_forward(signs: StrategySigns) -> int:
    """Return the all-gathers of the forward pass that are not functional collectives."""
    return signs.calls("all_gather", Phase.FORWARD) - signs.calls(
        "all_gather", Phase.FORWARD, site="functional"
    )


def gathers_in_backward(signs: StrategySigns) -> int:
    """Return the all-gathers of the backward pass that are not functional collectives."""
    return signs.calls("all_gather", *BACKWARD) - signs.calls("all_gather", *BACKWARD, site="functional")
