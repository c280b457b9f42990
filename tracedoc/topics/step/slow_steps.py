"""Facts of the run about when steps of the log are slow."""

from __future__ import annotations

from math import comb

import msgspec
import numpy as np
from numpy.typing import NDArray

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.topics.host.run import crowded
from tracedoc.topics.step.run import (
    OUTLIER_RATIO,
    Ints,
    JobSteps,
    core_wait_share,
    is_outlier,
    job_steps,
    lasting,
    stopped_steps,
)
from tracedoc.trace.distinct import median, quantile
from tracedoc.values import Unknown, Value, needed, once

PATTERNS = ("none", "irregular", "regular", "from one step on")
"""When steps are slow."""

LEAST_REPEATS = 4
"""So many outliers at equal distances are regular."""

REPEATS_FRAC = 0.75
"""So many of the steps at equal distances must be outliers."""

MAX_PERIODS = 32
"""So many distances are tried, those that occur most often."""

SHARED = 0.10
"""Ranks on CPUs that wait for cores for this share of all steps share them with what makes any of them long.
"""

LEAST_SIDE = 10
"""A job that is slower from some step on has so many steps before and after it."""

CHANCE = 0.001
"""What is this unlikely in a job whose steps vary by chance is no chance."""

LONGEST_TRIED = 64
"""All distances up to this are tried, and those that occur most often between outliers."""

Times = NDArray[np.float64]


class SlowSteps(msgspec.Struct, frozen=True):
    """When steps are slow: a word of :data:`PATTERNS`, and what it means in numbers.

    A slow step takes ``excess_ns`` longer than the others, which take ``usual_ns``, at the median; over all
    logged steps they cost ``cost_ns`` a step on average. ``start`` is the first slow one, ``period`` how far
    regular ones are apart, and ``lasts`` how many steps are slow each time.
    """

    pattern: str
    usual_ns: float
    excess_ns: float = 0.0
    cost_ns: float = 0.0
    start: int = 0
    period: int = 0
    lasts: int = 1


@once
def slow_steps(run: RunView) -> SlowSteps | Unknown:
    """The pattern of slow steps in the log: of those found, that which costs most.

    Garbage collections, and longer waits than usual for free cores, are left out of all lengths.
    """
    steps = needed(job_steps(run))
    length = steps.length_ns - steps.gc_cost_ns - steps.core_wait_cost_ns
    # Where threads wait for cores in each step, any step may take several times as long.
    waited = core_wait_share(run)
    chance = any(crowded(run, digest.rank) for digest in run.digests) or (
        isinstance(waited, float) and waited > SHARED and any(digest.is_cpu for digest in run.digests)
    )
    # What the system did to a process is no chance of cores.
    irregular = SlowSteps("none", steps.median_ns)
    if not chance or stopped_steps(run):
        irregular = _irregular(steps)
    regular = _regular(steps, length)
    # Outliers at equal distances are counted by both; some more lie between them by accident.
    later = [_from_one_on(steps, length)]
    if not chance:
        later.append(_behind_capture(run, steps, length, before=later[0].start))
    found = [one for one in (regular, *later) if one.cost_ns >= irregular.cost_ns / 2 and one.cost_ns]
    return max(found or [irregular], key=lambda one: one.cost_ns)


def _irregular(steps: JobSteps) -> SlowSteps:
    slow = is_outlier(steps)
    rest = np.maximum(steps.excess_ns - steps.gc_cost_ns - steps.core_wait_cost_ns, 0.0)
    rest = np.where(slow, rest, 0.0)
    if not rest.any():
        return SlowSteps("none", steps.median_ns)
    excess = float(median(rest[rest > 0]))
    start = int(steps.number[int(rest.argmax())])
    return SlowSteps("irregular", steps.median_ns, excess, float(rest.mean()), start)


def _from_one_on(steps: JobSteps, length: Times) -> SlowSteps:
    """The step from which on the job is slower, by Pettitt's test for one change.

    A non-parametric approach to the change-point problem, Applied Statistics 28 (1979). Also three quarters
    of the steps after it are longer than three quarters of those before. A change where steps are missing,
    because the capture touched them, may be the capture's own unless it makes outliers of them. Where what
    makes steps long lasts, with correlation r from one to the next, n steps count as n (1 - r) / (1 + r).
    """
    none = SlowSteps("none", float(median(length)))
    count = length.size
    rank = _ranks(length)
    # Many small ranks first, fewer than by chance behind: the sum lies below its mean before the change.
    statistic = np.arange(1, count) * (count + 1.0) - 2.0 * np.cumsum(rank)[:-1]
    place = int(statistic.argmax()) + 1
    if min(place, count - place) < LEAST_SIDE:
        return none
    largest = float(statistic[place - 1])
    before, after = length[:place], length[place:]
    again = lasting(np.concatenate([before - median(before), after - median(after)]))
    chance = 2.0 * float(np.exp(-6.0 * largest**2 * (1 - again) / (1 + again) / (count**3 + count**2)))
    apart = float(quantile(after, 0.25)) > float(quantile(before, 0.75))
    usual = float(median(before))
    excess = float(median(after)) - usual
    captured = steps.number[place] - steps.number[place - 1] > 1 and excess < (OUTLIER_RATIO - 1) * usual
    if chance > CHANCE or not apart or captured:
        return none
    cost = (float(after.mean()) - usual) * after.size / count
    return SlowSteps("from one step on", usual, excess, cost, int(steps.number[place]))


def _behind_capture(run: RunView, steps: JobSteps, length: Times, before: int) -> SlowSteps:
    """Steps that all come after the capture, and take outliers' time beside the captured ones.

    Where the log shows a change, those behind the capture are the steps ``before`` it; it is 0 without one.
    """
    captured = _captured_lengths(run)
    none = SlowSteps("none", float(median(length)))
    if not captured or int((steps.number > max(captured)).sum()) < max(LEAST_SIDE, length.size):
        return none
    usual = float(median(list(captured.values())))
    behind = length[steps.number < before] if before else length
    if float(quantile(behind, 0.25)) < OUTLIER_RATIO * usual:
        return none
    excess = float(median(length)) - usual
    cost = float(length.mean()) - usual
    return SlowSteps("from one step on", usual, excess, cost, int(steps.number[0]))


def _regular(steps: JobSteps, length: Times) -> SlowSteps:
    """Slow steps at equal distances.

    Of the steps with one remainder by the distance, at least four, three quarters are among as many longest
    of all, or among those that take most more than the step before, where what makes one slow lasts for the
    next ones as well; that either happens for any of the distances tried is less likely by chance than
    ``CHANCE``. What they cost holds their waits for cores (workers that start, or a process that saves, come
    with them), and the steps right behind them that are slow too: up to half of the distance.
    """
    whole = steps.length_ns - steps.gc_cost_ns
    best = SlowSteps("none", float(median(length)))
    places = [_from_longest(length), _from_longest(np.diff(whole, prepend=whole[0]))]
    longest = min(LONGEST_TRIED, length.size // LEAST_REPEATS)
    periods = sorted({*range(2, longest + 1), *_usual_distances(steps.number[is_outlier(steps)])})
    sizes = [np.bincount(steps.number % period) for period in periods]
    tried = sum(int((size >= LEAST_REPEATS).sum()) for size in sizes)
    for period, size in zip(periods, sizes, strict=True):
        remainder = steps.number % period
        hits = [np.bincount(remainder, weights=place < size[remainder]) for place in places]
        most = np.maximum(*hits).astype(np.int64)
        for one in np.flatnonzero((size >= LEAST_REPEATS) & (most >= REPEATS_FRAC * size)).tolist():
            behind = (remainder - one) % period
            later = bool((behind >= period // 2).any())
            if not later or tried * _chance(int(most[one]), int(size[one]), length.size) > CHANCE:
                continue
            lasts = _steps_slow(whole, behind, period // 2)
            mine, rest = behind < lasts, whole[behind >= lasts]
            cost = (float(whole[mine].mean()) - float(rest.mean())) * int(mine.sum()) / length.size
            # Of a distance and its multiples, of which each holds a part of the slow steps, the shortest.
            if cost > 1.05 * best.cost_ns:
                usual = float(median(rest))
                excess = float(median(whole[behind == 0])) - usual
                start = int(steps.number[behind == 0][0])
                best = SlowSteps("regular", usual, excess, cost, start, period, lasts)
    return best


def _from_longest(values: Times) -> Ints:
    """The place of each value among all, from the longest one on."""
    place = np.empty(values.size, dtype=np.int64)
    place[np.argsort(-values, kind="stable")] = np.arange(values.size)
    return place


def _steps_slow(length: Times, behind: Ints, most: int) -> int:
    """How many steps are slow each time, the first of which are 0 ``behind``: one, and at most so many.

    Three quarters of each of the next ones are longer than three quarters of those that come later.
    """
    usual = float(quantile(length[behind >= most], 0.75))
    lasts = 1
    while lasts < most and (next_ones := length[behind == lasts]).size:
        if float(quantile(next_ones, 0.25)) <= usual:
            break
        lasts += 1
    return lasts


def _usual_distances(numbers: Ints) -> list[int]:
    """The usual distances between outliers and the next three, from 2 on, the shortest first."""
    gaps = np.concatenate([numbers[lag:] - numbers[:-lag] for lag in (1, 2, 3)])
    values, counts = np.unique(gaps[gaps > 1], return_counts=True)
    usual = values[np.argsort(-counts, kind="stable")[:MAX_PERIODS]]
    return sorted(usual.tolist())


def _chance(hits: int, size: int, count: int) -> float:
    """The probability that ``size`` of ``count`` steps hold ``hits`` of the ``size`` longest, or more."""
    if size > 100:  # exact fractions of huge numbers say no more than that it is none
        return 0.0
    ways = sum(comb(size, k) * comb(count - size, size - k) for k in range(hits, size + 1))
    return ways / comb(count, size)


def _ranks(values: Times) -> Times:
    """The rank of each value among all, from 1, equal ones with their mean."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[where], dtype=np.float64)


@run_fact(unit="text", values=PATTERNS)
def slow_steps_pattern(run: RunView) -> Value:
    """When the logged steps are slow, what garbage collection explains left out.

    "from one step on": all that follow take longer than those before. "regular": every so many steps one
    takes longer. Neither needs steps of 1.5 times the median; "irregular" are such outliers without an order,
    "none" where there are no outliers either.
    """
    return needed(slow_steps(run)).pattern


@run_fact(unit="ms")
def slow_steps_excess_ms(run: RunView) -> Value:
    """How much longer a slow step (:func:`slow_steps_pattern`) takes: the difference of the medians."""
    return needed(slow_steps(run)).excess_ns / 1e6


@run_fact(unit="ms")
def slow_steps_usual_ms(run: RunView) -> Value:
    """Median length of the logged steps that are not slow (:func:`slow_steps_pattern`)."""
    return needed(slow_steps(run)).usual_ns / 1e6


@run_fact(unit="count")
def slow_steps_start(run: RunView) -> Value:
    """The first slow step of the log (:func:`slow_steps_pattern`); of irregular ones the longest."""
    return needed(_found(run)).start


@run_fact(unit="count")
def slow_steps_period(run: RunView) -> Value:
    """Every how many steps a slow one comes (:func:`slow_steps_pattern`), where they are regular."""
    return needed(_found(run)).period or Unknown("slow steps do not come at equal distances")


@run_fact(unit="count")
def slow_steps_lasting(run: RunView) -> Value:
    """How many steps are slow each time, where what comes at equal distances makes more than one slow."""
    lasts = needed(_found(run)).lasts
    return lasts if lasts > 1 else Unknown("slow steps come one at a time")


def _found(run: RunView) -> SlowSteps | Unknown:
    found = needed(slow_steps(run))
    return Unknown("no logged step is slow") if found.pattern == "none" else found


def _captured_lengths(run: RunView) -> dict[int, float]:
    """The length in ns of each step that every rank captured whole."""
    windows: dict[int, list[int]] = {}
    for digest in run.digests:
        for step in digest.complete_steps:
            windows.setdefault(step.index, []).append(step.budget.window_ns)
    return {index: float(median(of)) for index, of in windows.items() if len(of) == len(run.digests)}
