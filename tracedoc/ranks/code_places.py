"""Name the function of the script behind host time, from a rank's own trace or the step with stacks."""

from __future__ import annotations

from tracedoc.ranks.run_view import RunView
from tracedoc.timeline.own_code import CodePlace

ENOUGH = 0.5
"""A function is named for a length of time of which it takes at least this share."""


def code_place(run: RunView, rank: int, least_ms: float, *, loading: bool) -> CodePlace | None:
    """Return where the host of ``rank`` spends most time outside operators, ``None`` where nothing tells.

    ``least_ms`` is the length that is to be explained. ``loading`` asks for the data loader. One rank of a
    collected run records a step with stacks: what it shows of the loader holds for all ranks, which run one
    script; the rest only for itself.
    """
    digest = run.digest(rank)
    of_trace = digest.host_work.code if digest.host_work is not None else ()
    of_step = run.source_code if loading or rank == run.source_rank else ()
    with_lines = [one for one in of_trace if one.file]
    candidates = [one for one in (with_lines or of_step or of_trace) if one.loading == loading]
    first = max(candidates, key=lambda one: one.time_ns, default=None)
    if first is None or first.time_ns / 1e6 < ENOUGH * least_ms:
        return None
    return first
