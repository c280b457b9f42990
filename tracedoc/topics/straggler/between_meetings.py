"""What ranks take longer in steps in which they do not meet, and wait for when they do (local SGD)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tracedoc.ranks.run_view import RunView, meet_rarely
from tracedoc.spans import Int64Array
from tracedoc.topics.straggler.work_before import CAUSES
from tracedoc.trace.distinct import distinct, is_among


class OwnTimes(msgspec.Struct, frozen=True, eq=False):
    """What each rank takes for steps itself, as arrays ``[rank, step]`` in ns, without waiting for others.

    ``by_cause_us[rank, step, cause]`` is that by :data:`CAUSES`, in us.
    """

    own_ns: Int64Array
    by_cause_us: Int64Array

    @property
    def pace_ns(self) -> Int64Array:
        """What each step takes the rank that takes longest for it."""
        return np.asarray(self.own_ns.max(axis=0))

    @property
    def late_ns(self) -> Int64Array:
        """What each step takes longer than it takes the median rank, of two the earlier one."""
        return np.asarray(self.pace_ns - np.sort(self.own_ns, axis=0)[(len(self.own_ns) - 1) // 2])

    def later_ns(self, place: int) -> Int64Array:
        """How much longer a rank takes for each step than the median of the others; what adds up over all."""
        longer = self.own_ns[place] - np.median(np.delete(self.own_ns, place, axis=0), axis=0)
        positive = np.maximum(longer, 0)
        adds_up = longer.sum() / max(positive.sum(), 1)
        return np.asarray(np.rint(positive * max(adds_up, 0.0)), dtype=np.int64)

    def more_us(self, place: int) -> Int64Array:
        """How much longer than the median of the others a rank is at each cause: ``[step, cause]``."""
        others = np.median(np.delete(self.by_cause_us, place, axis=0), axis=0)
        return np.asarray(self.by_cause_us[place] - others.astype(np.int64))


def own_times(run: RunView, steps: Sequence[int]) -> OwnTimes | None:
    """What ranks take for ``steps``, ``None`` where they meet in each of them, in none, or are alone.

    Where they meet in some, those who are late in the others are waited for there, for all of it at once.
    """
    met = is_among(np.array(steps, dtype=np.int64), distinct(run.matching.step))
    if not meet_rarely(run.digests) or met.all() or not met.any():
        return None
    own = np.zeros((len(run.digests), len(steps)), dtype=np.int64)
    by_cause = np.zeros((*own.shape, len(CAUSES)), dtype=np.int64)
    for place, digest in enumerate(run.digests):
        windows = {step.index: step for step in digest.steps}
        if not windows.keys() >= set(steps):
            return None
        for column, index in enumerate(steps):
            step = windows[index]
            own[place, column] = step.budget.window_ns - run.splits[digest.rank, index].wait_ns
            named = {"kernels": step.budget.compute_ns, **step.idle_ns}
            by_cause[place, column] = [named.get(cause, 0) // 1000 for cause in CAUSES]
    return OwnTimes(own, by_cause)
