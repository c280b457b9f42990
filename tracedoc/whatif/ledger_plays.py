"""Play the steps of a run without some causes, and know what was played."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.run_replay import FAR_OFF, RunReplay
from tracedoc.whatif.removal import OverSteps, Removal, without

_Asked = tuple[Scenario, list[list[Removal]]]
"""A scenario, and what is to be without in each step."""


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
            (scenario, [_in_step(parts, place) for place in range(len(self._replay.steps))])
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

    def _played(self, lists: Sequence[_Asked]) -> list[float]:
        """The steps without what is asked."""
        played = self._replay.play_each(self._programs(*one) for one in lists)
        steps = zip(lists, played, strict=True)
        return [self._untied(*asked) if one is None else one.step_ns for asked, one in steps]

    def _untied(self, scenario: Scenario, steps: list[list[Removal]]) -> float:
        """The step without causes, but for those that tie events: something would wait for itself."""
        left = [[one for one in step if one.rewired is None] for step in steps]
        (played,) = self._replay.play_each(iter([self._programs(scenario, left)]))
        return self._replay.base_ns(scenario) if played is None else played.step_ns

    def _programs(self, scenario: Scenario, steps: list[list[Removal]]) -> list[RunProgram]:
        """The programs of all steps without what is asked of each."""
        bases = [one.base[scenario].program for one in self._replay.steps]
        return list(map(without, bases, steps))


def _in_step(causes: Iterable[OverSteps], place: int) -> list[Removal]:
    return [part for one in causes if (part := one.steps[place])]


def _steps_played(replay: RunReplay) -> float:
    """How many times the step the replay takes.

    It plays the whole capture where the step has no beginning and end of its own. One that is far off tells
    no more than the proportions of causes.
    """
    if replay.model_error_frac > FAR_OFF:
        return replay.replayed_ms / replay.step_ms
    layout = replay.program.layout
    note = layout.notes[replay.subject]
    alone = not (layout.periodic or note.framed)
    return max(note.span_ns / 1e6 / replay.step_ms, 1e-9) if alone and replay.step_ms else 1.0
