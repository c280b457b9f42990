"""Predict the step of a run after changes, one or several together, by replaying it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from tracedoc.replay.path import find_path
from tracedoc.replay.player import Played
from tracedoc.replay.run_program import Reading, RunProgram
from tracedoc.replay.run_replay import RunReplay
from tracedoc.replay.solver import Cyclic
from tracedoc.whatif.changes.change import Ask, Change, NotApplicable
from tracedoc.whatif.changes.registry import CHANGES, Request

NARROW = 0.05
"""Confidence is high only where the range is narrower than this share of the step."""

WIDENING = 0.5
"""The range is wider than the readings by this share of the replay's own error."""


class Prediction(msgspec.Struct, frozen=True):
    """A step after changes: low, likely and high, in milliseconds, and what it saves; high is the worst.

    A step that does twice the work counts by half. ``limited_by`` is the resource with the largest share of
    the critical path then.
    """

    step_ms: tuple[float, float, float]
    gain_ms: tuple[float, float, float]
    limited_by: str
    confidence: str
    assumptions: tuple[str, ...] = ()


def predict(replay: RunReplay, plans: Sequence[Sequence[Request]]) -> list[Prediction | NotApplicable]:
    """Return the step after each of several lists of changes, each list applied together, in order."""
    edited: list[tuple[int, Reading, RunProgram]] = []
    found: dict[int, NotApplicable] = {}
    for index, requests in enumerate(plans):
        for reading in Reading:
            program = apply_changes(replay, requests, reading)
            if isinstance(program, NotApplicable):
                found[index] = program
                break
            edited.append((index, reading, program))
    edited = [one for one in edited if one[0] not in found]
    played = _played(replay, edited, found)
    answers: list[Prediction | NotApplicable] = []
    for index, requests in enumerate(plans):
        answers.append(found[index] if index in found else _prediction(replay, requests, played[index]))
    return answers


def apply_changes(
    replay: RunReplay, requests: Sequence[Request], reading: Reading
) -> RunProgram | NotApplicable:
    """Return the run's program in one reading after changes."""
    program = replay.base[reading].program
    for request in requests:
        edited = CHANGES[request.name].edit(program, Ask(request.values, replay.splits))
        if isinstance(edited, NotApplicable):
            return edited
        program = edited
    return program


def _played(
    replay: RunReplay, edited: list[tuple[int, Reading, RunProgram]], failed: dict[int, NotApplicable]
) -> dict[int, dict[Reading, Played]]:
    found: dict[int, dict[Reading, Played]] = {}
    try:
        results = replay.player.play([program for _, _, program in edited])
    except Cyclic:
        results = []
        for index, _, program in edited:
            try:
                results += replay.player.play([program])
            except Cyclic:
                failed[index] = NotApplicable("with it, something would wait for itself")
                results.append(replay.base[Reading.LIKELY])
    for (index, reading, _), one in zip(edited, results, strict=True):
        found.setdefault(index, {})[reading] = one
    return found


def _prediction(replay: RunReplay, requests: Sequence[Request], played: dict[Reading, Played]) -> Prediction:
    changes = [CHANGES[request.name] for request in requests]
    units = prod(change.units for change in changes)
    steps = [
        replay.step_ms * played[reading].step_ns / replay.base[reading].step_ns / units for reading in Reading
    ]
    low, likely, high = min(steps), steps[Reading.LIKELY], max(steps)
    shares = [prod(change.gain_shares[place] for change in changes) for place in range(3)]
    # Gains count from the step of today, for the same work.
    gains = [
        (replay.step_ms - step) * (share if step < replay.step_ms else 1.0)
        for step, share in zip((high, likely, low), shares, strict=True)
    ]
    spread = WIDENING * replay.model_error_frac * replay.step_ms
    if abs(gains[1]) < spread:
        spread = abs(gains[1])
    gains = [gains[0] - spread, gains[1], gains[2] + spread]
    gained = (gains[0], gains[1], min(gains[2], replay.step_ms))
    after = (replay.step_ms - gained[2], replay.step_ms - gained[1], replay.step_ms - gained[0])
    path = find_path(played[Reading.LIKELY], replay.subject)
    return Prediction(
        step_ms=after,
        gain_ms=gained,
        limited_by=next(iter(path.shares()), ""),
        confidence=_confidence(replay, after),
        assumptions=tuple(dict.fromkeys(change.assumption for change in changes if change.assumption)),
    )


def _confidence(replay: RunReplay, step_ms: tuple[float, float, float]) -> str:
    narrow = step_ms[2] - step_ms[0] <= NARROW * replay.step_ms
    return "medium" if replay.confidence == "high" and not narrow else replay.confidence


def applicable(replay: RunReplay, change: Change, request: Request) -> NotApplicable | None:
    """Return why a change cannot be made to this run, ``None`` if it can."""
    edited = change.edit(replay.base[Reading.LIKELY].program, Ask(request.values, replay.splits))
    return edited if isinstance(edited, NotApplicable) else None
