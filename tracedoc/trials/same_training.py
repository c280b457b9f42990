"""Whether a job computed the same with a change: its losses and the norms of its gradients, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracedoc.collector.trial.changes import Change
from tracedoc.trials.one_run import Ran

ROUNDING = 1e-4
"""Losses in 32 bits may differ by this share for another order of sums, after some steps of training."""
SHORTER_ROUNDING = 3e-2
"""The same where products or sums keep 8 to 11 bits."""


def compare_training(base: Sequence[Ran], ran: Ran, changes: Sequence[Change]) -> tuple[str, bool]:
    """What losses say, in words, and whether that is as the changes say; ``base`` is the job as it is."""
    first = base[0]
    place, size = _difference(first, ran)
    if place is None:
        return "no losses to compare" if not _has_losses(ran) else _equal_words(ran), True
    own = [found for other in base[1:] if (found := _difference(first, other))[0] is not None]
    if own:
        largest = max(one[1] for one in own)
        words = f"two runs as it is differ from step {min(one[0] or 0 for one in own)} by {largest:.1g}"
        return f"losses cannot be compared: {words}", True
    said = f"losses differ from step {place} by {size:.1g}"
    if any(change.draws_anew for change in changes):
        return f"{said} (workers draw random samples of their own)", True
    if any(change.rounds for change in changes):
        return (
            f"{said} (fewer bits: {'expected' if size <= SHORTER_ROUNDING else 'more than that explains'})",
            (size <= SHORTER_ROUNDING),
        )
    if size <= ROUNDING:
        return f"{said} (rounding)", True
    return f"{said}: other data, or another computation", False


def _equal_words(ran: Ran) -> str:
    count = min((len(steps) - 1 for steps in ran.losses.values()), default=0)
    return f"losses equal to the last bit in {count} steps"


def _has_losses(ran: Ran) -> bool:
    return any(step for steps in ran.losses.values() for step in steps)


def _difference(one: Ran, other: Ran) -> tuple[int | None, float]:
    """The first step in which losses or gradients differ, from 1, and the largest relative difference."""
    pairs = [*_losses(one, other), *_norms(one, other)]
    apart = [(step, abs(a - b) / max(abs(a), abs(b))) for step, a, b in pairs if a != b]
    return (min(step for step, _ in apart), max(size for _, size in apart)) if apart else (None, 0.0)


def _losses(one: Ran, other: Ran) -> Iterator[tuple[int, float, float]]:
    for rank in one.losses.keys() & other.losses.keys():
        for step, (mine, theirs) in enumerate(zip(one.losses[rank], other.losses[rank], strict=False), 1):
            # The last step of a run may have been cut off between two micro-batches.
            for a, b in zip(mine, theirs, strict=False):
                if a is not None and b is not None:
                    yield step, a, b


def _norms(one: Ran, other: Ran) -> Iterator[tuple[int, float, float]]:
    for step, (a, b) in enumerate(zip(one.squared_norms, other.squared_norms, strict=False), 1):
        yield step, a**0.5, b**0.5
