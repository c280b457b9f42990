"""What captured steps show beside the analysed one: steps far longer, and ranks that are late in some."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.arrival_replay import StartPolicy, arrival_replay, gains_together
from tracedoc.ranks.run_view import RunView, habitual
from tracedoc.topics.host.run import core_wait_ms
from tracedoc.topics.straggler.late_ranks import stragglers

Floats = npt.NDArray[np.float64]

ALIKE_STEPS = 0.02
"""Steps that differ by no more than this share are alike: all of them are like the analysed one."""

LONGER, LONGER_OF_TWO = 0.10, 0.5
LONGER_SPREADS = 5.0
"""A step is far longer if it is by this share of the usual one, and by so many times what others differ; of
two steps, which do not show how much they differ, by the second share."""

KIND_OF = {"kernels": "ranks.compute", "input": "ranks.input"}
"""The cause of the ledger for what makes a rank late; all else is its host."""


STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Quantiles of Student's distribution, from one degree of freedom on: in 95 % of cases the mean of a long run
is at most so many standard errors above that of the captured steps."""


class StepsApart(msgspec.Struct, frozen=True):
    """The mean captured step, and what it holds beyond the replayed one, in ms.

    ``slow_ms`` is what steps that are far longer cost a step. ``late_ms`` is how much more late ranks cost
    the mean step than the replayed one (negative where it is less), ``late`` the share of each cause of the
    ledger in it, and which ranks these are.
    """

    step_ms: float
    steps: tuple[int, ...]
    slow_ms: float = 0.0
    slow_place: str = ""
    late_ms: float = 0.0
    late: dict[str, tuple[float, tuple[int, ...]]] = msgspec.field(default_factory=dict)


def late_over_steps(run: RunView, cause: str) -> tuple[int, ...]:
    """The ranks that a cause makes late, by what each costs all steps: those that cost half of the worst."""
    costs = {
        late.rank: float(np.maximum(late.gain_ns, 0).mean())
        for late in stragglers(run)
        if KIND_OF.get(late.cause, "ranks.host") == cause
    }
    worst = max(costs.values(), default=0.0)
    return tuple(sorted(rank for rank, ns in costs.items() if ns >= worst / 2 > 0))


def recurring_ms(run: RunView) -> tuple[float, float]:
    """What late ranks do longer than their peers in nearly every step, in ms: surely, and likely.

    Not sure is what they waited for a core. Both are 0 where none is late.
    """
    recurs = sum(float(habitual(np.maximum(one.excess_us, 0)).sum()) / 1e3 for one in stragglers(run))
    waits = core_wait_ms.by_rank(run)
    waited = sum(float(ms) for one in stragglers(run) if isinstance(ms := waits[str(one.rank)], float))
    return max(recurs - waited, 0.0), recurs


def steps_apart(run: RunView, replayed: int, replayed_ms: float, late_ms: float) -> StepsApart | None:
    """Compare all complete steps that every rank has with the replayed one; ``None`` without such steps.

    The replay takes ``replayed_ms``, of which ``late_ms`` are for late ranks.
    """
    lengths = _lengths_ms(run)
    if replayed not in lengths:
        return None
    steps = tuple(sorted(lengths))
    length = np.array([lengths[step] for step in steps])
    mean = float(length.mean())
    apart = mean - replayed_ms
    if abs(apart) <= ALIKE_STEPS * mean:
        return StepsApart(mean, steps)
    late = _late_ms(run, steps)
    more = float(late.mean()) - late_ms if late.any() else 0.0
    more = min(max(more, min(apart, 0.0)), max(apart, 0.0))
    usual = float(np.sort(length)[(length.size - 1) // 2])
    excess = length - usual - np.maximum(late - np.median(late), 0.0)
    spreads = np.sort(np.abs(length - usual))
    spread = float(spreads[(length.size - 1) // 2])
    far = excess > max((LONGER_OF_TWO if len(steps) == 2 else LONGER) * usual, LONGER_SPREADS * spread)
    slow = min(float(np.where(far, excess, 0.0).mean()), max(apart - more, 0.0))
    place = f"step {steps[int(np.argmax(excess))]}" if slow > 0 else ""
    return StepsApart(mean, steps, slow, place, more, _by_cause(run) if more > 0 else {})


def late_error_ms(run: RunView) -> float:
    """How far the cost of late ranks of a job may lie from that of the captured steps, in ms.

    Each operation to which a late rank came last is as uncertain as the clocks; and few steps leave open what
    the mean of many is. These have little to do with each other, so that they add up as squares.
    """
    late = stragglers(run)
    if not late:
        return 0.0
    operations = np.array([operation for one in late for operation in one.operations], dtype=np.intp)
    uncertain_ms = run.matching.uncertainty_ns[operations] / 1e6
    clocks = float((uncertain_ms**2).sum()) / max(len(late[0].steps), 1)
    costs = _late_ms(run, late[0].steps)
    if costs.size < 2:
        return float(clocks**0.5)
    sure = STUDENT[min(costs.size - 2, len(STUDENT) - 1)]
    return float(np.sqrt(clocks + (sure * costs.std(ddof=1)) ** 2 / costs.size))


def _lengths_ms(run: RunView) -> dict[int, float]:
    """The length of each step that all ranks with steps captured whole: the mean over the ranks."""
    counted = [one for one in run.digests if one.steps]
    found: dict[int, list[int]] = {}
    for digest in counted:
        for step in digest.complete_steps:
            found.setdefault(step.index, []).append(step.budget.window_ns)
    return {step: sum(ns) / len(ns) / 1e6 for step, ns in found.items() if len(ns) == len(counted)}


def _late_ms(run: RunView, steps: tuple[int, ...]) -> Floats:
    """What each step takes longer than if all ranks came as early as the median one; zeros if not known."""
    if len(run.digests) < 2 or arrival_replay(run) is None:
        return np.zeros(len(steps))
    return np.maximum(gains_together(run, StartPolicy.MEDIAN, steps), 0) / 1e6


def _by_cause(run: RunView) -> dict[str, tuple[float, tuple[int, ...]]]:
    """The share of each cause in what late ranks cost, by what makes each of them late, and its ranks."""
    costs: dict[str, float] = {}
    for late in stragglers(run):
        cause = KIND_OF.get(late.cause, "ranks.host")
        costs[cause] = costs.get(cause, 0.0) + float(np.maximum(late.gain_ns, 0).mean())
    total = sum(costs.values())
    return {name: (cost / total, late_over_steps(run, name)) for name, cost in costs.items() if total}
