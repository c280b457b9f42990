"""Settle micro-batch, accumulation and checkpointing where a question leaves them open."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.candidates import Candidate, candidate, usable
from tracedoc.planner.choice import chosen_for
from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.setup import PARALLEL_FRAMEWORKS, PlanRequest, Question

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
