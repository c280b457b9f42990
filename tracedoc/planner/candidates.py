"""Work out every strategy on a question: what it takes, whether that fits, and how long a step is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tracedoc.planner.activations import Memory, peak_memory
from tracedoc.planner.hardware import Cluster
from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS, Layout
from tracedoc.planner.memory import SPREAD
from tracedoc.planner.replayed import Replayed, as_replayed
from tracedoc.planner.setup import Question
from tracedoc.planner.strategies import Strategy, possible
from tracedoc.planner.timing import Step, predict
from tracedoc.planner.traffic import sent_in_a_step
from tracedoc.units import format_ms

FRAMEWORKS = ("pytorch", "accelerate", "trainer", "deepspeed", *PARALLEL_FRAMEWORKS)
OBJECTIVES = ("speed", "memory")


class Wish(msgspec.Struct, frozen=True):
    """What is known of the machines, and what is wanted."""

    cluster: Cluster
    objective: str = "speed"
    framework: str = "pytorch"
    utilisation: float | None = None
    """Share of the peak that all arithmetic reaches, in place of the fitted model."""
    measured_compute_ms: float | None = None
    """What the GPU of a captured run computed in a step, without recomputation; it replaces the estimate."""
    scale: float = 1.0
    """What a captured run computed over what was predicted for it; the estimate is multiplied by it."""
    idle_ms: float = 0.0
    """What a captured run's step took beside computation and communication; every step takes it."""
    replayed: tuple[Replayed, ...] = ()
    """Steps that the replay of a captured run predicts; they replace the estimate."""
    batch: int | None = None
    """Sequences of all GPUs for each update, where layouts divide them otherwise than evenly over GPUs."""


class Candidate(msgspec.Struct, frozen=True):
    """One strategy or layout on this question.

    It ``fits`` unless all but the reserve exceeds the memory by more than :data:`SPREAD`, and is ``tight`` if
    the whole peak comes that near to the memory: it may fit or not. ``headroom_bytes`` is what is left beside
    the peak, negative where it is missing. ``traffic_bytes`` is what each GPU sends in a step; ``step`` and
    ``tokens_per_second`` (of all GPUs) are ``None`` where GPU or link are not known.
    """

    strategy: str
    title: str
    family: str
    checkpointing: bool
    memory: Memory
    total_bytes: float
    fits: bool
    tight: bool
    headroom_bytes: float
    traffic_bytes: float
    step: Step | None
    tokens_per_second: float | None
    layout: Layout | None = None
    """How a model is split that is not only trained data-parallel."""
    selective: bool = False
    """Whether checkpointing keeps some of the activations."""

    @property
    def doubt(self) -> int:
        """How doubtful it is that this fits.

        0: it fits. 1: unless it takes more than predicted. 2: only if it takes less. 3: it does not.
        """
        if not self.fits:
            return 3
        return int(self.tight) + int(self.tight and self.headroom_bytes < 0)


def may_fit(memory: Memory, available: float) -> bool:
    """Return whether a peak may fit into so many bytes, if the reserve is not needed and the rest is less."""
    return (memory.total - memory.reserve) * (1 - SPREAD) <= available


def surely_fits(memory: Memory, available: float) -> bool:
    """Return whether a peak fits into so many bytes even if it is as much larger as published ones were."""
    return memory.total * (1 + SPREAD) <= available


def families(framework: str) -> tuple[str, ...]:
    """Return whose strategies a project may be advised: one on DeepSpeed stays there; stage 0 is DDP."""
    if framework in PARALLEL_FRAMEWORKS:
        return (framework,)
    return ("ddp", "deepspeed") if framework == "deepspeed" else ("ddp", "fsdp")


def usable(question: Question, wish: Wish) -> list[Strategy]:
    """Return the strategies of the framework that mean something on these GPUs."""
    return [s for s in possible(question.gpus, question.nodes) if s.family in families(wish.framework)]


def checkpointed(question: Question, wish: Wish, peak: Callable[[bool], Memory]) -> tuple[bool, Memory]:
    """Return whether activations are checkpointed, and the peak then: as asked, or where needed if left open.

    ``peak`` gives the peak with and without. For least memory they always are.
    """
    wanted = question.training.checkpointing
    if wanted == "auto" and wish.objective == "memory":
        wanted = "on"
    if wanted != "auto":
        return wanted != "off", peak(wanted != "off")
    without = peak(False)
    return (False, without) if surely_fits(without, question.memory_bytes) else (True, peak(True))


def candidate(question: Question, strategy: Strategy, wish: Wish) -> Candidate:
    """Return one strategy, with activation checkpointing where that is wanted, or needed and left open."""
    checkpointing, memory = checkpointed(
        question, wish, lambda on: peak_memory(question, strategy, checkpointing=on)
    )
    step = predict(
        question,
        strategy,
        wish.cluster,
        checkpointing=checkpointing,
        utilisation=wish.utilisation,
        measured_compute_ms=wish.measured_compute_ms,
        scale=wish.scale,
        idle_ms=wish.idle_ms,
    )
    step = as_replayed(step, question, strategy.id, wish.replayed, checkpointing=checkpointing)
    return assessed(
        question,
        strategy.id,
        strategy.title,
        strategy.family,
        checkpointing=checkpointing,
        memory=memory,
        step=step,
        sent=sent_in_a_step(question, strategy),
        tokens=question.tokens_in_a_step,
    )


def assessed(
    question: Question,
    name: str,
    title: str,
    family: str,
    *,
    checkpointing: bool,
    memory: Memory,
    step: Step | None,
    sent: float,
    tokens: float,
    layout: Layout | None = None,
) -> Candidate:
    """Return a candidate with what follows from its peak and step: whether it fits, and ``tokens`` a second.

    ``tokens`` are those of an update, of all GPUs; ``sent`` the bytes that each GPU sends for it.
    """
    fits = may_fit(memory, question.memory_bytes)
    return Candidate(
        strategy=name,
        title=title,
        family=family,
        checkpointing=checkpointing,
        memory=memory,
        total_bytes=memory.total,
        fits=fits,
        tight=fits and not surely_fits(memory, question.memory_bytes),
        headroom_bytes=question.memory_bytes - memory.total,
        traffic_bytes=sent,
        step=step,
        tokens_per_second=tokens / step.expected_ms * 1e3 if step else None,
        layout=layout,
        selective=checkpointing and question.training.checkpointing == "selective",
    )


def with_checkpointing(title: str, checkpointing: bool, *, selective: bool) -> str:
    """Return a strategy in words, and whether activations are checkpointed, all or those chosen."""
    kind = "selective activation checkpointing" if selective else "activation checkpointing"
    return f"{title} with {kind}" if checkpointing else title


def step_range(candidate: Candidate) -> str:
    """Return the predicted step in words, best to worst; empty where it is unknown."""
    if candidate.step is None:
        return ""
    best, worst = candidate.step.best_ms, candidate.step.worst_ms
    if worst < 1000:
        low, high, unit = f"{best:.0f}", f"{worst:.0f}", "ms"
        if best < 10:
            longest = format_ms(worst)
            if worst - best < 0.05 * worst:
                return longest
            shortest, unit = format_ms(best).rsplit(" ", 1)
            return f"{shortest}{'' if longest.endswith(f' {unit}') else f' {unit}'} to {longest}"
    else:
        digits = 2 if worst < 10_000 else 1
        low, high, unit = f"{best / 1e3:.{digits}f}", f"{worst / 1e3:.{digits}f}", "s"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
