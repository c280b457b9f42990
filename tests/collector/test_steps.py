"""Steps are counted on one clock, whatever else steps beside it or inside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tracedoc.collector.steps import Listener, StepClock, StepTimes, count_outermost


class Optimizer:
    """An optimizer that steps others inside its own step."""

    def __init__(self, *inner: Optimizer) -> None:
        self.inner = inner

    def step(self) -> str:
        for optimizer in self.inner:
            type(optimizer).step(optimizer)
        return "stepped"


def counting(ended: Callable[[Optimizer], None]) -> type[Optimizer]:
    return type("Counted", (Optimizer,), {"step": count_outermost(Optimizer.step, Listener(ended))})


def test_an_optimizer_inside_another_does_not_count_beside_it() -> None:
    ended: list[Optimizer] = []
    kind = counting(ended.append)
    outer = kind(kind(), kind())
    assert outer.step() == "stepped"
    assert ended == [outer]


def test_a_step_that_raises_is_no_step() -> None:
    ended: list[object] = []

    def step(self: object) -> None:
        raise ValueError

    counted = count_outermost(step, Listener(ended.append))
    for _ in range(2):
        with pytest.raises(ValueError):
            counted(1)
    assert ended == []


def test_accumulated_micro_steps_are_no_steps() -> None:
    ended: list[int] = []
    counted = count_outermost(lambda engine: None, Listener(ended.append), lambda engine: engine % 2 == 0)
    for engine in range(4):
        counted(engine)
    assert ended == [0, 2]


def test_the_first_that_steps_is_the_clock() -> None:
    clock, critic, generator = StepClock(), Optimizer(), Optimizer()
    ticks = [clock.is_tick(stepped) for stepped in (critic, critic, generator) * 3]
    assert ticks == [True, True, False] * 3
    assert clock.calls == {"Optimizer": 9}


def test_an_optimizer_for_each_of_many_parameters_ticks_once_an_iteration() -> None:
    clock, optimizers = StepClock(), [Optimizer() for _ in range(200)]
    ticks = [clock.is_tick(optimizer) for _ in range(5) for optimizer in optimizers]
    assert sum(ticks) == 5


def test_another_optimizer_takes_over_where_the_clock_falls_silent() -> None:
    clock, first, second = StepClock(), Optimizer(), Optimizer()
    assert clock.is_tick(first)
    ticks = [clock.is_tick(second) for _ in range(60)]
    # The 50th step in a row makes it the clock, and is its first tick.
    assert ticks == [False] * 49 + [True] * 11


def test_another_optimizer_takes_over_where_the_clock_is_gone() -> None:
    clock, first, second = StepClock(), Optimizer(), Optimizer()
    assert clock.is_tick(first)
    del first
    assert clock.is_tick(second)


def test_medians_are_of_the_steps_there_were() -> None:
    times = StepTimes()
    times.before.extend([100_000_000] + [2_000_000] * 10)
    times.during.extend([3_000_000, 5_000_000])
    assert times.medians() == {
        "before": {"median_ms": 2.0, "steps": 10},
        "during": {"median_ms": 4.0, "steps": 2},
    }
