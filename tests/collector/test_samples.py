"""The stacks of steps far longer than usual, and nothing of the others."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from itertools import pairwise

import pytest

from tracedoc.collector import evidence, samples
from tracedoc.collector.samples import KeptSteps, SampledStep, StackSamples


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> StackSamples:
    """Samples of this thread after four steps; a step is long from 1 ms more than usual on."""
    monkeypatch.setattr(samples, "LEAST_NS", 1_000_000)
    found = StackSamples()
    for _ in range(6):
        found.step(time.perf_counter_ns())
    return found


class Frames:
    """The steps of a thread on a clock that is told what it does: it is in a function until a time, in ms."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, found: StackSamples, plan: list[tuple[int, str]]
    ) -> None:
        self.now_ns, self._plan, self._found = found._began_ns, plan, found
        self._start_ns = found._began_ns
        monkeypatch.setattr(samples.time, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(samples, "other_threads", lambda training: [])
        monkeypatch.setattr(samples.sys, "_current_frames", lambda: {found._thread: None})
        monkeypatch.setattr(samples, "stack_of", lambda frame, ours=False: self.stack())
        monkeypatch.setattr(samples, "_words", lambda stack: [str(one) for one in stack])
        monkeypatch.setattr(found, "_tick", self)

    def stack(self) -> tuple[str, ...]:
        """Where the thread is now."""
        ms = (self.now_ns - self._start_ns) / 1e6
        return (next(name for end, name in self._plan if ms < end),)

    def wait(self, seconds: float) -> bool:
        """Let the time pass; the steps that end in it end, the last with what is planned."""
        until = self.now_ns + int(seconds * 1e9)
        ends = [self._start_ns + end * 10**6 for end, name in self._plan if name.endswith("!")]
        for end in ends:
            if self.now_ns < end <= until:
                self.now_ns = end
                self._found.step(self.now_ns)
                self._found._over = end == ends[-1]
                return True
        self.now_ns = until
        return False

    def clear(self) -> None:
        """Nothing: whoever waits is woken once for each step."""

    set = clear


def test_a_sample_stands_for_the_time_halfway_to_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps of 8 ms one of 80 and one of 100, each with 40 ms of statistics at its beginning.

    The first is sampled from 28 ms on, which is 20 more than usual, and shows where the 72 ms went that it
    takes longer; the second from its beginning on.
    """
    found = StackSamples()
    found._steps, found._lengths = 100, deque([8_000_000] * 9, maxlen=9)
    found._began_ns = 1
    plan = [(40, "statistics"), (80, "train!"), (120, "statistics"), (180, "train!"), (188, "train!")]
    Frames(monkeypatch, found, plan)
    found._watch()
    told = found.describe()
    assert isinstance(told, dict)
    assert (told["steps"], told["long"], told["frames"][1:]) == (103, 2, [["train!"], ["statistics"]])
    first, second = told["sampled"]
    assert (first["step"], first["whole"], first["long"]) == (101, False, True)
    assert sum(first["stacks"].values()) == 72
    assert first["stacks"]["2"] == pytest.approx(32, abs=5)
    assert (second["step"], second["whole"], second["long"]) == (102, True, True)
    assert sum(second["stacks"].values()) == 100
    assert second["stacks"]["2"] == pytest.approx(40, abs=5)


def test_a_usual_step_is_sampled_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 128, unless it is captured; it takes 80 ms as all others."""
    for captured, sampled in ((False, [128]), (True, [])):
        found = StackSamples()
        found._steps, found._lengths = 127, deque([80_000_000] * 9, maxlen=9)
        found._began_ns, found._captured = 1, captured
        Frames(monkeypatch, found, [(80, "train!"), (160, "train!")])
        found._watch()
        told = found.describe()
        steps = told["sampled"] if isinstance(told, dict) else []
        assert [(one["step"], one["whole"], one["long"]) for one in steps] == [
            (number, True, False) for number in sampled
        ]


def test_of_many_long_steps_some_are_kept_evenly_spread() -> None:
    kept = KeptSteps()
    for number in range(1000):
        kept.add(SampledStep(number, whole=False))
    numbers = [one.number for one in kept.steps]
    assert samples.SAMPLED_KEPT // 2 <= len(numbers) <= samples.SAMPLED_KEPT
    assert len({later - earlier for earlier, later in pairwise(numbers)}) == 1


def evaluate(found: StackSamples) -> None:
    """Stay until a step was sampled, as long as that lasts."""
    while not found.describe():
        spin(0.02)
        found.step(time.perf_counter_ns())


def test_a_long_step_shows_what_it_does(watched: StackSamples) -> None:
    watched.begin()
    evaluate(watched)
    watched.end()
    told = watched.describe()
    assert isinstance(told, dict)
    assert told["long"] >= 1
    first = evaluate.__code__.co_firstlineno
    frames = [frame for stack in told["frames"] for frame in stack]
    assert any(f"test_samples.py({first}): evaluate@" in frame for frame in frames)
    assert not any("collector/samples.py" in frame for frame in frames)
    assert any("watched@" in frame for frame in told["loop"])


def spin(seconds: float) -> None:
    """Take so long, on the processor."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def first_part() -> None:
    """Be over before a step of four milliseconds is long."""
    spin(0.003)


def test_the_step_after_a_long_one_is_sampled_from_its_beginning(
    watched: StackSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "LEAST_NS", 4_000_000)
    monkeypatch.setattr(samples, "median", lambda lengths: 0)
    watched.begin()
    told: object = None
    while "first_part@" not in str(told):
        first_part()
        spin(0.006)
        watched.step(time.perf_counter_ns())
        told = watched.describe()
    watched.end()


def test_steps_that_are_not_long_leave_nothing(watched: StackSamples) -> None:
    watched.step(time.perf_counter_ns())
    assert watched.describe() is None


def test_a_step_that_the_collector_makes_long_does_not_count(watched: StackSamples) -> None:
    watched.skip()
    watched.step(time.perf_counter_ns())
    assert len(watched._lengths) == 5


class Clock:
    """A thread that asks for the interpreter wakes when it is told to, and has waited for cores as told."""

    woken, trains_ns, sleeps_ns = 1, 0, 0
    """In each wait it gets so many turns, training runs and the machine is suspended for so long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = self.core_ns = self.late_ns = self.turns = self.trained_ns = self.suspended_ns = 0
        monkeypatch.setattr(samples.time, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(samples.Waits, "_trained_ns", lambda waits: self.trained_ns)
        monkeypatch.setattr(samples, "_scheduled", lambda thread: (0, self.core_ns, self.turns))
        monkeypatch.setattr(samples, "_suspended_ns", lambda: self.suspended_ns)

    def wait(self, seconds: float) -> bool:
        self.now_ns += int(seconds * 1e9) + self.late_ns
        self.turns += self.woken
        self.trained_ns += self.trains_ns
        self.suspended_ns += self.sleeps_ns
        return False

    def is_set(self) -> bool:
        return False


def test_the_interpreter_is_held_for_those_who_wait_a_switch_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four times it came at once, after 6 ms, after 6 ms of which 5 were for a core, and after 3 ms."""
    clock, asks = Clock(monkeypatch), samples.Waits()
    assert asks.describe() is None
    for late_ms, core_ms in [(0, 0), (6, 0), (6, 5), (3, 0)]:
        clock.late_ns = late_ms * 10**6
        clock.core_ns += core_ms * 10**6
        asks.wait(clock, 0.02)
    assert asks.describe() == {"asked": 4, "held": 1}


@pytest.mark.parametrize(
    ("late_ms", "woken", "trains_ms", "sleeps_ms", "stopped_ms"),
    [
        (300, 1, 15, 0, 300),
        (40, 1, 0, 0, None),
        # The interpreter is held: who waits for it wakes every 5 ms.
        (300, 60, 0, 0, None),
        # This thread alone is kept from running, as by a page that is read.
        (300, 1, 310, 0, None),
        (0, 1, 0, 5_000, 5_000),
    ],
)
def test_a_process_that_the_system_stops_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    late_ms: int,
    woken: int,
    trains_ms: int,
    sleeps_ms: int,
    stopped_ms: int | None,
) -> None:
    clock, stops = Clock(monkeypatch), list[int]()
    waits = samples.Waits(lambda end_ns, length_ns: stops.append(length_ns))
    clock.late_ns, clock.woken = late_ms * 10**6, woken
    clock.trains_ns, clock.sleeps_ns = trains_ms * 10**6, sleeps_ms * 10**6
    waits.wait(clock, 0.02)
    assert stops == ([] if stopped_ms is None else [stopped_ms * 10**6])


def test_threads_without_a_lock_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asks = Clock(monkeypatch), samples.Waits()
    clock.late_ns = 6 * 10**6
    asks.wait(clock, 0.02)
    monkeypatch.setattr(samples.sys, "_is_gil_enabled", lambda: False, raising=False)
    assert asks.describe() is None


def free_memory() -> None:
    """Collect garbage, as scripts do."""
    gc.collect()


def test_a_long_collection_shows_who_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "LONG_PAUSE_NS", 0)
    watch = evidence.CollectionWatch(lambda generation, end, length: None)
    watch.begin()
    free_memory()
    watch.end()
    told = watch.describe()
    assert isinstance(told, dict)
    frames = [frame for one in told["stacks"] for frame in one["frames"]]
    assert any("free_memory@" in frame for frame in frames)
    assert not any("collector/evidence.py" in frame for frame in frames)
    assert told["asked_ms"] > 0


def test_a_step_that_hangs_is_told_once_and_again_when_it_ends(
    watched: StackSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "STUCK", 0)
    told: list[list[str] | None] = []
    ended = threading.Event()

    def on_stuck(stack: list[str] | None) -> None:
        told.append(stack)
        if stack is None:
            ended.set()
        else:
            watched.step(time.perf_counter_ns())

    watched._on_stuck = on_stuck
    watched.begin()
    monkeypatch.setattr(samples, "STUCK_NS", 1)  # not before, or this thread may still be in a frame of ours
    assert ended.wait(60)
    watched.end()
    assert told[0] is not None
    assert any("test_a_step_that_hangs_is_told_once" in frame for frame in told[0])
    assert told[1] is None
