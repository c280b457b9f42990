"""Play the steps of a run without some causes, and know what was played."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracedoc.play.run_program import Scenario
from tracedoc.play.run_replay import FAR_OFF, RunReplay
from tracedoc.play.solver import Cyclic
from tracedoc.whatif.removal import OverSteps, Removal, without


class Plays:
    """Plays the steps of a run without some causes, in one scenario, and knows what was played."""

    def __init__(self, replay: RunReplay, scenario: Scenario) -> None:
        self._replay = replay
        self._bases = [one.base[scenario].program for one in replay.steps]
        self._scale, self._base_ns = _steps_played(replay) * 1e6, replay.base_ns(scenario)
        self._known: dict[frozenset[int], float] = {frozenset(): 0.0}

    def gains(self, asked: Sequence[Iterable[OverSteps]]) -> list[float]:
        """How much shorter the mean step is without each of several lists of causes, in ms."""
        lists = [{id(part): part for part in one} for one in asked]
        new = {key: one for one in lists if (key := frozenset(one)) not in self._known}
        steps = [
            [
                [part for one in each.values() if (part := one.steps[place])]
                for place in range(len(self._bases))
            ]
            for each in new.values()
        ]
        for key, step_ns in zip(new, self._played(steps), strict=True):
            self._known[key] = max(self._base_ns - step_ns, 0.0) / self._scale
        return [self._known[frozenset(one)] for one in lists]

    def more(self, given: Iterable[OverSteps], taken: Iterable[OverSteps]) -> float:
        """How much shorter the mean step is without what is taken, where what is given is gone; in ms."""
        before = tuple(given)
        with_both, without = self.gains([(*before, *taken), before])
        return max(with_both - without, 0.0)

    @property
    def base_ms(self) -> float:
        """The mean step without a change."""
        return self._base_ns / self._scale

    def _played(self, lists: list[list[list[Removal]]]) -> list[float]:
        width = self._replay.together
        found: list[float] = []
        for begin in range(0, len(lists), width):
            some = lists[begin : begin + width]
            found += self._together(some) or [self._lone(one) for one in some]
        return found

    def _together(self, lists: Sequence[Sequence[Sequence[Removal]]]) -> list[float]:
        """The steps without each of several lists of causes; nothing where something waits for itself."""
        try:
            return [
                one.step_ns
                for one in self._replay.play([list(map(without, self._bases, steps)) for steps in lists])
            ]
        except Cyclic:
            return []

    def _lone(self, steps: Sequence[Sequence[Removal]]) -> float:
        """The steps without causes one of which may make something wait for itself: that one stays."""
        for kept in (steps, [[one for one in step if one.rewired is None] for step in steps]):
            if played := self._together([kept]):
                return played[0]
        return self._base_ns


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
