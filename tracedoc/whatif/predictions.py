"""Predict the step of a run after changes, one or several together, by replaying it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from math import prod

import msgspec
import numpy as np
from msgspec.structs import replace

from tracedoc.play.path import find_path
from tracedoc.play.player import Played
from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.run_replay import Refusal, RunReplay, in_a_row, replay_run
from tracedoc.predicted import as_runs_differ
from tracedoc.ranks.run_view import RunView
from tracedoc.timeline.lags import PAUSE_NS
from tracedoc.topics.step.run import own_frac
from tracedoc.values import once
from tracedoc.whatif.changes.change import NotApplicable, where_possible
from tracedoc.whatif.changes.registry import Request
from tracedoc.whatif.even_ranks import pauses
from tracedoc.whatif.ledger_steps import kinds_of_time, other_steps

NARROW = 0.05
"""Confidence is high only where the range is narrower than this share of the step."""

COOLED_NS = 2_000_000
"""After a pause of a CPU what follows takes up to so much longer: caches fill again, and cores wake.
Measured over pairs of real jobs, as :data:`tracedoc.predicted.WARMER_SHARE` (benchmarks/README.md)."""

PAUSES = ("host.pause", "host.gc", "ranks.host")
"""Causes that are time in which a host pauses."""

WIDENING = 0.5
"""The range is wider than the scenarios by this share of the replay's own error."""


class Prediction(msgspec.Struct, frozen=True):
    """What changes save of a replayed step of ``of_ms``: low, likely and high, in milliseconds.

    A step that does twice the work counts by half. ``limited_by`` is the resource with the largest share of
    the critical path then; "" where that is the processor of a CPU run. ``mean_error_ms`` is by how much the
    gain of very many steps may differ from that of this one.
    """

    gain_ms: tuple[float, float, float]
    of_ms: float
    limited_by: str
    confidence: str
    assumptions: tuple[str, ...] = ()
    mean_error_ms: float = 0.0

    def saves(self, today_ms: float) -> tuple[float, float, float]:
        """What they save of today's step: of one shorter than those that were replayed the same share."""
        low, likely, high = self.gain_ms
        gains = low - self.mean_error_ms, likely, high + self.mean_error_ms
        low, likely, high = (ms * min(today_ms / self.of_ms, 1.0) for ms in gains)
        return low, likely, min(high, today_ms)


class _Outcome(msgspec.Struct, frozen=True):
    """What is kept of a program that was played; ``limited_by`` of that in the likely scenario only."""

    step_ns: float
    cooled_ms: float
    limited_by: str = ""


_Outcomes = dict[Scenario, _Outcome]


@once
def run_replay(run: RunView) -> RunReplay | Refusal:
    """The replay of a run, made once: of its analysed step, and of others in a row where these differ."""
    found = replay_run(run)
    if isinstance(found, Refusal):
        return found
    made = in_a_row(replace(found, own_frac=own_frac(run)), other_steps(run, found))
    return made if made.others else replace(made, varies=kinds_of_time(run))


def predict(replay: RunReplay, plans: Sequence[Sequence[Request]]) -> list[Prediction | NotApplicable]:
    """Return the step after each of several lists of changes, each list applied together, in order."""
    found: list[_Outcomes] = [{} for _ in plans]
    refused: dict[int, NotApplicable] = {}
    asked: list[tuple[int, Scenario]] = []

    def edited() -> Iterator[list[RunProgram]]:
        for place, requests in enumerate(plans):
            for scenario in Scenario:
                try:
                    made = _edited(replay, requests, scenario)
                except NotApplicable as reason:
                    refused[place] = reason
                    break
                asked.append((place, scenario))
                yield made

    for number, outcome in enumerate(replay.play_each(edited(), partial(_outcome, replay))):
        place, scenario = asked[number]
        if outcome is None:
            refused[place] = NotApplicable("with it, something would wait for itself")
        else:
            found[place][scenario] = outcome
    return [
        refused[place] if place in refused else _prediction(replay, plan, found[place])
        for place, plan in enumerate(plans)
    ]


def _outcome(replay: RunReplay, played: Played) -> _Outcome:
    """What is kept of a program that was played."""
    limited_by = ""
    if played.program.scenario is Scenario.LIKELY:
        limited_by = next(iter(find_path(played, replay.subject).shares()), "")
        if played.program.layout.is_cpu and limited_by == "compute":
            limited_by = ""  # all that a process does but wait, operators and sleeps alike
    return _Outcome(played.step_ns, _cooled_ms(played.program), limited_by)


def _cooled_ms(program: RunProgram) -> float:
    """What the pauses of a CPU step may cost what follows them, on the rank that has most of them."""
    if not program.layout.is_cpu:
        return 0.0
    away = pauses(program, program.lag.astype(np.int64))
    cooled = np.where(away >= PAUSE_NS, np.minimum(away, COOLED_NS), 0)
    return float(np.bincount(program.layout.point_rank, weights=cooled).max(initial=0.0)) / 1e6


def cooled_ms(run: RunView, causes: Iterable[str]) -> float:
    """What pauses of a CPU step may cost what follows them, if some of these causes are pauses; else 0."""
    replay = run_replay(run)
    if isinstance(replay, Refusal) or not set(causes) & set(PAUSES):
        return 0.0
    return _cooled_ms(replay.base[Scenario.FAST].program)


def _edited(replay: RunReplay, requests: Sequence[Request], scenario: Scenario) -> list[RunProgram]:
    """The programs of all steps after changes, in one scenario.

    What cannot be made to the analysed step is not made; another step to which it cannot be stays as it is.
    """

    def changed(program: RunProgram) -> RunProgram:
        return reduce(lambda made, request: request.made_to(made), requests, program)

    first, *others = (one.base[scenario].program for one in replay.steps)
    return [changed(first), *(where_possible(changed, one) for one in others)]


def _prediction(replay: RunReplay, requests: Sequence[Request], found: _Outcomes) -> Prediction:
    """What comes of changes, as ``found``; gains count from the step of today, for the same work."""
    changes = [request.change for request in requests]
    today, units = replay.mean_ms, prod(change.units for change in changes)
    steps = [today * found[scenario].step_ns / replay.base_ns(scenario) / units for scenario in Scenario]
    gains = [today - step for step in (max(steps), steps[Scenario.LIKELY], min(steps))]
    spread = WIDENING * replay.model_error_frac * replay.step_ms
    if abs(gains[1]) < spread:
        spread = abs(gains[1])
    gained = (gains[0] - spread, gains[1], min(gains[2] + spread, today))
    if replay.program.layout.is_cpu:
        cooled = _cooled_ms(replay.base[Scenario.FAST].program) - found[Scenario.FAST].cooled_ms
        gained = as_runs_differ(gained, today, replay.own_frac, max(cooled, 0.0))
    return Prediction(
        gain_ms=gained,
        of_ms=today,
        limited_by=found[Scenario.LIKELY].limited_by,
        confidence=_confidence(replay, gained),
        assumptions=tuple(
            dict.fromkeys(
                change.assumption.format(**request.values)
                for change, request in zip(changes, requests, strict=True)
                if change.assumption
            )
        ),
        mean_error_ms=replay.mean_error_ms(gains[1]),
    )


def _confidence(replay: RunReplay, gain_ms: tuple[float, float, float]) -> str:
    narrow = gain_ms[2] - gain_ms[0] <= NARROW * replay.step_ms
    return "medium" if replay.confidence == "high" and not narrow else replay.confidence
