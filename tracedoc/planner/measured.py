"""Hold predictions against a captured run: what fits, rescaled steps, and those that a replay predicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.planner.layouts import STRATEGIES, data_parallel
from tracedoc.planner.memory import SPREAD, model_states, peak_memory
from tracedoc.planner.setup import PlanRequest, Question, Replayed, Training
from tracedoc.planner.shape import shape_from_parameters
from tracedoc.planner.timing import Step, predict
from tracedoc.units import format_gb, format_ms


class Fit(msgspec.Struct, frozen=True):
    """Whether a change surely fits on a GPU. ``fits`` is ``None`` where that is not known, for ``reason``.

    ``added_bytes`` is what the change adds to the measured peak; it ``fits`` where that leaves
    :data:`tracedoc.planner.memory.SPREAD` of what is added.
    """

    fits: bool | None
    added_bytes: float | None
    reason: str = ""


def unsharded(
    strategy: str,
    *,
    parameters: int | None,
    gpus: int,
    memory_bytes: float | None,
    peak_bytes: float | None,
    precision: str = "bf16-mixed",
) -> Fit:
    """Whether a run of a sharding strategy that uses AdamW would still fit as DDP.

    ``strategy`` is an id of :data:`tracedoc.planner.layouts.STRATEGIES`; ``peak_bytes`` the measured peak of
    one GPU, everything in it. What is ``None`` is not known.
    """
    for value, name in ((memory_bytes, "the memory of the GPU"), (peak_bytes, "the peak of the run")):
        if value is None:
            return Fit(None, None, f"{name} is not known")
    if parameters is None or parameters < 100_000:
        return Fit(None, None, "the parameters of the model are not known")
    assert memory_bytes is not None
    assert peak_bytes is not None
    question = Question(shape_from_parameters(parameters), Training(precision=precision), gpus, 1, 1.0)
    now, then = (model_states(question, data_parallel(question, name)) for name in (strategy, "ddp"))
    added = then.states + then.copies - now.states - now.copies
    return Fit(peak_bytes + added * (1 + SPREAD) <= memory_bytes, added)


def peak_note(question: Question, strategy: str, peak_bytes: float) -> str:
    """Return the measured peak and what is predicted for it, without the context, which is in neither."""
    if strategy not in STRATEGIES:
        return ""
    memory = peak_memory(question, data_parallel(question, strategy))
    predicted = memory.total - memory.context
    error = f"{predicted / peak_bytes - 1:+.0%}"
    return f"Measured peak {format_gb(peak_bytes)} on a GPU, predicted {format_gb(predicted)} ({error})."


class Comparison(msgspec.Struct, frozen=True):
    """What was predicted for the run as it is, and what its computation took over that.

    ``rescaled`` is the prediction with the run's own computation in it.
    """

    title: str
    predicted: Step
    rescaled: Step
    scale: float

    def idle_ms(self, measured_ms: float | None) -> float:
        """The milliseconds of a step beyond computation and communication: the host's part, which stays."""
        return max(0.0, measured_ms - self.rescaled.expected_ms) if measured_ms else 0.0

    def note(self, measured_ms: float | None) -> str:
        """Return measured and predicted step in a sentence; empty where no step was measured."""
        if measured_ms is None:
            return ""
        predicted = self.predicted.expected_ms
        error = f"{predicted / measured_ms - 1:+.0%}"
        return (
            f"Measured {measured_ms:.3g} ms a step with {self.title}, predicted {predicted:.3g} ms ({error})."
            f" Computation is scaled by {self.scale:.2f} here, as the run measured it, and each strategy"
            f" idles {self.idle_ms(measured_ms):.3g} ms as the run does."
        )


def beside_computation(
    question: Question, request: PlanRequest, strategy: str, step_ms: float
) -> tuple[float, str]:
    """The milliseconds of a run's step beside computation and communication, and a sentence about them.

    For a run whose tokens are not known: its computation, in ``request``, stands for every strategy.
    """
    compute_ms = request.measured_compute_ms
    own = f"Measured {step_ms:.3g} ms a step, of which {compute_ms:.3g} ms computation"
    found = None
    if strategy in STRATEGIES:
        found = predict(
            question,
            data_parallel(question, strategy),
            request.cluster,
            measured_compute_ms=compute_ms,
        )
    if found is None:
        return 0.0, f"{own}, which stands for every strategy."
    idle_ms = max(0.0, step_ms - found.expected_ms)
    return idle_ms, (
        f"{own}, which stands for every strategy; with it {found.expected_ms:.3g} ms are predicted for"
        f" {STRATEGIES[strategy].title}, and each strategy idles {idle_ms:.3g} ms as the run does."
    )


def compare(
    question: Question, request: PlanRequest, strategy: str, measured_compute_ms: float
) -> Comparison | None:
    """Return the comparison for the strategy that the run has now, ``None`` where no time can be predicted.

    ``question`` is the run as it was captured. The update is part of what a run computes.
    """
    if strategy not in STRATEGIES:
        return None
    chosen = data_parallel(question, strategy)
    predicted = predict(question, chosen, request.cluster, utilisation=request.utilisation)
    if predicted is None or predicted.compute_ms <= 0:
        return None
    scale = max(0.05, measured_compute_ms - predicted.optimizer_ms) / predicted.compute_ms
    rescaled = predict(question, chosen, request.cluster, scale=scale)
    assert rescaled is not None
    return Comparison(chosen.title, predicted, rescaled, scale)


KEPT = {"full-shard": "shard-grad-op", "zero-3": "zero-2"}
"""What a strategy becomes whose parameters stay gathered from the forward to the backward pass."""


def replayed_steps(
    question: Question,
    strategy: str,
    measured_ms: float | None,
    predicted: Iterable[tuple[str, tuple[float, float, float]]],
) -> tuple[Replayed, ...]:
    """Return the steps that changes of a captured run stand for; ``question`` is the run as it is.

    ``predicted`` are changes, as ``tracedoc whatif`` takes them, with the step after each. Beside them stands
    the run's own step: what was measured is compared with what was replayed, and not with a formula.
    """
    if strategy not in STRATEGIES or measured_ms is None:
        return ()

    def step(of: str, gpus: int, step_ms: tuple[float, float, float]) -> Replayed:
        return Replayed(of, question.training, gpus, question.nodes, step_ms)

    found = []
    for change, step_ms in predicted:
        name, _, rest = change.partition(" ")
        if name == "keep-gathered" and not rest and strategy in KEPT:
            found.append(step(KEPT[strategy], question.gpus, step_ms))
        elif name == "more-ranks" and rest.startswith("by="):
            found.append(step(strategy, round(question.gpus * float(rest[3:])), step_ms))
    return (step(strategy, question.gpus, (measured_ms,) * 3), *found) if found else ()


def as_replayed(
    step: Step | None, question: Question, strategy: str, known: Sequence[Replayed]
) -> Step | None:
    """Return a predicted step whose length is that of the replay, where there is one; its parts stay."""
    one = _of(question, strategy, known)
    if step is None or one is None:
        return step
    low, likely, high = one.step_ms
    return replace(step, best_ms=low, expected_ms=likely, worst_ms=high)


def _of(question: Question, strategy: str, known: Sequence[Replayed]) -> Replayed | None:
    asked = (strategy, question.training, question.gpus, question.nodes)
    same = (one for one in known if asked == (one.strategy, one.training, one.gpus, one.nodes))
    return next(same, None)


def replayed_note(question: Question, known: Sequence[Replayed]) -> str:
    """A sentence on the strategies whose steps are replayed for a question; empty where none is."""
    steps = [
        f"{format_ms(one.step_ms[1])} for {STRATEGIES[one.strategy].title}"
        for one in known[1:]
        if one == _of(question.changed(checkpointing=one.training.checkpointing), one.strategy, known)
    ]
    return f"Replayed from the run instead of estimated: {', '.join(steps)}." if steps else ""
