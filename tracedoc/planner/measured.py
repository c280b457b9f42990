"""Hold a prediction against a measured run, so that other strategies can be rescaled by it."""

from __future__ import annotations

import msgspec

from tracedoc.planner.candidates import Wish
from tracedoc.planner.layouts import STRATEGIES, data_parallel
from tracedoc.planner.memory import peak_memory
from tracedoc.planner.setup import Question
from tracedoc.planner.timing import Step, predict
from tracedoc.units import format_gb


def peak_note(question: Question, strategy: str, peak_bytes: float, *, checkpointing: bool) -> str:
    """Return the measured peak and what is predicted for it, without the context, which is in neither."""
    if strategy not in STRATEGIES:
        return ""
    memory = peak_memory(question, data_parallel(question, strategy), checkpointing=checkpointing)
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
        """Return what a step took beyond computation and communication: the host's part, which stays."""
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
    question: Question, wish: Wish, strategy: str, step_ms: float, *, checkpointing: bool
) -> tuple[float, str]:
    """Return what a run's step took beside its computation and communication, and a sentence about it.

    For a run whose tokens are not known: its computation, in ``wish``, stands for every strategy.
    """
    compute_ms = wish.measured_compute_ms
    own = f"Measured {step_ms:.3g} ms a step, of which {compute_ms:.3g} ms computation"
    found = None
    if strategy in STRATEGIES:
        found = predict(
            question,
            data_parallel(question, strategy),
            wish.cluster,
            checkpointing=checkpointing,
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
    question: Question, wish: Wish, strategy: str, measured_compute_ms: float, *, checkpointing: bool
) -> Comparison | None:
    """Return the comparison for the strategy that the run has now, ``None`` where no time can be predicted.

    ``question`` is the run as it was captured. The update is part of what a run computes.
    """
    if strategy not in STRATEGIES:
        return None
    chosen = data_parallel(question, strategy)
    predicted = predict(
        question, chosen, wish.cluster, checkpointing=checkpointing, utilisation=wish.utilisation
    )
    if predicted is None or predicted.compute_ms <= 0:
        return None
    scale = max(0.05, measured_compute_ms - predicted.optimizer_ms) / predicted.compute_ms
    rescaled = predict(question, chosen, wish.cluster, checkpointing=checkpointing, scale=scale)
    assert rescaled is not None
    return Comparison(chosen.title, predicted, rescaled, scale)
