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
    step_range,
    update_of,
    usable,
    with_checkpointing,
)
from tracedoc.planner.choice import Change, changes, choose, chosen_for, halved, turning_points
from tracedoc.planner.configurations import WHOLE_BLOCKS, Configuration, configurations_of
from tracedoc.planner.layouts import check_layouts, data_parallel
from tracedoc.planner.memory import SPREAD
from tracedoc.planner.setup import PARALLEL_FRAMEWORKS, PlanRequest, Question, Training, check
from tracedoc.units import format_gb, format_percent

LARGEST_FITTED_BATCH = 512
SHOWN_CANDIDATES = 5
AS_FAST = 0.97
"""Share of the fastest's tokens a second from which the simplest is taken."""


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


def settled(question: Question, request: PlanRequest) -> tuple[Question, PlanRequest, tuple[Found, ...]]:
    """The question with the micro-batch and accumulation that are best, and the fastest that were found.

    The request's ``batch`` stays the same; ``None`` leaves that open. Layouts find their own. Raises
    :class:`InputError` for a batch that cannot be, and where times are needed and not predicted.
    """
    if request.framework in PARALLEL_FRAMEWORKS:
        return question, request, ()
    sizes = _sizes(question, request)
    if request.objective == "memory" and not request.search:
        size, rounds = sizes[0]
        return question.changed(micro_batch=size, accumulation=rounds), request, ()
    if request.cluster.gpu is None and not request.search:
        return _largest(question, request, sizes), request, ()
    found = search(question, request, sizes)
    if not found:
        size, rounds = sizes[0]
        return question.changed(micro_batch=size, accumulation=rounds), request, ()
    best = found[0]
    training = {name: getattr(best, name) for name in ("micro_batch", "accumulation", "checkpointing")}
    return question.changed(**training), replace(request, strategy=best.strategy), found


def search(question: Question, request: PlanRequest, sizes: list[tuple[int, int]]) -> tuple[Found, ...]:
    """The fastest combinations that fit: first the simplest of those nearly as fast, then by speed."""
    found = [
        (one, asked) for asked in _combinations(question, request, sizes) for one in _fitting(asked, request)
    ]
    if any(one.tokens_per_second is None for one, _ in found):
        raise InputError(
            "the fastest micro-batch cannot be searched without predicted times",
            'name the GPU, as --gpu "NVIDIA L4", or the size: --micro-batch 1',
        )
    found.sort(key=lambda pair: (pair[0].pace, pair[0].total_bytes))
    alike = [pair for pair in found if AS_FAST * pair[0].pace <= found[0][0].pace]
    for simplest in sorted(alike, key=lambda pair: pair[0].set_up)[:1]:
        found.remove(simplest)
        found.insert(0, simplest)
    return tuple(
        Found(
            strategy=one.strategy,
            title=one.title,
            micro_batch=asked.training.micro_batch,
            accumulation=asked.training.accumulation,
            checkpointing=asked.training.checkpointing,
            total_bytes=one.total_bytes,
            step_ms=one.step.expected_ms,
            tokens_per_second=one.tokens_per_second,
        )
        for one, asked in found[:SHOWN_CANDIDATES]
        if one.step and one.tokens_per_second
    )


def _sizes(question: Question, request: PlanRequest) -> list[tuple[int, int]]:
    """Micro-batches and how many of them an update has, the smallest micro-batch first."""
    training, batch = question.training, request.batch
    size = training.micro_batch if request.keeps_micro_batch else None
    rounds = training.accumulation if request.keeps_accumulation else None
    if batch is None:
        return [(2**power, rounds or 1) for power in range(LARGEST_FITTED_BATCH.bit_length())]
    each = question.gpus * (size or 1) * (rounds or 1)
    if batch % each or (size and rounds and batch != each):
        near = each * (1 if size and rounds else max(1, round(batch / each)))
        of = f"{question.gpus} GPUs" + (
            f" with {size or rounds} sequences each" if each > question.gpus else ""
        )
        raise InputError(f"--batch {batch} does not divide evenly over {of}", f"nearest: --batch {near}")
    part = batch // question.gpus
    if rounds:
        return [(part // rounds, rounds)]
    every = (size,) if size else range(1, min(part, LARGEST_FITTED_BATCH) + 1)
    return [(one, part // one) for one in every if part % one == 0]


def _largest(question: Question, request: PlanRequest, sizes: list[tuple[int, int]]) -> Question:
    """The question with the largest micro-batch that fits, without recomputation where any does."""
    wanted = question.training.checkpointing
    every = [question.changed(micro_batch=size, accumulation=rounds) for size, rounds in reversed(sizes)]
    for kind in ("off", "on") if wanted == "auto" else (wanted,):
        for asked in (one.changed(checkpointing=kind) for one in every):
            one = chosen_for(asked, request)
            if one is not None and not one.tight:
                return asked.changed(checkpointing=wanted)
    return every[-1]


def _combinations(
    question: Question, request: PlanRequest, sizes: list[tuple[int, int]]
) -> Iterator[Question]:
    wanted = question.training.checkpointing
    kinds: tuple[str, ...] = ("off", "on") if wanted == "auto" else (wanted,)
    if wanted == "auto" and request.framework == "pytorch":
        kinds = ("off", "selective", "on")
    for size, rounds in sizes:
        for kind in kinds:
            yield question.changed(micro_batch=size, accumulation=rounds, checkpointing=kind)


def _fitting(question: Question, request: PlanRequest) -> Iterator[Candidate]:
    for strategy in usable(question, request):
        one = candidate(question, data_parallel(question, strategy.id), request)
        if not one.doubt:
            yield one


PLAN_SCHEMA = "1"
CLEARLY = 1.1
"""How many times the tokens a second are worth changing machines or framework for."""
MANY_GPUS = 64
"""From so many GPUs on other frameworks are compared with torchtitan, whose models are written for it."""


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


class Alternative(msgspec.Struct, frozen=True):
    """A faster way to train the same: ``times`` as many tokens a second as the best on all of the GPUs.

    ``what`` says it in a sentence, ``option`` asks for it on the command line.
    """

    what: str
    option: str
    strategy: str
    checkpointing: bool
    times: float
    tokens_per_second: float


class Plan(msgspec.Struct, frozen=True):
    """Everything ``tracedoc plan`` has to say. Bytes, milliseconds, shares 0..1.

    ``recommended`` is the id of a strategy, ``None`` if nothing fits; ``because`` its reason or, then, what
    is missing. ``changes`` are single changes after which something fits, the smallest first. ``faster`` is a
    strategy that even with nothing hidden is predicted ahead of the recommended one's middle, if any;
    ``least`` is the framework's strategy that takes least. ``load_bytes_per_node`` is the host memory of a
    node while a checkpoint is loaded, ``None`` where that is not known. ``alternatives`` are fewer GPUs or
    another framework that are predicted clearly faster.
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
    alternatives: tuple[Alternative, ...] = ()


def plan(question: Question, request: PlanRequest, *, notes: tuple[str, ...] = ()) -> Plan:
    """Return the plan for a question; ``notes`` say where its numbers come from.

    Where a search is asked for, the plan is that of the fastest combination, if one fits. Raises
    :class:`tracedoc.errors.InputError` for what cannot be.
    """
    found: tuple[Found, ...] = ()
    if request.search or request.batch is not None:
        check(question)
        question, request, found = settled(question, request)
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
        alternatives=advice.alternatives,
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
        text += f" It may not fit: {_DOUBT}." if chosen.tight else ""
        return " ".join([*(one.what for one in advice.alternatives), text])
    least = advice.least
    others = any(one.doubt <= 1 for one in advice.candidates)
    nothing = f"Nothing of {_OWNERS[advice.request.framework]}" if others else "Nothing"
    if least.fits:
        nothing = f"{nothing} is predicted to fit: {each} has {memory}, and {least.title} takes"
        text = f"{nothing} {format_gb(least.total_bytes)} ({_DOUBT})."
        return text + _smallest(advice)
    needed = f"{'training' if least.strategy == 'single' else f'even {least.title}'} needs"
    text = f"{nothing} fits: {each} has {memory}, and {needed} {format_gb(least.total_bytes)}."
    return text + _smallest(advice)


_OWNERS = {
    "pytorch": "PyTorch's",
    "accelerate": "PyTorch's",
    "trainer": "PyTorch's",
    "deepspeed": "DeepSpeed's",
    "torchtitan": "torchtitan's",
    "megatron": "Megatron's",
}


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
    may = "may" if smallest.tight else "would"
    return f" The smallest change that {may}: {smallest.what} ({then}, {size})."


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


class Advice(msgspec.Struct, frozen=True):
    """The answer: every strategy, best first; the chosen one with its reason, or what would make one fit."""

    question: Question
    request: PlanRequest
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    rule: str
    because: str
    changes: tuple[Change, ...]
    alternatives: tuple[Alternative, ...]
    turning_points: tuple[str, ...]
    least: Candidate
    """Of the framework's strategies, the one that takes least."""
    faster: Candidate | None
    """A usable strategy that fits and is predicted to be faster than the chosen one, if only a little."""


def advise(question: Question, request: PlanRequest) -> Advice:
    """Return the ranked strategies and the chosen one; raise :class:`InputError` for what cannot be."""
    check(question)
    if request.framework in PARALLEL_FRAMEWORKS:
        check_layouts(question, request)
    if not offered(question, request):
        gpus = f"{question.gpus} GPU{'s' * (question.gpus > 1)}"
        other = "all" if request.framework != "deepspeed" and question.gpus > 1 else "none"
        raise InputError(
            f"{request.framework} cannot offload {question.training.offload!r} on {gpus}",
            f"use --offload {other}, or --framework deepspeed on 2 GPUs or more",
        )
    if question.training.checkpointing == "selective" and request.framework in WHOLE_BLOCKS:
        raise InputError(
            f"{request.framework} checkpoints whole blocks", "take --checkpointing on, or --framework pytorch"
        )
    candidates = rank(question, request)
    if not candidates and request.framework not in PARALLEL_FRAMEWORKS:
        raise InputError(
            f"no strategy of {request.framework} trains with {question.training.optimizer} as asked",
            "take --optimizer adamw, or leave out --offload",
        )
    if not candidates:
        sequences = update_of(question, request).sequences or "given"
        raise InputError(
            f"no layout divides the {sequences} sequences of an update evenly over {question.gpus} GPUs",
            f"take a multiple of the GPUs: --batch {question.gpus * question.training.micro_batch}",
        )
    chosen, rule, because = choose(candidates, question, request)
    asked = asked_for(candidates, question, request)
    # What else would fit, or where the answer turns, leaves the layout open.
    left_open = replace(request, layout="", strategy="", keeps_accumulation=False)
    needed = () if chosen and not chosen.tight else tuple(changes(question, left_open, tight=chosen is None))
    turning: tuple[str, ...] = ()
    if chosen is not None and chosen is not asked:
        turning = tuple(turning_points(question, left_open, chosen))
    own = [c for c in candidates if c.family in families(request.framework)]
    return Advice(
        question=question,
        request=request,
        candidates=candidates,
        chosen=chosen,
        rule=rule,
        because=because,
        changes=needed,
        alternatives=tuple(_alternatives(question, left_open, _fastest(chosen, own))) if chosen else (),
        turning_points=turning,
        least=min(own, key=lambda c: c.total_bytes),
        faster=_faster(chosen, own, request) if chosen else None,
    )


def _fastest(chosen: Candidate, own: list[Candidate]) -> Candidate:
    """Of what fits as surely as the chosen one, what is predicted to be the fastest."""
    fitting = (one for one in own if one.doubt <= chosen.doubt)
    return max(fitting, key=lambda one: one.tokens_per_second or 0.0)


def _faster(chosen: Candidate, own: list[Candidate], request: PlanRequest) -> Candidate | None:
    timed = [(c.step.expected_ms, c) for c in own if c.fits and not c.tight and c.step is not None]
    if chosen.step is None or request.objective == "memory" or not timed:
        return None
    expected, fastest = min(timed, key=lambda pair: pair[0])
    return fastest if expected < 0.97 * chosen.step.expected_ms else None


def _alternatives(question: Question, request: PlanRequest, best: Candidate) -> Iterator[Alternative]:
    """Yield the fastest way with fewer GPUs and the fastest framework, where they are clearly faster.

    ``best`` is what is fastest of the framework on all of the GPUs.
    """
    if best.tokens_per_second is None or request.objective == "memory":
        return
    for tries in (_fewer(question, request), _frameworks(question, request)):
        fitting = ((what, option, chosen_for(q, r)) for what, option, q, r in tries)
        timed = [
            (one.tokens_per_second, what, option, one)
            for what, option, one in fitting
            if one is not None and one.tokens_per_second and not one.tight
        ]
        for rate, what, option, one in sorted(timed, key=lambda found: -found[0])[:1]:
            times = rate / best.tokens_per_second
            if times >= CLEARLY:
                title = with_checkpointing(one.title, one.checkpointing, selective=one.selective)
                faster = f"{times:.2g} times as fast" if times >= 2 else f"{format_percent(times - 1)} faster"
                text = f"{what} predicted {faster}: {title} ({option})."
                yield Alternative(text, option, one.strategy, one.checkpointing, times, rate)


_Try = tuple[str, str, Question, PlanRequest]


def _fewer(question: Question, request: PlanRequest) -> Iterator[_Try]:
    """Half of the nodes, half of those, and so on; then half of a node."""
    local = question.gpus_per_node
    machines = [(nodes * local, nodes) for nodes in halved(question.nodes) if question.nodes % nodes == 0]
    for gpus, nodes in [*machines, *((gpus, 1) for gpus in halved(local))]:
        place = f" in {'one node' if nodes == 1 else f'{nodes} nodes'}" if question.nodes > 1 else ""
        what = f"{gpus} GPU{'s' if gpus > 1 else ''}{place} {'are' if gpus > 1 else 'is'}"
        option = f"--gpus {gpus}" + (f" --nodes {nodes}" if question.nodes > 1 else "")
        yield what, option, question.changed(gpus=gpus, nodes=nodes), request


def _frameworks(question: Question, request: PlanRequest) -> Iterator[_Try]:
    if question.gpus == 1 or request.framework in PARALLEL_FRAMEWORKS:
        return
    other = ("PyTorch", "DeepSpeed")[request.framework != "deepspeed"]
    for name in (other, "torchtitan") if question.gpus >= MANY_GPUS else (other,):
        yield f"{name} is", f"--framework {name.lower()}", question, replace(request, framework=name.lower())
