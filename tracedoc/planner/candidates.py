"""Work out every strategy or layout on a question: what it takes, whether that fits, how long a step is."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.layouts import (
    STRATEGIES,
    Layout,
    Strategy,
    Update,
    can_offload,
    can_train,
    data_parallel,
    exchanges_heads,
    in_framework,
    layouts,
    parse_layout,
    possible,
)
from tracedoc.planner.measured import as_replayed
from tracedoc.planner.memory import SPREAD, Memory, peak_memory
from tracedoc.planner.setup import PARALLEL_FRAMEWORKS, PlanRequest, Question
from tracedoc.planner.timing import Step, predict
from tracedoc.planner.traffic import sent_in_an_update
from tracedoc.units import format_ms

SHOWN_LAYOUTS = 8


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
    layout: Layout
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

    @property
    def pace(self) -> float:
        """Seconds for each token of all GPUs, 0 where no time is predicted."""
        return 1 / self.tokens_per_second if self.tokens_per_second else 0.0

    @property
    def set_up(self) -> int:
        """How many things are set up beside the model: each way of splitting it, and checkpointing."""
        return self.layout.ways + self.checkpointing

    def dominates(self, other: Candidate) -> bool:
        """Whether this is no worse in doubt, time, memory and set-up, and better in one of them.

        Where no time is predicted, what is sent and whether activations are recomputed stand for it.
        """
        costs = [
            (one.doubt, one.total_bytes, one.set_up)
            + ((one.pace,) if self.step and other.step else (one.traffic_bytes, float(one.checkpointing)))
            for one in (self, other)
        ]
        return costs[0] != costs[1] and all(own <= its for own, its in zip(*costs, strict=True))


def may_fit(memory: Memory, available: float) -> bool:
    """Whether a peak may fit into so many bytes, if the reserve is not needed and the rest is less."""
    return (memory.total - memory.reserve) * (1 - SPREAD) <= available


def surely_fits(memory: Memory, available: float) -> bool:
    """Whether a peak fits into so many bytes even if it is as much larger as published ones were."""
    return memory.total * (1 + SPREAD) <= available


def families(framework: str) -> tuple[str, ...]:
    """The families whose strategies fit a project: one on DeepSpeed stays there; stage 0 is DDP."""
    if framework in PARALLEL_FRAMEWORKS:
        return (framework,)
    return ("ddp", "deepspeed") if framework == "deepspeed" else ("ddp", "fsdp")


def usable(question: Question, request: PlanRequest) -> list[Strategy]:
    """Return the strategies of the framework that mean something on these GPUs, and train what is asked."""
    return [s for s in _meaningful(question, request) if s.family in families(request.framework)]


def _meaningful(question: Question, request: PlanRequest) -> list[Strategy]:
    return [
        strategy
        for strategy in possible(question.gpus, question.nodes)
        if can_offload(strategy, question.training.offload)
        and can_train(strategy, question)
        and _can_say(strategy, request.framework)
    ]


def _checkpointed(question: Question, layout: Layout, request: PlanRequest) -> tuple[Question, Memory]:
    """The question with how much is checkpointed, and the peak then: as asked, or the least that surely fits.

    Selectively where a line of the framework's settings says so. For least memory all that can be is.
    """
    kinds: tuple[str, ...] = (question.training.checkpointing,)
    if kinds == ("auto",):
        selective = ("selective",) if layout.family == "torchtitan" else ()
        kinds = ("on",) if request.objective == "memory" else ("off", *selective, "on")
    for kind in kinds:
        question = question.changed(checkpointing=kind)
        memory = peak_memory(question, layout)
        if surely_fits(memory, question.memory_bytes):
            break
    return question, memory


def candidate(question: Question, layout: Layout, request: PlanRequest) -> Candidate:
    """One layout, with activation checkpointing where that is wanted, or needed and left open."""
    asked, memory = _checkpointed(in_framework(question, layout), layout, request)
    available, training = question.memory_bytes, asked.training
    strategy_alone = layout.strategy in STRATEGIES
    step = predict(
        asked,
        layout,
        request.cluster,
        utilisation=request.utilisation,
        measured_compute_ms=request.measured_compute_ms if strategy_alone else None,
        scale=request.scale,
        idle_ms=request.idle_ms,
    )
    step = as_replayed(step, asked, layout.id, request.replayed)
    fits = may_fit(memory, available)
    tokens = layout.data * layout.rounds * training.tokens
    return Candidate(
        strategy=layout.id,
        title=layout.title,
        family=layout.family,
        checkpointing=training.recomputes,
        memory=memory,
        total_bytes=memory.total,
        fits=fits,
        tight=fits and not surely_fits(memory, available),
        headroom_bytes=available - memory.total,
        traffic_bytes=sent_in_an_update(asked, layout),
        step=step,
        tokens_per_second=tokens / step.expected_ms * 1e3 if step else None,
        layout=layout,
        selective=training.checkpointing == "selective",
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


def rank(question: Question, request: PlanRequest) -> tuple[Candidate, ...]:
    """The candidates that mean something here: those that fit first, then by the objective.

    For a framework of data parallelism that is every strategy, those of other frameworks among them; for
    torchtitan and Megatron the best few layouts.
    """
    if request.framework in PARALLEL_FRAMEWORKS:
        found = _layout_candidates(question, request)
        order = {one.strategy: number for number, one in enumerate(found)}
    else:
        found = [
            candidate(question, data_parallel(question, strategy.id), request)
            for strategy in _meaningful(question, request)
        ]
        found = _without_slow_variants(found, request)
        order = {name: number for number, name in enumerate(STRATEGIES)}
    ranked = sorted(found, key=lambda one: (*key(one, request), order[one.strategy]))
    if request.framework in PARALLEL_FRAMEWORKS:
        first = _simplest_first(ranked, request)
        asked = asked_for(first, question, request)
        shown = [one for one in first if one is not asked][: SHOWN_LAYOUTS - (asked is not None)]
        return tuple(one for one in first if one is asked or one in shown)
    return tuple(ranked)


def asked_for(found: Iterable[Candidate], question: Question, request: PlanRequest) -> Candidate | None:
    """The candidate of the layout or strategy that is asked about, ``None`` where that is left open."""
    if not (request.layout or request.strategy):
        return None
    name = request.strategy or parse_layout(request.layout, question, request.framework).id
    return next((one for one in found if one.strategy == name), None)


def _simplest_first(ranked: list[Candidate], request: PlanRequest) -> list[Candidate]:
    """Put the layout with least to set up first, of those as fast as the fastest by a tenth."""
    first = ranked[0] if ranked else None
    if first is None or first.step is None or first.doubt > 1 or request.objective == "memory":
        return ranked
    alike = [one for one in ranked if one.doubt == first.doubt and one.pace <= 1.1 * first.pace]
    simplest = min(alike, key=lambda one: one.set_up)
    return [simplest, *(one for one in ranked if one is not simplest)]


def _can_say(strategy: Strategy, framework: str) -> bool:
    """Whether a framework's settings have this; to reshard to a node is in PyTorch's code alone."""
    return not strategy.kept_in_node or framework not in ("accelerate", "trainer")


def _without_slow_variants(found: list[Candidate], request: PlanRequest) -> list[Candidate]:
    """Leave out variants of a strategy that are not the best of their family by a twentieth."""

    def cost(one: Candidate) -> float:
        return one.step.expected_ms if one.step and request.objective == "speed" else one.total_bytes

    usual = [one for one in found if not STRATEGIES[one.strategy].variant]
    variants = [one for one in found if one not in usual and not one.doubt]
    for one in sorted(variants, key=lambda one: (one.strategy != request.strategy, cost(one))):
        rivals = [cost(other) for other in usual if other.family == one.family and not other.doubt]
        if one.strategy == request.strategy or not rivals or cost(one) < 0.95 * min(rivals):
            return [*usual, one]
    return usual


def offered(question: Question, request: PlanRequest) -> bool:
    """Whether the framework offloads what is asked, on so many GPUs."""
    if request.framework in PARALLEL_FRAMEWORKS:
        return question.training.offload == "none"
    every = possible(question.gpus, question.nodes)
    own = (s for s in every if s.family in families(request.framework))
    return any(can_offload(s, question.training.offload) for s in own)


def key(one: Candidate, request: PlanRequest) -> tuple[float, ...]:
    """What candidates are ranked by: doubt, then what was asked for, then all that can still differ."""
    if one.doubt > 1 or request.objective == "memory":
        return one.doubt, one.total_bytes, one.pace, one.set_up
    return one.doubt, one.pace, one.total_bytes, one.set_up


def _layout_candidates(question: Question, request: PlanRequest) -> list[Candidate]:
    """Return for each way of splitting the best of its micro-batches, schedules and checkpointing."""

    def best(found: Iterable[Layout]) -> dict[str, Candidate]:
        chosen: dict[str, Candidate] = {}
        for layout in found:
            layout = as_run(layout, request)
            if not exchanges_heads(question, layout):
                continue
            one = candidate(question, layout, request)
            known = chosen.get(one.strategy)
            if known is None or key(one, request) < key(known, request):
                chosen[one.strategy] = one
        return chosen

    every = best(layouts(question, request.framework, update_of(question, request)))
    if request.layout:
        asked = as_run(parse_layout(request.layout, question, request.framework), request)
        if not exchanges_heads(question, asked):
            raise InputError(
                f"--layout {request.layout}: {asked.tensor * asked.context} GPUs cannot share the"
                f" {question.model.heads} heads of {question.model.name}",
                "take --context-parallel ring",
            )
        update = update_of(question, request, asked)
        of_it = best(update.of(asked))
        if not of_it:
            parts = asked.data * (update.micro_batch or 1) * (update.rounds or 1)
            near = max(1, round((update.sequences or 1) / parts)) * parts
            raise InputError(
                f"--layout {request.layout}: {update.sequences} sequences do not divide evenly over its"
                f" {asked.data} groups{' as asked' * (parts > asked.data)}",
                f"nearest: --batch {near}",
            )
        every |= of_it
    return list(every.values())


def update_of(question: Question, request: PlanRequest, asked: Layout | None = None) -> Update:
    """The update that layouts are planned for; that of the layout ``asked`` about has its accumulation.

    All others make as many sequences of it, in micro-batches of their own unless these are given.
    """
    training = question.training
    rounds = training.accumulation if request.keeps_accumulation else None
    if rounds and request.batch is None and not request.layout:
        return Update(None, training.micro_batch, rounds)
    size = training.micro_batch if request.keeps_micro_batch else None
    every = sequences_of_an_update(question, request)
    return Update(every, size, rounds if asked or not request.layout else None)


OVERLAPPING_GBPS = 100.0
"""GB/s of a link from which Transformer Engine sends parts of a product beside the next ones: NVLink's.

Its buffers are written by the peers themselves, which PCIe between sockets does not allow.
"""


def as_run(layout: Layout, request: PlanRequest) -> Layout:
    """The layout with what the request says of how its GPUs share a sequence and what they overlap."""
    layout = replace(
        layout,
        overlaps=request.overlaps,
        context_by=request.context_by,
        sequence_parallel=request.sequence_parallel,
        flex=request.flex,
    )
    inside = request.cluster.inside
    slow = request.overlaps is None and inside is not None and inside.gbps < OVERLAPPING_GBPS
    if request.sequence_parallel and not slow:
        return layout
    return replace(layout, overlaps=tuple(name for name in layout.overlapped if name != "tensor"))


def sequences_of_an_update(question: Question, request: PlanRequest) -> int:
    """The sequences of all GPUs for each update of a layout."""
    training = question.training
    if request.layout and request.keeps_accumulation:
        data = parse_layout(request.layout, question, request.framework).data
        rounds, size = training.accumulation, training.micro_batch
        typed = data * rounds * size
        if request.batch is None:
            return typed
        if request.keeps_micro_batch and request.batch != typed:
            raise InputError(
                f"--batch {request.batch} is not {size} x {rounds} of {data} groups",
                f"leave it out, or: --batch {typed}",
            )
    return request.batch or training.micro_batch * training.accumulation * question.gpus
