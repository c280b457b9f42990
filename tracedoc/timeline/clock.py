"""Bring the clocks of several hosts together, from the ends of symmetric collectives.

All ranks leave an all-reduce, reduce-scatter or all-gather at nearly the same time; what is left of their
difference over many operations is the clocks'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tracedoc.errors import Limit

RESIDUAL_SHARE = 0.10
"""Ends that still differ by more than this share of the median wait make waits meaningless."""

SETTLED_NS = 50_000
"""Ends this close are as good as simultaneous, whatever the waits are."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Offsets to subtract from each rank's timestamps.

    ``residual_ns`` is the median distance that remains between the ends of one operation; ``aligned`` is
    False where times of different ranks cannot be compared.
    """

    offset_ns: Mapping[int, int] = field(default_factory=dict)
    residual_ns: int | None = None
    aligned: bool = True
    limits: tuple[Limit, ...] = ()


Operation = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def align_clocks(hosts: Mapping[int, str], operations: Sequence[Operation]) -> Clock:
    """Return one offset per host (per rank where hosts are unknown), from ``(ranks, starts, ends)``.

    Ranks of one named host share a clock and are not shifted. With nothing to align by, ranks of one host
    or of unknown hosts are taken as they are; different named hosts are then not comparable.
    """
    named = {host for host in hosts.values() if host}
    if len(hosts) < 2 or (len(named) == 1 and all(hosts.values())):
        return Clock()
    if not operations:
        if len(named) < 2:
            return Clock()
        return Clock(
            aligned=False, limits=(_not_aligned("there is no symmetric collective to align them by"),)
        )
    offsets = _offsets(hosts, operations)
    residuals, waits = [], []
    for ranks, starts, ends in operations:
        shifts = np.array([offsets.get(rank, 0) for rank in ranks], dtype=np.int64)
        start, end = np.array(starts, dtype=np.int64) - shifts, np.array(ends, dtype=np.int64) - shifts
        residuals.append(int(end.max() - end.min()))
        waits.extend((start.max() - start).tolist())
    residual, wait = int(np.median(residuals)), float(np.median(waits))
    if residual > max(RESIDUAL_SHARE * wait, SETTLED_NS):
        reason = f"ends of one collective still differ by {residual / 1e6:.2f} ms"
        return Clock({}, residual, False, (_not_aligned(reason),))
    return Clock(offsets, residual)


def _offsets(hosts: Mapping[int, str], operations: Sequence[Operation]) -> dict[int, int]:
    distances: dict[str, list[int]] = defaultdict(list)
    clock_of = {rank: host or f"rank {rank}" for rank, host in hosts.items()}
    for ranks, _, ends in operations:
        middle = int(np.median(np.array(ends, dtype=np.int64) - ends[0])) + ends[0]
        for rank, end in zip(ranks, ends, strict=True):
            distances[clock_of[rank]].append(end - middle)
    per_clock = {clock: int(np.median(found)) for clock, found in distances.items()}
    return {rank: per_clock.get(clock, 0) for rank, clock in clock_of.items()}


def _not_aligned(reason: str) -> Limit:
    return Limit(
        "clocks-not-aligned",
        f"the clocks of the hosts cannot be brought together: {reason}",
        "waiting is not told from transfer",
    )
