"""What captured steps show beside the analysed one: steps far longer, and ranks that are late in some."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.rehearsal import Together, gains_together, rehearsal
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.stragglers import stragglers

Floats = npt.NDArray[np.float64]

ALIKE = 0.02
"""Steps that differ by no more than this share are alike: all of them are like the analysed one."""

FAR, FAR_OF_TWO = 0.10, 0.5
FAR_SPREADS = 5.0
"""A step is far longer if it is by this share of the usual one, and by so many times what others differ; of two
steps, which do not show how much they differ, by the second share."""

KIND_OF = {"kernels": "ranks.compute", "input": "ranks.input"}
"""The cause of the ledger for what makes a rank late; all else is its host."""


class StepsApart(msgspec.Struct, frozen=True):
    """The mean captured step, and what it holds beyond the analysed one, in ms.

    ``slow_ms`` is what steps that are far longer cost a step. ``ranks`` has, by the cause of the ledger, how
    much more late ranks cost the mean step than the analysed one (negative where it is less), and which these
    are.
    """

    step_ms: float
    steps: tuple[int, ...]
    slow_ms: float = 0.0
    slow_place: str = ""
    ranks: dict[str, tuple[float, tuple[int, ...]]] = msgspec.field(default_factory=dict)


def late_over_steps(run: RunView, cause: str) -> tuple[int, ...]:
    """The ranks that a cause makes late, by what each costs all steps: those that cost half of the worst."""
    costs = {
        late.rank: float(np.maximum(late.gain_ns, 0).mean())
        for late in stragglers(run)
        if KIND_OF.get(late.cause, "ranks.host") == cause
    }
    worst = max(costs.values(), default=0.0)
    return tuple(sorted(rank for rank, ns in costs.items() if ns >= worst / 2 > 0))


def steps_apart(run: RunView, analysed: int, analysed_ms: float) -> StepsApart:
    """Compare all complete steps that every rank has with the analysed one."""
    lengths = _lengths_ms(run)
    if analysed not in lengths:
        return StepsApart(analysed_ms, (analysed,))
    steps = tuple(sorted(lengths))
    length = np.array([lengths[step] for step in steps])
    mean = float(length.mean())
    if np.abs(length - lengths[analysed]).max() <= ALIKE * lengths[analysed]:
        return StepsApart(mean, steps)
    late = _late_ms(run, steps)
    own = steps.index(analysed)
    usual = float(np.sort(length)[(length.size - 1) // 2])
    excess = length - usual - np.maximum(late - late[own], 0.0)
    apart = np.sort(np.abs(length - usual))
    spread = float(apart[(length.size - 1) // 2])
    far = excess > max((FAR_OF_TWO if len(steps) == 2 else FAR) * usual, FAR_SPREADS * spread)
    slow = float(np.where(far, excess, 0.0).mean())
    place = f"step {steps[int(np.argmax(excess))]}" if far.any() else ""
    more = float(late.mean() - late[own])
    return StepsApart(mean, steps, slow, place, _by_cause(run, steps, own, more))


def _lengths_ms(run: RunView) -> dict[int, float]:
    """The length of each step that all ranks captured whole: the mean over the ranks."""
    found: dict[int, list[int]] = {}
    for digest in run.digests:
        for step in digest.complete_steps:
            found.setdefault(step.index, []).append(step.budget.window_ns)
    return {
        step: sum(every) / len(every) / 1e6 for step, every in found.items() if len(every) == len(run.digests)
    }


def _late_ms(run: RunView, steps: tuple[int, ...]) -> Floats:
    """What each step takes longer than if all ranks came as early as the median one; zeros if not known."""
    if len(run.digests) < 2 or rehearsal(run) is None:
        return np.zeros(len(steps))
    return np.maximum(gains_together(run, Together.MEDIAN, steps), 0) / 1e6


def _by_cause(
    run: RunView, steps: tuple[int, ...], own: int, more: float
) -> dict[str, tuple[float, tuple[int, ...]]]:
    """What late ranks cost beyond the analysed step, by what makes each of them late."""
    if not more:
        return {}
    parts: dict[str, dict[int, float]] = {}
    for late in stragglers(run):
        gain = np.maximum(late.gain_ns, 0) / 1e6
        at = {step: float(ms) for step, ms in zip(late.steps, gain.tolist(), strict=True)}
        beyond = float(gain.mean()) - at.get(steps[own], 0.0)
        if beyond * more > 0:
            parts.setdefault(KIND_OF.get(late.cause, "ranks.host"), {})[late.rank] = abs(beyond)
    total = sum(sum(ranks.values()) for ranks in parts.values())
    return {
        name: (more * sum(ranks.values()) / total, tuple(sorted(ranks)) if more > 0 else ())
        for name, ranks in parts.items()
    }
