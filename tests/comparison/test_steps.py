"""Whether a change is more than noise."""

from __future__ import annotations

import random
from itertools import permutations
from math import comb, exp, log1p

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import sharded
from tracedoc.comparison.step_change import (
    StepChange,
    _cut,
    _rank_sum_counts,
    run_steps,
    same_capture,
    step_change,
    verdict_on,
)
from tracedoc.diagnosis import Diagnosis, FactRecord


def lasting(*steps_ms: float, device: str = "NVIDIA H100 80GB HBM3", unprofiled: float = 0.0) -> Diagnosis:
    """Return a run of one rank with complete steps of these lengths."""
    whole = sharded()
    rank = whole.ranks[0]
    steps = tuple(
        replace(rank.steps[0], index=index, complete=True, step_ms=ms) for index, ms in enumerate(steps_ms)
    )
    facts = {"unprofiled_step_ms": FactRecord("ms", "rank", unprofiled)} if unprofiled else {}
    run = replace(whole.run, device=device)
    return replace(whole, ranks=(replace(rank, steps=steps),), run=run, facts=facts)


def word(base: Diagnosis, head: Diagnosis) -> str:
    return verdict_on(step_change(base, head)).word


def test_statistic_has_the_distribution_of_counted_orders() -> None:
    values = [0] * (2 * 3 + 1)
    for order in set(permutations("aabbb")):
        values[sum(order[i] == "b" and order[j] == "a" for i in range(5) for j in range(i + 1, 5))] += 1
    assert list(_rank_sum_counts(2, 3)) == values
    assert sum(_rank_sum_counts(7, 5)) == comb(12, 5)


@pytest.mark.parametrize(
    ("first", "second", "critical"), [(4, 4, 0), (5, 5, 2), (8, 8, 13), (10, 10, 23), (5, 9, 7)]
)
def test_ends_are_those_of_published_tables(first: int, second: int, critical: int) -> None:
    """Critical values of the Mann-Whitney U at 5 %, two-sided, as every textbook prints them."""
    assert _cut(first, second) == critical


def test_large_samples_take_the_normal_approximation() -> None:
    assert _cut(61, 61) == pytest.approx(_cut(60, 60) * (61 / 60) ** 2, rel=0.02)


def test_the_run_s_step_is_the_median_of_its_ranks() -> None:
    run = sharded()
    steps = run_steps(run)
    assert len(steps) == len({s.index for rank in run.ranks for s in rank.steps if s.complete})


def test_one_slow_rank_is_not_the_run_s_step() -> None:
    run = lasting(100.0)
    ranks = tuple(
        replace(run.ranks[0], rank=rank, steps=(replace(run.ranks[0].steps[0], step_ms=ms),))
        for rank, ms in enumerate((90.0, 160.0, 100.0))
    )
    assert run_steps(replace(run, ranks=ranks)) == [100]


def test_all_steps_shorter_is_improved() -> None:
    assert word(lasting(176, 178, 175, 181, 168), lasting(139, 124, 128, 129, 161)) == "improved"
    assert word(lasting(139, 124, 128, 129, 161), lasting(176, 178, 175, 181, 168)) == "regressed"


def test_same_steps_are_unchanged() -> None:
    steps = (100.0, 101.0, 99.5, 100.5, 100.2)
    assert word(lasting(*steps), lasting(*reversed(steps))) == "unchanged"


def test_change_within_the_noise_of_two_captures_is_not_a_regression() -> None:
    steps = [100 + 0.1 * i for i in range(8)]
    assert word(lasting(*steps), lasting(*(1.015 * s for s in steps))) == "unchanged"
    assert word(lasting(*steps), lasting(*(1.06 * s for s in steps))) == "regressed"
    cpu = {"device": "CPU"}
    assert word(lasting(*steps, **cpu), lasting(*(1.06 * s for s in steps), **cpu)) == "unchanged"


def test_wild_steps_are_inconclusive_and_say_how_many_would_do() -> None:
    found = verdict_on(step_change(lasting(100, 140, 90, 130, 105), lasting(120, 95, 150, 110, 100)))
    assert found.word == "inconclusive"
    assert found.steps_needed is None or found.steps_needed > 5
    more = verdict_on(step_change(lasting(100, 128, 90, 120, 105), lasting(122, 140, 115, 150, 128)))
    assert more.word == "inconclusive"
    assert more.steps_needed is not None


@pytest.mark.parametrize("head", [(50.0,) * 9, (100.0,)])
def test_one_step_decides_nothing(head: tuple[float, ...]) -> None:
    found = verdict_on(step_change(lasting(100.0), lasting(*head)))
    assert found.word == "inconclusive"
    assert "cannot be told from noise" in found.why


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        ((100, 101, 102), (130, 131, 132), "regressed"),
        ((130, 131, 132), (100, 101, 102), "improved"),
        ((100, 101, 102), (101, 102, 103), "unchanged"),
        ((100, 101, 102), (104, 105, 106), "inconclusive"),  # 1.3 to 6.5 % longer
        ((100, 101, 102), (130, 131, 400), "inconclusive"),  # one long step, perhaps by chance
        ((100, 100, 300), (50, 50, 50), "inconclusive"),
        ((100, 101), (130, 131), "regressed"),
        ((100, 110), (130, 140), "inconclusive"),  # 4.303 errors of 6 %
        ((100, 101), (130, 131, 132, 133, 134, 135, 136), "regressed"),
    ],
)
def test_few_steps_decide_by_their_spread(
    base: tuple[float, ...], head: tuple[float, ...], expected: str
) -> None:
    found = verdict_on(step_change(lasting(*base), lasting(*head)))
    assert found.word == expected
    assert ("cannot be told from noise" in found.why) == (expected == "inconclusive")


def test_the_interval_of_few_steps_is_that_of_welch() -> None:
    """Logarithms 0, 1, 2 and 3, 4, 8.

    Variances 1 and 7, error sqrt(8 / 3) = 1.633, freedom (8/3)^2 / ((1/3)^2 / 2 + (7/3)^2 / 2) = 2.56, so
    4 -+ 4.303 * 1.633.
    """
    change = step_change(lasting(*map(exp, (0, 1, 2))), lasting(*map(exp, (3, 4, 8))))
    assert change is not None
    ends = (log1p(change.low_frac), log1p(change.high_frac))
    assert ends == pytest.approx((4 - 7.027, 4 + 7.027), abs=0.001)


def test_the_reason_is_the_reason() -> None:
    """All steps of HEAD are 9 to 12 % longer: a change for sure, but two captures on CPUs differ by 10 %."""
    base = lasting(100, 100.2, 100.4, 100.6, 100.8, device="CPU")
    head = lasting(109.2, 109.9, 110.6, 111.3, 112, device="CPU")
    change = step_change(base, head)
    assert change is not None
    assert change.low_frac > 0
    assert verdict_on(change).why == "two captures of one job may differ by as much"
    wild = step_change(lasting(60, 80, 100, 120, 140), lasting(70, 90, 110, 130, 150))
    assert verdict_on(wild).why == "the steps vary more than the change"


def test_a_capture_does_not_differ_from_itself() -> None:
    """Not even where it has a single step, of which nothing else could be told."""
    run = lasting(100.0)
    assert same_capture(run, replace(run, tool_version="another"))
    assert not same_capture(run, lasting(100.1))
    assert not same_capture(replace(run, ranks=()), replace(run, ranks=()))
    assert verdict_on(step_change(run, run)).word == "inconclusive"
    assert verdict_on(step_change(run, run), same_capture=True).word == "unchanged"


def test_side_without_steps_is_inconclusive() -> None:
    assert verdict_on(step_change(lasting(), lasting(100))).why == "a side has no complete step"


def test_absurd_steps_are_no_steps() -> None:
    assert run_steps(lasting(100, 1e300, 0, -5, 100)) == [100, 100]
    wild = verdict_on(step_change(lasting(1e-300, 1e8, 1e-300, 1e8), lasting(1e8, 1e-300, 1e8, 1e-300)))
    assert (wild.word, wild.steps_needed) == ("inconclusive", None)


def test_steps_without_the_profiler_may_object() -> None:
    before, after = (100.0, 101.0, 102.0, 103.0, 104.0), (90.0, 91.0, 92.0, 93.0, 94.0)
    assert word(lasting(*before, unprofiled=80), lasting(*after, unprofiled=70)) == "improved"
    assert word(lasting(*before, unprofiled=70), lasting(*after, unprofiled=80)) == "inconclusive"


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        (81.5, "improved"),  # 1.9 % longer: two captures of one job differ by 2 %
        (82.0, "inconclusive"),  # 2.5 % longer
        (40.0, "improved"),  # half as long: it agrees, and more so
    ],
)
def test_steps_without_the_profiler_object_only_beyond_the_noise(without: float, expected: str) -> None:
    """Captured steps of 100 and 90 ms, and 80 ms without the profiler before."""
    before, after = (100.0, 101.0, 102.0, 103.0, 104.0), (90.0, 91.0, 92.0, 93.0, 94.0)
    assert word(lasting(*before, unprofiled=80.0), lasting(*after, unprofiled=without)) == expected


def test_waiting_for_cores_may_explain_a_change() -> None:
    """100 -> 150 ms: 30 ms of waiting leave 120 and a regression, 50 explain all of it."""

    def waiting(run: Diagnosis, wait_ms: float) -> Diagnosis:
        return replace(run, facts={"core_wait_ms": FactRecord("ms", "rank", wait_ms, values={"0": wait_ms})})

    fast, slow = lasting(*[100.0] * 5), lasting(*[150.0] * 5)
    assert word(fast, waiting(slow, 30)) == "regressed"
    assert word(waiting(slow, 30), fast) == "improved"
    assert word(fast, waiting(slow, 50)) == "inconclusive"
    assert word(waiting(slow, 50), fast) == "inconclusive"
    assert word(waiting(fast, 90), slow) == "regressed"
    assert "free cores" in verdict_on(step_change(fast, waiting(slow, 50))).why


def test_captures_of_one_job_are_seldom_told_apart() -> None:
    """Of 400 pairs drawn from one distribution at most a few may seem different: 5 %, less for the margin."""
    draw = random.Random(7)
    apart = 0
    for _ in range(400):
        base, head = ([100 * draw.lognormvariate(0, 0.03) for _ in range(6)] for _ in range(2))
        apart += word(lasting(*base), lasting(*head)) in ("improved", "regressed")
    assert apart <= 8


def test_change_is_stated_with_both_ends() -> None:
    change = step_change(lasting(100, 100, 100, 100), lasting(110, 110, 110, 110))
    assert isinstance(change, StepChange)
    assert (change.low_frac, change.change_frac, change.high_frac) == pytest.approx((0.1, 0.1, 0.1))


def on_cpu(step_ms: float, operators_ms: float, waits_ms: tuple[float, ...] = ()) -> Diagnosis:
    """Return a run on CPUs of ten alike steps, with its time in operators and its ranks' waits for cores."""
    run = lasting(*[step_ms] * 10, device="CPU")
    steps = tuple(replace(step, compute_ms=operators_ms) for step in run.ranks[0].steps)
    waited = FactRecord("ms", "rank", values={str(rank): ms for rank, ms in enumerate(waits_ms)})
    return replace(run, ranks=(replace(run.ranks[0], steps=steps),), facts={"core_wait_ms": waited})


@pytest.mark.parametrize(
    ("head", "same_program", "expected"),
    [
        (on_cpu(150, 75), True, "inconclusive"),  # all 1.5 times as long: 150 / 1.5 = 100
        (on_cpu(150, 75), False, "regressed"),
        (on_cpu(150, 50), True, "regressed"),  # the operators as long as before
        (on_cpu(150, 60), True, "regressed"),  # 1.2 times as long: 150 / 1.2 = 125
        (on_cpu(130, 75), True, "inconclusive"),  # the operators explain more than the change
        (on_cpu(150, 40), True, "regressed"),  # they got shorter
    ],
)
def test_operators_that_take_longer_on_cpus_may_explain_a_change(
    head: Diagnosis, same_program: bool, expected: str
) -> None:
    change = step_change(on_cpu(100, 50), head)
    assert verdict_on(change, same_program=same_program).word == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (on_cpu(60, 25), "inconclusive"),  # 100 less 50 of waiting are 50
        (on_cpu(60, 25, (30.0,)), "improved"),  # 60 less 30 of waiting are 30
        (on_cpu(60, 25, (10.0,)), "inconclusive"),  # 60 less 10 of waiting are 50
    ],
)
def test_waits_of_both_sides_are_taken_off(head: Diagnosis, expected: str) -> None:
    assert verdict_on(step_change(on_cpu(100, 50, (50.0,)), head)).word == expected


@pytest.mark.parametrize(
    ("unprofiled", "expected"),
    [
        ((100.0, 70.0), "improved"),
        ((100.0, 95.0), "inconclusive"),  # within 10 %
        ((None, 70.0), "inconclusive"),
    ],
)
def test_steps_without_the_profiler_decide_what_few_captured_ones_leave_open(
    unprofiled: tuple[float | None, float], expected: str
) -> None:
    """The captured steps shrank by 30 %, by 8 % at least; two runs on CPUs may differ by 10 %."""
    before, after = unprofiled
    change = StepChange(
        100, 70, 5, 5, -0.3, -0.5, -0.08, 0.1, base_unprofiled_ms=before, head_unprofiled_ms=after
    )
    assert verdict_on(change).word == expected


def test_waits_for_cores_come_on_top_of_slower_operators() -> None:
    # 200 ms, less 20 % of waiting, are 160; operators that take 1.5 times as long make 107 of them.
    slow = on_cpu(200, 75, (40,))
    assert verdict_on(step_change(on_cpu(100, 50), slow), same_program=True).word == "inconclusive"
    assert verdict_on(step_change(slow, on_cpu(100, 50)), same_program=True).word == "inconclusive"
    unhurried = on_cpu(200, 75)
    assert verdict_on(step_change(on_cpu(100, 50), unhurried), same_program=True).word == "regressed"
    assert verdict_on(step_change(unhurried, on_cpu(100, 50)), same_program=True).word == "improved"


def test_more_steps_are_needed_with_the_square_of_the_width() -> None:
    """6 % with 6 % to either side: to be surely above 2 % takes 2/3 of that width, so 2.25 times 5 steps."""
    change = StepChange(100.0, 106.0, 5, 5, 0.06, 0.0, 0.12, noise_frac=0.02)
    assert verdict_on(change).steps_needed == 12


def with_log(
    low_ms: float,
    high_ms: float,
    *captured_ms: float,
    mean_ms: float = 0.0,
    waited_frac: float = 0.0,
    slow_ms: float = 0.0,
) -> Diagnosis:
    """Return a run on CPUs with a log whose median lies between two lengths, and captured steps."""
    facts = {
        "logged_median_low_ms": FactRecord("ms", "run", low_ms),
        "logged_median_high_ms": FactRecord("ms", "run", high_ms),
        "logged_mean_step_ms": FactRecord("ms", "run", mean_ms or (low_ms + high_ms) / 2),
        "logged_core_wait_frac": FactRecord("fraction", "run", waited_frac),
        "slow_steps_pattern": FactRecord("text", "run", "regular" if slow_ms else "irregular"),
        "slow_steps_cost_ms": FactRecord("ms", "run", slow_ms),
    }
    return replace(lasting(*captured_ms, device="CPU"), facts=facts)


WILD = (60.0, 100.0, 80.0, 140.0, 70.0)
"""Five captured steps that decide nothing."""


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (with_log(60.5, 67.5, *WILD), "improved"),
        (with_log(60.5, 67.5, *(3 * ms for ms in WILD)), "inconclusive"),  # the captured ones object
        (with_log(78, 90, *WILD), "inconclusive"),  # perhaps 5 % less, and two runs differ by 10
        (with_log(78, 90, *(0.8 * ms for ms in WILD)), "improved"),  # the captured ones say it too
        (with_log(90, 110, *WILD), "inconclusive"),  # logs that vary by 10 % exclude no change of 20
        (with_log(90, 110, *WILD, mean_ms=150), "inconclusive"),
        (with_log(130, 140, *WILD), "regressed"),
        # A quarter of the time was waited for cores: 130 less 32 are 98.
        (with_log(130, 140, *WILD, waited_frac=0.25), "inconclusive"),
    ],
)
def test_the_log_of_all_steps_decides_where_few_captured_ones_cannot(head: Diagnosis, expected: str) -> None:
    assert word(with_log(90, 110, *WILD), head) == expected


def test_errors_of_two_medians_add_as_squares() -> None:
    """On logarithms, from 90 to 110 down to 60.5 to 67.5 ms: ln(64 / 100) is -0.446.

    What ln(67.5 / 64) and ln(100 / 90), 0.053 and 0.105, leave of that is -0.328; the other way ln(64 / 60.5)
    and ln(110 / 100), 0.056 and 0.095, make it -0.557.
    """
    change = step_change(with_log(90, 110, *WILD), with_log(60.5, 67.5, *WILD))
    assert change is not None
    found = (change.low_frac, change.change_frac, change.high_frac)
    assert found == pytest.approx((-0.4271, -0.36, -0.2798), abs=1e-4)


def test_a_log_that_does_not_change_is_unchanged_unless_its_mean_is() -> None:
    steady = (100.0, 100.5, 99.5, 100.2, 99.8)
    base = with_log(99, 101, *steady)
    assert word(base, with_log(98, 102, *reversed(steady))) == "unchanged"
    seldom = verdict_on(step_change(base, with_log(98, 102, *reversed(steady), mean_ms=130)))
    assert (seldom.word, seldom.why) == (
        "inconclusive",
        "the mean step changed, and half of all steps may take as long as before",
    )
    assert verdict_on(step_change(base, with_log(60, 62, *reversed(steady)))).word == "improved"


@pytest.mark.parametrize(
    ("mean_ms", "slow_ms", "expected"), [(130, 30, "improved"), (130, 5, "inconclusive")]
)
def test_slow_steps_in_an_order_decide_what_the_median_does_not_know(
    mean_ms: float, slow_ms: float, expected: str
) -> None:
    """The mean falls from 130 to 100 ms, by 23 %: by steps at equal distances, or by what may be chance."""
    steady = (100.0, 100.5, 99.5, 100.2, 99.8)
    base = with_log(99, 101, *steady, mean_ms=mean_ms, slow_ms=slow_ms)
    change = step_change(base, with_log(98, 102, *reversed(steady)))
    assert verdict_on(change).word == expected
    assert verdict_on(change, same_program=True).word == "inconclusive"


def test_a_log_alone_tells_no_captures_of_one_program_apart() -> None:
    """The same script, whose captured steps take as long: the others ran at another hour."""
    steady = (100.0, 100.5, 99.5, 100.2, 99.8)
    change = step_change(with_log(99, 101, *steady), with_log(150, 152, *reversed(steady)))
    assert verdict_on(change).word == "regressed"
    assert verdict_on(change, same_program=True).word == "inconclusive"
