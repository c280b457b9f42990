"""Read a program fast, likely and slow: three answers to what a capture leaves open."""

from __future__ import annotations

import numpy as np

from tracedoc.play.latency import Split, split_transfers
from tracedoc.play.run_program import Reading, RunProgram
from tracedoc.step.program import UNKNOWN_SHARE, Cause

UNMEASURED_CONTENTION = {Reading.FAST: 0.0, Reading.LIKELY: 0.06, Reading.SLOW: 0.15}
CONTENTION_MARGIN = {Reading.FAST: 0.7, Reading.LIKELY: 1.0, Reading.SLOW: 1.3}


LEAD_SHARE = 0.02
LEAD_NS = 1_000_000
PACED_SHARE = 0.98
"""Where every launch is early by this share of the step, and this long, yet the host takes as long as the
step, it does not set the pace: something that the trace does not show holds it back for the GPU."""


def read_as(program: RunProgram, reading: Reading) -> RunProgram:
    """Return the program in one reading.

    The slow one keeps what the causes leave unexplained, and orders that may or may not be needed; the fast
    one leaves out what gathers of no known unit may be needed for.
    """
    program = _without_idle_hosts(program)
    contention = _contention(program, reading)
    if reading is Reading.FAST:
        sure = program.active & (program.layout.cause_kind != Cause.USE)
        return program.edited(reading=reading, contention=contention, active=sure)
    if reading is Reading.LIKELY:
        return program.edited(reading=reading, contention=contention)
    return as_measured(program).edited(reading=reading, contention=contention)


def as_measured(program: RunProgram) -> RunProgram:
    """Return the program with all causes that may hold, and the delays that they leave unexplained."""
    return program.edited(active=np.ones_like(program.active), delay=program.layout.delay)


def _contention(program: RunProgram, reading: Reading) -> float:
    if program.layout.joins.event.size == 0:
        return 0.0
    known = [one.contention for one in program.layout.notes if one.contention != UNKNOWN_SHARE]
    if not known:
        return UNMEASURED_CONTENTION[reading]
    return float(np.median(known)) * CONTENTION_MARGIN[reading]


def splits(program: RunProgram) -> dict[Reading, Split]:
    """Return in each reading what of the transfers stays when their bytes become fewer."""
    return {reading: split_transfers(program.layout.joins, reading) for reading in Reading}


def _without_idle_hosts(program: RunProgram) -> RunProgram:
    """Return the program with no work left on the hosts that are ahead of their GPU all the time."""
    layout = program.layout
    ahead = np.array(
        [
            one.lead_ns >= max(LEAD_NS, LEAD_SHARE * one.step_ns) and one.lag_ns >= PACED_SHARE * one.step_ns
            for one in layout.notes
        ],
        dtype=bool,
    )
    if not ahead.any():
        return program
    idle = np.repeat(ahead, np.diff(layout.point_base))
    return program.edited(lag=np.where(idle, 0, program.lag))
