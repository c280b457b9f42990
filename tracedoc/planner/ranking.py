"""Rank what a framework could do with a question: strategies of data parallelism, or layouts of all kinds."""

from __future__ import annotations

from tracedoc.planner.candidates import Candidate, Wish, assessed, candidate, checkpointed, usable
from tracedoc.planner.layout_memory import layout_memory
from tracedoc.planner.layout_timing import layout_step
from tracedoc.planner.layout_traffic import sent_in_an_update, traffic
from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS, Layout, in_framework, layouts
from tracedoc.planner.memory import can_offload, can_train
from tracedoc.planner.setup import Question
from tracedoc.planner.strategies import STRATEGIES, Strategy, possible

SHOWN_LAYOUTS = 8


def rank(question: Question, wish: Wish) -> tuple[Candidate, ...]:
    """Return what means something here: what fits first, then by the objective.

    For a framework of data parallelism that is every strategy, those of other frameworks among them; for
    torchtitan and Megatron the best few layouts.
    """
    if wish.framework in PARALLEL_FRAMEWORKS:
        found = _layout_candidates(question, wish)
        order = {one.strategy: number for number, one in enumerate(found)}
    else:
        found = [
            candidate(question, strategy, wish)
            for strategy in possible(question.gpus, question.nodes)
            if can_offload(strategy, question.training.offload)
            and can_train(strategy, question)
            and _can_say(strategy, wish.framework)
        ]
        found = _without_slow_variants(found, wish)
        order = {name: number for number, name in enumerate(STRATEGIES)}
    ranked = sorted(found, key=lambda one: (*_key(one, wish), order[one.strategy]))
    if wish.framework in PARALLEL_FRAMEWORKS:
        return tuple(_simplest_first(ranked, wish)[:SHOWN_LAYOUTS])
    return tuple(ranked)


def _simplest_first(ranked: list[Candidate], wish: Wish) -> list[Candidate]:
    """Put the layout that splits in fewest ways first, of those as fast as the fastest by a tenth."""
    first = ranked[0] if ranked else None
    if first is None or first.step is None or first.doubt > 1 or wish.objective == "memory":
        return ranked
    reach = 1.1 * first.step.expected_ms
    alike = [one for one in ranked if one.doubt == first.doubt and one.step and one.step.expected_ms <= reach]
    simplest = min(alike, key=lambda one: len(one.layout.parts) if one.layout else 0)
    return [simplest, *(one for one in ranked if one is not simplest)]


def _can_say(strategy: Strategy, framework: str) -> bool:
    """Return whether a framework's settings have this; to reshard to a node is in PyTorch's code alone."""
    return not strategy.kept_in_node or framework not in ("accelerate", "trainer")


def _without_slow_variants(found: list[Candidate], wish: Wish) -> list[Candidate]:
    """Leave out variants of a strategy that are not the best of their family by a twentieth."""

    def cost(one: Candidate) -> float:
        return one.step.expected_ms if one.step and wish.objective == "speed" else one.total_bytes

    usual = [one for one in found if not STRATEGIES[one.strategy].variant]
    variants = [one for one in found if one not in usual and one.fits and not one.tight]
    for one in sorted(variants, key=cost):
        rivals = [cost(other) for other in usual if other.family == one.family and other.fits]
        if not rivals or cost(one) < 0.95 * min(rivals):
            return [*usual, one]
    return usual


def offered(question: Question, wish: Wish) -> bool:
    """Return whether the framework offloads what is asked, on so many GPUs."""
    if wish.framework in PARALLEL_FRAMEWORKS:
        return question.training.offload == "none"
    return any(can_offload(s, question.training.offload) for s in usable(question, wish))


def _key(one: Candidate, wish: Wish) -> tuple[int, float]:
    if one.doubt > 1 or wish.objective == "memory":
        return one.doubt, one.total_bytes
    return one.doubt, one.step.expected_ms if one.step else 0.0


def _layout_candidates(question: Question, wish: Wish) -> list[Candidate]:
    """Return for each way of splitting the best of its micro-batches, schedules and checkpointing."""
    training = question.training
    sequences = wish.batch or training.micro_batch * training.accumulation * question.gpus
    best: dict[str, Candidate] = {}
    for layout in layouts(question, wish.framework, sequences):
        one = _of_layout(question, layout, wish, tokens=sequences * training.sequence)
        known = best.get(one.strategy)
        if known is None or _key(one, wish) < _key(known, wish):
            best[one.strategy] = one
    return list(best.values())


def _of_layout(question: Question, layout: Layout, wish: Wish, *, tokens: int) -> Candidate:
    asked = in_framework(question, layout)
    checkpointing, memory = checkpointed(
        asked, wish, lambda on: layout_memory(asked, layout, checkpointing=on)
    )
    step = layout_step(
        asked,
        layout,
        wish.cluster,
        checkpointing=checkpointing,
        utilisation=wish.utilisation,
        scale=wish.scale,
        idle_ms=wish.idle_ms,
    )
    sent = traffic(asked, layout, wish.cluster, checkpointing=checkpointing)
    return assessed(
        asked,
        layout.id,
        layout.title,
        layout.family,
        checkpointing=checkpointing,
        memory=memory,
        step=step,
        sent=sent_in_an_update(sent, layout) if sent else 0.0,
        tokens=tokens,
        layout=layout,
    )
