"""Answer a question: every strategy ranked, one chosen with its reason, and what would change that."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.candidates import Candidate, Wish, families, offered, rank
from tracedoc.planner.changes import Change, changes, turning_points
from tracedoc.planner.choice import choose
from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS, STRATEGIES, check_layouts
from tracedoc.planner.setup import Question, check
from tracedoc.units import format_percent


class Advice(msgspec.Struct, frozen=True):
    """The answer: every strategy, best first; the chosen one with its reason, or what would make one fit."""

    question: Question
    wish: Wish
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


def advise(question: Question, wish: Wish) -> Advice:
    """Return the ranked strategies and the chosen one; raise :class:`InputError` for what cannot be."""
    check(question)
    if wish.framework in PARALLEL_FRAMEWORKS:
        check_layouts(question, wish.framework)
    if not offered(question, wish):
        other = "all" if wish.framework != "deepspeed" and question.gpus > 1 else "none"
        raise InputError(
            f"{wish.framework} cannot offload {question.training.offload!r} on {_gpus(question.gpus)}",
            f"use --offload {other}, or --framework deepspeed on 2 GPUs or more",
        )
    candidates = rank(question, wish)
    if not candidates:
        raise InputError(
            f"no layout divides --batch {wish.batch} evenly over {question.gpus} GPUs",
            f"take a multiple of the GPUs: --batch {question.gpus}",
        )
    chosen, rule, because = choose(candidates, question, wish)
    needed = () if chosen and not chosen.tight else tuple(changes(question, wish))
    turning = (*turning_points(question, wish, chosen), *_layout(question, wish, chosen)) if chosen else ()
    own = [c for c in candidates if c.family in families(wish.framework)]
    return Advice(
        question=question,
        wish=wish,
        candidates=candidates,
        chosen=chosen,
        rule=rule,
        because=because,
        changes=needed,
        turning_points=turning,
        least=min(own, key=lambda c: c.total_bytes),
        faster=_faster(chosen, own, wish) if chosen else None,
    )


def _layout(question: Question, wish: Wish, chosen: Candidate) -> Iterator[str]:
    """Yield the layout that is predicted a tenth faster than sharding over many GPUs, if there is one."""
    own = STRATEGIES.get(chosen.strategy)
    many = question.gpus >= MANY_GPUS and own is not None and "parameters" in own.split
    if not many or chosen.step is None:
        return
    for best in rank(question, replace(wish, framework="torchtitan"))[:1]:
        if best.fits and not best.tight and best.step is not None:
            less = 1 - best.step.expected_ms / chosen.step.expected_ms
            if less > 0.1:
                yield f"--framework torchtitan: {best.title}, a step predicted {format_percent(less)} shorter"


MANY_GPUS = 64
"""From so many GPUs on, an answer for other frameworks names a layout that is faster."""


def _faster(chosen: Candidate, own: list[Candidate], wish: Wish) -> Candidate | None:
    timed = [(c.step.expected_ms, c) for c in own if c.fits and not c.tight and c.step is not None]
    if chosen.step is None or wish.objective == "memory" or not timed:
        return None
    expected, fastest = min(timed, key=lambda pair: pair[0])
    return fastest if expected < 0.97 * chosen.step.expected_ms else None


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
