"""Take the step of a strategy from the replay of a captured run, where that predicts the same change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.planner.layouts import STRATEGIES
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.timing import Step
from tracedoc.units import format_ms

KEPT = {"full-shard": "shard-grad-op", "zero-3": "zero-2"}
"""What a strategy becomes whose parameters stay gathered from the forward to the backward pass."""


class Replayed(msgspec.Struct, frozen=True):
    """The step of one strategy that a run's replay predicts: low, likely and high, in milliseconds.

    It holds for ``training`` on so many ``gpus`` in so many ``nodes``, and for nothing else.
    """

    strategy: str
    training: Training
    checkpointing: bool
    gpus: int
    nodes: int
    step_ms: tuple[float, float, float]


def replayed_steps(
    question: Question,
    strategy: str,
    measured_ms: float | None,
    predicted: Iterable[tuple[str, tuple[float, float, float]]],
    *,
    checkpointing: bool,
) -> tuple[Replayed, ...]:
    """Return the steps that changes of a captured run stand for; ``question`` is the run as it is.

    ``predicted`` are changes, as ``tracedoc whatif`` takes them, with the step after each. Beside them stands
    the run's own step: what was measured is compared with what was replayed, and not with a formula.
    """
    if strategy not in STRATEGIES or measured_ms is None:
        return ()

    def step(of: str, gpus: int, step_ms: tuple[float, float, float]) -> Replayed:
        return Replayed(of, question.training, checkpointing, gpus, question.nodes, step_ms)

    found = []
    for change, step_ms in predicted:
        name, _, rest = change.partition(" ")
        if name == "keep-gathered" and not rest and strategy in KEPT:
            found.append(step(KEPT[strategy], question.gpus, step_ms))
        elif name == "more-ranks" and rest.startswith("by="):
            found.append(step(strategy, round(question.gpus * float(rest[3:])), step_ms))
    return (step(strategy, question.gpus, (measured_ms,) * 3), *found) if found else ()


def as_replayed(
    step: Step | None, question: Question, strategy: str, known: Sequence[Replayed], *, checkpointing: bool
) -> Step | None:
    """Return a predicted step whose length is that of the replay, where there is one; its parts stay."""
    one = _of(question, strategy, known, checkpointing=checkpointing)
    if step is None or one is None:
        return step
    low, likely, high = one.step_ms
    return replace(step, best_ms=low, expected_ms=likely, worst_ms=high)


def _of(
    question: Question, strategy: str, known: Sequence[Replayed], *, checkpointing: bool
) -> Replayed | None:
    asked = (strategy, question.training, checkpointing, question.gpus, question.nodes)
    same = (one for one in known if asked == (
        one.strategy, one.training, one.checkpointing, one.gpus, one.nodes
    ))  # fmt: skip
    return next(same, None)


def note(question: Question, known: Sequence[Replayed]) -> str:
    """Return which strategies' steps are replayed for a question; empty where none is."""
    steps = [
        f"{format_ms(one.step_ms[1])} for {STRATEGIES[one.strategy].title}"
        for one in known[1:]
        if one == _of(question, one.strategy, known, checkpointing=one.checkpointing)
    ]
    return f"Replayed from the run instead of estimated: {', '.join(steps)}." if steps else ""
