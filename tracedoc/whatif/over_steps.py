"""What a cause costs in every captured step, of which a replay shows one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import hypot

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.arrival_replay import StartPolicy, arrival_replay, gains_together
from tracedoc.ranks.run_view import RunView
from tracedoc.topics.host.rank import sync_idle_ms
from tracedoc.topics.input.rank import input_idle_ms
from tracedoc.topics.memory.rank import allocator_idle_ms
from tracedoc.topics.straggler.late_ranks import stragglers
from tracedoc.topics.straggler.run import straggler_any_cost_ms, straggler_cost_ms
from tracedoc.topics.straggler.uneven import uneven_by_step, uneven_work_ms

ByStep = Mapping[int, float]

SURE = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Quantiles of Student's distribution, from one degree of freedom on: in 95 % of cases the mean of a long run
is at most so many standard errors above that of the captured steps."""


ALIKE_STEPS = 0.02
"""Steps whose lengths differ by no more than this share are alike."""


class Cost(msgspec.Struct, frozen=True):
    """What a cause costs the analysed step and the mean step, in ms.

    ``error_ms`` is how much more the mean of a long run may be than that of the captured steps, 0 where only
    one step was captured; and what the clocks of the ranks leave open. ``mean_step_ms`` is the length of the
    mean step, ``None`` where it is that of the analysed one but for :data:`ALIKE_STEPS`.
    """

    analysed_ms: float
    mean_ms: float
    error_ms: float
    mean_step_ms: float | None = None


def cost_over_steps(run: RunView, fact: str, key: str | None, step: int) -> Cost | None:
    """Return what the cause that a fact measures costs over the steps, ``None`` where that is not known.

    ``key`` is a rank, ``None`` the run; ``step`` the analysed step.
    """
    measure = _BY_STEP.get(fact)
    found = measure(run, key) if measure is not None else {}
    if step not in found:
        return None
    costs = np.array(list(found.values()), dtype=np.float64) / 1e6
    error = 0.0
    if costs.size > 1:
        error = SURE[min(costs.size - 2, len(SURE) - 1)] * float(costs.std(ddof=1)) / costs.size**0.5
    if fact in _OF_LATE_RANKS:
        error = hypot(error, _clock_error_ms(run, key))
    return Cost(found[step] / 1e6, float(costs.mean()), error, _mean_step_ms(run, step))


def _mean_step_ms(run: RunView, analysed: int) -> float | None:
    """Return the mean length of the complete steps, ``None`` where the analysed step is as long.

    Of the ranks' lengths of one step the lower median counts, as for the analysed one.
    """
    lengths: dict[int, list[int]] = {}
    for digest in run.digests:
        for step in digest.complete_steps:
            lengths.setdefault(step.index, []).append(step.budget.window_ns)
    usual = {step: sorted(found)[(len(found) - 1) // 2] for step, found in lengths.items()}
    if analysed not in usual:
        return None
    mean = sum(usual.values()) / len(usual)
    return None if abs(mean - usual[analysed]) <= ALIKE_STEPS * usual[analysed] else mean / 1e6


def _clock_error_ms(run: RunView, key: str | None) -> float:
    """Return what the clocks leave open of the waiting of a step for a late rank (any, for ``None``).

    Each operation to which it came last is as uncertain as the clocks; the errors have little to do with each
    other, so that they add up as squares.
    """
    late = [one for one in stragglers(run) if key is None or str(one.rank) == key]
    if not late:
        return 0.0
    operations = np.array([operation for one in late for operation in one.operations], dtype=np.intp)
    uncertain_ms = run.matching.uncertainty_ns[operations] / 1e6
    return float(np.sqrt((uncertain_ms**2).sum() / max(len(late[0].steps), 1)))


def _of_rank(run: RunView, key: str | None) -> ByStep:
    late = next((one for one in stragglers(run) if str(one.rank) == key), None)
    return {} if late is None else _numbered(late.steps, late.gain_ns)


def _of_any_rank(run: RunView, key: str | None) -> ByStep:
    late = stragglers(run)
    if not late or arrival_replay(run) is None:
        return {}
    return _numbered(late[0].steps, np.maximum(gains_together(run, StartPolicy.MEDIAN, late[0].steps), 0))


def _of_uneven_work(run: RunView, key: str | None) -> ByStep:
    return uneven_by_step(run) or {}


def _idle_for(cause: str) -> Callable[[RunView, str | None], ByStep]:
    """Return what measures the idle time of one cause, on the rank that has most of it in a step."""

    def measure(run: RunView, key: str | None) -> ByStep:
        found: dict[int, float] = {}
        for digest in run.digests:
            for step in digest.complete_steps:
                found[step.index] = max(found.get(step.index, 0.0), step.idle_ns.get(cause, 0))
        return found

    return measure


def _numbered(steps: tuple[int, ...], costs_ns: npt.NDArray[np.int64]) -> ByStep:
    return dict(zip(steps, costs_ns.astype(np.float64).tolist(), strict=True))


_OF_LATE_RANKS = (straggler_cost_ms.name, straggler_any_cost_ms.name, uneven_work_ms.name)
"""Facts that compare when ranks arrive."""

_BY_STEP: dict[str, Callable[[RunView, str | None], ByStep]] = {
    straggler_cost_ms.name: _of_rank,
    straggler_any_cost_ms.name: _of_any_rank,
    uneven_work_ms.name: _of_uneven_work,
    input_idle_ms.name: _idle_for("input"),
    allocator_idle_ms.name: _idle_for("allocator"),
    sync_idle_ms.name: _idle_for("sync"),
}
"""What measures a cause in every step, in ns, by the fact that measures it in one or in all of them."""
