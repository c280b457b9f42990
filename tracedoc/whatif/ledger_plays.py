"""Play the steps of a run without some causes, and know what was played."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracedoc.play.run_program import Scenario
from tracedoc.play.run_replay import FAR_OFF, RunReplay
from tracedoc.play.solver import Cyclic
from tracedoc.whatif.removal import OverSteps, Removal, without


class Plays:
    """Plays the steps of a run without some causes, in one scenario, and knows what was played."""

    def __init__(self, replays: Sequence[RunReplay], scenario: Scenario) -> None:
        self._steps = [_StepPlays(replay, scenario) for replay in replays]

    def gains(self, asked: Sequence[Iterable[OverSteps]]) -> list[float]:
        """How much shorter the mean step is without each of several lists of causes, in ms."""
        return [sum(gains) / len(gains) for gains in self.by_step(asked)]

    def by_step(self, asked: Sequence[Iterable[OverSteps]]) -> list[tuple[float, ...]]:
        """How much shorter each step is without each of several lists of causes, in ms."""
        lists = [tuple(one) for one in asked]
        found = [
            step.gains([[part for one in each if (part := one.steps[place]) is not None] for each in lists])
            for place, step in enumerate(self._steps)
        ]
        return list(zip(*found, strict=True))

    def more(self, given: Iterable[OverSteps], taken: Iterable[OverSteps]) -> float:
        """How much shorter the mean step is without what is taken, where what is given is gone; in ms."""
        before = tuple(given)
        with_both, without = self.gains([(*before, *taken), before])
        return max(with_both - without, 0.0)

    @property
    def base_ms(self) -> float:
        """The mean step without a change."""
        return sum(one.base_ms for one in self._steps) / len(self._steps)


class _StepPlays:
    """Plays one step."""

    def __init__(self, replay: RunReplay, scenario: Scenario) -> None:
        self._replay, self._base = replay, replay.base[scenario]
        self._scale = _steps_played(replay) * 1e6
        self._known: dict[frozenset[int], float] = {frozenset(): 0.0}

    def gains(self, lists: Sequence[Sequence[Removal]]) -> list[float]:
        """How much shorter the step is without each of several lists of removals, in ms."""
        keys = [frozenset(map(id, one)) for one in lists]
        new = {key: one for key, one in zip(keys, lists, strict=True) if key not in self._known}
        for key, step_ns in zip(new, self._played(list(new.values())), strict=True):
            self._known[key] = max(self._base.step_ns - step_ns, 0.0) / self._scale
        return [self._known[key] for key in keys]

    @property
    def base_ms(self) -> float:
        """The step without a change."""
        return self._base.step_ns / self._scale

    def _played(self, lists: list[Sequence[Removal]]) -> list[float]:
        width = self._replay.player.together(self._base.program)
        found: list[float] = []
        for begin in range(0, len(lists), width):
            some = lists[begin : begin + width]
            found += self._together(some) or [self._lone(one) for one in some]
        return found

    def _together(self, lists: Sequence[Sequence[Removal]]) -> list[float]:
        """The step without each of several lists of causes; nothing where something waits for itself."""
        base = self._base.program
        try:
            return [one.step_ns for one in self._replay.player.play([without(base, one) for one in lists])]
        except Cyclic:
            return []

    def _lone(self, removals: Sequence[Removal]) -> float:
        """The step without causes one of which may make something wait for itself: that one stays."""
        for kept in (removals, [one for one in removals if one.rewired is None]):
            if played := self._together([kept]):
                return played[0]
        return self._base.step_ns


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
