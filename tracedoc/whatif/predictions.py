"""Predict the step of a run after changes, one or several together, by replaying it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from tracedoc.play.path import find_path
from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.run_replay import Refusal, RunReplay, replay_run
from tracedoc.play.solver import Cyclic
from tracedoc.predicted import as_runs_differ
from tracedoc.ranks.run_view import RunView, once
from tracedoc.whatif.changes.change import ALL_COUNTS, Arguments, Change, NotApplicable
from tracedoc.whatif.changes.registry import CHANGES, Request

NARROW = 0.05
"""Confidence is high only where the range is narrower than this share of the step."""

WIDENING = 0.5
"""The range is wider than the scenarios by this share of the replay's own error."""


class Prediction(msgspec.Struct, frozen=True):
    """What changes save of a step: low, likely and high, in milliseconds.

    A step that does twice the work counts by half. ``limited_by`` is the resource with the largest share of
    the critical path then.
    """

    gain_ms: tuple[float, float, float]
    limited_by: str
    confidence: str
    assumptions: tuple[str, ...] = ()


class _Outcome(msgspec.Struct, frozen=True):
    """What is kept of a program that was played; ``limited_by`` of that in the likely scenario only."""

    step_ns: float
    limited_by: str = ""


_Outcomes = dict[Scenario, _Outcome]


@once
def run_replay(run: RunView) -> RunReplay | Refusal:
    """The replay of a run, made once."""
    return replay_run(run)


def predict(replay: RunReplay, plans: Sequence[Sequence[Request]]) -> list[Prediction | NotApplicable]:
    """Return the step after each of several lists of changes, each list applied together, in order.

    Where only a share of a change's replayed gain counts, it is a share of what it adds to the others.
    Programs are edited as they are played, some lists at a time, and of very many ranks one scenario at a
    time: each program takes megabytes then.
    """
    lists = [*plans, *filter(None, map(_sure, plans))]
    together = replay.player.together(replay.base[Scenario.LIKELY].program)
    every = tuple(Scenario)
    turns = [every] if together >= len(every) else [(scenario,) for scenario in every]
    width = max(1, together // len(every))
    found: list[_Outcomes | NotApplicable] = []
    for begin in range(0, len(lists), width):
        found += _outcomes(replay, lists[begin : begin + width], turns)
    sure = iter(found[len(plans) :])
    return [
        one if isinstance(one, NotApplicable) else _prediction(replay, plan, one, before)
        for plan, one in zip(plans, found, strict=False)
        for before in [next(sure) if _sure(plan) else None]
    ]


def _sure(plan: Sequence[Request]) -> Sequence[Request]:
    """The changes of a list whose replayed gain counts in full, where others are among them; else none."""
    sure = [one for one in plan if CHANGES[one.name].gain_shares == ALL_COUNTS]
    return sure if len(sure) < len(plan) else []


def _outcomes(
    replay: RunReplay, plans: Sequence[Sequence[Request]], turns: Sequence[tuple[Scenario, ...]]
) -> list[_Outcomes | NotApplicable]:
    """What comes of each list of changes; the scenarios of one turn are played together."""
    found: list[_Outcomes | NotApplicable] = [{} for _ in plans]
    try:
        for scenarios in turns:
            _play(replay, plans, scenarios, found)
    except Cyclic:
        if len(plans) == 1:
            return [NotApplicable("with it, something would wait for itself")]
        return [one for plan in plans for one in _outcomes(replay, [plan], turns)]
    return found


def _play(
    replay: RunReplay,
    plans: Sequence[Sequence[Request]],
    scenarios: tuple[Scenario, ...],
    found: list[_Outcomes | NotApplicable],
) -> None:
    """Add to what was ``found`` of each list of changes what it is in some scenarios, or why it cannot be."""
    programs: list[RunProgram] = []
    outcomes: list[_Outcomes] = []
    for place, (requests, known) in enumerate(zip(plans, found, strict=True)):
        if isinstance(known, NotApplicable):
            continue
        edited = _edited(replay, requests, scenarios)
        if isinstance(edited, NotApplicable):
            found[place] = edited
        else:
            programs += edited
            outcomes += [known] * len(edited)
    for played, known in zip(replay.player.play(programs), outcomes, strict=True):
        scenario, limited_by = played.program.scenario, ""
        if scenario is Scenario.LIKELY:
            limited_by = next(iter(find_path(played, replay.subject).shares()), "")
        known[scenario] = _Outcome(played.step_ns, limited_by)


def _edited(
    replay: RunReplay, requests: Sequence[Request], scenarios: tuple[Scenario, ...]
) -> list[RunProgram] | NotApplicable:
    """Return the run's program after changes in some scenarios."""
    programs = []
    for scenario in scenarios:
        program = apply_changes(replay, requests, scenario)
        if isinstance(program, NotApplicable):
            return program
        programs.append(program)
    return programs


def apply_changes(
    replay: RunReplay, requests: Sequence[Request], scenario: Scenario
) -> RunProgram | NotApplicable:
    """Return the run's program in one scenario after changes."""
    program = replay.base[scenario].program
    for request in requests:
        edited = CHANGES[request.name].edit(program, Arguments(request.values, replay.splits))
        if isinstance(edited, NotApplicable):
            return edited
        program = edited
    return program


def _prediction(
    replay: RunReplay,
    requests: Sequence[Request],
    found: _Outcomes,
    before: _Outcomes | NotApplicable | None,
) -> Prediction:
    """What comes of changes, as ``found``; ``before`` is what comes of those that count in full alone."""
    changes = [CHANGES[request.name] for request in requests]
    # Gains count from the step of today, for the same work.
    gains = _gains(replay, found, changes)
    sure = [one for one in changes if one.gain_shares == ALL_COUNTS]
    known = _gains(replay, before, sure) if isinstance(before, dict) else [0.0, 0.0, 0.0]
    shares = [prod(change.gain_shares[place] for change in changes) for place in range(3)]
    gains = [
        first + (gain - first) * (share if gain > first else 1.0)
        for gain, first, share in zip(gains, known, shares, strict=True)
    ]
    spread = WIDENING * replay.model_error_frac * replay.step_ms
    if abs(gains[1]) < spread:
        spread = abs(gains[1])
    gained = (gains[0] - spread, gains[1], min(gains[2] + spread, replay.step_ms))
    if replay.base[Scenario.LIKELY].program.layout.is_cpu:
        gained = as_runs_differ(gained, replay.step_ms)
    return Prediction(
        gain_ms=gained,
        limited_by=found[Scenario.LIKELY].limited_by,
        confidence=_confidence(replay, gained),
        assumptions=tuple(
            dict.fromkeys(
                change.assumption.format(**request.values)
                for change, request in zip(changes, requests, strict=True)
                if change.assumption
            )
        ),
    )


def _gains(replay: RunReplay, found: _Outcomes, changes: Sequence[Change]) -> list[float]:
    """How much shorter the step of ``replay`` is in the scenarios, in ms: at worst, likely, at best."""
    units = prod(change.units for change in changes)
    steps = [
        replay.step_ms * found[scenario].step_ns / replay.base[scenario].step_ns / units
        for scenario in Scenario
    ]
    return [replay.step_ms - step for step in (max(steps), steps[Scenario.LIKELY], min(steps))]


def _confidence(replay: RunReplay, gain_ms: tuple[float, float, float]) -> str:
    narrow = gain_ms[2] - gain_ms[0] <= NARROW * replay.step_ms
    return "medium" if replay.confidence == "high" and not narrow else replay.confidence


def applicable(replay: RunReplay, change: Change, request: Request) -> NotApplicable | None:
    """The reason why a change cannot be made to this run; ``None`` if it can."""
    edited = change.edit(replay.base[Scenario.LIKELY].program, Arguments(request.values, replay.splits))
    return edited if isinstance(edited, NotApplicable) else None
