"""Count optimizer steps on one clock, and time them."""

from __future__ import annotations

import functools
import statistics
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

SAMPLED_STEPS = 10
"""Steps timed without the profiler, before the captured ones and after them."""

_SILENCE_OF_THE_CLOCK = 50
"""Steps of one other object since the clock's last, after which it becomes the clock: jobs train in phases.

Not steps of others in all: an optimizer for each parameter makes hundreds of them an iteration.
"""


class _Nesting(threading.local):
    """How deep in step functions a thread is: an optimizer may step others inside its own step."""

    depth = 0


_nesting = _Nesting()


class Listener:
    """Who is called at each step; ``on_step`` can be exchanged once steps are being counted."""

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self.on_step = on_step


def count_outermost(
    step: Callable[..., Any],
    listener: Listener,
    is_whole: Callable[[Any], bool] = lambda stepped: True,
) -> Callable[..., Any]:
    """Return a step function that calls ``listener.on_step(self)`` after every outermost call that returned.

    ``is_whole(self)`` is asked before the call, whether it is a step or one of several accumulated.
    """

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        whole = _nesting.depth > 0 or is_whole(args[0])
        _nesting.depth += 1
        try:
            result = step(*args, **kwargs)
        finally:
            _nesting.depth -= 1
        if whole and _nesting.depth == 0:
            listener.on_step(args[0])
        return result

    return counted


class StepClock:
    """Decides whose steps are the job's: those of the object that steps first, for as long as it does.

    A GAN steps two optimizers, one of them perhaps several times an iteration; ``calls`` counts the steps
    of every class, so that a reader can regroup.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._chosen: weakref.ref[object] | None = None
        self._others: dict[int, int] = {}

    @property
    def name(self) -> str:
        """The class whose steps are counted, "" before the first."""
        chosen = self._chosen() if self._chosen is not None else None
        return type(chosen).__name__ if chosen is not None else ""

    def is_tick(self, stepped: object) -> bool:
        """Note that an object stepped; return whether its steps are the ones to count."""
        name = type(stepped).__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        chosen = self._chosen() if self._chosen is not None else None
        if chosen is stepped:
            if self._others:
                self._others.clear()
            return True
        if chosen is not None:
            since = self._others.get(id(stepped), 0) + 1
            self._others[id(stepped)] = since
            if since < _SILENCE_OF_THE_CLOCK:
                return False
        self._chosen = weakref.ref(stepped)
        self._others.clear()
        return True


class StepTimes:
    """Nanoseconds of steps: the last ones before the profiler, those under it, the first ones after."""

    def __init__(self) -> None:
        self.before: deque[int] = deque(maxlen=SAMPLED_STEPS)
        self.during: list[int] = []
        self.after: list[int] = []

    @property
    def enough(self) -> bool:
        """Whether all steps that are timed after the capture have been."""
        return len(self.after) >= SAMPLED_STEPS

    def medians(self) -> dict[str, object]:
        """Return the median of each in milliseconds and the number of steps it is of, where there are any."""
        kinds = {"before": self.before, "during": self.during, "after": self.after}
        return {
            kind: {"median_ms": round(statistics.median(times) / 1e6, 4), "steps": len(times)}
            for kind, times in kinds.items()
            if times
        }
