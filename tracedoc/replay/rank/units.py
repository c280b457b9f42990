"""Tell which parts of a program belong to sharded units: their collectives, and the host's time in hooks."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from tracedoc.replay.rank.program import NONE, RankProgram
from tracedoc.spans import Int64Array
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.shards.times import blocks_of_units


def with_units(program: RankProgram, timeline: RankTimeline, starts_ns: Int64Array) -> RankProgram:
    """Return the program with what belongs to sharded units; ``starts_ns`` is when its first points start."""
    if timeline.units is None:
        return program
    units = timeline.units.units
    block_of_row = np.full(len(timeline.collectives) + 1, NONE, dtype=np.int32)
    blocks = blocks_of_units(units)
    for calls in (units.gathers, units.reductions):
        known = calls.unit >= 0
        block_of_row[calls.row[known]] = blocks[calls.unit[known]]
    block = block_of_row[program.row]
    events = np.flatnonzero(block != NONE)
    lag = program.lag[: starts_ns.size].astype(np.int64)
    inside = units.hooks.covered_ns(starts_ns - lag, starts_ns)
    points = np.flatnonzero(inside > 0)
    return replace(
        program,
        hook_point=points.astype(np.int32),
        hook_ns=inside[points],
        unit_event=events.astype(np.int32),
        unit_block=block[events],
    )
