"""Facts of the run about communication: what is exposed, how much of it is waiting, and what it is for."""

from __future__ import annotations

import statistics
from collections import Counter

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import digest_fact, run_fact
from tracedoc.ranks.matching import NO_OPERATION
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_roles import Role, is_extra
from tracedoc.timeline.collective_table import NONE
from tracedoc.topics.host.rank import sync_idle_ms
from tracedoc.topics.links.run import half_rate_bytes, usual_call_ns, usual_rates
from tracedoc.topics.step.rank import NO_STEP
from tracedoc.trace.distinct import is_among
from tracedoc.trace.vocabulary import busbw_factor
from tracedoc.values import Unknown, Value, needed, once

MOST_OVER_USUAL = 4
"""Small calls that take this many times as long as usual do more than pay latency."""

WAITING_OR_SLOW = Unknown(
    "calls of unknown arrivals take several times as long as their size needs: waiting, or a slow network"
)

UNSIZED = Unknown("most of the exposed communication is in collectives that carry no size")

SPLITS = ("transfer", "one rank", "arrivals unknown", "arrivals partly known")

LATENCY_BOUND_SHARE = 0.25
"""Below this share of the half-rate size a message takes nearly as long as an empty one."""


@digest_fact(unit="ms", needs=("collectives",))
def exposed_transfer_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Exposed communication of the median step in which data moves: after the last rank has come."""
    return run.splits[digest.rank, step.index].transfer_ns / 1e6


@digest_fact(unit="ms", needs=("collectives",))
def exposed_wait_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Exposed communication of the median step spent waiting for a later rank."""
    return run.splits[digest.rank, step.index].wait_ns / 1e6


@digest_fact(unit="ms", needs=("collectives",))
def pipeline_wait_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Exposed communication of the median step spent waiting for a pipeline neighbour."""
    return run.splits[digest.rank, step.index].pipeline_wait_ns / 1e6


@digest_fact(unit="ms", needs=("collectives",))
def exposed_comm_unsplit_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Exposed communication of the median step whose peers' arrival is unknown: transfer or waiting."""
    return run.splits[digest.rank, step.index].unsplit_ns / 1e6


@digest_fact(unit="ms", needs=("kernels", "collectives"))
def exposed_comm_excluding_wait_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Exposed communication of the median step minus what other ranks are known to cause.

    That is waiting for a later rank, and transfer that the rank that came last hides behind its compute: it
    is exposed here only because this rank arrived early and had no work left. With the traces of one rank
    nothing is known, so this is all exposed communication.
    """
    all_of_them = np.ones(len(digest.collectives), dtype=bool)
    split = run.splits[digest.rank, step.index]
    transfer_ns = max(split.transfer_ns - hidden_by_last_ns(run, digest, step, all_of_them), 0)
    return (transfer_ns + split.unsplit_ns) / 1e6


@digest_fact(unit="gbps", needs=("collectives",))
def least_transfer_gbps(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Bus bandwidth that the exposed collectives of the median step reach at least, weighted by time.

    As nccl-tests count it, but over all of their time: how much of that is waiting is not known. Unknown
    where it is (:func:`transfer_gbps`), and without collectives whose bytes and ranks are known.
    """
    table, rows = digest.collectives, _unsplit_rows(run, digest, step)
    lasted = int((table.end_ns - table.start_ns)[rows].sum())
    if not lasted:
        return Unknown("waiting is known apart from transfer, or no message has a size")
    return float((table.nbytes * _busbw_factors(digest))[rows].sum() / lasted)


@digest_fact(unit="fraction", needs=("gpu", "collectives"))
def least_transfer_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """The time that the collectives of :func:`least_transfer_gbps` should take, as a share of what they take.

    For their sizes and bus bandwidth; a group of up to 8 ranks counts as being on one host.
    """
    rows = _unsplit_rows(run, digest, step)
    usual = (usual_call_ns(run, digest) * _busbw_factors(digest))[rows]
    if rows.size == 0 or np.isnan(usual).any():
        return Unknown("no such collectives, or what the link should give is not known")
    return float(usual.sum() / (digest.collectives.end_ns - digest.collectives.start_ns)[rows].sum())


def _busbw_factors(digest: RankDigest) -> npt.NDArray[np.float64]:
    """What turns the bytes of each of a rank's collectives into those of bus bandwidth."""
    kinds = digest.collectives.kinds
    factors = np.array([busbw_factor(kind.op, kind.group_size or 0) for kind in kinds] or [0.0])
    found: npt.NDArray[np.float64] = factors[digest.collectives.kind]
    return found


def _unsplit_rows(run: RunView, digest: RankDigest, step: StepDigest) -> npt.NDArray[np.intp]:
    """The exposed collectives with a size of a step of which transfer and waiting are not known apart."""
    table = digest.collectives
    if run.splits[digest.rank, step.index].unsplit_ns <= 0:
        return np.empty(0, dtype=np.intp)
    sized = (table.nbytes != NONE) & (_busbw_factors(digest) > 0)
    return np.flatnonzero((table.step == step.index) & (table.exposed_ns > 0) & sized)


@run_fact(unit="text", values=SPLITS)
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


@digest_fact(unit="fraction", needs=("collectives",))
def latency_bound_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Share of the median step's sized collectives that are too small to use the link.

    Latency-bound is below a quarter of the size at which the link reaches half of its rate. That size is
    fitted to the transfers of this run where a group has three or more sizes, else taken from measured
    machines, in proportion to the link's rate (8x H200: 20 MiB; 32 ranks on several hosts: 120 MiB). Groups
    of fewer than 8 ranks pay less latency, as NCCL counts it: 2 ranks reach half of the rate at 48 % of that
    size, 4 at 60 %.
    """
    latency_bound = _latency_bound(run, digest)
    table = digest.collectives
    counted = table.in_window(step.start_ns, step.end_ns) & ((table.nbytes != NONE) | latency_bound)
    counted &= ~table.is_op("barrier")
    if not counted.any():
        return Unknown("no collective carries its size")
    return float(latency_bound[counted].mean())


@digest_fact(unit="ms", needs=("collectives",), interval="exposed latency-bound collective")
def latency_bound_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in latency-bound collectives, less known waiting.

    Unknown where most of that time is in calls whose peers' arrivals are not known, and these take more than
    four times as long as calls of their size on measured machines: that is waiting, or a slow network.
    """
    latency_bound = _latency_bound(run, digest)
    table = digest.collectives
    window = table.in_window(step.start_ns, step.end_ns)
    small = window & latency_bound
    inside = digest.exposed_comm.clip(step.start_ns, step.end_ns)
    spans = run.exposed_transfer(digest, step, small)
    unsized = window & (table.nbytes == NONE) & ~latency_bound & ~table.is_op("barrier")
    if run.exposed_transfer(digest, step, unsized).total_ns > inside.total_ns / 2:
        return UNSIZED
    unsplit = np.flatnonzero(small & ~run.arrivals[digest.rank].known)
    their_ns = int(inside.covered_ns(table.start_ns[unsplit], table.end_ns[unsplit]).sum())
    if 2 * their_ns <= spans.total_ns:
        return spans
    # Not known between hosts: the sum is NaN then, and the time is kept.
    usual_ns = float(usual_call_ns(run, digest)[unsplit].sum())
    return WAITING_OR_SLOW if their_ns > MOST_OVER_USUAL * usual_ns else spans


def latency_bound_bytes(run: RunView, digest: RankDigest) -> npt.NDArray[np.float64] | Unknown:
    """The size below which its group is latency-bound, for each of a rank's collectives."""
    halves = half_rate_bytes(run, digest)
    return halves if isinstance(halves, Unknown) else LATENCY_BOUND_SHARE * halves


def _latency_bound(run: RunView, digest: RankDigest) -> npt.NDArray[np.bool_]:
    """A mask of the rank's collectives that are too small to use the link.

    One without a size is too small where it moves data for no longer than one of the limit's size would.
    """
    limits, table = needed(latency_bound_bytes(run, digest)), digest.collectives
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
    """The exposed transfer of wanted collectives, in ns, that the rank that came last hides behind compute.

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


# -- what collectives are for


JUST_AFTER_NS = 50_000
"""An idle piece that begins this soon after a collective's end comes from the host's wait for it."""

NO_PEERS = Unknown("ranks were not captured or matched: transfer and waiting cannot be separated")

NO_SIZES = Unknown("they carry no size")


@digest_fact(unit="count", needs=("collectives", "host_ops"))
def extra_collectives_per_step(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Barriers and small messages of a step that training does not need: the median over complete steps.

    Counted are barriers anywhere, collectives of up to 1 MiB outside of forward pass, backward pass, clipping
    and optimizer (metrics, pickled objects), gathers of any size there beside DDP, which gathers nothing, and
    in the forward pass those of fewer than 64 bytes (a logged loss). Without a captured optimizer only
    barriers count: where clipping ends cannot be told.
    """
    steps = digest.complete_steps or (step,)
    numbers = digest.collectives.step[is_extra(digest.roles)]
    return statistics.median_low([int((numbers == one.index).sum()) for one in steps])


@digest_fact(unit="count", needs=("collectives", "host_ops"))
def extra_reductions(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """All-reduces and reduces among the calls of ``extra_collectives_per_step``, in the median step."""
    table = digest.collectives
    reduces = table.is_op("all_reduce") | table.is_op("reduce")
    return int((is_extra(digest.roles) & (table.step == step.index) & reduces).sum())


@digest_fact(unit="count", needs=("collectives", "host_ops"))
def extra_barriers(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Barriers among the calls of ``extra_collectives_per_step``, in the median step."""
    table = digest.collectives
    return int((is_extra(digest.roles) & (table.step == step.index) & table.is_op("barrier")).sum())


@digest_fact(unit="count", needs=("collectives", "host_ops"))
def extra_before_update(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Norms among the calls of ``extra_collectives_per_step``: between backward pass and optimizer."""
    return int(rows_of_role(digest, step, Role.NORM).size)


@digest_fact(unit="text", needs=("collectives", "host_ops"))
def extra_collectives(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """The calls of ``extra_collectives_per_step`` in the median step by kind, as "2 barriers"."""
    table = digest.collectives
    rows = np.flatnonzero(is_extra(digest.roles) & (table.step == step.index))
    counts = Counter(table.kinds[kind].op.replace("_", "-") for kind in table.kind[rows].tolist())
    return ", ".join(f"{n} {op if n == 1 else op + 's'}" for op, n in counts.most_common()) or "none"


@digest_fact(
    unit="ms",
    needs=("collectives", "host_ops", "kernels", sync_idle_ms),
    interval="barrier or bookkeeping message with no compute beside it, or idle behind it",
)
def extra_collectives_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What the calls of ``extra_collectives_per_step`` cost the median step.

    Their exposed time less waiting for other ranks, and the idle time right behind them in which the
    host, which waited for them, launches again.
    """
    rows = rows_of_role(digest, step, Role.BOOKKEEPING, Role.NORM)
    found = needed(exposed_transfer(run, digest, step, rows))
    idle = sync_idle_ms.spans_of(digest)
    table = digest.collectives
    reach = Spans.of(table.start_ns[rows], table.end_ns[rows] + JUST_AFTER_NS)
    behind = reach.covered_ns(idle.starts, np.minimum(idle.starts + 1, idle.ends)) > 0
    return found | Spans(idle.starts[behind], idle.ends[behind])


@digest_fact(unit="count", needs=("collectives", "host_ops"))
def buffer_broadcasts_per_step(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Broadcasts of DDP before its forward passes in the median step: it sends rank 0's buffers to all."""
    return int(rows_of_role(digest, step, Role.BUFFERS).size)


@digest_fact(unit="bytes", needs=("collectives", "host_ops"))
def buffer_broadcast_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Bytes of buffers that DDP broadcasts in the median step."""
    return total_bytes(digest, rows_of_role(digest, step, Role.BUFFERS))


@digest_fact(
    unit="ms",
    needs=("collectives", "host_ops", "kernels", "multi_rank"),
    interval="broadcast of buffers with no compute beside it",
)
def buffer_broadcast_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of DDP's broadcasts of buffers in the median step, without waiting for a late rank.

    When the root comes to a broadcast does not show when the others may go on. So each counts for as long as
    its shortest part over all ranks, at its end; where a rank was not captured it is not known.
    """
    return exposed_transfer(run, digest, step, rows_of_role(digest, step, Role.BUFFERS))


@digest_fact(unit="bytes", needs=("collectives", "host_ops"))
def optimizer_gather_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Bytes of updated parameters that the median step's optimizer gathers from the other ranks."""
    return total_bytes(digest, rows_of_role(digest, step, Role.OPTIMIZER_GATHER))


@digest_fact(
    unit="ms",
    needs=("collectives", "host_ops", "kernels"),
    interval="gather of updated parameters with no compute beside it",
)
def optimizer_gather_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time in which the median step's optimizer hands out updated parameters, less waiting.

    All-gathers and broadcasts that the optimizer launched (ZeRO-1 and ZeRO-2, distributed optimizers).
    """
    return exposed_transfer(run, digest, step, rows_of_role(digest, step, Role.OPTIMIZER_GATHER))


@digest_fact(
    unit="ms",
    needs=("collectives", "kernels"),
    interval="all-to-all with no compute beside it",
)
def all_to_all_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in all-to-alls (experts, sequences, embeddings), less waiting."""
    return exposed_transfer(run, digest, step, rows_of_kind(digest, step, "all_to_all"))


@digest_fact(unit="count", needs=("collectives",))
def all_to_alls_per_step(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """All-to-alls of the median step."""
    return int(rows_of_kind(digest, step, "all_to_all").size)


def exposed_transfer(
    run: RunView, digest: RankDigest, step: StepDigest, rows: npt.NDArray[np.intp]
) -> Spans | Unknown:
    """The exposed time of some of a rank's collectives, less waiting.

    A broadcast or reduce, of which arrivals say nothing, counts for as long as its shortest part over all
    ranks, at its end. Unknown where calls whose waiting is not known make up half of the time or more.
    """
    table, arrivals = digest.collectives, run.arrivals[digest.rank]
    operations, ends = run.operations[digest.rank][rows], table.end_ns[rows]
    complete = operations != NO_OPERATION
    complete[complete] = run.matching.complete[operations[complete]]
    begins = arrivals.last_arrival_ns(table)[rows]
    begins[complete] = np.maximum(begins[complete], ends[complete] - _shortest_ns(run)[operations[complete]])
    window = digest.exposed_comm.clip(step.start_ns, step.end_ns)
    found, unsure = window & Spans.of(begins, ends), window & Spans.of(begins[~complete], ends[~complete])
    return NO_PEERS if unsure.total_ns and 2 * unsure.total_ns >= found.total_ns else found


def rows_of_role(digest: RankDigest, step: StepDigest, *roles: Role) -> npt.NDArray[np.intp]:
    """The collectives of a step that are for some purposes, as rows of the rank's table."""
    inside = digest.collectives.in_window(step.start_ns, step.end_ns)
    return np.flatnonzero(is_among(digest.roles, roles) & inside)


def rows_of_kind(digest: RankDigest, step: StepDigest, *ops: str) -> npt.NDArray[np.intp]:
    """The collectives of a step that are of one of these kinds, as rows of the rank's table."""
    table = digest.collectives
    return np.flatnonzero(table.is_op(*ops) & table.in_window(step.start_ns, step.end_ns))


def total_bytes(digest: RankDigest, rows: npt.NDArray[np.intp]) -> int | Unknown:
    """The payload of some of a rank's collectives."""
    sizes = digest.collectives.nbytes[rows]
    return int(sizes.sum()) if bool((sizes != NONE).all()) else NO_SIZES


@once
def _shortest_ns(run: RunView) -> Int64Array:
    """The length of the shortest part of each matched operation."""
    matching = run.matching
    if len(matching) == 0:
        return np.zeros(0, dtype=np.int64)
    lengths = matching.end_ns - matching.start_ns
    return np.asarray(np.minimum.reduceat(lengths, matching.first[:-1]))


# -- uneven all-to-alls


@run_fact(unit="ratio", needs=("collectives", "multi_rank"))
@once
def all_to_all_imbalance_ratio(run: RunView) -> float | Unknown:
    """Bytes of the rank with most of them over the mean of all ranks, in the run's all-to-alls.

    Weighted by bytes; 1 where all ranks move as much. Of operations whose ranks were all captured and all
    say their size.
    """
    matching = run.matching
    ops = [index for index, op in enumerate(matching.ops) if op == "all_to_all"]
    rows = np.flatnonzero((matching.op == ops[0]) & matching.complete) if ops else np.empty(0, dtype=np.intp)
    tables = [digest.collectives for digest in run.digests]
    most, mean = 0.0, 0.0
    for row in rows.tolist():
        parts = range(int(matching.first[row]), int(matching.first[row + 1]))
        sizes = [int(tables[int(matching.part_rank[p])].nbytes[int(matching.part_row[p])]) for p in parts]
        if NONE not in sizes and sum(sizes) > 0:
            most += max(sizes)
            mean += sum(sizes) / len(sizes)
    return (
        most / mean if mean else Unknown("no all-to-all was matched over all of its ranks with their sizes")
    )


@digest_fact(
    unit="ms", needs=("collectives", "multi_rank", all_to_all_exposed_ms, all_to_all_imbalance_ratio)
)
def all_to_all_imbalance_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """What even splits would save of ``all_to_all_exposed_ms``: 1 - mean / most bytes of it."""
    ratio, exposed = needed(all_to_all_imbalance_ratio(run)), needed(all_to_all_exposed_ms(run, digest, step))
    return exposed.total_ns / 1e6 * (1.0 - 1.0 / ratio)
