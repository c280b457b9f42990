"""Search micro-batch, accumulation, checkpointing and strategy for the fastest plan that fits."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tracedoc.errors import InputError
from tracedoc.planner.candidates import Candidate, Wish, candidate, usable
from tracedoc.planner.layouts import can_offload, can_train, data_parallel
from tracedoc.planner.setup import Question

LARGEST_MICRO_BATCH = 512
SHOWN = 5


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


def search(question: Question, wish: Wish, *, batch: int | None) -> tuple[Found, ...]:
    """Return the fastest combinations that fit, the fastest first.

    ``batch`` is the sequences of all GPUs between two updates, which then stay the same; ``None`` leaves that
    open, without accumulation. Raises :class:`InputError` where no time can be predicted, as for an unknown
    GPU, and where ``batch`` does not divide over the GPUs.
    """
    if batch is not None and batch % question.gpus:
        near = max(1, round(batch / question.gpus)) * question.gpus
        raise InputError(
            f"--batch {batch} does not divide evenly over {question.gpus} GPUs", f"nearest: --batch {near}"
        )
    found = []
    for asked in _combinations(question, wish, batch):
        for one in _fitting(asked, wish):
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
    return tuple(found[:SHOWN])


def _best(found: list[Found]) -> float:
    return max((f.tokens_per_second for f in found), default=1.0)


def _combinations(question: Question, wish: Wish, batch: int | None) -> Iterator[Question]:
    wanted = question.training.checkpointing
    kinds: tuple[str, ...] = ("off", "on") if wanted == "auto" else (wanted,)
    if wanted == "auto" and wish.framework == "pytorch":
        kinds = ("off", "selective", "on")
    size = 1
    while size <= LARGEST_MICRO_BATCH:
        rounds = batch // question.gpus // size if batch else 1
        if batch is None or (rounds and batch == rounds * size * question.gpus):
            for kind in kinds:
                yield question.changed(micro_batch=size, accumulation=rounds, checkpointing=kind)
        size *= 2


def _fitting(question: Question, wish: Wish) -> Iterator[Candidate]:
    for strategy in usable(question, wish):
        if can_offload(strategy, question.training.offload) and can_train(strategy, question):
            one = candidate(question, data_parallel(question, strategy.id), wish)
            if one.fits and not one.tight:
                yield one
