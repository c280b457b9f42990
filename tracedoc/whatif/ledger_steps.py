"""What captured steps show beside the analysed one: steps far longer, and ranks that are late in some."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.play.run_replay import WRONG, RunReplay, replay_other
from tracedoc.ranks.run_view import RunView
from tracedoc.topics.host.run import core_wait_ms
from tracedoc.topics.step.long_steps import SLOWER, late_ms_of, long_steps, why_long
from tracedoc.topics.straggler.causes import IN_CODE, late_place
from tracedoc.topics.straggler.late_ranks import stragglers
from tracedoc.topics.straggler.run import rare_work
from tracedoc.trace.distinct import is_among
from tracedoc.units import format_ranges
from tracedoc.values import Unknown

Floats = npt.NDArray[np.float64]

ALIKE_STEPS = 0.02
"""Steps that differ by no more than this share are alike: all of them are like the analysed one."""

NONE_LATE = 0
"""The place of nobody beside ranks that are late."""

KIND_OF = {"kernels": "ranks.compute", "input": "ranks.input"}
"""The cause of the ledger for what makes a rank late; all else is its host."""


STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Quantiles of Student's distribution, from one degree of freedom on: in 95 % of cases the mean of a long run
is at most so many standard errors above that of the captured steps."""


class StepsApart(msgspec.Struct, frozen=True):
    """Today's step (:func:`today_ms`), and what it holds beyond the replayed ones, in ms.

    ``slow_ms`` is what steps that are far longer cost a step, but for ``input_ms`` of it, which is the
    loader's; ``slow_ranks`` are those that make them long, where these are not all. ``late_ms`` is how much
    more late ranks cost the mean step than the replayed one (negative where it is less), ``late`` the share
    of each cause of the ledger in it, and which ranks these are.
    """

    step_ms: float
    steps: tuple[int, ...]
    slow_ms: float = 0.0
    slow_place: str = ""
    slow_ranks: tuple[int, ...] = ()
    input_ms: float = 0.0
    late_ms: float = 0.0
    late: dict[str, tuple[float, tuple[int, ...]]] = msgspec.field(default_factory=dict)


def late_over_steps(run: RunView, cause: str) -> tuple[int, ...]:
    """The ranks that a cause makes late, by what each costs all steps: those that cost half of the worst."""
    costs = {rank: ns for kind, rank, ns in _costs(run) if kind == cause}
    worst = max(costs.values(), default=0.0)
    return tuple(sorted(rank for rank, ns in costs.items() if ns >= worst / 2 > 0))


def _costs(run: RunView) -> list[tuple[str, int, float]]:
    """The cause that makes each late rank late, the rank, and what it costs all steps on average, in ns."""
    return [
        (KIND_OF.get(one.cause, "ranks.host"), one.rank, float(np.maximum(one.gain_ns, 0).mean()))
        for one in stragglers(run)
    ]


def recurring_ms(run: RunView) -> tuple[float, float]:
    """What late ranks do longer than their peers, and not by chance, in ms: surely, and likely.

    That is what they do in nearly every step, or one of them alone in few. Not sure is what they waited for a
    core, which comes and goes with other processes: of a rank that is late in a function that stacks name,
    what falls outside of it, if it waits as much in all of the step. Both are 0 where none is late.
    """
    waits, lengths = core_wait_ms.by_rank(run), long_steps(run).length_ms
    lasts = float(lengths.mean()) if lengths.size else 0.0
    recurs = waited = 0.0
    for one in stragglers(run):
        rare = rare_work(run).get(one.rank)
        rare_ms = rare.ns / max(len(one.steps), 1) / 1e6 if rare is not None else 0.0
        recurs += (mine := max(one.recurring_ms, rare_ms))
        if isinstance(ms := waits[str(one.rank)], float):
            named = lasts and one.cause in IN_CODE and late_place(run, one) is not None
            waited += ms * (max(1.0 - mine / lasts, 0.0) if named else 1.0)
    return max(recurs - waited, 0.0), recurs


MOST_PLAYED = 300_000
"""Further steps are played as long as all have no more calls and GPU events than this."""


def other_steps(run: RunView, first: RunReplay) -> list[RunReplay]:
    """The replays of the other captured steps of the same ranks, where these differ in length or who is late.

    None of those that are far longer, nor of the first one, if what it waits for in the step before was not
    captured: work of a GPU, or the batch that loader workers made before: one that is like it stands for it.
    Nor of one behind which the rank that is late in it would be late again, as it never is.
    """
    layout = first.program.layout
    most = MOST_PLAYED // max(layout.points + layout.events, 1) - 1
    captured = long_steps(run)
    length = dict(zip(captured.steps, captured.length_ms.tolist(), strict=True))
    whole = layout.is_cpu and not layout.batch_point.size
    begun = captured.steps if whole else captured.steps[1:]
    usual = [one for one in begun if one not in captured.numbers and one != first.step]
    if first.model_error_frac > WRONG or first.step not in length or first.step in captured.numbers:
        return []
    compared = np.array([one in (first.step, *usual) for one in captured.steps])
    late, least = _late_ms(run, captured.steps), ALIKE_STEPS * length[first.step]
    if max(float(np.ptp(one[compared])) for one in (captured.length_ms, *late)) <= least:
        return []
    found: list[RunReplay] = []
    for step in usual:
        made = replay_other(run, first, step) if len(found) < most else None
        if isinstance(made, RunReplay):
            found.append(made)
    table = np.array([captured.length_ms, *late])
    played = {captured.steps.index(one.step): one for one in (first, *found)}
    for place in np.flatnonzero(~captured.far).tolist() if len(played) > 1 else ():
        nearest = min(played, key=lambda one: float(np.abs(table[:, one] - table[:, place]).max()))
        alike = np.abs(table[:, nearest] - table[:, place]).max() <= least
        if place not in played and alike and len(found) < most:
            found.append(replace(played[nearest], step=captured.steps[place]))
    row = sorted([first.step, *(one.step for one in found)])
    who = np.where(late.max(axis=0) > least, late.argmax(axis=0), NONE_LATE)[is_among(captured.steps, row)]
    twice = (who[:-1] == who[1:]) & (who[1:] == who[0])
    if who.size > 2 and who[-1] == who[0] != NONE_LATE and not twice.any():
        gone = row[0] if row[-1] == first.step else row[-1]
        found = [one for one in found if one.step != gone]
    return found


def _late_ms(run: RunView, steps: Sequence[int]) -> Floats:
    """What late ranks cost some steps, a row each, in ms; the first row is of nobody."""
    costs = (dict(zip(one.steps, one.gain_ns.tolist(), strict=True)) for one in stragglers(run))
    return np.array([np.zeros(len(steps)), *([ns.get(step, 0) / 1e6 for step in steps] for ns in costs)])


def today_ms(run: RunView, replay: RunReplay) -> float:
    """The step that an answer accounts for and predicts from: the mean captured one, in ms.

    It is the analysed one where all that were captured are like it, so that an answer has one step.
    """
    captured = long_steps(run)
    if replay.step not in captured.steps:
        return replay.step_ms
    mean = float(captured.length_ms.mean())
    return replay.step_ms if abs(mean - replay.step_ms) <= ALIKE_STEPS * mean else mean


def steps_apart(run: RunView, replays: Sequence[RunReplay], played_ms: float, late_ms: float) -> StepsApart:
    """Compare all complete steps that every rank has with those replayed, of which the first is analysed.

    A replayed step takes ``played_ms`` on average, of which ``late_ms`` are for late ranks.
    """
    found, today = long_steps(run), today_ms(run, replays[0])
    if replays[0].step not in found.steps:
        return StepsApart(today, tuple(one.step for one in replays))
    mean = float(found.length_ms.mean())
    apart = mean - played_ms
    why = why_long(run)
    # Kernels that take longer are compute in every step, played or not: no other cause has that.
    slower = not isinstance(why, Unknown) and why.kind == SLOWER
    if abs(apart) <= ALIKE_STEPS * mean and not slower:
        return StepsApart(today, found.steps)
    late = late_ms_of(run, found.steps) if found.late_ms is None else found.late_ms
    more = float(late.mean()) - late_ms if late.any() else 0.0
    more = min(max(more, min(apart, 0.0)), max(apart, 0.0))
    slow = float(np.where(found.far, found.excess_ms, 0.0).mean())
    slow = slow if slower else min(slow, max(apart - more, 0.0))
    if slow <= 0 or isinstance(why, Unknown):
        return StepsApart(today, found.steps, late_ms=more, late=_by_cause(run) if more > 0 else {})
    numbers = ("step " if len(found.numbers) == 1 else "steps ") + format_ranges(found.numbers)
    ranks = () if len(why.ranks) == len(run.digests) else why.ranks
    return StepsApart(
        today,
        found.steps,
        slow * (1.0 - why.input_frac),
        f"{numbers}: {why.doing}" if why.doing else numbers,
        ranks,
        slow * why.input_frac,
        more,
        _by_cause(run) if more > 0 else {},
    )


def late_error_ms(run: RunView) -> float:
    """How far the cost of late ranks of a job may lie from that of the captured steps, in ms.

    Clocks are uncertain, and few steps leave open what the mean of many is. These have little to do with each
    other, so that they add up as squares.
    """
    late = stragglers(run)
    return float(np.hypot(clock_error_ms(run), mean_error(late_ms_of(run, late[0].steps)))) if late else 0.0


def clock_error_ms(run: RunView) -> float:
    """How uncertain clocks leave what late ranks cost a step, in ms.

    Each operation to which a late rank came last is as uncertain as the clocks.
    """
    late = stragglers(run)
    operations = np.array([operation for one in late for operation in one.operations], dtype=np.intp)
    uncertain_ms = run.matching.uncertainty_ns[operations] / 1e6
    return float(((uncertain_ms**2).sum() / max(len(late[0].steps), 1)) ** 0.5) if late else 0.0


def kinds_of_time(run: RunView) -> tuple[tuple[float, float], ...]:
    """What of the captured steps each kind of time takes, and how far its mean is known, both in ms.

    The most uneven first; all together as far as the length of a step is known: one kind may become another.
    Steps that are far longer are told by themselves, and what two runs on CPUs differ is more than what their
    steps do.
    """
    captured = long_steps(run)
    usual = {*captured.steps} - {*captured.numbers}
    if run.digests[0].is_cpu or len(usual) < 2:
        return ()
    counted = [digest for digest in run.digests if digest.steps]
    budgets = [[one.budget for one in digest.steps if one.index in usual] for digest in counted]
    names = ("compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns")
    kinds = np.array([[[getattr(one, name) for one in rank] for rank in budgets] for name in names]) / 1e6
    uneven = sorted((mean_error(ms) / ms.mean(), float(ms.mean())) for ms in kinds if ms.any())[::-1]
    share, lasts = np.array(uneven).T
    together = np.minimum(np.cumsum(share * lasts), mean_error(kinds.sum(axis=0)))
    return tuple(zip(lasts.tolist(), np.diff(together, prepend=0.0).tolist(), strict=True))


def mean_error(values: Floats) -> float:
    """By how much the mean of very many such values may be above that of these; 0 of fewer than two.

    The last axis are steps; rows are of ranks, each of which shows by how much steps differ.
    """
    steps = values.shape[-1]
    if steps < 2:
        return 0.0
    apart = values - values.mean(axis=-1, keepdims=True)
    free = values.size - values.size // steps
    return float(STUDENT[min(free, len(STUDENT)) - 1] * ((apart**2).sum() / free / steps) ** 0.5)


def _by_cause(run: RunView) -> dict[str, tuple[float, tuple[int, ...]]]:
    """The share of each cause in what late ranks cost, by what makes each of them late, and its ranks."""
    costs: dict[str, float] = {}
    for cause, _, ns in _costs(run):
        costs[cause] = costs.get(cause, 0.0) + ns
    total = sum(costs.values())
    return {name: (cost / total, late_over_steps(run, name)) for name, cost in costs.items() if total}
