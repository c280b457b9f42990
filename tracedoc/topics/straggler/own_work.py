"""Facts of the run about what a late rank does: whether it does it alone, and where in the script."""

from __future__ import annotations

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.code_places import has_stacks, late_place
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.solo_work import does_alone
from tracedoc.ranks.stragglers import Straggler, stragglers
from tracedoc.values import Unknown, Value


@run_fact(unit="bool", scope="rank")
def first_rank(run: RunView) -> dict[str, Value]:
    """Whether this is rank 0, to which scripts give what is done once: logs, checkpoints, evaluation."""
    return {str(digest.rank): digest.rank == 0 for digest in run.digests}


@run_fact(unit="bool", scope="rank", needs=("collectives", "multi_rank"))
def straggler_alone(run: RunView) -> dict[str, Value]:
    """Whether this rank is late from something that no other rank does.

    The cause (:func:`straggler_cause`) is Python, code that no operator covers, launching, waiting for the
    GPU or copies, and no other rank takes a third or more of its time for that before the same collectives;
    or it is that the rank starts more kernels. False for a rank that nobody waits for.
    """
    found: dict[str, Value] = {str(digest.rank): False for digest in run.digests}
    for late in stragglers(run):
        found[str(late.rank)] = does_alone(run, late)
    return found


# -- the function of the script


STACKS_ON_ALL = 8
"""In jobs of so many ranks ``tracedoc collect`` has all record a step with stacks."""


@run_fact(unit="text", scope="rank", needs=("collectives", "multi_rank"))
def straggler_code(run: RunView) -> dict[str, Value]:
    """The function of the script in which a late rank takes longer than its peers, or "none".

    From the stacks of that rank alone, in its trace or in its step with stacks. What the function takes on
    ranks that are not late does not count (:func:`straggler_code_ms`); the rest is half or more of what the
    rank is longer at its cause.
    """
    found: dict[str, Value] = {str(digest.rank): "none" for digest in run.digests}
    for late in stragglers(run):
        shown = late_place(run, late)
        found[str(late.rank)] = str(shown.place) if shown is not None else "none"
    return found


@run_fact(unit="ms", scope="rank", needs=("collectives", "multi_rank"))
def straggler_code_ms(run: RunView) -> dict[str, Value]:
    """How much longer a late rank is in :func:`straggler_code` than the median rank that is not late.

    In steps that were recorded with stacks, which make Python slower.
    """
    found: dict[str, Value] = {str(digest.rank): Unknown("no function is named") for digest in run.digests}
    for late in stragglers(run):
        shown = late_place(run, late)
        if shown is not None:
            alone = Unknown("no rank that is not late recorded stacks")
            found[str(late.rank)] = shown.more_ns / 1e6 if shown.more_ns is not None else alone
    return found


@run_fact(unit="text", scope="rank", needs=("collectives", "multi_rank"))
def straggler_recapture(run: RunView) -> dict[str, Value]:
    """The command that records the Python stacks that a late rank lacks, or "none".

    Asked of ranks that are late by code of their own process. In jobs of up to 8 ranks, and on rank 0, it is
    "tracedoc collect", elsewhere "tracedoc collect --ranks 0,77".
    """
    found: dict[str, Value] = {str(digest.rank): "none" for digest in run.digests}
    few = (run.world_size or len(run.digests)) <= STACKS_ON_ALL
    recorded = run.job.sources if run.job is not None else {}
    for late in stragglers(run):
        known = late.rank in recorded or has_stacks(run, late.rank)
        if not known and _is_in_code_of_rank(run, late):
            chosen = "" if few or late.rank == 0 else f" --ranks 0,{late.rank}"
            found[str(late.rank)] = f"tracedoc collect{chosen}"
    return found


def _is_in_code_of_rank(run: RunView, late: Straggler) -> bool:
    """Whether what makes a rank late runs in its own process, where stacks would show it."""
    if late.cause != "input":
        return late.cause in ("python", "unknown")
    job = run.job.rank(late.rank) if run.job is not None else None
    return job is not None and job.loader.workers == 0


@run_fact(unit="bool", scope="rank", needs=("collectives", "multi_rank", straggler_code))
def straggler_located(run: RunView) -> dict[str, Value]:
    """Whether :func:`straggler_code` names a function."""
    return {rank: place != "none" for rank, place in straggler_code(run).items()}
