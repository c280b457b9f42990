"""Facts about transfers that are slower than their like: single ones, those of one group, and uneven ones."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact, total_ms
from tracedoc.facts.per_run.purposes import all_to_all_exposed_ms
from tracedoc.ranks.matching import Matching
from tracedoc.ranks.run_view import RunView, once
from tracedoc.timeline.collective_table import NONE, boundaries
from tracedoc.trace.vocabulary import SYMMETRIC_OPS
from tracedoc.units import format_bytes, format_ms
from tracedoc.values import Unknown, Value

ENOUGH_ALIKE = 8
"""The median of fewer transfers of one kind says little about what is usual."""

OUTLIER_TIMES = 3.0
"""A transfer this many times as long as the median of its like is none of the usual spread."""

FEWEST_CALLS = 3
"""A group is compared with its sisters where it moved a size so often."""

NO_LIKE = Unknown("no eight transfers of one kind and size were matched over all of their ranks")
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


@run_fact("outlier_transfers", unit="count", needs=("collectives", "multi_rank"))
def outlier_transfers(run: RunView) -> Value:
    """Transfers that take three times as long as the median of their like, or longer, in all captured steps.

    Alike are all-reduces, reduce-scatters or all-gathers of one group and size, eight of them at least. Their
    time counts from the last rank's arrival, so waiting for a late rank makes no outlier.
    """
    found = _outliers(run)
    return found if isinstance(found, Unknown) else found.calls


@run_fact("outlier_transfers_ms", unit="ms", needs=("collectives", "multi_rank"))
def outlier_transfers_ms(run: RunView) -> Value:
    """By how much ``outlier_transfers`` are longer than the median of their like, a step on average."""
    found = _outliers(run)
    return found if isinstance(found, Unknown) else found.ms_per_step


@run_fact("worst_outlier_transfer", unit="text", needs=("collectives", "multi_rank"))
def worst_outlier_transfer(run: RunView) -> Value:
    """The longest of ``outlier_transfers``: its kind, size, ranks, step and time; "none" without any."""
    found = _outliers(run)
    return found if isinstance(found, Unknown) else found.worst


@run_fact("slow_group_ratio", unit="ratio", needs=("collectives", "multi_rank"))
def slow_group_ratio(run: RunView) -> Value:
    """How many times as long transfers take in the slowest group as in its sister groups.

    Sisters have as many ranks and run all-reduces, reduce-scatters or all-gathers of one size, three times
    each at least. Compared are the medians of their transfers, from the last rank's arrival on.
    """
    found = _slow_group(run)
    return found if isinstance(found, Unknown) else found.ratio


@run_fact("slow_group_ms", unit="ms", needs=("collectives", "multi_rank"))
def slow_group_ms(run: RunView) -> Value:
    """By how much the transfers of that group are longer than those of its sisters, a step on average."""
    found = _slow_group(run)
    return found if isinstance(found, Unknown) else found.ms_per_step


@run_fact("slow_group", unit="text", needs=("collectives", "multi_rank"))
def slow_group(run: RunView) -> Value:
    """The ranks of that group, and what their transfers take beside those of the sisters."""
    found = _slow_group(run)
    return found if isinstance(found, Unknown) else found.words


@run_fact("all_to_all_imbalance_ratio", unit="ratio", needs=("collectives", "multi_rank"))
def all_to_all_imbalance_ratio(run: RunView) -> Value:
    """Bytes of the rank with most of them over the mean of all ranks, in the run's all-to-alls.

    Weighted by bytes; 1 where all ranks move as much. Of operations whose ranks were all captured and all
    say their size.
    """
    return _imbalance(run)


@run_fact("all_to_all_imbalance_ms", unit="ms", scope="rank", needs=("collectives", "multi_rank"))
def all_to_all_imbalance_ms(run: RunView) -> dict[str, Value]:
    """What even splits would save of ``all_to_all_exposed_ms``: 1 - mean / most bytes of it."""
    ratio = _imbalance(run)
    exposed = all_to_all_exposed_totals(run)
    if isinstance(ratio, Unknown):
        return dict.fromkeys(exposed, ratio)
    return {
        rank: ms if isinstance(ms, Unknown) else float(ms) * (1.0 - 1.0 / ratio)
        for rank, ms in exposed.items()
    }


def all_to_all_exposed_totals(run: RunView) -> dict[str, Value]:
    """Return ``all_to_all_exposed_ms`` of each rank."""
    return run.by_rank(lambda digest, step: total_ms(all_to_all_exposed_ms(run, digest, step)))


def _steps(run: RunView) -> int:
    return max((len(digest.complete_steps) for digest in run.digests), default=0)


def is_symmetric(matching: Matching) -> npt.NDArray[np.bool_]:
    """Return which operations are all-reduces, reduce-scatters or all-gathers.

    Sends and receives may share one kernel, which then waits for both; what an all-to-all moves differs.
    """
    known = np.array([op in SYMMETRIC_OPS for op in matching.ops] or [False], dtype=bool)
    return np.asarray(known[matching.op] if len(matching) else np.zeros(0, dtype=bool))


def _alike(run: RunView) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the split operations, ordered by kind, size and group, and where runs of equal ones begin."""
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
    calls, longer, worst, worst_ns = 0, 0, "none", 0
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        mine = rows[begin:end]
        if mine.size < ENOUGH_ALIKE:
            continue
        compared = True
        usual = int(np.sort(transfer[mine])[(mine.size - 1) // 2])
        odd = mine[transfer[mine] > OUTLIER_TIMES * max(usual, 1)]
        if odd.size == 0:
            continue
        calls += int(odd.size)
        longer += int((transfer[odd] - usual).sum())
        largest = int(odd[np.argmax(transfer[odd])])
        if int(transfer[largest]) - usual > worst_ns:
            worst_ns = int(transfer[largest]) - usual
            took = f"{format_ms(int(transfer[largest]) / 1e6)}, usually {format_ms(usual / 1e6)}"
            op, nbytes = matching.ops[int(matching.op[largest])], int(matching.nbytes[largest])
            what = f"{op.replace('_', '-')} of {format_bytes(nbytes)}"
            worst = (
                f"{what} among {_ranks(matching.ranks_of(largest))} in step {matching.step[largest]}: {took}"
            )
    if not compared or steps == 0:
        return NO_LIKE
    return _Outliers(calls, longer / steps / 1e6, worst)


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


@once
def _imbalance(run: RunView) -> float | Unknown:
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


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
