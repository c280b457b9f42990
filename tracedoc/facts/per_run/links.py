"""Facts about links and clocks: reached against expected bandwidth, and how far clocks agree."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.bandwidth import REFERENCE_RANKS, Transfers, size_curve, transfers
from tracedoc.ranks.matching import NO_OPERATION
from tracedoc.ranks.run_view import RunView
from tracedoc.step.device import unlisted
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.collective_table import NONE
from tracedoc.values import Unknown, Value

MOST_EFFICIENT = 1.5
"""All-reduces that NVLink switches add up reach up to 1.4 times what rings do; more is no measurement."""

ONE_RANK = Unknown("the traces of one rank: when data begins to move is not known")


@run_fact("transfer_gbps", unit="gbps", needs=("collectives", "multi_rank"))
def transfer_gbps(run: RunView) -> Value:
    """Bus bandwidth that the run's all-reduces, reduce-scatters and all-gathers reach, weighted by bytes.

    As nccl-tests count it, over the time from the last rank's arrival to the end, never over kernel
    durations, which hold the waiting. Only operations whose ranks were all captured, and only those whose
    expected bandwidth is known (:func:`expected_transfer_gbps`) where there are such.
    """
    found = _compared(run)
    return found if isinstance(found, Unknown) else _weighted(found, found.gbps)


@run_fact("expected_transfer_gbps", unit="gbps", needs=("gpu", "collectives", "multi_rank"))
def expected_transfer_gbps(run: RunView) -> Value:
    """Bus bandwidth that messages of these sizes should reach on this device's link, weighted by bytes.

    80 % of NVLink or PCIe (70 % of the links to the group's peers, where devices are wired pair by pair),
    times ``size / (size + half)``: small messages never reach the link's rate. The half-rate size is the
    larger of that of measured machines and that of this run, which is fitted where a group has three or
    more sizes. Not known between hosts: the trace does not name the network.
    """
    found = _compared(run)
    if isinstance(found, Unknown):
        return found
    return _weighted(found, found.expected_gbps) if _is_known(found) else _no_link(run)


@run_fact("link_efficiency_frac", unit="fraction", needs=("gpu", "collectives", "multi_rank"))
def link_efficiency_frac(run: RunView) -> Value:
    """Bandwidth that transfers reach as a share of what their size should on this link, weighted by bytes.

    Above 1 is possible: switches can reduce by themselves. Unknown above 1.5: the link, or the time when the
    last rank arrives, is then not what it seems. All-to-all is left out (its transfer is a lower
    bound), and so are operations of which a rank was not captured.
    """
    found = _compared(run)
    if isinstance(found, Unknown):
        return found
    if not _is_known(found):
        return _no_link(run)
    share = _weighted(found, found.gbps / found.expected_gbps)
    return share if share <= MOST_EFFICIENT else Unknown("transfers are faster than this link should allow")


@run_fact("clock_residual_ms", unit="ms", needs=("collectives", "multi_rank"))
def clock_residual_ms(run: RunView) -> Value:
    """Median distance between the ends of one operation on two clocks, once they were brought together.

    Arrivals are known to this precision. Ranks of one host share a clock and are not compared.
    """
    residual = run.matching.clock.residual_ns
    return (
        Unknown("all ranks share one clock, or nothing aligns them") if residual is None else residual / 1e6
    )


@run_fact("matched_collectives_frac", unit="fraction", needs=("collectives", "multi_rank"))
def matched_collectives_frac(run: RunView) -> Value:
    """Share of the collectives of all captured ranks that were matched with those of another rank."""
    if len(run.digests) < 2:
        return ONE_RANK
    total = sum(len(digest.collectives) for digest in run.digests)
    return run.matching.part_row.size / total if total else Unknown("no collective was captured")


def half_rate_bytes(run: RunView, digest: RankDigest) -> npt.NDArray[np.float64] | Unknown:
    """Return for each row of a rank's collectives the size that reaches half of the link's rate.

    From the matched operation's group where there is one, else from the table by the group's size.
    """
    table = digest.collectives
    by_kind = []
    for kind in table.kinds:
        ranks = kind.group_size or len(kind.group) or run.world_size or len(run.digests)
        curve = size_curve(digest.device, max(ranks, 2))
        if curve is None:
            return unlisted(digest.device)
        by_kind.append(curve.half_bytes)
    halves = np.array(by_kind or [0.0])[table.kind]
    operations = run.operations[digest.rank]
    matched = np.flatnonzero(operations != NO_OPERATION)
    known = np.array([np.nan if curve is None else curve.half_bytes for curve in run.curves] or [np.nan])
    found = known[run.matching.group[operations[matched]]]
    halves[matched] = np.where(np.isnan(found), halves[matched], found)
    return halves


def usual_call_ns(run: RunView, digest: RankDigest) -> npt.NDArray[np.float64]:
    """Return how long a call of each row's size takes on measured machines, NaN where that is not known.

    That is ``(size + half-rate size) / rate``: on NVLink and on PCIe some 60 us for a small message.
    """
    table, halves = digest.collectives, half_rate_bytes(run, digest)
    if isinstance(halves, Unknown):
        return np.full(len(table), np.nan)
    took = (table.nbytes + halves) / usual_rates(run, digest)
    usual: npt.NDArray[np.float64] = np.where(table.nbytes == NONE, np.nan, took)
    return usual


def usual_rates(run: RunView, digest: RankDigest) -> npt.NDArray[np.float64]:
    """Return the rate of the link in GB/s for each of a rank's collectives, NaN where it is not known."""
    table = digest.collectives
    by_kind = []
    for kind in table.kinds:
        ranks = kind.group_size or len(kind.group) or run.world_size or len(run.digests)
        curve = size_curve(digest.device, max(ranks, 2), 2 if ranks > REFERENCE_RANKS else 1)
        by_kind.append((curve and curve.peak_gbps) or np.nan)
    rates = np.array(by_kind or [np.nan])[table.kind]
    operations = run.operations[digest.rank]
    matched = np.flatnonzero(operations != NO_OPERATION)
    known = np.array([(curve and curve.peak_gbps) or np.nan for curve in run.curves] or [np.nan])
    rates[matched] = known[run.matching.group[operations[matched]]]
    return rates


class OperationClass(msgspec.Struct, frozen=True):
    """All matched operations of one kind in one group: medians, and how often each rank came last."""

    calls: int
    partial_calls: int
    transfer_ms: float
    spread_ms: float
    expected_gbps: float | None
    last_arrivals: dict[str, int]


def operation_class(run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp]) -> OperationClass | None:
    """Return the matched operations of the kind and group that some rows of a rank are of, in all steps."""
    matching = run.matching
    operations = run.operations[digest.rank][rows]
    operations = operations[operations != NO_OPERATION]
    if operations.size == 0:
        return None
    op, group = matching.op[operations[0]], int(matching.group[operations[0]])
    alike = np.flatnonzero((matching.op == op) & (matching.group == group))
    split = alike[matching.has_latest_start[alike]]
    last, counts = np.unique(matching.part_rank[matching.last_part[split]], return_counts=True)
    first = np.minimum.reduceat(matching.start_ns, matching.first[:-1])[alike]
    curve, sizes = run.curves[group], matching.nbytes[alike]
    sized = sizes[sizes != NONE]
    return OperationClass(
        calls=int(alike.size),
        partial_calls=int((~matching.complete[alike]).sum()),
        transfer_ms=float(np.median(matching.transfer_ns[alike])) / 1e6,
        spread_ms=float(np.median(matching.latest_start_ns[alike] - first)) / 1e6,
        expected_gbps=curve.expected_gbps(float(np.median(sized))) if curve and sized.size else None,
        last_arrivals={
            str(matching.ranks[rank]): count
            for rank, count in zip(last.tolist(), counts.tolist(), strict=True)
        },
    )


def _compared(run: RunView) -> Transfers | Unknown:
    """Return the known transfers: those with a known link, where there are any."""
    if len(run.digests) < 2:
        return ONE_RANK
    found = transfers(run.matching, run.curves)
    if found.operation.size == 0:
        return Unknown("no sized collective was matched over all of its ranks")
    known = ~np.isnan(found.expected_gbps)
    if not known.any():
        return found
    return Transfers(
        found.operation[known],
        found.nbytes[known],
        found.transfer_ns[known],
        found.gbps[known],
        found.expected_gbps[known],
    )


def _is_known(found: Transfers) -> bool:
    return not bool(np.isnan(found.expected_gbps).any())


def _no_link(run: RunView) -> Unknown:
    device = run.digests[0].device
    why = unlisted(device).reason if size_curve(device, 2) is None else "groups span hosts"
    return Unknown(f"what the link should give is not known: {why}")


def _weighted(found: Transfers, values: npt.NDArray[np.float64]) -> float:
    return float(np.average(values, weights=found.nbytes))
