"""Facts about communication: what is exposed, how much of it is waiting, and how large the messages are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.facts.per_run.links import half_rate_bytes, usual_call_ns, usual_rates
from tracedoc.ranks.exposure import ExposedSplit
from tracedoc.ranks.matching import NO_OPERATION
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_table import NONE
from tracedoc.values import Unknown, Value

MOST_OVER_USUAL = 4
"""Small calls that take this many times as long as usual do more than pay latency."""

WAITING_OR_SLOW = Unknown(
    "calls of unknown arrivals take several times as long as their size needs: waiting, or a slow network"
)

UNSIZED = Unknown("most of the exposed communication is in collectives that carry no size")

SPLITS = ("transfer", "one rank", "arrivals unknown", "arrivals partly known")

LATENCY_BOUND_SHARE = 0.25
"""Below this share of the half-rate size a message takes nearly as long as an empty one."""


@run_fact("exposed_transfer_ms", unit="ms", scope="rank", needs=("collectives",))
def exposed_transfer_ms(run: RunView) -> dict[str, Value]:
    """Exposed communication of the median step in which data moves: after the last rank has come."""
    return _split_part(run, lambda split: split.transfer_ns)


@run_fact("exposed_wait_ms", unit="ms", scope="rank", needs=("collectives",))
def exposed_wait_ms(run: RunView) -> dict[str, Value]:
    """Exposed communication of the median step spent waiting for a later rank."""
    return _split_part(run, lambda split: split.wait_ns)


@run_fact("pipeline_wait_ms", unit="ms", scope="rank", needs=("collectives",))
def pipeline_wait_ms(run: RunView) -> dict[str, Value]:
    """Exposed communication of the median step spent waiting for a pipeline neighbour."""
    return _split_part(run, lambda split: split.pipeline_wait_ns)


@run_fact("exposed_comm_unsplit_ms", unit="ms", scope="rank", needs=("collectives",))
def exposed_comm_unsplit_ms(run: RunView) -> dict[str, Value]:
    """Exposed communication of the median step whose peers' arrival is unknown: transfer or waiting."""
    return _split_part(run, lambda split: split.unsplit_ns)


@run_fact("exposed_comm_excluding_wait_ms", unit="ms", scope="rank", needs=("kernels", "collectives"))
def exposed_comm_excluding_wait_ms(run: RunView) -> dict[str, Value]:
    """Exposed communication of the median step minus what other ranks are known to cause.

    That is waiting for a later rank, and transfer that the rank that came last hides behind its compute: it
    is exposed here only because this rank arrived early and had no work left. With the traces of one rank
    nothing is known, so this is all exposed communication.
    """
    return run.by_rank(lambda digest, step: _less_wait(run, digest, step))


@run_fact("comm_split", unit="text", values=SPLITS)
def comm_split(run: RunView) -> Value:
    """What is known of exposed communication: how far transfer and waiting for peers could be separated.

    "transfer" where they are, but for a tenth at most: :func:`exposed_comm_excluding_wait_ms` is transfer
    then. Else it may be waiting as well: "one rank" was captured, the "arrivals unknown" of all peers, or
    the "arrivals partly known".
    """
    representative = run.representative_digest
    step = representative.judged_step if representative is not None else None
    if representative is None or step is None:
        return NO_STEP
    split = run.splits[representative.rank, step.index]
    exposed = step.budget.exposed_comm_ns
    if exposed == 0 or split.unsplit_ns <= 0.1 * exposed:
        return "transfer"
    if len(run.digests) == 1:
        return "one rank"
    if split.unsplit_ns == exposed:
        return "arrivals unknown"
    return "arrivals partly known"


@run_fact("latency_bound_frac", unit="fraction", scope="rank", needs=("collectives",))
def latency_bound_frac(run: RunView) -> dict[str, Value]:
    """Share of the median step's sized collectives that are too small to use the link.

    Latency-bound is below a quarter of the size at which the link reaches half of its rate. That size is
    fitted to the transfers of this run where a group has three or more sizes, else taken from measured
    machines, in proportion to the link's rate (8x H200: 20 MiB; 32 ranks on several hosts: 120 MiB). Groups
    of fewer than 8 ranks pay less latency, as NCCL counts it: 2 ranks reach half of the rate at 48 % of that
    size, 4 at 60 %.
    """
    return run.by_rank(lambda digest, step: _latency_bound_share(run, digest, step))


@run_fact(
    "latency_bound_exposed_ms",
    unit="ms",
    scope="rank",
    needs=("collectives",),
    interval="exposed latency-bound collective",
)
def latency_bound_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in latency-bound collectives, less known waiting.

    Unknown where most of that time is in calls whose peers' arrivals are not known, and these take more than
    four times as long as calls of their size on measured machines: that is waiting, or a slow network.
    """
    latency_bound = _latency_bound(run, digest)
    if isinstance(latency_bound, Unknown):
        return latency_bound
    table = digest.collectives
    window = table.in_window(step.start_ns, step.end_ns)
    small = window & latency_bound
    inside = digest.exposed_comm.clip(step.start_ns, step.end_ns)
    spans = run.exposed_transfer(digest, step, small)
    unsized = window & (table.nbytes == NONE) & ~latency_bound & ~table.is_op("barrier")
    if 2 * run.exposed_transfer(digest, step, unsized).total_ns > inside.total_ns:
        return UNSIZED
    unsplit = np.flatnonzero(small & ~run.arrivals[digest.rank].known)
    their_ns = int(inside.covered_ns(table.start_ns[unsplit], table.end_ns[unsplit]).sum())
    if 2 * their_ns <= spans.total_ns:
        return spans
    # Not known between hosts: the sum is NaN then, and the time is kept.
    usual_ns = float(usual_call_ns(run, digest)[unsplit].sum())
    return WAITING_OR_SLOW if their_ns > MOST_OVER_USUAL * usual_ns else spans


def _latency_bound_share(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    latency_bound = _latency_bound(run, digest)
    if isinstance(latency_bound, Unknown):
        return latency_bound
    table = digest.collectives
    counted = table.in_window(step.start_ns, step.end_ns) & ((table.nbytes != NONE) | latency_bound)
    counted &= ~table.is_op("barrier")
    if not counted.any():
        return Unknown("no collective carries its size")
    return float(latency_bound[counted].mean())


def latency_bound_bytes(run: RunView, digest: RankDigest) -> npt.NDArray[np.float64] | Unknown:
    """Return for each of a rank's collectives the size below which its group is latency-bound."""
    halves = half_rate_bytes(run, digest)
    return halves if isinstance(halves, Unknown) else LATENCY_BOUND_SHARE * halves


def _latency_bound(run: RunView, digest: RankDigest) -> npt.NDArray[np.bool_] | Unknown:
    """Return a mask of the rank's collectives that are too small to use the link.

    One without a size is too small where it moves data for no longer than one of the limit's size would.
    """
    limits, table = latency_bound_bytes(run, digest), digest.collectives
    if isinstance(limits, Unknown):
        return limits
    arrivals, rates = run.arrivals[digest.rank], usual_rates(run, digest)
    with np.errstate(invalid="ignore"):
        short = (table.end_ns - arrivals.last_arrival_ns(table)) < (
            1 / LATENCY_BOUND_SHARE + 1
        ) * limits / rates
    unsized = (table.nbytes == NONE) & ~table.is_op("barrier")
    return np.asarray(
        np.where(unsized, short & arrivals.known, (table.nbytes != NONE) & (table.nbytes < limits))
    )


def hidden_by_last_ns(
    run: RunView, digest: RankDigest, step: StepDigest, wanted: npt.NDArray[np.bool_]
) -> int:
    """Return how much exposed transfer of wanted collectives the rank that came last hides behind compute.

    It is exposed on this rank only because it came early and had no work left.
    """
    table, arrivals = digest.collectives, run.arrivals[digest.rank]
    operations = run.operations[digest.rank]
    certain = arrivals.known & arrivals.complete & (operations != NO_OPERATION) & wanted
    rows = np.flatnonzero(certain & table.in_window(step.start_ns, step.end_ns))
    turn = np.clip(arrivals.last_arrival_ns(table)[rows], step.start_ns, step.end_ns)
    ends = np.clip(table.end_ns[rows], step.start_ns, step.end_ns)
    own = digest.exposed_comm.covered_ns(turn, ends)
    return int(np.maximum(own - run.last_exposed_ns[operations[rows]], 0).sum())


def _less_wait(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    all_of_them = np.ones(len(digest.collectives), dtype=bool)
    split = run.splits[digest.rank, step.index]
    transfer_ns = max(split.transfer_ns - hidden_by_last_ns(run, digest, step, all_of_them), 0)
    return (transfer_ns + split.unsplit_ns) / 1e6


def _split_part(run: RunView, part: Callable[[ExposedSplit], int]) -> dict[str, Value]:
    return run.by_rank(lambda digest, step: part(run.splits[digest.rank, step.index]) / 1e6)
