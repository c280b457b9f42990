"""Work out every strategy on a question: what it takes, whether that fits, and how long a step is."""

from __future__ import annotations

import msgspec

from tracedoc.planner.activations import Memory, peak_memory
from tracedoc.planner.hardware import Cluster
from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS, Layout
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
    """One strategy on this question.

    It ``fits`` if the memory holds everything but the reserve, and is ``tight`` if it does not hold that as
    well: published runs live there, others run out of memory. ``headroom_bytes`` is what is left beside the
    reserve, negative where it is missing. ``traffic_bytes`` is what each GPU sends in a step; ``step`` and
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


def families(framework: str) -> tuple[str, ...]:
    """Return whose strategies a project may be advised: one on DeepSpeed stays there; stage 0 is DDP."""
    if framework in PARALLEL_FRAMEWORKS:
        return (framework,)
    return ("ddp", "deepspeed") if framework == "deepspeed" else ("ddp", "fsdp")


def usable(question: Question, wish: Wish) -> list[Strategy]:
    """Return the strategies of the framework that mean something on these GPUs."""
    return [s for s in possible(question.gpus, question.nodes) if s.family in families(wish.framework)]


def candidate(question: Question, strategy: Strategy, wish: Wish) -> Candidate:
    """Return one strategy, with activation checkpointing where that is wanted, or needed and left open."""
    wanted = question.training.checkpointing
    if wanted == "auto" and wish.objective == "memory":
        wanted = "on"
    for checkpointing in {"on": (True,), "selective": (True,), "off": (False,)}.get(wanted, (False, True)):
        memory = peak_memory(question, strategy, checkpointing=checkpointing)
        if memory.total <= question.memory_bytes:
            break
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
    fits = memory.total - memory.reserve <= question.memory_bytes
    return Candidate(
        strategy=strategy.id,
        title=strategy.title,
        family=strategy.family,
        checkpointing=checkpointing,
        memory=memory,
        total_bytes=memory.total,
        fits=fits,
        tight=fits and memory.total > question.memory_bytes,
        headroom_bytes=question.memory_bytes - memory.total,
        traffic_bytes=sent_in_a_step(question, strategy),
        step=step,
        tokens_per_second=question.tokens_in_a_step / step.expected_ms * 1e3 if step else None,
        selective=checkpointing and wanted == "selective",
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
            return (
                format_ms(worst)
                if worst - best < 0.05 * worst
                else f"{format_ms(best)} to {format_ms(worst)}"
            )
    else:
        digits = 2 if worst < 10_000 else 1
        low, high, unit = f"{best / 1e3:.{digits}f}", f"{worst / 1e3:.{digits}f}", "s"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
