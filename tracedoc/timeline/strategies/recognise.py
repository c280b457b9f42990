"""Name the strategy of a run from the signs that frameworks leave in a trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tracedoc.trace.columns import Kind, Trace


@dataclass(frozen=True, slots=True)
class Recognised:
    """A strategy, how sure it is ("high", "medium", "low"), and the signs it rests on."""

    name: str
    confidence: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sign:
    strategy: str
    label: str
    matches: Callable[[str], bool]


def _named(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda name: compiled.search(name) is not None


SIGNS: tuple[_Sign, ...] = (
    _Sign("FSDP2", "FSDP:: annotations", _named(r"^FSDP::")),
    _Sign("FSDP1", "FullyShardedDataParallel annotations", _named(r"^FullyShardedDataParallel\.")),
    _Sign("Megatron-FSDP", "CustomFSDP.forward", _named(r"^CustomFSDP\.forward$")),
    _Sign(
        "DeepSpeed ZeRO-3",
        "ZeRO-3 module hooks",
        _named(r"^((Pre|Post)BackwardFunction(ForModule|Module)?|LinearFunctionForZeroStage3)$"),
    ),
    _Sign("DDP", "DistributedDataParallel.forward", _named(r"^DistributedDataParallel\.forward$")),
    _Sign("DataParallel", "DataParallel.forward", _named(r"^DataParallel\.forward$")),
)
"""From the most to the least specific: the first that a trace shows names the strategy."""


def strategy_signs(trace: Trace) -> tuple[str, ...]:
    """Return the strategies whose signs occur among a trace's host events, in the order of ``SIGNS``."""
    host = trace.is_kind(Kind.CPU_OP, Kind.ANNOTATION)
    names = [trace.names[index] for index in np.unique(trace.name[host]).tolist()]
    found = [sign.strategy for sign in SIGNS if any(sign.matches(name) for name in names)]
    megatron = any(group.description.endswith("_PARALLEL_GROUP") for group in trace.info.groups)
    return (*found, *(["Megatron"] if megatron else []))


def recognise(
    signs: Iterable[tuple[str, ...]], *, world_size: int | None, has_collectives: bool
) -> Recognised:
    """Return the strategy of a run from the signs of its ranks.

    "single process" needs a world of one; collectives without a known wrapper are "not recognised".
    """
    listed = list(signs)
    labels = {sign.strategy: sign.label for sign in SIGNS} | {"Megatron": "Megatron process groups"}
    shown = [name for name in labels if any(name in found for found in listed)]
    if shown:
        everywhere = all(shown[0] in found for found in listed)
        return Recognised(shown[0], "high" if everywhere else "medium", tuple(labels[name] for name in shown))
    if world_size == 1 or (world_size is None and not has_collectives):
        known = world_size == 1
        evidence = "world size 1" if known else "no collectives and no world size in the trace"
        return Recognised("single process", "high" if known else "low", (evidence,))
    return Recognised("not recognised", "low", ("no annotation of a known wrapper",))
