"""Stages of a pipeline whose processes share cores: what each takes, by amounts of work and by idle time.

Compute is as long as the other processes let it be, so that the compute of all ranks is shared out by their
arithmetic (or number of operators). Time without operators or waiting, as a sleep or a file, counts as far as
it is there in at least three quarters of the steps.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.run_view import RunView, once
from tracedoc.ranks.work_shares import work_shares
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest
from tracedoc.trace.distinct import is_among

Floats = npt.NDArray[np.float64]


class CpuWork(msgspec.Struct, frozen=True, eq=False):
    """What the ranks of a CPU run have to do in the steps that all captured whole, in ns.

    ``compute_ns[rank, step]`` is the compute of all ranks by this one's share of their arithmetic;
    ``away_ns`` the time of a rank in which it neither runs operators nor waits for a transfer.
    """

    steps: tuple[int, ...]
    compute_ns: Floats
    away_ns: Floats

    @property
    def usual_away_ns(self) -> Floats:
        """What each rank is away in at least three quarters of the steps."""
        return np.asarray(np.sort(self.away_ns, axis=1)[:, (len(self.steps) - 1) // 4])


@once
def cpu_work(run: RunView) -> CpuWork | None:
    """Return the work of the ranks of a CPU run; ``None`` without a whole step, or amounts of work."""
    shares = work_shares(run)
    arithmetic, _, operators = shares.amount
    amount = np.where(np.isnan(arithmetic).any(), operators, arithmetic)
    if not shares.steps or np.isnan(amount).any():
        return None
    away = np.array([_away_ns(digest, shares.steps) for digest in run.digests])
    compute = shares.compute_ns.sum(axis=0) * amount / amount.sum(axis=0)
    return CpuWork(shares.steps, compute, away)


def _away_ns(digest: RankDigest, steps: tuple[int, ...]) -> list[float]:
    """Return the time of each step in which a rank neither computes nor waits for a transfer."""
    waiting = waiting_for_transfers(digest)
    chosen = [step for step in digest.steps if step.index in steps]
    waits = waiting.covered_ns([step.start_ns for step in chosen], [step.end_ns for step in chosen])
    return [
        float(step.budget.window_ns - step.budget.compute_ns - wait)
        for step, wait in zip(chosen, waits.tolist(), strict=True)
    ]


def waiting_for_transfers(digest: RankDigest) -> Spans:
    """Return when a rank waits for transfers with no compute beside them.

    A wait lasts until a transfer ends. What lasts until the rank computes or begins another transfer is its
    own time, whatever travels meanwhile: a send that nobody waits for yet lasts as long as a sleep beside it.
    """
    table, exposed = digest.collectives, digest.exposed_comm
    times = np.unique(np.concatenate((table.start_ns, table.end_ns, exposed.starts, exposed.ends)))
    ends = is_among(times[1:], np.unique(table.end_ns))
    return exposed & Spans.of(times[:-1][ends], times[1:][ends])
