"""Sample the stacks of steps far longer than usual: what comes now and then has no other trace."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from types import CodeType, FrameType

from tracedoc.collector.probe import Plain

LONG = 1.5
LEAST_NS = 20_000_000
"""A step is sampled from when it takes 1.5 times the usual one, and so much longer than that."""

STEPS_FOR_USUAL = 4
"""Of so many steps the median is the usual one."""

STUCK_NS = 30_000_000_000
STUCK = 10
"""A step hangs that takes so long and ten times the usual one."""

KEPT_STACKS = 32
KEPT_FRAMES = 60
SAMPLED_KEPT = 48
"""So many long steps are kept, and so many others."""

OTHERS = 8
"""Of other steps, from twice this number on, half as many are sampled from one power of two to the next."""

PAUSES = 8
"""Of a usual step so many samples are taken, at most one in 5 ms."""

GROWS = 1.25
"""From one sample of a step to the next it takes this much longer, so that a long one has few."""

_OURS = os.path.dirname(__file__)
_AROUND = frozenset({"counted", "watched", "watched_start"})
"""Functions of the collector around the job's own: all optimizers and data loaders run in one."""

STOPPED_NS = 50_000_000
"""A process that stood still for so long was stopped, which is told."""

NOTICED_S = 0.1
"""The collector's thread wakes so often: a stop is noticed where it should have done so meanwhile."""

HELD = 0.8
"""A thread that waits so much of the switch interval is let in because it asked; less is slack."""

OWN_THREADS = "tracedoc-"
_TASKS = "/proc/self/task/{}/schedstat"
MAX_THREADS = 64

Stack = tuple[tuple[CodeType, int], ...]


def ran_ns(thread: threading.Thread) -> int:
    """The ns for which a thread of this process has run, by the Linux scheduler; 0 where nobody counts it."""
    return _scheduled(thread)[0]


def _scheduled(thread: threading.Thread) -> tuple[int, int, int]:
    """The ns for which a thread ran, and for which it waited for a core, and how often it got one.

    0 where nobody counts them.
    """
    try:
        with open(_TASKS.format(thread.native_id), encoding="ascii") as file:
            ran, waited, turns = map(int, file.read().split())
            return ran, waited, turns
    except (OSError, ValueError):
        return 0, 0, 0


def _suspended_ns() -> int:
    """For how long this machine was suspended since it began, as far as its kernel knows."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0 if clock is None else time.clock_gettime_ns(clock) - time.monotonic_ns()


class Waits:
    """What the waits of the collector's own thread show: who held the interpreter, and when nothing ran.

    PyTorch gives the interpreter away in its operators: where it is held for a whole switch interval when
    this thread asks for it, that is Python code, of any other thread. What the thread waited for a core does
    not count. Who asks gets a turn in each interval: where this thread had none for long and waited for no
    core, nor did the thread that trains run, the system had stopped the process, or suspended the machine.
    ``on_stop`` gets when that had ended, by ``time.time_ns``, and how long it took at least.
    """

    def __init__(self, on_stop: Callable[[int, int], None] = lambda end_ns, length_ns: None) -> None:
        self._on_stop = on_stop
        self._training = threading.get_ident()
        self._asked = self._held = self._waited_ns = self._turns = 0
        self._suspended_ns = _suspended_ns()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for an event as it does, and note what kept this thread from going on then."""
        seconds = max(seconds, 0.0)
        ran_ns = self._trained_ns()
        due_ns = time.perf_counter_ns() + int(seconds * 1e9)
        happened = event.wait(seconds)
        late_ns = time.perf_counter_ns() - due_ns
        interval_ns = sys.getswitchinterval() * 1e9
        _, waited_ns, turns = _scheduled(threading.current_thread())
        late_ns, self._waited_ns = late_ns - (waited_ns - self._waited_ns), waited_ns
        had, self._turns = turns - self._turns, turns
        asleep_ns, self._suspended_ns = -self._suspended_ns, _suspended_ns()
        asleep_ns += self._suspended_ns
        trained_ns = self._trained_ns() - ran_ns - seconds * 1e9
        if had and max(2 * had * interval_ns, 2 * trained_ns) < late_ns:
            asleep_ns += late_ns
        if asleep_ns >= STOPPED_NS:
            self._on_stop(time.time_ns(), asleep_ns)
        elif not happened:
            self._asked += 1
            self._held += late_ns >= HELD * interval_ns
        return happened

    def _trained_ns(self) -> int:
        """For how long the thread that made this ran, 0 where that is not known."""
        try:
            return time.clock_gettime_ns(time.pthread_getcpuclockid(self._training))
        except (AttributeError, OSError):
            return 0

    def describe(self) -> Plain | None:
        """How often it was ``asked`` for, and ``held``; ``None`` before, and where threads need no lock."""
        locks = getattr(sys, "_is_gil_enabled", lambda: True)()
        return {"asked": self._asked, "held": self._held} if locks and self._asked else None


def other_threads(training: int) -> list[threading.Thread]:
    """The Python threads of this process beside the one that trains, without the collector's own."""
    found = (one for one in threading.enumerate() if one.ident != training)
    return [one for one in found if not one.name.startswith(OWN_THREADS)][:MAX_THREADS]


class ThreadTimes:
    """For how long Python threads beside the one that trains ran in a window."""

    def __init__(self) -> None:
        self._training = threading.get_ident()
        self._before: dict[threading.Thread, int] = {}

    def open(self) -> None:
        """Begin to count."""
        self._before = {one: ran_ns(one) for one in other_threads(self._training)}

    def close(self) -> dict[str, int]:
        """The us for which each thread ran since :meth:`open`, by its name."""
        found: Counter[str] = Counter()
        for one in other_threads(self._training):
            found[one.name[:80]] += (ran_ns(one) - self._before.get(one, 0)) // 1000
        self._before = {}
        return {name: us for name, us in found.most_common() if us > 0}


class StackTimes:
    """How long a thread was in each of some stacks; of many those with most time are kept."""

    def __init__(self) -> None:
        self._ns: Counter[Stack] = Counter()

    def add(self, stack: Stack, ns: int) -> None:
        """Add to the time of a stack; an empty one, of the collector itself at work, is nobody's."""
        if stack:
            self._ns[stack] += ns
        if len(self._ns) > 8 * KEPT_STACKS:
            self._ns = Counter(dict(self._ns.most_common(KEPT_STACKS)))

    def take(self, other: StackTimes) -> None:
        """Add the times of others."""
        for stack, ns in other.most():
            self.add(stack, ns)

    def most(self) -> list[tuple[Stack, int]]:
        """The stacks with most time first, and that time in ns."""
        return self._ns.copy().most_common(KEPT_STACKS)


class SampledStep:
    """The stacks of one step, each with the time for which it stands; ``number`` is that of the step log.

    ``whole`` from its beginning on, else from when it took longer than usual.
    """

    __slots__ = ("beside", "long", "number", "stacks", "whole")

    def __init__(self, number: int, *, whole: bool) -> None:
        self.number, self.whole, self.long = number, whole, True
        self.stacks, self.beside = StackTimes(), StackTimes()


class KeptSteps:
    """Of ever more steps some, evenly spread."""

    def __init__(self) -> None:
        self.steps: list[SampledStep] = []
        self._seen, self._every = 0, 1

    def add(self, step: SampledStep) -> None:
        """Keep a step, unless it lies between those that are kept."""
        if self._seen % self._every == 0:
            self.steps.append(step)
        self._seen += 1
        if len(self.steps) > SAMPLED_KEPT:
            self.steps, self._every = self.steps[::2], 2 * self._every


class StackSamples:
    """The stacks of one thread in long steps, and in some others to compare them with.

    After a long step the next one is sampled from its beginning on, and that which comes as much later as the
    last two lay apart; of the others ever fewer: 16, 20, 24, 28, 32, 40, 48, and so on. ``on_stuck`` gets the
    stack of a step that hangs, and ``None`` when it ends after all; ``on_look`` is called whenever that is
    looked at, ``on_stop`` after the process stood still (:class:`Waits`).
    """

    def __init__(
        self,
        on_stuck: Callable[[list[str] | None], None] = lambda stack: None,
        on_look: Callable[[], None] = lambda: None,
        on_stop: Callable[[int, int], None] = lambda end_ns, length_ns: None,
    ) -> None:
        self._on_stuck, self._on_look = on_stuck, on_look
        self._thread = threading.get_ident()
        self._lengths: deque[int] = deque(maxlen=9)
        self._began_ns, self._steps, self._slow = 0, 0, 0
        self._over = False
        self._tick = threading.Event()
        self._sampling = self._captured = False
        self._due: frozenset[int] = frozenset()
        self._wakes_at = 2 * OTHERS - 1
        self._last_long = 0
        self._long, self._usual = KeptSteps(), KeptSteps()
        self._loop: Stack = ()
        self.waits = Waits(on_stop)

    def begin(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._watch, name="tracedoc-samples", daemon=True).start()

    def end(self) -> None:
        """Watch no more."""
        self._over = True
        self._tick.set()

    def step(self, now_ns: int) -> None:
        """Note that a step ended; the functions that now call the optimizer run in every step."""
        if self._began_ns:
            self._lengths.append(now_ns - self._began_ns)
        elif not self._loop:
            self._loop = stack_of(sys._getframe(), ours=True)
        self._began_ns = now_ns
        self._steps = ended = self._steps + 1
        if self._sampling or ended >= self._wakes_at:
            self._tick.set()

    def skip(self, *, captured: bool = False) -> None:
        """Leave the step that runs now out: the collector itself makes it long.

        Of those ``captured`` from now on none is sampled to compare with others.
        """
        self._began_ns, self._captured = 0, captured

    def describe(self) -> Plain | None:
        """The sampled steps, of which some are ``long``, and the functions around every step, if any were.

        Of each the ms of its ``stacks`` by their place among ``frames``, of which the first stands for those
        with least time, and of other threads ``beside`` for as long as they ran.
        """
        kept = sorted([*self._long.steps, *self._usual.steps], key=lambda step: step.number)
        if not kept:
            return None
        total: Counter[Stack] = Counter()
        for step in kept:
            for stack, ns in (*step.stacks.most(), *step.beside.most()):
                total[stack] += ns
        most = [stack for stack, _ in total.most_common(2 * KEPT_STACKS)]
        place = {stack: number for number, stack in enumerate(most, 1)}
        return {
            "steps": self._steps,
            "long": self._slow,
            "loop": _words(self._loop),
            "frames": [[], *map(_words, most)],
            "sampled": [
                {
                    "step": step.number,
                    "whole": step.whole,
                    "long": step.long,
                    "stacks": _ms_by_frames(step.stacks, place),
                    "beside": _ms_by_frames(step.beside, place),
                }
                for step in kept
            ],
        }

    def _is_due(self, number: int) -> bool:
        """Whether a step is to be sampled from its beginning on."""
        return number in self._due or (not self._captured and _next_other(number) == number)

    def _watch(self) -> None:
        due_ns = LEAST_NS
        while True:
            later = self._steps + 2
            self._wakes_at = min([_next_other(later), *(one for one in self._due if one >= later)]) - 1
            self.waits.wait(self._tick, min(due_ns / 1e9, NOTICED_S))
            if self._over:
                return
            self._tick.clear()
            self._on_look()
            began, number = self._began_ns, self._steps + 1
            due_ns = LEAST_NS
            if not began or len(self._lengths) < STEPS_FOR_USUAL:
                if began and time.perf_counter_ns() - began > STUCK_NS:
                    self._hold(number)
                continue
            due_ns = began + self._long_ns() - time.perf_counter_ns()
            if due_ns > 0 and not self._is_due(number):
                continue
            self._sampling = True
            step = self._sample(SampledStep(number, whole=due_ns > 0), began)
            self._sampling = False
            due_ns = 0
            if step is not None:
                (self._long if step.long else self._usual).add(step)
                if step.long:
                    self._slow += 1
                    apart, self._last_long = number - self._last_long, number
                    self._due = frozenset((number + 1, number + apart))

    def _long_ns(self) -> int:
        """From when on a step is long."""
        usual = int(median(self._lengths))
        return max(int(LONG * usual), usual + LEAST_NS)

    def _sample(self, step: SampledStep, began: int) -> SampledStep | None:
        """Take samples until the step ends: each stands for the time halfway to its neighbours.

        ``None`` where the step is not to count, or the end of sampling came first.
        """
        stack: Stack | None
        usual, long_ns = int(median(self._lengths)), self._long_ns()
        pause_ns = max(usual // PAUSES, LEAST_NS // 4)
        since, told = began if step.whole else began + usual, False
        taken, stack = began, None
        ran = {one: ran_ns(one) for one in other_threads(self._thread)}
        if step.whole:
            self.waits.wait(self._tick, pause_ns / 2e9)
        while self._began_ns == began and not self._over:
            frames = sys._current_frames()
            now = time.perf_counter_ns()
            found = stack_of(frames.get(self._thread))
            others = {
                one: (stack_of(frames.get(one.ident or 0)), ran_ns(one))
                for one in other_threads(self._thread)
            }
            del frames
            if self._began_ns != began:
                break
            if stack is not None:
                between = (taken + now) // 2
                step.stacks.add(stack, between - since)
                since = between
            taken, stack = now, found
            for one, (of_thread, ns) in others.items():
                if ns > ran.get(one, ns):
                    step.beside.add(of_thread, ns - ran[one])
            ran = {one: ns for one, (_, ns) in others.items()}
            if not told and now - began > max(STUCK_NS, STUCK * usual):
                told = True
                self._on_stuck(script_frames(self._thread))
            self.waits.wait(self._tick, pause_ns / 1e9)
            pause_ns = min(int(pause_ns * GROWS), STUCK_NS // 2)
        if told and not self._over:
            self._on_stuck(None)
        ended = self._began_ns
        if stack is None or not ended or self._over or self._steps > step.number:
            return None
        step.stacks.add(stack, ended - since)
        step.long = ended - began >= long_ns
        return step

    def _hold(self, number: int) -> None:
        """Tell that one of the first steps hangs, and wait for its end."""
        self._on_stuck(script_frames(self._thread))
        while self._steps < number:
            if self._tick.wait(1.0) and self._over:
                return
        self._on_stuck(None)


def _next_other(number: int) -> int:
    """The first of the steps that are sampled to compare with others, from this number on."""
    number = max(number, 2 * OTHERS)
    apart = (1 << number.bit_length()) // OTHERS
    return -(-number // apart) * apart


def stack_of(frame: FrameType | None, *, ours: bool = False) -> Stack:
    """The frames from the innermost outwards without the collector's.

    Nothing where the collector itself is at work, unless ``ours`` is asked for.
    """
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < KEPT_FRAMES:
        if not frame.f_code.co_filename.startswith(_OURS):
            found.append((frame.f_code, frame.f_lineno))
        elif not ours and frame.f_code.co_name not in _AROUND:
            return ()
        frame = frame.f_back
    return tuple(found)


def _is_installed(file: str) -> bool:
    ours = (os.path.dirname(os.__file__), sys.prefix, "<frozen")
    return file.startswith(ours) or "site-packages" in file or "dist-packages" in file


def script_frames(thread: int) -> list[str]:
    """The frames of a thread that are of the script's own code, from the innermost outwards; else all."""
    frame = sys._current_frames().get(thread)
    stack = stack_of(frame)
    del frame
    own = tuple(one for one in stack if not _is_installed(one[0].co_filename))
    return _words(own or stack)


def _ms_by_frames(times: StackTimes, place: Mapping[Stack, int]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for stack, ns in times.most():
        found[str(place.get(stack, 0))] += ns
    return {frames: ns / 1e6 for frames, ns in found.items()}


def in_words(stacks: Iterable[tuple[Stack, int]]) -> list[Plain]:
    """Stacks as they are kept: the ms of each, and its frames in words."""
    return [{"ms": ns / 1e6, "frames": _words(stack)} for stack, ns in stacks]


def _words(stack: Stack) -> list[str]:
    """Frames as the profiler writes them, ``train.py(12): main``, with the line that runs behind them."""
    roots = sorted((root.rstrip("/") + "/" for root in sys.path if root), key=len, reverse=True)
    found = []
    for code, line in stack:
        file = code.co_filename
        root = next((root for root in roots if file.startswith(root)), "")
        found.append(f"{file[len(root) :]}({code.co_firstlineno}): {code.co_name}@{line}")
    return found
