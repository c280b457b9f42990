"""Facts about collectives by what they are for: bookkeeping, buffers, updated parameters, layers, experts."""

from __future__ import annotations

import statistics
from collections import Counter

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.matching import NO_OPERATION
from tracedoc.ranks.run_view import RunView, once
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_roles import Role
from tracedoc.timeline.collective_table import NONE
from tracedoc.values import Unknown, Value

JUST_AFTER_NS = 50_000
"""An idle piece that begins this soon after a collective's end comes from the host's wait for it."""

NO_PEERS = Unknown("ranks were not captured or matched: transfer and waiting cannot be separated")

UNSIZED = Unknown("they carry no size")


# -- barriers, metrics, objects


@run_fact("extra_collectives_per_step", unit="count", scope="rank", needs=("collectives", "host_ops"))
def extra_collectives_per_step(run: RunView) -> dict[str, Value]:
    """Barriers and small messages of a step that training does not need: the median over complete steps.

    Counted are barriers anywhere, collectives of up to 1 MiB outside of forward pass, backward pass, clipping
    and optimizer (metrics, pickled objects), and in the forward pass those of fewer than 64 bytes (a logged
    loss). Without a captured optimizer only barriers count: where clipping ends cannot be told.
    """

    def median(digest: RankDigest, step: StepDigest) -> Value:
        steps = digest.complete_steps or (step,)
        numbers = digest.collectives.step[digest.roles == Role.BOOKKEEPING]
        return statistics.median_low([int((numbers == one.index).sum()) for one in steps])

    return run.by_rank(median)


@run_fact("extra_collectives", unit="text", scope="rank", needs=("collectives", "host_ops"))
def extra_collectives(run: RunView) -> dict[str, Value]:
    """The calls of ``extra_collectives_per_step`` in the median step by kind, as "2 barriers"."""

    def in_words(digest: RankDigest, step: StepDigest) -> Value:
        table = digest.collectives
        rows = np.flatnonzero((digest.roles == Role.BOOKKEEPING) & (table.step == step.index))
        counts = Counter(table.kinds[kind].op.replace("_", "-") for kind in table.kind[rows].tolist())
        return ", ".join(f"{n} {op if n == 1 else op + 's'}" for op, n in counts.most_common()) or "none"

    return run.by_rank(in_words)


@run_fact(
    "extra_collectives_ms",
    unit="ms",
    scope="rank",
    needs=("collectives", "host_ops", "kernels"),
    interval="barrier or bookkeeping message with no compute beside it, or idle behind it",
)
def extra_collectives_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What the calls of ``extra_collectives_per_step`` cost the median step.

    Their exposed time less waiting for other ranks, and the idle time right behind them in which the
    host, which waited for them, launches again.
    """
    rows = _rows(digest, step, Role.BOOKKEEPING)
    found = exposed_transfer(run, digest, step, rows)
    if isinstance(found, Unknown):
        return found
    idle = digest.spans("sync_idle_ms")
    table = digest.collectives
    reach = Spans.of(table.start_ns[rows], table.end_ns[rows] + JUST_AFTER_NS)
    behind = reach.covered_ns(idle.starts, np.minimum(idle.starts + 1, idle.ends)) > 0
    return found | Spans(idle.starts[behind], idle.ends[behind])


# -- buffers


@run_fact("buffer_broadcasts_per_step", unit="count", scope="rank", needs=("collectives", "host_ops"))
def buffer_broadcasts_per_step(run: RunView) -> dict[str, Value]:
    """Broadcasts of DDP before its forward passes in the median step: it sends rank 0's buffers to all."""
    return run.by_rank(lambda digest, step: int(_rows(digest, step, Role.BUFFERS).size))


@run_fact("buffer_broadcast_bytes", unit="bytes", scope="rank", needs=("collectives", "host_ops"))
def buffer_broadcast_bytes(run: RunView) -> dict[str, Value]:
    """Bytes of buffers that DDP broadcasts in the median step."""
    return run.by_rank(lambda digest, step: _total(digest, _rows(digest, step, Role.BUFFERS)))


@run_fact(
    "buffer_broadcast_ms",
    unit="ms",
    scope="rank",
    needs=("collectives", "host_ops", "kernels", "multi_rank"),
    interval="broadcast of buffers with no compute beside it",
)
def buffer_broadcast_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of DDP's broadcasts of buffers in the median step, without waiting for a late rank.

    When the root comes to a broadcast does not show when the others may go on. So each counts for as long as
    its shortest part over all ranks, at its end; where a rank was not captured it is not known.
    """
    rows = _rows(digest, step, Role.BUFFERS)
    return exposed_transfer(run, digest, step, rows)


# -- sharded optimizers


@run_fact("optimizer_gather_bytes", unit="bytes", scope="rank", needs=("collectives", "host_ops"))
def optimizer_gather_bytes(run: RunView) -> dict[str, Value]:
    """Bytes of updated parameters that the median step's optimizer gathers from the other ranks."""
    return run.by_rank(lambda digest, step: _total(digest, _rows(digest, step, Role.OPTIMIZER_GATHER)))


@run_fact(
    "optimizer_gather_ms",
    unit="ms",
    scope="rank",
    needs=("collectives", "host_ops", "kernels"),
    interval="gather of updated parameters with no compute beside it",
)
def optimizer_gather_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time in which the median step's optimizer hands out updated parameters, less waiting.

    All-gathers and broadcasts that the optimizer launched (ZeRO-1 and ZeRO-2, distributed optimizers).
    """
    return exposed_transfer(run, digest, step, _rows(digest, step, Role.OPTIMIZER_GATHER))


# -- what layers exchange


@run_fact("layer_exchanges_per_step", unit="count", scope="rank", needs=("collectives", "host_ops"))
def layer_exchanges_per_step(run: RunView) -> dict[str, Value]:
    """Collectives of tensor-parallel layers in the median step, both passes.

    Those of a group that adds up 64 KiB or more in the forward pass, by all-reduce or reduce-scatter.
    """
    return run.by_rank(lambda digest, step: int(_rows(digest, step, Role.LAYER).size))


@run_fact("layer_exchange_bytes", unit="bytes", scope="rank", needs=("collectives", "host_ops"))
def layer_exchange_bytes(run: RunView) -> dict[str, Value]:
    """Bytes of the collectives of tensor-parallel layers in the median step."""
    return run.by_rank(lambda digest, step: _total(digest, _rows(digest, step, Role.LAYER)))


@run_fact(
    "layer_exchange_ms",
    unit="ms",
    scope="rank",
    needs=("collectives", "host_ops", "kernels"),
    interval="collective of a tensor-parallel layer with no compute beside it",
)
def layer_exchange_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in collectives of tensor-parallel layers, less waiting."""
    return exposed_transfer(run, digest, step, _rows(digest, step, Role.LAYER))


@run_fact(
    "all_to_all_exposed_ms",
    unit="ms",
    scope="rank",
    needs=("collectives", "kernels"),
    interval="all-to-all with no compute beside it",
)
def all_to_all_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in all-to-alls (experts, sequences, embeddings), less waiting."""
    return exposed_transfer(run, digest, step, _of_kind(digest, step, "all_to_all"))


@run_fact("all_to_alls_per_step", unit="count", scope="rank", needs=("collectives",))
def all_to_alls_per_step(run: RunView) -> dict[str, Value]:
    """All-to-alls of the median step."""
    return run.by_rank(lambda digest, step: int(_of_kind(digest, step, "all_to_all").size))


@run_fact(
    "p2p_exposed_ms",
    unit="ms",
    scope="rank",
    needs=("collectives", "kernels"),
    interval="send or receive with no compute beside it",
)
def p2p_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in sends and receives, less waiting for the other end."""
    return exposed_transfer(run, digest, step, _of_kind(digest, step, "send", "recv", "send_recv"))


@run_fact("p2p_bytes", unit="bytes", scope="rank", needs=("collectives",))
def p2p_bytes(run: RunView) -> dict[str, Value]:
    """Bytes that the median step sends to and receives from single ranks."""
    return run.by_rank(
        lambda digest, step: _total(digest, _of_kind(digest, step, "send", "recv", "send_recv"))
    )


def exposed_transfer(
    run: RunView, digest: RankDigest, step: StepDigest, rows: npt.NDArray[np.intp]
) -> Spans | Unknown:
    """Return when some of a rank's collectives run with no compute beside them, less waiting.

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


def _rows(digest: RankDigest, step: StepDigest, role: Role) -> npt.NDArray[np.intp]:
    inside = digest.collectives.in_window(step.start_ns, step.end_ns)
    return np.flatnonzero((digest.roles == role) & inside)


def _of_kind(digest: RankDigest, step: StepDigest, *ops: str) -> npt.NDArray[np.intp]:
    table = digest.collectives
    return np.flatnonzero(table.is_op(*ops) & table.in_window(step.start_ns, step.end_ns))


def _total(digest: RankDigest, rows: npt.NDArray[np.intp]) -> Value:
    sizes = digest.collectives.nbytes[rows]
    return int(sizes.sum()) if bool((sizes != NONE).all()) else UNSIZED


@once
def _shortest_ns(run: RunView) -> Int64Array:
    """Return the length of the shortest part of each matched operation."""
    matching = run.matching
    if len(matching) == 0:
        return np.zeros(0, dtype=np.int64)
    lengths = matching.end_ns - matching.start_ns
    return np.asarray(np.minimum.reduceat(lengths, matching.first[:-1]))
