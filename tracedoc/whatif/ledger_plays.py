"""Play the steps of a run without some causes, and know what was played."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.run_replay import FAR_OFF, RunReplay
from tracedoc.play.solver import Cyclic
from tracedoc.whatif.removal import OverSteps, Removal, without


class _Asked(msgspec.Struct, frozen=True):
    """What is to be without in each step, in a scenario."""

    scenario: Scenario
    steps: list[list[Removal]]


class Plays:
    """Plays the steps of a run without some causes, and knows what was played.

    What is asked at once is played at once, which takes far less than one play after the other.
    """

    def __init__(self, replay: RunReplay) -> None:
        self._replay = replay
        self._scale = _steps_played(replay) * 1e6
        self._known: dict[tuple[Scenario, frozenset[int]], float] = {}

    def play(self, asked: Iterable[tuple[Scenario, Iterable[OverSteps]]]) -> None:
        """Play the mean step without each of several lists of causes, those that were not yet."""
        new: dict[tuple[Scenario, frozenset[int]], list[OverSteps]] = {}
        for scenario, causes in asked:
            parts = {id(part): part for part in causes}
            key = scenario, frozenset(parts)
            if parts and key not in self._known:
                new[key] = list(parts.values())
        lists = [
            _Asked(scenario, [_in_step(parts, place) for place in range(len(self._replay.steps))])
            for (scenario, _), parts in new.items()
        ]
        for key, step_ns in zip(new, self._played(lists), strict=True):
            self._known[key] = max(self._replay.base_ns(key[0]) - step_ns, 0.0) / self._scale

    def gains(
        self, asked: Sequence[Iterable[OverSteps]], scenario: Scenario = Scenario.LIKELY
    ) -> list[float]:
        """How much shorter the mean step is without each of several lists of causes, in ms."""
        lists = [list(one) for one in asked]
        self.play((scenario, one) for one in lists)
        return [self._known[scenario, frozenset(map(id, one))] if one else 0.0 for one in lists]

    def more(self, given: Iterable[OverSteps], taken: Iterable[OverSteps]) -> float:
        """How much shorter the mean step is without what is taken, where what is given is gone; in ms."""
        before = tuple(given)
        with_both, without = self.gains([(*before, *taken), before])
        return max(with_both - without, 0.0)

    @property
    def base_ms(self) -> float:
        """The mean step without a change."""
        return self._replay.base_ns(Scenario.LIKELY) / self._scale

    def _played(self, lists: list[_Asked]) -> list[float]:
        width = self._replay.together
        found: list[float] = []
        for begin in range(0, len(lists), width):
            some = lists[begin : begin + width]
            found += self._together(some) or [self._lone(one) for one in some]
        return found

    def _together(self, lists: Sequence[_Asked]) -> list[float]:
        """The steps without each of several lists of causes; nothing where something waits for itself."""
        try:
            return [one.step_ns for one in self._replay.play([self._programs(one) for one in lists])]
        except Cyclic:
            return []

    def _programs(self, asked: _Asked) -> list[RunProgram]:
        """The programs of all steps without what is asked of each."""
        bases = [one.base[asked.scenario].program for one in self._replay.steps]
        return list(map(without, bases, asked.steps))

    def _lone(self, asked: _Asked) -> float:
        """The step without causes one of which may make something wait for itself: that one stays."""
        tied = _Asked(asked.scenario, [[one for one in step if one.rewired is None] for step in asked.steps])
        for kept in (asked, tied):
            if played := self._together([kept]):
                return played[0]
        return self._replay.base_ns(asked.scenario)


def _in_step(causes: Iterable[OverSteps], place: int) -> list[Removal]:
    return [part for one in causes if (part := one.steps[place])]


def _steps_played(replay: RunReplay) -> float:
    """How many times the step the replay takes.

    It plays the whole capture where the step has no beginning and end of its own. One that is far off tells
    no more than the proportions of causes.
    """
    if replay.model_error_frac > FAR_OFF:
        return replay.replayed_ms / replay.step_ms
    layout = replay.base[Scenario.LIKELY].program.layout
    note = layout.notes[replay.subject]
    alone = not (layout.periodic or note.framed)
    return max(note.span_ns / 1e6 / replay.step_ms, 1e-9) if alone and replay.step_ms else 1.0
