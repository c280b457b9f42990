"""Facts of the run about links: reached against expected bandwidth, slow groups, clocks, and nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.bandwidth import FAST_GBPS, REFERENCE_RANKS, SizeCurve, Transfers, size_curve, transfers
from tracedoc.ranks.matching import NO_OPERATION, Matching
from tracedoc.ranks.run_view import RunView
from tracedoc.step.device import unlisted
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.collective_table import NONE, boundaries
from tracedoc.trace.devices import device_peak, spans_hosts
from tracedoc.trace.vocabulary import SYMMETRIC_OPS
from tracedoc.units import format_bytes, format_ms
from tracedoc.values import Unknown, Value, needed, once

MOST_EFFICIENT = 1.5
"""All-reduces that NVLink switches add up reach up to 1.4 times what rings do; more is no measurement."""

ONE_RANK = Unknown("the traces of one rank: when data begins to move is not known")


@run_fact(unit="gbps", needs=("collectives", "multi_rank"))
def transfer_gbps(run: RunView) -> Value:
    """Bus bandwidth that the run's all-reduces, reduce-scatters and all-gathers reach, weighted by bytes.

    As nccl-tests count it, over the time from the last rank's arrival to the end, never over kernel
    durations, which hold the waiting. Only operations whose ranks were all captured, and only those whose
    expected bandwidth is known (:func:`expected_transfer_gbps`) where there are such.
    """
    found = needed(_compared(run))
    return _weighted(found, found.gbps)


@run_fact(unit="gbps", needs=("gpu", "collectives", "multi_rank"))
def expected_transfer_gbps(run: RunView) -> Value:
    """Bus bandwidth that messages of these sizes should reach on this device's link, weighted by bytes.

    80 % of NVLink or PCIe (70 % of the links to the group's peers, where devices are wired pair by pair),
    times ``size / (size + half)``: small messages never reach the link's rate. The half-rate size is the
    larger of that of measured machines and that of this run, which is fitted where a group has three or
    more sizes. Not known between hosts: the trace does not name the network.
    """
    found = needed(_compared(run))
    return _weighted(found, found.expected_gbps) if _is_known(found) else _no_link(run)


@run_fact(unit="fraction", needs=("gpu", "collectives", "multi_rank"))
def link_efficiency_frac(run: RunView) -> Value:
    """Bandwidth that transfers reach as a share of what their size should on this link, weighted by bytes.

    Above 1 is possible: switches can reduce by themselves. Unknown above 1.5: the link, or the time when the
    last rank arrives, is then not what it seems. All-to-all is left out (its transfer is a lower
    bound), and so are operations of which a rank was not captured.
    """
    found = needed(_compared(run))
    if not _is_known(found):
        return _no_link(run)
    share = _weighted(found, found.gbps / found.expected_gbps)
    return share if share <= MOST_EFFICIENT else Unknown("transfers are faster than this link should allow")


@run_fact(unit="gbps", needs=("gpu", "collectives", "multi_rank"))
def transfer_between_hosts_gbps(run: RunView) -> Value:
    """Bandwidth that transfers of groups reach that span hosts, where none stays within one.

    The trace does not name the network, so that it is not known what it should give.
    """
    found = needed(_compared(run))
    device = run.digests[0].device
    if _is_known(found) or size_curve(device, 2) is None:
        return Unknown("groups stay within hosts, or the device is not known")
    return _weighted(found, found.gbps)


def half_rate_bytes(run: RunView, digest: RankDigest) -> npt.NDArray[np.float64] | Unknown:
    """The size that reaches half of the link's rate, for each of a rank's collectives."""
    halves = of_curves(run, digest, lambda curve: curve.half_bytes)
    return unlisted(digest.device) if np.isnan(halves).any() else halves


def usual_call_ns(run: RunView, digest: RankDigest) -> npt.NDArray[np.float64]:
    """The time, in ns, of a call of each row's size on measured machines, NaN where that is not known.

    That is ``(size + half-rate size) / rate``: on NVLink and on PCIe some 60 us for a small message.
    """
    table, halves = digest.collectives, of_curves(run, digest, lambda curve: curve.scaled_half_bytes)
    took = (table.nbytes + halves) / usual_rates(run, digest)
    usual: npt.NDArray[np.float64] = np.where(table.nbytes == NONE, np.nan, took)
    return usual


def usual_rates(run: RunView, digest: RankDigest) -> npt.NDArray[np.float64]:
    """The rate of the link in GB/s for each of a rank's collectives, NaN where it is not known."""
    return of_curves(run, digest, lambda curve: curve.peak_gbps)


def of_curves(
    run: RunView, digest: RankDigest, what: Callable[[SizeCurve], float | None]
) -> npt.NDArray[np.float64]:
    """What the size curve of each of a rank's collectives says, NaN where there is none or it does not know.

    The curve is that of the matched operation's group where there is one, else that of the table for the
    group's size.
    """

    def told(curve: SizeCurve | None) -> float:
        found = None if curve is None else what(curve)
        return np.nan if found is None else found

    table, by_kind = digest.collectives, []
    for kind in table.kinds:
        ranks = kind.group_size or len(kind.group) or run.world_size or len(run.digests)
        hosts = 2 if ranks > REFERENCE_RANKS else 1
        by_kind.append(told(size_curve(digest.device, max(ranks, 2), hosts)))
    found = np.array(by_kind or [np.nan])[table.kind]
    operations = run.operations[digest.rank]
    matched = np.flatnonzero(operations != NO_OPERATION)
    of_group = np.array([told(curve) for curve in run.curves] or [np.nan])
    found[matched] = of_group[run.matching.group[operations[matched]]]
    return found


def _compared(run: RunView) -> Transfers | Unknown:
    """The known transfers: those with a known link, where there are any."""
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


# -- transfers that are slower than their like


ENOUGH_ALIKE = 8
"""The median of fewer transfers of one kind says little about what is usual."""

OUTLIER_TIMES = 3.0
"""A transfer this many times as long as the median of its like is none of the usual spread."""

FEWEST_CALLS = 3
"""A group is compared with its sisters where it moved a size so often."""

NO_LIKE = Unknown("no three transfers of one kind and size were matched over all of their ranks")

NO_SISTERS = Unknown("no two groups of one size moved messages of one kind and size")


class _Outliers(msgspec.Struct, frozen=True):
    """Transfers far longer than their like: how many, what they cost a step, the longest in words."""

    calls: int
    ms_per_step: float
    worst: str


class _SlowGroup(msgspec.Struct, frozen=True):
    """The slowest group of a kind: over the median of its sisters, and what that costs a step."""

    ratio: float
    ms_per_step: float
    words: str


@run_fact(unit="count", needs=("collectives", "multi_rank"))
def outlier_transfers(run: RunView) -> Value:
    """Transfers that take three times as long as the median of their like, or longer, in all captured steps.

    Alike are all-reduces, reduce-scatters or all-gathers of one group and size. Of three to seven, one that
    takes three times as long as each of the others. Their time counts from the last rank's arrival, so
    waiting for a late rank makes no outlier.
    """
    return needed(_outliers(run)).calls


@run_fact(unit="ms", needs=("collectives", "multi_rank"))
def outlier_transfers_ms(run: RunView) -> Value:
    """By how much ``outlier_transfers`` are longer than the median of their like, a step on average.

    Groups run beside each other: of each step the one counts whose transfers are longer by most.
    """
    return needed(_outliers(run)).ms_per_step


@run_fact(unit="text", needs=("collectives", "multi_rank"))
def worst_outlier_transfer(run: RunView) -> Value:
    """The longest of ``outlier_transfers``: its kind, size, ranks, step and time; "none" without any."""
    return needed(_outliers(run)).worst


@run_fact(unit="ratio", needs=("collectives", "multi_rank"))
def slow_group_ratio(run: RunView) -> Value:
    """How many times as long transfers take in the slowest group as in its sister groups.

    Sisters have as many ranks and run all-reduces, reduce-scatters or all-gathers of one size, three times
    each at least. Compared are the medians of their transfers, from the last rank's arrival on.
    """
    return needed(_slow_group(run)).ratio


@run_fact(unit="ms", needs=("collectives", "multi_rank"))
def slow_group_ms(run: RunView) -> Value:
    """By how much the transfers of that group are longer than those of its sisters, a step on average."""
    return needed(_slow_group(run)).ms_per_step


@run_fact(unit="text", needs=("collectives", "multi_rank"))
def slow_group(run: RunView) -> Value:
    """The ranks of that group, and what their transfers take beside those of the sisters."""
    return needed(_slow_group(run)).words


def _steps(run: RunView) -> int:
    return max((len(digest.complete_steps) for digest in run.digests), default=0)


def is_symmetric(matching: Matching) -> npt.NDArray[np.bool_]:
    """A mask of the operations that are all-reduces, reduce-scatters or all-gathers.

    Sends and receives may share one kernel, which then waits for both; what an all-to-all moves differs.
    """
    known = np.array([op in SYMMETRIC_OPS for op in matching.ops] or [False], dtype=bool)
    return np.asarray(known[matching.op] if len(matching) else np.zeros(0, dtype=bool))


def _alike(run: RunView) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The split operations, ordered by kind, size and group, and where runs of equal ones begin."""
    matching = run.matching
    rows = np.flatnonzero(
        is_symmetric(matching) & matching.complete & (matching.nbytes != NONE) & (matching.step != NONE)
    )
    order = np.lexsort((matching.group[rows], matching.nbytes[rows], matching.op[rows]))
    rows = rows[order]
    return rows, boundaries(matching.op[rows], matching.nbytes[rows], matching.group[rows])


@once
def _outliers(run: RunView) -> _Outliers | Unknown:
    matching, transfer = run.matching, run.matching.transfer_ns
    rows, edges = _alike(run)
    steps, compared = _steps(run), False
    calls, worst, worst_ns = 0, "none", 0
    longer: dict[int, Counter[int]] = defaultdict(Counter)
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        mine = rows[begin:end]
        if mine.size < FEWEST_CALLS:
            continue
        compared = True
        took = np.sort(transfer[mine])
        usual = int(took[(mine.size - 1) // 2])
        # Of a few, one is far off only where it is so from each of the others.
        least = int(took[-2]) if mine.size < ENOUGH_ALIKE else usual
        odd = mine[transfer[mine] > OUTLIER_TIMES * max(least, 1)]
        if odd.size == 0:
            continue
        calls += int(odd.size)
        for step, more in zip(matching.step[odd].tolist(), (transfer[odd] - usual).tolist(), strict=True):
            longer[step][int(matching.group[odd[0]])] += more
        largest = int(odd[np.argmax(transfer[odd])])
        if int(transfer[largest]) - usual > worst_ns:
            worst_ns = int(transfer[largest]) - usual
            op, nbytes = matching.ops[int(matching.op[largest])], int(matching.nbytes[largest])
            times = f"{format_ms(int(transfer[largest]) / 1e6)}, usually {format_ms(usual / 1e6)}"
            what = f"{op.replace('_', '-')} of {format_bytes(nbytes)}"
            worst = (
                f"{what} among {_ranks(matching.ranks_of(largest))} in step {matching.step[largest]}: {times}"
            )
    if not compared or steps == 0:
        return NO_LIKE
    total_ns = sum(max(by_group.values()) for by_group in longer.values())
    return _Outliers(calls, total_ns / steps / 1e6, worst)


@once
def _slow_group(run: RunView) -> _SlowGroup | Unknown:
    matching, transfer = run.matching, run.matching.transfer_ns
    rows, edges = _alike(run)
    classes: dict[tuple[int, int, int], list[tuple[int, float, int]]] = {}
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        mine = rows[begin:end]
        if mine.size < FEWEST_CALLS:
            continue
        group = int(matching.group[mine[0]])
        size = len(matching.groups[group].ranks)
        key = (int(matching.op[mine[0]]), int(matching.nbytes[mine[0]]), size)
        usual = float(np.sort(transfer[mine])[(mine.size - 1) // 2])
        classes.setdefault(key, []).append((group, usual, int(mine.size)))
    worst: _SlowGroup | None = None
    for (op, nbytes, _), found in classes.items():
        if len(found) < 2:
            continue
        found.sort(key=lambda one: one[1])
        group, slowest, calls = found[-1]
        usual = found[:-1][(len(found) - 2) // 2][1]
        cost = max(slowest - usual, 0.0) * calls / max(_steps(run), 1) / 1e6
        if worst is None or cost > worst.ms_per_step:
            words = (
                f"{_ranks(matching.groups[group].ranks)}: {matching.ops[op].replace('_', '-')} of "
                f"{format_bytes(nbytes)} takes {format_ms(slowest / 1e6)}, in the other groups "
                f"{format_ms(usual / 1e6)}"
            )
            worst = _SlowGroup(slowest / max(usual, 1.0), cost, words)
    return NO_SISTERS if worst is None else worst


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")


# -- nodes


@run_fact(unit="count")
def ranks_per_host(run: RunView) -> Value:
    """Most captured ranks of the job on one host; unknown where a trace does not name its host."""
    hosts = [digest.host for digest in run.digests]
    if not hosts or "" in hosts:
        return Unknown("the traces do not name their hosts")
    return max(hosts.count(host) for host in set(hosts))


def leaves_node(
    run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp] | npt.NDArray[np.int32]
) -> Value:
    """Whether the group that moves most bytes in these rows leaves the fast links inside a node."""
    members = _main_group(run, digest, rows)
    hosts = {one.rank: one.host for one in run.digests}
    if not members or any(not hosts.get(rank) for rank in members):
        return Unknown("the hosts of some ranks of the group are not known")
    named = [hosts[rank] for rank in members]
    if len(set(named)) == 1 or len(set(named)) == len(named):
        return False
    if spans_hosts(digest.device):
        return Unknown(f"NVLink of {digest.device} may join several hosts; the capture does not say which")
    peak = device_peak(digest.device)
    if peak is None or peak.link_gbps is None:
        return Unknown(f"how GPUs of the kind {digest.device!r} are joined is not known")
    return peak.link_gbps >= FAST_GBPS


def _main_group(
    run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp] | npt.NDArray[np.int32]
) -> tuple[int, ...]:
    """The ranks of the group that moves most bytes in some of a rank's collectives."""
    table = digest.collectives
    sizes = np.bincount(table.kind[rows], weights=np.maximum(table.nbytes[rows], 1), minlength=1)
    by_group: dict[tuple[int, ...], float] = {}
    for kind, size in enumerate(sizes.tolist()):
        if size and kind < len(table.kinds):
            group = table.kinds[kind].group
            by_group[group] = by_group.get(group, 0.0) + size
    return max(by_group, key=lambda group: by_group[group], default=())
