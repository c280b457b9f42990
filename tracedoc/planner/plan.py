"""Answer a question with a Plan: what ``tracedoc plan`` shows, in every format."""

from __future__ import annotations

import msgspec

from tracedoc.planner.advice import Advice, advise
from tracedoc.planner.assumptions import assumptions, short_step
from tracedoc.planner.candidates import Candidate, Wish, step_range, with_checkpointing
from tracedoc.planner.changes import Change
from tracedoc.planner.configurations import Configuration, configurations_of
from tracedoc.planner.loading import load_bytes_per_node
from tracedoc.planner.memory import SPREAD
from tracedoc.planner.search import Found, search
from tracedoc.planner.setup import Question, Training, check
from tracedoc.units import format_gb, format_percent

PLAN_SCHEMA = "1"


class Asked(msgspec.Struct, frozen=True):
    """The question in the words and numbers that the answer repeats."""

    model: str
    parameters: int
    trainable_parameters: int
    gpus: int
    nodes: int
    gpu: str
    gpu_memory_bytes: float
    training: Training


class Ask(msgspec.Struct, frozen=True):
    """What else is asked: to search the fastest micro-batch, with so many sequences for each update; how long
    training takes for so many tokens, and what it costs at a price of a GPU and hour.
    """

    search: bool = False
    batch: int | None = None
    tokens: int | None = None
    price: float | None = None


class Plan(msgspec.Struct, frozen=True):
    """Everything ``tracedoc plan`` has to say. Bytes, milliseconds, shares 0..1.

    ``recommended`` is the id of a strategy, ``None`` if nothing fits; ``because`` its reason or, then, what
    is missing. ``changes`` are single changes after which something fits, the smallest first. ``faster`` is a
    strategy that even with nothing hidden is predicted ahead of the recommended one's middle, if any;
    ``least`` is the framework's strategy that takes least. ``load_bytes_per_node`` is the host memory of a
    node while a checkpoint is loaded, ``None`` where that is not known.
    """

    schema_version: str
    summary: str
    asked: Asked
    recommended: str | None
    rule: str
    because: str
    strategies: tuple[Candidate, ...]
    changes: tuple[Change, ...]
    turning_points: tuple[str, ...]
    faster: str | None
    least: str
    configurations: tuple[Configuration, ...]
    assumptions: tuple[str, ...]
    objective: str
    framework: str
    tokens_per_second: float | None = None
    days: float | None = None
    cost: float | None = None
    found: tuple[Found, ...] = ()
    load_bytes_per_node: float | None = None


def plan(question: Question, wish: Wish, *, notes: tuple[str, ...] = (), ask: Ask | None = None) -> Plan:
    """Return the plan for a question; ``notes`` say where its numbers come from.

    Where a search is asked for, the plan is that of the fastest combination, if one fits. Raises
    :class:`tracedoc.errors.InputError` for what cannot be.
    """
    ask = ask or Ask()
    found: tuple[Found, ...] = ()
    if ask.search:
        check(question)
        found = search(question, wish, batch=ask.batch)
        for best in found[:1]:
            question = question.changed(
                micro_batch=best.micro_batch,
                accumulation=best.accumulation,
                checkpointing=best.checkpointing,
            )
    advice = advise(question, wish)
    chosen = advice.chosen
    model = question.model
    written: tuple[Configuration, ...] = ()
    if chosen is not None:
        written = configurations_of(question, chosen)
    return Plan(
        schema_version=PLAN_SCHEMA,
        summary=_summary(advice),
        asked=Asked(
            model=model.name,
            parameters=model.parameters,
            trainable_parameters=question.trainable,
            gpus=question.gpus,
            nodes=question.nodes,
            gpu=wish.cluster.gpu.name if wish.cluster.gpu else "",
            gpu_memory_bytes=question.memory_bytes,
            training=question.training,
        ),
        recommended=chosen.strategy if chosen else None,
        rule=advice.rule,
        because=advice.because if chosen else _missing(advice),
        strategies=_ordered(advice),
        changes=advice.changes,
        turning_points=advice.turning_points,
        faster=advice.faster.strategy if advice.faster else None,
        least=advice.least.strategy,
        configurations=written,
        assumptions=(*notes, *assumptions(question, wish, chosen), *short_step(chosen, wish)),
        objective=wish.objective,
        framework=wish.framework,
        tokens_per_second=chosen.tokens_per_second if chosen else None,
        **_duration(question, chosen, ask),
        found=found,
        load_bytes_per_node=load_bytes_per_node(question, chosen, wish.framework) if chosen else None,
    )


def _duration(question: Question, chosen: Candidate | None, ask: Ask) -> dict[str, float]:
    if ask.tokens is None or chosen is None or chosen.tokens_per_second is None:
        return {}
    days = ask.tokens / chosen.tokens_per_second / 86_400
    cost = {} if ask.price is None else {"cost": days * 24 * question.gpus * ask.price}
    return {"days": days, **cost}


def _summary(advice: Advice) -> str:
    question, chosen = advice.question, advice.chosen
    each = "the GPU" if question.gpus == 1 else f"each of {question.gpus} GPUs"
    memory = format_gb(question.memory_bytes)
    if chosen is not None:
        time = f", {step_range(chosen)} a step predicted" if chosen.step else ""
        title = with_checkpointing(chosen.title, chosen.checkpointing, selective=chosen.selective)
        title = title[:1].upper() + title[1:]
        text = f"{title}: {format_gb(chosen.total_bytes)} of the {memory} on {each}{time}."
        return text + (f" It may not fit: {_DOUBT}." if chosen.tight else "")
    least = advice.least
    if least.fits:
        nothing = f"Nothing is predicted to fit: {each} has {memory}, and {least.title} takes"
        text = f"{nothing} {format_gb(least.total_bytes)} ({_DOUBT})."
        return text + _smallest(advice)
    needed = f"{'training' if least.strategy == 'single' else f'even {least.title}'} needs"
    nothing = "Nothing of DeepSpeed's" if advice.wish.framework == "deepspeed" else "Nothing"
    text = f"{nothing} fits: {each} has {memory}, and {needed} {format_gb(least.total_bytes)}."
    return text + _smallest(advice)


def _smallest(advice: Advice) -> str:
    if not advice.changes:
        return " No single change that is known here helps."
    smallest = advice.changes[0]
    then = with_checkpointing(smallest.strategy, smallest.checkpointing, selective=smallest.selective)
    size = format_gb(smallest.total_bytes)
    return f" The smallest change that would: {smallest.what} ({then}, {size})."


_DOUBT = f"nine of ten published peaks lie within {format_percent(SPREAD)} of what is predicted"


def _missing(advice: Advice) -> str:
    least = advice.least
    states = format_gb(least.memory.states.states)
    missing = format_gb(-least.headroom_bytes)
    where = "the GPU" if least.strategy == "single" else f"each GPU with {least.title}"
    return f"{missing} are missing on {where}: parameters, gradients and optimizer alone take {states}."


def _ordered(advice: Advice) -> tuple[Candidate, ...]:
    # The chosen one leads; the ranking stays as it is below.
    chosen = advice.chosen
    rest = [c for c in advice.candidates if chosen is None or c.strategy != chosen.strategy]
    return (chosen, *rest) if chosen else tuple(rest)
