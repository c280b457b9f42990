"""Answer a question with a Plan: search, rank, choose, and say so; what ``tracedoc plan`` shows."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.assumptions import assumptions, load_bytes_per_node, short_step
from tracedoc.planner.candidates import (
    Candidate,
    asked_for,
    candidate,
    families,
    offered,
    rank,
    sequences_of_an_update,
    step_range,
    usable,
    with_checkpointing,
)
from tracedoc.planner.choice import Change, changes, choose, turning_points
from tracedoc.planner.configurations import Configuration, configurations_of
from tracedoc.planner.layouts import STRATEGIES, can_offload, can_train, check_layouts, data_parallel
from tracedoc.planner.memory import SPREAD
from tracedoc.planner.setup import PARALLEL_FRAMEWORKS, PlanRequest, Question, Training, check
from tracedoc.units import format_gb, format_percent

PLAN_SCHEMA = "1"


class QuestionSummary(msgspec.Struct, frozen=True):
    """The question in the words and numbers that the answer repeats."""

    model: str
    parameters: int
    trainable_parameters: int
    gpus: int
    nodes: int
    gpu: str
    gpu_memory_bytes: float
    training: Training


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
    asked: QuestionSummary
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


def plan(question: Question, request: PlanRequest, *, notes: tuple[str, ...] = ()) -> Plan:
    """Return the plan for a question; ``notes`` say where its numbers come from.

    Where a search is asked for, the plan is that of the fastest combination, if one fits. Raises
    :class:`tracedoc.errors.InputError` for what cannot be.
    """
    found: tuple[Found, ...] = ()
    if request.search:
        check(question)
        found = search(question, request)
        for best in found[:1]:
            question = question.changed(
                micro_batch=best.micro_batch,
                accumulation=best.accumulation,
                checkpointing=best.checkpointing,
            )
    advice = advise(question, request)
    chosen = advice.chosen
    model = question.model
    written: tuple[Configuration, ...] = ()
    if chosen is not None:
        written = configurations_of(question, chosen)
    return Plan(
        schema_version=PLAN_SCHEMA,
        summary=_summary(advice),
        asked=QuestionSummary(
            model=model.name,
            parameters=model.parameters,
            trainable_parameters=question.trainable,
            gpus=question.gpus,
            nodes=question.nodes,
            gpu=request.cluster.gpu.name if request.cluster.gpu else "",
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
        assumptions=(*notes, *assumptions(question, request, chosen), *short_step(chosen, request)),
        objective=request.objective,
        framework=request.framework,
        tokens_per_second=chosen.tokens_per_second if chosen else None,
        **_duration(question, chosen, request),
        found=found,
        load_bytes_per_node=load_bytes_per_node(question, chosen, request.framework) if chosen else None,
    )


def _duration(question: Question, chosen: Candidate | None, request: PlanRequest) -> dict[str, float]:
    if request.tokens is None or chosen is None or chosen.tokens_per_second is None:
        return {}
    days = request.tokens / chosen.tokens_per_second / 86_400
    cost = {} if request.price is None else {"cost": days * 24 * question.gpus * request.price}
    return {"days": days, **cost}


def _summary(advice: Advice) -> str:
    question, chosen = advice.question, advice.chosen
    each = "the GPU" if question.gpus == 1 else f"each of {question.gpus} GPUs"
    memory = format_gb(question.memory_bytes)
    if chosen is not None:
        time = f", {step_range(chosen)} a step predicted" if chosen.step else ""
        title = with_checkpointing(chosen.title, chosen.checkpointing, selective=chosen.selective)
        title = _unlike_asked(advice) + title[:1].upper() + title[1:]
        text = f"{title}: {format_gb(chosen.total_bytes)} of the {memory} on {each}{time}."
        return text + (f" It may not fit: {_DOUBT}." if chosen.tight else "")
    least = advice.least
    if least.fits:
        nothing = f"Nothing is predicted to fit: {each} has {memory}, and {least.title} takes"
        text = f"{nothing} {format_gb(least.total_bytes)} ({_DOUBT})."
        return text + _smallest(advice)
    needed = f"{'training' if least.strategy == 'single' else f'even {least.title}'} needs"
    nothing = "Nothing of DeepSpeed's" if advice.request.framework == "deepspeed" else "Nothing"
    text = f"{nothing} fits: {each} has {memory}, and {needed} {format_gb(least.total_bytes)}."
    return text + _smallest(advice)


def _unlike_asked(advice: Advice) -> str:
    """A sentence on the layout that is asked for, empty where it fits or none is."""
    asked = asked_for(advice.candidates, advice.question, advice.request)
    if asked is None or asked is advice.chosen:
        return ""
    return f"{asked.title} is not predicted to fit: it takes {format_gb(asked.total_bytes)}. "


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


LARGEST_FITTED_BATCH = 512
SHOWN_CANDIDATES = 5


class Found(msgspec.Struct, frozen=True):
    """One combination that fits with its reserve: sequences of a GPU and micro-step, and what it reaches.

    ``checkpointing`` is "off", "selective" or "on"; ``tokens_per_second`` counts all GPUs.
    """

    strategy: str
    title: str
    micro_batch: int
    accumulation: int
    checkpointing: str
    total_bytes: float
    step_ms: float
    tokens_per_second: float


def search(question: Question, request: PlanRequest) -> tuple[Found, ...]:
    """The fastest combinations that fit, the fastest first.

    The request's ``batch`` stays the same; ``None`` leaves that open, without accumulation. Raises
    :class:`InputError` where no time can be predicted, as for an unknown GPU, and where the batch does not
    divide over the GPUs.
    """
    batch = request.batch
    if batch is not None and batch % question.gpus:
        near = max(1, round(batch / question.gpus)) * question.gpus
        raise InputError(
            f"--batch {batch} does not divide evenly over {question.gpus} GPUs", f"nearest: --batch {near}"
        )
    found = []
    for asked in _combinations(question, request, batch):
        for one in _fitting(asked, request):
            if one.step is None or one.tokens_per_second is None:
                raise InputError(
                    "the fastest micro-batch cannot be searched without predicted times",
                    'name the GPU, as --gpu "NVIDIA L4", or the size: --micro-batch 1',
                )
            training = asked.training
            found.append(
                Found(
                    strategy=one.strategy,
                    title=one.title,
                    micro_batch=training.micro_batch,
                    accumulation=training.accumulation,
                    checkpointing=training.checkpointing,
                    total_bytes=one.total_bytes,
                    step_ms=one.step.expected_ms,
                    tokens_per_second=one.tokens_per_second,
                )
            )
    # Of what is as fast to a percent, the one that takes less memory.
    found.sort(key=lambda f: (-round(f.tokens_per_second / _best(found), 2), f.total_bytes))
    return tuple(found[:SHOWN_CANDIDATES])


def _best(found: list[Found]) -> float:
    return max((f.tokens_per_second for f in found), default=1.0)


def _combinations(question: Question, request: PlanRequest, batch: int | None) -> Iterator[Question]:
    wanted = question.training.checkpointing
    kinds: tuple[str, ...] = ("off", "on") if wanted == "auto" else (wanted,)
    if wanted == "auto" and request.framework == "pytorch":
        kinds = ("off", "selective", "on")
    size = 1
    while size <= LARGEST_FITTED_BATCH:
        rounds = batch // question.gpus // size if batch else 1
        if batch is None or (rounds and batch == rounds * size * question.gpus):
            for kind in kinds:
                yield question.changed(micro_batch=size, accumulation=rounds, checkpointing=kind)
        size *= 2


def _fitting(question: Question, request: PlanRequest) -> Iterator[Candidate]:
    for strategy in usable(question, request):
        if can_offload(strategy, question.training.offload) and can_train(strategy, question):
            one = candidate(question, data_parallel(question, strategy.id), request)
            if one.fits and not one.tight:
                yield one


class Advice(msgspec.Struct, frozen=True):
    """The answer: every strategy, best first; the chosen one with its reason, or what would make one fit."""

    question: Question
    request: PlanRequest
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    rule: str
    because: str
    changes: tuple[Change, ...]
    turning_points: tuple[str, ...]
    least: Candidate
    """Of the framework's strategies, the one that takes least."""
    faster: Candidate | None
    """A usable strategy that fits and is predicted to be faster than the chosen one, if only a little."""


def advise(question: Question, request: PlanRequest) -> Advice:
    """Return the ranked strategies and the chosen one; raise :class:`InputError` for what cannot be."""
    check(question)
    if request.framework in PARALLEL_FRAMEWORKS:
        check_layouts(question, request.framework)
    if not offered(question, request):
        other = "all" if request.framework != "deepspeed" and question.gpus > 1 else "none"
        raise InputError(
            f"{request.framework} cannot offload {question.training.offload!r} on {_gpus(question.gpus)}",
            f"use --offload {other}, or --framework deepspeed on 2 GPUs or more",
        )
    candidates = rank(question, request)
    if not candidates and request.framework not in PARALLEL_FRAMEWORKS:
        raise InputError(
            f"no strategy of {request.framework} trains with {question.training.optimizer} as asked",
            "take --optimizer adamw, or leave out --offload",
        )
    if not candidates:
        sequences = sequences_of_an_update(question, request)
        raise InputError(
            f"no layout divides the {sequences} sequences of an update evenly over {question.gpus} GPUs",
            f"take a multiple of the GPUs: --batch {question.gpus * question.training.micro_batch}",
        )
    chosen, rule, because = choose(candidates, question, request)
    asked = asked_for(candidates, question, request)
    # What else would fit, or where the answer turns, leaves the layout open.
    left_open = replace(request, layout="", keeps_accumulation=False)
    needed = () if chosen and not chosen.tight else tuple(changes(question, left_open))
    turning: tuple[str, ...] = ()
    if chosen is not None and chosen is not asked:
        points = turning_points(question, left_open, chosen)
        turning = (*points, *_layout(question, left_open, chosen))
    own = [c for c in candidates if c.family in families(request.framework)]
    return Advice(
        question=question,
        request=request,
        candidates=candidates,
        chosen=chosen,
        rule=rule,
        because=because,
        changes=needed,
        turning_points=turning,
        least=min(own, key=lambda c: c.total_bytes),
        faster=_faster(chosen, own, request) if chosen else None,
    )


def _layout(question: Question, request: PlanRequest, chosen: Candidate) -> Iterator[str]:
    """Yield the layout that is predicted a tenth faster than sharding over many GPUs, if there is one."""
    own = STRATEGIES.get(chosen.strategy)
    many = question.gpus >= MANY_GPUS and own is not None and "parameters" in own.split
    if not many or chosen.step is None:
        return
    for best in rank(question, replace(request, framework="torchtitan"))[:1]:
        if best.fits and not best.tight and best.step is not None:
            less = 1 - best.step.expected_ms / chosen.step.expected_ms
            if less > 0.1:
                yield f"--framework torchtitan: {best.title}, a step predicted {format_percent(less)} shorter"


MANY_GPUS = 64
"""From so many GPUs on, an answer for other frameworks names a layout that is faster."""


def _faster(chosen: Candidate, own: list[Candidate], request: PlanRequest) -> Candidate | None:
    timed = [(c.step.expected_ms, c) for c in own if c.fits and not c.tight and c.step is not None]
    if chosen.step is None or request.objective == "memory" or not timed:
        return None
    expected, fastest = min(timed, key=lambda pair: pair[0])
    return fastest if expected < 0.97 * chosen.step.expected_ms else None


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
