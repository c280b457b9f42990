"""Facts about stragglers: who comes late, what that costs the others, and what it did meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_run.settings import core_wait_ms
from tracedoc.ranks.arrival_replay import StartPolicy, arrival_replay, gains_together
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.stragglers import (
    CAUSE_SHARE,
    CAUSES,
    KERNEL_CAUSES,
    MORE_KERNELS,
    NOTICED,
    Straggler,
    kernel_cause,
    stragglers,
)
from tracedoc.timeline.host import PHASES
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value

SHARED_GPU = "shared GPU"
"""What makes a rank late on whose GPU another process has its turns."""

ENOUGH_TURNS = 4
AS_LONG = 0.9
"""Work that ranks do in turn takes about as long in so many steps or more: this share of the median."""

MAINLY = 0.9
"""A rank that causes this share of all waiting for late ranks is the late one."""


@run_fact("straggler_cost_ms", unit="ms", scope="rank", needs=("collectives", "multi_rank"))
def straggler_cost_ms(run: RunView) -> dict[str, Value]:
    """How much shorter a step would be if nobody ever waited for this rank.

    All ranks are replayed from one meeting to the next, without this one's arrivals: the others' own work
    and the pace of their hosts stay, and where they are as slow as this rank nothing is gained. Of ranks
    that come last from work of their own, not from waiting for somebody else. The median over the steps
    that all ranks captured whole (or the mean, where that is more); 0 for a rank that nobody waits for. In
    a CPU trace it is what the median other rank waits for it, with no compute beside it.
    """

    return _of_late(run, lambda late: _cost_ms(run, late), 0.0)


@run_fact("straggler_least_ms", unit="ms", scope="rank", needs=("collectives", "multi_rank"))
def straggler_least_ms(run: RunView) -> dict[str, Value]:
    """What every other rank waits for this rank in at least three quarters of the steps.

    That is how late it is after the second-latest. Where a cause is named (:func:`straggler_cause`), at
    most as long as it is at that in as many steps: the rest may be chance, as where processes share cores.
    """

    def least(late: Straggler) -> Value:
        surely = np.minimum(late.low_ns, late.cause_ns) if late.cause else late.low_ns
        return _habitual(surely) / 1e6

    return _of_late(run, least, 0.0)


@run_fact("straggler_steps_frac", unit="fraction", scope="rank", needs=("collectives", "multi_rank"))
def straggler_steps_frac(run: RunView) -> dict[str, Value]:
    """Share of the steps in which this rank costs the others most, and 2 % of the step or more."""
    worst = _worst_by_step(run)
    return _of_late(run, lambda late: worst.count(late.rank) / max(len(worst), 1), 0.0)


@run_fact("straggler_share_frac", unit="fraction", scope="rank", needs=("collectives", "multi_rank"))
def straggler_share_frac(run: RunView) -> dict[str, Value]:
    """This rank's share of all waiting for late ranks, over all steps."""
    total = sum(int(late.gain_ns.sum()) for late in stragglers(run))
    return _of_late(run, lambda late: int(late.gain_ns.sum()) / total if total else 0.0, 0.0)


@run_fact("straggler_turns_frac", unit="fraction", scope="rank", needs=("collectives", "multi_rank"))
def straggler_turns_frac(run: RunView) -> dict[str, Value]:
    """How much of the waiting for the latest rank of each step is for this one.

    Of each step counts the rank that costs the others most, by what it costs. 1 for a rank that is the
    latest whenever one is late, in whichever steps that is; where two take turns it is about a half.
    """
    late = stragglers(run)
    costs = np.stack([one.gain_ns for one in late]) if late else np.zeros((1, 1))
    worst, largest = costs.argmax(axis=0), costs.max(axis=0)
    total = int(largest.sum())
    return _of_late(
        run, lambda one: int(largest[worst == late.index(one)].sum()) / total if total else 0.0, 0.0
    )


@run_fact("straggler_collectives_per_step", unit="count", scope="rank", needs=("collectives", "multi_rank"))
def straggler_collectives_per_step(run: RunView) -> dict[str, Value]:
    """Collectives of a step to which this rank comes last from work of its own, on average."""
    return _of_late(run, lambda late: len(late.operations) / max(len(late.steps), 1), 0.0)


@run_fact(
    "straggler_cause",
    unit="text",
    scope="rank",
    needs=("collectives", "multi_rank"),
    values=("none", *KERNEL_CAUSES, *CAUSES[1:], SHARED_GPU),
)
def straggler_cause(run: RunView) -> dict[str, Value]:
    """What this rank did longer than its peers before the collectives to which it came last.

    Each of its nanoseconds between two collectives has one cause; the one that explains half of the
    difference or more is named, "none" where there is none.

    Of kernels, or in a CPU trace operators: "more kernels"; "larger kernels", as many on more data;
    "slow GPU", matrix products of the same shapes take longer; else "longer kernels". Other exposed work:
    "communication", "copy". Idle time (:mod:`tracedoc.idle_causes`): "input", "allocator", "sync", "compile",
    "gc", "profiler", "dependency", "unknown", and late launches: "optimizer", "dispatch", "python".
    Instead of "dependency" it is "shared GPU" where half of that is turns of another process
    (:func:`foreign_turns_ms`).
    """

    def word(late: Straggler) -> Value:
        if late.cause == "kernels":
            return kernel_cause(late, run)
        turns = run.digest(late.rank).facts.get("foreign_turns_ms")
        excess = float(np.median(late.cause_ns)) / 1e6
        if late.cause == "dependency" and isinstance(turns, float) and turns >= CAUSE_SHARE * excess:
            return SHARED_GPU
        return late.cause or "none"

    return _of_late(run, word, "none")


@run_fact("straggler_excess_ms", unit="ms", scope="rank", needs=("collectives", "multi_rank"))
def straggler_excess_ms(run: RunView) -> dict[str, Value]:
    """How much longer than its peers this rank is at its cause; 0 without one.

    The median over the steps in which others wait for it. The first captured one counts only where the cause
    shows in it: what came before its first collective may not be captured.
    """

    def excess(late: Straggler) -> Value:
        seen = late.gain_ns > 0
        seen[0] &= bool(late.cause_ns[0] > 0)
        return float(np.median(late.cause_ns[seen])) / 1e6 if seen.any() else 0.0

    return _of_late(run, excess, 0.0)


@run_fact("straggler_phase", unit="text", scope="rank", needs=("collectives", "multi_rank"), values=PHASES)
def straggler_phase(run: RunView) -> dict[str, Value]:
    """Where in the step this rank's host was longest away before a collective to which it came last.

    "the forward pass", "between forward and backward", "the backward pass", "between backward and optimizer",
    "the optimizer", "between two steps"; else "an unknown phase".
    """
    return _of_late(run, lambda late: PHASES[late.away_phase], PHASES[0])


@run_fact("straggler_explained_frac", unit="fraction", scope="rank", needs=("collectives", "multi_rank"))
def straggler_explained_frac(run: RunView) -> dict[str, Value]:
    """How much of the waiting the cause explains in at least three quarters of the steps.

    A cause that is there in every step explains it; where processes share cores, a rank can come last
    several times by chance, and then it did nothing else than its peers. Each step's cause is compared with
    the waiting of that step. Only for longer kernels it is compared with that of the median step: sharing
    a core makes them longer as well, by a different length in each step.
    """

    def explained(late: Straggler) -> Value:
        waited = late.gain_ns.astype(np.float64)
        if late.cause == "kernels" and late.more_kernels < MORE_KERNELS:
            waited = np.full(waited.size, np.median(waited))
        shares = np.minimum(late.cause_ns / np.maximum(waited, 1.0), 1.0)[waited > 0]
        return _habitual(shares) if shares.size else 0.0

    return _of_late(run, explained, 0.0)


@run_fact("straggler_habit_ms", unit="ms", scope="rank", needs=("collectives", "multi_rank"))
def straggler_habit_ms(run: RunView) -> dict[str, Value]:
    """How much longer than its peers this rank is at its cause in at least three quarters of the steps."""
    return _of_late(run, lambda late: _habitual(late.cause_ns) / 1e6, 0.0)


@run_fact("straggler_recurring_ms", unit="ms", scope="rank", needs=("collectives", "multi_rank"))
def straggler_recurring_ms(run: RunView) -> dict[str, Value]:
    """How much longer than its peers this rank is in at least three quarters of the steps, at all causes.

    Of each cause what recurs, added up. What it is longer at in a few steps only is not in it.
    """

    def recurring(late: Straggler) -> Value:
        excess_us = np.maximum(late.excess_us, 0)
        return sum(_habitual(excess_us[:, cause]) for cause in range(excess_us.shape[1])) / 1e3

    return _of_late(run, recurring, 0.0)


@run_fact("straggler_core_wait_frac", unit="fraction", scope="rank", needs=("collectives", "multi_rank"))
def straggler_core_wait_frac(run: RunView) -> dict[str, Value]:
    """Share of :func:`straggler_cost_ms` for which this rank had no free core (:func:`core_wait_ms`).

    All of it where "longer kernels" is the cause, which nothing else shows. Of other causes, which are seen
    on their own, only what it waited longer than the median of the other ranks; 0 where that is not known,
    and where nobody waits.
    """
    waits = core_wait_ms(run)

    def share(late: Straggler) -> Value:
        wait, cost = waits[str(late.rank)], _cost_ms(run, late)
        if late.cause != "kernels" or kernel_cause(late, run) != "longer kernels":
            others = [value for rank, value in waits.items() if rank != str(late.rank)]
            known = [float(value) for value in (wait, *others) if not isinstance(value, (Unknown, str))]
            if len(known) <= len(others):
                return 0.0
            wait = max(known[0] - float(np.median(known[1:])), 0.0)
        if isinstance(wait, Unknown):
            return wait
        return float(wait) / cost if cost else 0.0

    return _of_late(run, share, 0.0)


@run_fact("straggler_beyond_cores_ms", unit="ms", scope="rank", needs=("collectives", "multi_rank"))
def straggler_beyond_cores_ms(run: RunView) -> dict[str, Value]:
    """What is left of :func:`straggler_cost_ms` without :func:`straggler_core_wait_frac` of it."""
    fractions = straggler_core_wait_frac(run)

    def beyond(late: Straggler) -> Value:
        waited = fractions[str(late.rank)]
        if isinstance(waited, Unknown):
            return waited
        return _cost_ms(run, late) * max(1.0 - float(waited), 0.0)

    return _of_late(run, beyond, 0.0)


@run_fact("straggler_steady_frac", unit="fraction", needs=("collectives", "multi_rank"))
def straggler_steady_frac(run: RunView) -> Value:
    """Share of the steps in which the rank that is most often the late one is it.

    A rank is late in a step in which it costs the others most, and 2 % of the step or more. Little means that
    the late rank changes, or that there is one in some steps only.
    """
    worst = _worst_by_step(run)
    late = [rank for rank in worst if rank is not None]
    if not late:
        return Unknown("no rank is late") if _matched(run) else _NOT_MATCHED
    return max(map(late.count, late)) / len(worst)


@run_fact("straggler_main_share_frac", unit="fraction", needs=("collectives", "multi_rank"))
def straggler_main_share_frac(run: RunView) -> Value:
    """The share of all waiting for late ranks that the rank causes for which the others wait longest.

    Over all steps; near 1 one rank is the late one, if not in every step.
    """
    gains = [int(one.gain_ns.sum()) for one in stragglers(run)]
    if not sum(gains):
        return Unknown("no rank is late") if _matched(run) else _NOT_MATCHED
    return max(gains) / sum(gains)


@run_fact(
    "straggler_pattern",
    unit="text",
    needs=("collectives", "multi_rank"),
    values=("several ranks", "one rank"),
)
def straggler_pattern(run: RunView) -> Value:
    """Whether "one rank" causes nearly all waiting for late ranks (nine tenths), or "several ranks"."""
    share = straggler_main_share_frac(run)
    if isinstance(share, Unknown):
        return share
    return "one rank" if isinstance(share, float) and share >= MAINLY else "several ranks"


@run_fact("straggler_frequent_rank", unit="text", needs=("collectives", "multi_rank"))
def straggler_frequent_rank(run: RunView) -> Value:
    """The rank that is late in most steps, of several such the lowest."""
    turns = _turns(run)
    return turns if isinstance(turns, Unknown) else str(turns[0][0])


@run_fact("straggler_frequent_steps", unit="count", needs=("collectives", "multi_rank"))
def straggler_frequent_steps(run: RunView) -> Value:
    """In how many steps :func:`straggler_frequent_rank` is the late one."""
    turns = _turns(run)
    return turns if isinstance(turns, Unknown) else turns[0][1]


@run_fact("straggler_other_ranks", unit="text", needs=("collectives", "multi_rank"))
def straggler_other_ranks(run: RunView) -> Value:
    """The ranks that are late in other steps than that of :func:`straggler_frequent_rank`: ``0, 4-7``."""
    turns = _turns(run)
    return turns if isinstance(turns, Unknown) else format_ranges(rank for rank, _ in turns[1:]) or "none"


def _turns(run: RunView) -> list[tuple[int, int]] | Unknown:
    """Return the late ranks with the number of steps in which each is it, the most frequent first."""
    late = [rank for rank in _worst_by_step(run) if rank is not None]
    if not late:
        return Unknown("no rank is late") if _matched(run) else _NOT_MATCHED
    return sorted(Counter(late).items(), key=lambda one: (-one[1], one[0]))


@run_fact("straggler_any_cost_ms", unit="ms", needs=("collectives", "multi_rank"))
def straggler_any_cost_ms(run: RunView) -> Value:
    """How much shorter a step would be if every rank came to every collective as early as the median rank.

    By the replay of :func:`straggler_cost_ms`; the mean over the steps. In a CPU trace, what the median rank
    waits for whichever rank costs most: the median share of a step, of the analysed one.
    """
    late = stragglers(run)
    if not late:
        return 0.0 if _matched(run) else _NOT_MATCHED
    if arrival_replay(run) is None:
        return _of_analysed_step(run, late[0].steps, np.max([one.gain_ns for one in late], axis=0)) / 1e6
    return max(float(np.mean(gains_together(run, StartPolicy.MEDIAN, late[0].steps))) / 1e6, 0.0)


@run_fact("straggler_turn_ms", unit="ms", needs=("collectives", "multi_rank"))
def straggler_turn_ms(run: RunView) -> Value:
    """How much longer than the others the latest rank of each step, whichever it is, is at work of its own.

    Of its causes (:func:`straggler_cause`) the largest that is no operators, communication or copies: that is
    sleep, I/O, loading, Python. What it is in at least three quarters of the steps. 0 where that is less
    than nine tenths of the median: what comes by chance is of any length. Unknown with fewer than four steps.
    """
    late = stragglers(run)
    if not late:
        return 0.0 if _matched(run) else _NOT_MATCHED
    if len(late[0].steps) < ENOUGH_TURNS:
        return Unknown(f"fewer than {ENOUGH_TURNS} steps can be compared")
    worst = np.argmax([one.gain_ns for one in late], axis=0)
    own = [CAUSES.index(cause) for cause in CAUSES if cause not in ("kernels", "communication", "copy")]
    longest = np.array([late[place].excess_us[step, own].max() for step, place in enumerate(worst.tolist())])
    usual, least = float(np.median(longest)), _habitual(longest)
    return max(least, 0.0) / 1e3 if least >= AS_LONG * usual else 0.0


@run_fact("straggler_steps_compared", unit="count", needs=("collectives", "multi_rank"))
def straggler_steps_compared(run: RunView) -> Value:
    """Steps over which late ranks are compared: those that all ranks captured whole."""
    late = stragglers(run)
    if late:
        return len(late[0].steps)
    return 0 if _matched(run) else _NOT_MATCHED


def _cost_ms(run: RunView, late: Straggler) -> float:
    usual = float(np.median(late.gain_ns)) / 1e6
    return usual if arrival_replay(run) is None else max(usual, float(late.gain_ns.mean()) / 1e6)


def _of_analysed_step(run: RunView, steps: Sequence[int], waited_ns: np.ndarray) -> float:
    """Return the median share of the steps that is waited, of the analysed step, in ns.

    Of a step whose length no rank knows the waiting itself counts.
    """
    representative = run.representative_digest
    analysed = representative.judged_step if representative is not None else None
    lengths: dict[int, int] = {}
    for digest in run.digests:
        for step in digest.complete_steps:
            lengths[step.index] = max(lengths.get(step.index, 0), step.budget.window_ns)
    if analysed is None or any(not lengths.get(step) for step in steps):
        return float(np.median(waited_ns))
    shares = waited_ns / np.array([lengths[step] for step in steps])
    return float(np.median(shares)) * analysed.budget.window_ns


def _habitual(values: np.ndarray) -> float:
    """Return what holds in at least three quarters of the steps: the lower quartile of a value per step."""
    return float(np.sort(values)[(values.size - 1) // 4])


_NOT_MATCHED = Unknown("no collective could be matched over the ranks")


def _matched(run: RunView) -> bool:
    return bool(run.matching.has_latest_start.any())


def _of_late(run: RunView, measure: Callable[[Straggler], Value], otherwise: Value) -> dict[str, Value]:
    if not _matched(run):
        return {str(digest.rank): _NOT_MATCHED for digest in run.digests}
    late = {one.rank: one for one in stragglers(run)}
    return {
        str(digest.rank): measure(late[digest.rank]) if digest.rank in late else otherwise
        for digest in run.digests
    }


def _worst_by_step(run: RunView) -> list[int | None]:
    """Return for each step the rank that costs the others most, ``None`` where nobody is late."""
    late = stragglers(run)
    if not late:
        return []
    representative = run.representative_digest
    step = representative.judged_step if representative is not None else None
    least = NOTICED * step.budget.window_ns if step is not None else 0.0
    costs = np.stack([one.gain_ns for one in late])
    worst = costs.argmax(axis=0)
    return [
        late[place].rank if costs[place, column] >= max(least, 1.0) else None
        for column, place in enumerate(worst.tolist())
    ]
