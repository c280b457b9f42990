"""How long a rank's host is busy with its own work in a step, whatever it waits for."""

from __future__ import annotations

import numpy as np

from tracedoc.idle_causes import CAUSES, LATE_LAUNCH
from tracedoc.ranks.run_view import RunView, once

OF_THE_HOST = frozenset({*LATE_LAUNCH, *CAUSES} - {"launch", "sync", "dependency"})
"""Causes of idle time that are the host's own time."""

AHEAD = 0.02
"""A host whose every launch is early by this share of the step may wait where the trace does not show it."""


@once
def own_host_ns(run: RunView) -> dict[int, int]:
    """Return by rank the host's own time in the judged step, without what it waited for the GPU.

    Ranks whose host is not followed call by call (CPU runs, no launches), or is ahead of its GPU throughout,
    are left out.
    """
    found: dict[int, int] = {}
    for digest in run.digests:
        if not digest.programs or digest.is_cpu:
            continue
        program = digest.programs[0].decoded()
        if program.point.size and program.lead_ns < AHEAD * program.step_ns:
            found[digest.rank] = int(
                np.sum(program.lag, dtype=np.int64) + np.sum(program.own, dtype=np.int64)
            )
    return found


def host_surplus_ns(run: RunView, rank: int) -> int | None:
    """Return how much longer a rank's host is at its own work than that of the median other rank, if known.

    A rank that comes last never waits in a collective, so its gaps between launches show as idle time, while
    those of its peers lie beside their waiting. Their hosts may be as slow, which only this tells.
    """
    own = own_host_ns(run)
    others = [ns for other, ns in own.items() if other != rank]
    if rank not in own or not others:
        return None
    return own[rank] - int(np.median(others))
