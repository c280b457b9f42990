"""Find the repeated blocks of a model (transformer layers) that its sharded units belong to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.timeline.shards.shard_units import ROOT, Units, block_of, unit_bytes

SAME_SHARE = 0.9
"""A pattern of sizes repeats if this share of the units agrees with it."""

LONGEST_BLOCK = 256
"""A block has at most so many units: longer patterns are not looked for."""


def block_count(units: Units) -> int:
    """Return how many blocks the units belong to, the root left out; at least one.

    With names: distinct names up to the first number. Without: the units over the shortest pattern of sizes
    that repeats. Where nothing repeats, every unit is a block.
    """
    if units.named:
        return len({block_of(name) for name in units.names if name != ROOT}) or 1
    root, period = _pattern(units)
    return max(round((len(units.names) - root) / period), 1)


def blocks_of_units(units: Units) -> npt.NDArray[np.int32]:
    """Return the number of the block that each unit belongs to; a root is a block of its own."""
    if units.named:
        numbers: dict[str, int] = {}
        found = [numbers.setdefault(block_of(name), len(numbers)) for name in units.names]
        return np.array(found, dtype=np.int32)
    root, period = _pattern(units)
    return np.asarray((np.arange(len(units.names)) - root) // period + root, dtype=np.int32)


def _pattern(units: Units) -> tuple[int, int]:
    """Return how many units come before the first block, as the root's in FSDP1, and how many one has."""
    sizes = unit_bytes(units)
    for root in (0, 1):
        body = sizes[root:]
        for period in range(1, min(body.size // 2, LONGEST_BLOCK) + 1):
            if float(np.mean(body[period:] == body[:-period])) >= SAME_SHARE:
                return root, period
    return 0, 1
