"""Tell whether a late rank does something that its peers do not do at all."""

from __future__ import annotations

import numpy as np

from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.stragglers import CAUSES, Straggler, did_before, kernel_cause

OWN_CAUSES = frozenset({"python", "unknown", "dispatch", "sync", "copy"})
"""What a script may do on one rank only. Loading, collecting garbage and compiling are for all alike."""

ALONE = 1 / 3
"""A peer that takes this share of a rank's time for something does it as well."""


def does_alone(run: RunView, late: Straggler) -> bool:
    """Return whether no peer takes a third or more of the time that a late rank takes for its cause.

    Compared are times before the collectives to which it came last, all of them together. Kernels count where
    the rank starts more of them than its peers.
    """
    if late.cause == "kernels":
        return kernel_cause(late, run) == "more kernels"
    if late.cause not in OWN_CAUSES:
        return False
    cause = CAUSES.index(late.cause)
    own, others = 0, np.zeros(len(run.digests), dtype=np.int64)
    for operation in late.operations:
        for place, us in did_before(run, operation):
            if run.digests[place].rank == late.rank:
                own += int(us[cause])
            else:
                others[place] += int(us[cause])
    return own > 0 and int(others.max(initial=0)) < ALONE * own
