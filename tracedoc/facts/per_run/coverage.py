"""Facts about the capture: what was seen of the run, and what was not."""

from __future__ import annotations

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.values import Unknown, Value


@run_fact(unit="count")
def ranks_seen(run: RunView) -> Value:
    """Ranks whose trace was read."""
    return len(run.digests)


@run_fact(unit="count")
def world_size(run: RunView) -> Value:
    """Ranks of the job, by its traces."""
    return run.world_size if run.world_size is not None else Unknown("no trace names the world size")


@run_fact(unit="count")
def missing_ranks(run: RunView) -> Value:
    """Ranks of the job without a trace."""
    if run.world_size is None:
        return Unknown("no trace names the world size")
    return max(run.world_size - len(run.digests), 0)


@run_fact(unit="count")
def fewest_complete_steps(run: RunView) -> Value:
    """Complete steps of the rank that has fewest; ranks without device activity are left out."""
    counts = [len(digest.complete_steps) for digest in run.digests if digest.steps]
    return min(counts) if counts else Unknown("no rank has steps")


@run_fact(unit="count")
def truncated_traces(run: RunView) -> Value:
    """Trace files that are truncated, or in which damaged events had to be skipped."""
    return sum(digest.truncated for digest in run.digests)
