"""Facts about work of one rank only: whether what makes a rank late is done by it alone."""

from __future__ import annotations

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.solo_work import does_alone
from tracedoc.ranks.stragglers import stragglers
from tracedoc.values import Value


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
