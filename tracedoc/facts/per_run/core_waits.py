"""How long the training threads waited for free cores in each step of the log."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tracedoc.run.job import RankJob
from tracedoc.run.steplog import CORE_WAIT

Ints = NDArray[np.int64]


def core_waits_ns(rank: RankJob, numbers: Ints) -> Ints | None:
    """Return how long a rank's training thread waited for a core in each of these steps, 0 where not logged.

    ``None`` where no step has it: the kernel does not count it, or the log is older than that.
    """
    if rank.log is None:
        return None
    words = np.frombuffer(rank.log.words, dtype=np.int64).reshape(-1, 3)
    words = words[words[:, 0] >> 32 == CORE_WAIT]
    if not len(words):
        return None
    logged, once = np.unique(words[:, 0] & 0xFFFFFFFF, return_index=True)
    place = np.minimum(np.searchsorted(logged, numbers), logged.size - 1)
    return np.asarray(np.where(logged[place] == numbers, words[once[place], 2], 0), dtype=np.int64)
