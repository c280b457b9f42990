"""By how much the steps of two runs differ, and whether that is more than noise.

The interval is that of Hodges and Lehmann for the shift between two samples, on the logarithms of step times:
all ratios of a step of one side and a step of the other, less the outermost as the exact distribution of the
rank-sum statistic allows (Lehmann, Nonparametrics, 1975, chapter 2). It assumes no shape, and holds for a
handful of steps. No order of three against three is rare enough: of so few it is all ratios, and what their
spread allows as well (Welch, The generalization of "Student's" problem, Biometrika 1947).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, comb, expm1, hypot, log

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.diagnosis import Diagnosis, StepBudget
from tracedoc.predicted import CPU_RUNS_DIFFER

CONFIDENCE = 0.95

LEAST_CHANGE = 0.02
"""Two captures of one job may differ by this much for reasons that no capture shows: clocks, placement."""

UNCHANGED = 0.05
"""An interval within this much around none is "unchanged", even where a small change would still fit in."""

LEAST_RUN = 0.05
"""A thread that waited nearly all of a step still ran for some of it."""

IN_ORDER = ("regular", "from one step on")
"""Words of ``slow_steps_pattern`` for slow steps in an order that chance makes in one log of a thousand."""

_STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""What 97.5 % of Student's distribution are below, with 1 to 7 degrees of freedom."""

_EXACT_UP_TO = 60
_STEPS_COMPARED = 1000
_LONGEST_MS = 1e9  # eleven days; what is longer is no step


class StepChange(msgspec.Struct, frozen=True):
    """The steps of two runs in milliseconds, and the change from BASE to HEAD as a share of BASE.

    ``low_frac`` to ``high_frac`` is the interval of 95 %, with a single step on a side all there is. Where
    ``logged``, it is of all steps of both runs outside their captures, and so is ``change_frac``, as medians;
    ``mean_frac`` is that of their means, ``slow_frac`` what slow steps that lie in an order cost more, as a
    share of BASE's mean, and ``captured_frac`` the change of the captured steps.
    ``noise_frac`` is the change below which two captures of one job are not told apart. The waited shares are
    how much of a step training threads waited for a free core, on the rank where they did most.
    ``operators_frac`` is the change of the time in operators, for two runs on CPUs.
    """

    base_ms: float
    head_ms: float
    base_steps: int
    head_steps: int
    change_frac: float
    low_frac: float
    high_frac: float
    noise_frac: float
    base_waited_frac: float = 0.0
    head_waited_frac: float = 0.0
    base_unprofiled_ms: float | None = None
    head_unprofiled_ms: float | None = None
    operators_frac: float | None = None
    logged: bool = False
    captured_frac: float = 0.0
    mean_frac: float = 0.0
    slow_frac: float = 0.0

    @property
    def of_slow_steps(self) -> bool:
        """Whether the mean changes by more than noise because slow steps in an order come or go.

        The median hardly knows of them, however long they are.
        """
        surely = min(abs(self.mean_frac), abs(self.slow_frac)) > self.noise_frac
        return surely and self.mean_frac * self.slow_frac > 0


class StepVerdict(msgspec.Struct, frozen=True):
    """``word`` is "improved", "unchanged", "regressed" or "inconclusive"; ``why`` may say why.

    ``steps_needed`` is how many steps on each side would probably decide, ``None`` where that is not known.
    """

    word: str
    why: str = ""
    steps_needed: int | None = None


def run_steps(diagnosis: Diagnosis) -> list[float]:
    """Return the length of each complete step of a run in ms: the median over its ranks."""
    return _by_step(diagnosis, lambda step: step.step_ms)


def _by_step(diagnosis: Diagnosis, value: Callable[[StepBudget], float]) -> list[float]:
    by_step: dict[int, list[float]] = {}
    for rank in diagnosis.ranks:
        for step in rank.steps:
            if step.complete and 0 < step.step_ms < _LONGEST_MS:
                by_step.setdefault(step.index, []).append(value(step))
    return [float(np.median(by_step[index])) for index in sorted(by_step)][:_STEPS_COMPARED]


def step_change(base: Diagnosis, head: Diagnosis) -> StepChange | None:
    """The change of the steps; ``None`` where a side has no complete step."""
    before, after = run_steps(base), run_steps(head)
    if not before or not after:
        return None
    found = replace(
        change_between(before, after, noise_of(on_cpu="CPU" in (base.run.device, head.run.device))),
        base_waited_frac=_waited(base, before),
        head_waited_frac=_waited(head, after),
        base_unprofiled_ms=_unprofiled(base),
        head_unprofiled_ms=_unprofiled(head),
        operators_frac=_operators(base, head) if base.run.device == head.run.device == "CPU" else None,
    )
    old, new = _logged(base), _logged(head)
    if old is None or new is None:
        return found
    low, change, high = _between_intervals(old, new)
    return replace(
        found,
        change_frac=change,
        low_frac=low,
        high_frac=high,
        base_waited_frac=old.waited_frac,
        head_waited_frac=new.waited_frac,
        logged=True,
        captured_frac=found.change_frac,
        mean_frac=new.mean_ms / old.mean_ms - 1,
        slow_frac=(new.slow_ms - old.slow_ms) / old.mean_ms,
    )


class _Logged(msgspec.Struct, frozen=True):
    """The interval of the median step of a log, its mean, and for which share threads waited for cores.

    ``slow_ms`` is what slow steps cost the mean that come at equal distances, or from one step on.
    """

    low_ms: float
    high_ms: float
    mean_ms: float
    waited_frac: float
    slow_ms: float


def _logged(diagnosis: Diagnosis) -> _Logged | None:
    """What a run's log of all steps says of them; ``None`` where it has too few."""
    low, high = diagnosis.number("logged_median_low_ms"), diagnosis.number("logged_median_high_ms")
    if not low or not high or not 0 < low <= high < _LONGEST_MS:
        return None
    mean = diagnosis.number("logged_mean_step_ms") or (low + high) / 2
    ordered = diagnosis.value("slow_steps_pattern") in IN_ORDER
    slow = diagnosis.number("slow_steps_cost_ms") if ordered else None
    return _Logged(low, high, mean, min(diagnosis.number("logged_core_wait_frac") or 0.0, 1.0), slow or 0.0)


def _between_intervals(old: _Logged, new: _Logged) -> tuple[float, float, float]:
    """The change from one median to another as a share, low, likely and high, by the interval of each.

    They are estimated apart, so their errors add as squares, on logarithms and on each side by itself (Zou
    and Donner, Construction of confidence limits about effect measures, 2008).
    """
    (old_low, old_mid, old_high), (new_low, new_mid, new_high) = (
        (log(one.low_ms), log((one.low_ms + one.high_ms) / 2), log(one.high_ms)) for one in (old, new)
    )
    change = new_mid - old_mid
    low = change - hypot(new_mid - new_low, old_high - old_mid)
    high = change + hypot(new_high - new_mid, old_mid - old_low)
    return expm1(low), expm1(change), expm1(high)


def noise_of(*, on_cpu: bool) -> float:
    """The share of a step by which two runs of one job may differ."""
    return CPU_RUNS_DIFFER if on_cpu else LEAST_CHANGE


def change_between(before: Sequence[float], after: Sequence[float], noise_frac: float) -> StepChange:
    """The change from some steps to others, both in milliseconds and at least one; they need no order."""
    ratios = np.sort(np.subtract.outer(np.log(after), np.log(before)).ravel())
    cut = _cut(len(before), len(after))
    low, middle, high = ratios[cut], np.median(ratios), ratios[ratios.size - 1 - cut]
    if _are_few(len(before), len(after)) and min(len(before), len(after)) > 1:
        least, most = _by_spread(np.log(before), np.log(after))
        low, high = min(low, least), max(high, most)
    return StepChange(
        base_ms=float(np.median(before)),
        head_ms=float(np.median(after)),
        base_steps=len(before),
        head_steps=len(after),
        change_frac=expm1(middle),
        low_frac=expm1(low),
        high_frac=expm1(high),
        noise_frac=noise_frac,
    )


def _are_few(first: int, second: int) -> bool:
    """True where chance brings any order of two samples more often than once in twenty."""
    return 2 / comb(first + second, first) > 1 - CONFIDENCE


def _by_spread(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The interval of 95 % for the difference of two means, of two to seven values a side."""
    errors = [float(np.var(one, ddof=1)) / one.size for one in (before, after)]
    error, change = sum(errors), float(after.mean() - before.mean())
    if not error:
        return change, change
    parts = (one**2 / (side.size - 1) for one, side in zip(errors, (before, after), strict=True))
    half = _STUDENT_95[max(int(error**2 / sum(parts) + 1e-9), 1) - 1] * error**0.5
    return change - half, change + half


def same_capture(base: Diagnosis, head: Diagnosis) -> bool:
    """True where both sides have the very same steps, which no second capture has."""
    steps = [tuple((rank.rank, rank.steps) for rank in side.ranks if rank.steps) for side in (base, head)]
    return bool(steps[0]) and steps[0] == steps[1]


def verdict_on(
    change: StepChange | None, *, same_program: bool = False, same_capture: bool = False
) -> StepVerdict:
    """The verdict: HEAD is faster or slower than BASE beyond noise, or neither, or it is not known.

    ``same_program``: nothing that follows from the script or its settings differs between the two;
    ``same_capture``: the sides are one capture.
    """
    if same_capture:
        return StepVerdict("unchanged", "both sides are the same capture")
    if change is None:
        return StepVerdict("inconclusive", "a side has no complete step")
    fewest = min(change.base_steps, change.head_steps)
    few = not change.logged and _are_few(change.base_steps, change.head_steps)
    not_told = f"{fewest} complete {'step' if fewest == 1 else 'steps'} on a side cannot be told from noise"
    if few and fewest == 1:
        return StepVerdict("inconclusive", not_told, 5)
    noise = change.noise_frac
    if change.high_frac >= -noise and change.low_frac <= noise and not _agreed(change):
        if change.of_slow_steps and not same_program:
            return StepVerdict("improved" if change.mean_frac < 0 else "regressed")
        others = {"captured steps changed": change.captured_frac, "mean step changed": change.mean_frac}
        for what, frac in others.items():
            if abs(frac) > max(noise, UNCHANGED):
                return StepVerdict(
                    "inconclusive", f"the {what}, and half of all steps may take as long as before"
                )
        if max(-change.low_frac, change.high_frac) <= max(noise, UNCHANGED):
            return StepVerdict("unchanged")
        if few:
            return StepVerdict("inconclusive", not_told, 5)
        sure = change.low_frac > 0 or change.high_frac < 0
        why = (
            "two captures of one job may differ by as much" if sure else "the steps vary more than the change"
        )
        return StepVerdict("inconclusive", why, _needed(change))
    why = ""
    if _waiting_explains(change):
        why = "training threads waited for free cores, which may explain the change"
    elif same_program and _machine_explains(change):
        taken = f"{1 + (change.operators_frac or 0.0):.2f} times as long"
        why = f"the same operators took {taken}: the machine may have been slower or faster"
    elif same_program and change.logged and abs(change.captured_frac) <= noise:
        why = "the captured steps do not show it, and nothing else differs"
    elif _contradicted(change):
        why = "the steps without the profiler do not agree with the captured ones"
    if why:
        return StepVerdict("inconclusive", why)
    return StepVerdict("improved" if change.change_frac < 0 else "regressed")


def _waiting_explains(change: StepChange, machine: float = 1.0) -> bool:
    """True where the change could vanish if threads had waited for cores on neither side.

    What else runs on the machine differs from capture to capture, so each side is taken without its own
    waiting. HEAD's machine takes ``machine`` times as long for the same work.
    """
    ran = (1 - change.head_waited_frac) / max(1 - change.base_waited_frac, LEAST_RUN) / machine
    # Of many steps the interval holds that some waited more than others; of few it is all that is known.
    likely = change.logged or _agreed(change)
    if change.change_frac < 0:
        least = change.change_frac if likely else change.high_frac
        return (1 + least) * ran > 1 - change.noise_frac
    least = change.change_frac if likely else change.low_frac
    return (1 + least) * ran < 1 + change.noise_frac


def _machine_explains(change: StepChange) -> bool:
    """True where the change could be that of a machine on which every operator takes so much longer.

    A busy neighbour on the host of a virtual machine, or another clock, slows all that a CPU does, and no
    thread waits for a core; what threads do wait may come on top.
    """
    if change.operators_frac is None or change.operators_frac * change.change_frac <= 0:
        return False
    return _waiting_explains(change, 1 + change.operators_frac)


def _operators(base: Diagnosis, head: Diagnosis) -> float | None:
    """Return the change of the time that a step spends in operators; ``None`` where it is not known."""
    before, after = (_by_step(side, lambda step: step.compute_ms) for side in (base, head))
    old, new = float(np.median(before)), float(np.median(after))
    return new / old - 1 if old > 0 and new > 0 else None


def _waited(diagnosis: Diagnosis, steps_ms: Sequence[float]) -> float:
    """Return the share of a step in which training threads waited for a free core; 0 where unknown."""
    waits = diagnosis.numbers("core_wait_ms").values()
    return min(max(waits, default=0.0) / float(np.median(steps_ms)), 1.0)


def _agreed(change: StepChange) -> bool:
    """True where steps differ for sure, if not surely by more than noise, and other ones of the runs say it.

    Captured steps and those without the profiler are other ones: where the medians of both change by more
    than noise, in one direction, that is no chance.
    """
    base, head = change.base_unprofiled_ms, change.head_unprofiled_ms
    others = change.captured_frac if change.logged else head / base - 1 if head and base else 0.0
    if change.low_frac <= 0 <= change.high_frac:
        return False
    sign = 1 if change.change_frac > 0 else -1
    return min(sign * change.change_frac, sign * others) > change.noise_frac


def _contradicted(change: StepChange) -> bool:
    if change.logged:
        return change.captured_frac * change.change_frac < 0 and abs(change.captured_frac) > change.noise_frac
    base, head = change.base_unprofiled_ms, change.head_unprofiled_ms
    if not base or not head:
        return False
    outside = head / base - 1
    return outside * change.change_frac < 0 and abs(outside) > change.noise_frac


def _unprofiled(diagnosis: Diagnosis) -> float | None:
    step_ms = diagnosis.number("unprofiled_step_ms")
    return step_ms if step_ms is not None and step_ms > 0 else None


def _needed(change: StepChange) -> int | None:
    """Return about how many steps a side needs: an interval narrows with the root of their number."""
    if change.logged:
        return None
    half = (change.high_frac - change.low_frac) / 2
    size = abs(change.change_frac)
    room = size - change.noise_frac if size > change.noise_frac else UNCHANGED - size
    if room <= 0 or half <= 0:
        return None
    wider = min(half / room, float(_STEPS_COMPARED))
    needed = ceil(min(change.base_steps, change.head_steps) * wider**2)
    return needed if needed <= _STEPS_COMPARED else None


def _cut(first: int, second: int) -> int:
    """The number of sorted ratios to leave out at each end for the interval of 95 %.

    That is the largest c for which P(U <= c) is at most 2.5 %, U being the rank-sum statistic of two samples
    from one distribution; 0 where none is.
    """
    tail = (1 - CONFIDENCE) / 2
    if max(first, second) > _EXACT_UP_TO:
        spread = (first * second * (first + second + 1) / 12) ** 0.5
        return max(int(first * second / 2 - 1.959964 * spread) - 1, 0)
    counts = _rank_sum_counts(first, second)
    total, below = comb(first + second, first), 0
    for cut, count in enumerate(counts):
        below += count
        if below > tail * total:
            return max(cut - 1, 0)
    return 0


def _rank_sum_counts(first: int, second: int) -> Sequence[int]:
    """The number of orders of two samples in which the statistic U has each value: a Gaussian binomial."""
    counts = [1]
    for size in range(1, first + 1):
        # times (1 - q^(second + size)) / (1 - q^size)
        grown = [0] * (len(counts) + second)
        for value, count in enumerate(counts):
            grown[value] += count
            if value + second + size < len(grown):
                grown[value + second + size] -= count
        for value in range(size, len(grown)):
            grown[value] += grown[value - size]
        counts = grown
    return counts
