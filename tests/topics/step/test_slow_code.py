"""What steps far longer than usual are in: a function, a loader, or a thread beside training."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tracedoc.run.job import Job, RankJob
from tracedoc.run.machine import SampledStep, Samples, Stacks
from tracedoc.run.steplog import STEP, STOPPED, StepLog
from tracedoc.topics.step.slow_code import slow_steps_code, slow_steps_cost_ms, slow_steps_doing
from tracedoc.topics.step.slow_steps import slow_steps_pattern
from tracedoc.values import Unknown

MAIN = "train.py(30): main@41"
TORCH = "torch/nn/modules/linear.py(120): forward@125"
SAVE = ("torch/serialization.py(900): save@950", "train.py(9): save_state@12", MAIN)
LOADER = (
    "multiprocessing/queues.py(98): get@103",
    "torch/utils/data/dataloader.py(1200): _get_data@1220",
    "torch/utils/data/dataloader.py(700): __next__@708",
    MAIN,
)
SAMPLE = ("data.py(5): __getitem__@9", *LOADER[2:])
THREAD = ("train.py(60): upload@66", "threading.py(975): run@982")


def run_of(*stacks: tuple[float, tuple[str, ...]], beside: Stacks = ()) -> Any:
    """One rank with these stacks of 4 long steps of 40, of which one was sampled, and a log of equal ones."""
    return run_of_ranks(
        [
            SampledStep(
                20,
                tuple((ms / 4, frames) for ms, frames in stacks),
                tuple((ms / 4, frames) for ms, frames in beside),
            )
        ],
        lengths_ms=(100,) * 40,
    )


def run_of_ranks(
    *sampled: list[SampledStep],
    lengths_ms: tuple[int, ...] = (),
    stops_ms: Sequence[Mapping[int, int]] = ({}, {}),
) -> Any:
    """Ranks with 4 long steps of 40 and these samples, and the lengths of the steps that the log has.

    Each rank was stopped in some steps, until 1 ms before their ends.
    """
    words = array("q")
    for number, ms in enumerate(lengths_ms, 1):
        words.extend([STEP << 32 | number, number * 10**9, ms * 10**6])
    stops = [array("q", words) for _ in sampled]
    for log, of_rank in zip(stops, stops_ms, strict=False):
        for number, ms in of_rank.items():
            log.extend([STOPPED << 32, number * 10**9 - 10**6, ms * 10**6])
    ranks = tuple(
        RankJob(
            rank, samples=Samples(40, 4, (MAIN.partition("@")[0],), tuple(steps)), log=StepLog(rank, 0, log)
        )
        for rank, (steps, log) in enumerate(zip(sampled, stops, strict=True))
    )
    return SimpleNamespace(job=Job(ranks), kept={}, digests=(), meets_rarely=False)


@pytest.mark.parametrize(
    ("run", "code", "doing", "ms"),
    [
        (run_of((300.0, SAVE), (100.0, (TORCH, MAIN))), "`save_state` (`train.py:9`)", "saving", 7.5),
        (run_of((400.0, LOADER)), "the data loader", "loading", 10.0),
        (run_of((400.0, SAMPLE)), "`__getitem__` (`data.py:5`)", "other", 10.0),
        (
            run_of((400.0, (TORCH, MAIN)), beside=((320.0, THREAD),)),
            "`upload` (`train.py:60`) in a thread beside training",
            "a thread beside",
            8.0,
        ),
        # The thread that trains is in a function itself: that one speaks.
        (run_of((400.0, SAVE), beside=((320.0, THREAD),)), "`save_state` (`train.py:9`)", "saving", 10.0),
    ],
)
def test_long_steps_name_what_they_are_in(run: Any, code: str, doing: str, ms: float) -> None:
    assert (slow_steps_code(run), slow_steps_doing(run), slow_steps_cost_ms(run)) == (code, doing, ms)


@pytest.mark.parametrize("beside", [(), ((150.0, THREAD),), ((300.0, (TORCH,)),)])
def test_a_thread_that_ran_for_less_than_half_is_not_named(beside: Stacks) -> None:
    """400 ms of long steps in torch; torch's own threads are nobody's either."""
    run = run_of((400.0, (TORCH, MAIN)), beside=beside)
    assert slow_steps_code(run) == "none"
    assert isinstance(slow_steps_doing(run), Unknown)


@pytest.mark.parametrize(
    ("beside_ms", "usual_ms", "named"),
    [(26.0, 0.0, True), (24.0, 0.0, False), (58.0, 20.0, False), (62.0, 20.0, True)],
)
def test_a_thread_is_judged_by_steps_that_were_sampled_whole(
    beside_ms: float, usual_ms: float, named: bool
) -> None:
    """A whole slow step takes 100 ms, 50 more than usual; of another one only its last 40 ms were sampled.

    A thread that runs in every step is named where slow ones make that longer by twice as much.
    """
    steps = [
        SampledStep(16, ((50.0, TRAIN),), ((usual_ms, THREAD),), whole=True, long=False),
        SampledStep(20, ((100.0, TRAIN),), ((beside_ms, THREAD),), whole=True),
        SampledStep(30, ((40.0, TRAIN),)),
    ]
    found = "`upload` (`train.py:60`) in a thread beside training" if named else "none"
    assert slow_steps_code(run_of_ranks(steps)) == found


@pytest.mark.parametrize(
    ("stops_ms", "code"),
    [
        (({}, {20: 280, 33: 270}), "a stopped process on rank 1"),
        (({20: 280}, {33: 270}), "a stopped process"),
        (({}, {20: 140, 33: 140}), "`save_state` (`train.py:9`)"),  # less than half of 300 ms
        (({}, {21: 280, 34: 270}), "`save_state` (`train.py:9`)"),  # in other steps
    ],
)
def test_steps_are_slow_because_the_system_stops_a_process(
    stops_ms: tuple[dict[int, int], ...], code: str
) -> None:
    """Two of 40 steps take 300 ms more than the usual 100, and were sampled in the function that was left."""
    lengths = [400 if number in (20, 33) else 100 for number in range(1, 41)]
    slow = [SampledStep(number, ((400.0, SAVE),)) for number in (20, 33)]
    run = run_of_ranks(slow, slow, lengths_ms=tuple(lengths), stops_ms=stops_ms)
    assert slow_steps_code(run) == code
    assert slow_steps_pattern(run) == "irregular"
    assert slow_steps_doing(run) == ("stopped" if "stopped" in code else "saving")


TRAIN = (TORCH, MAIN)
STATISTICS = ("train.py(50): track@52", MAIN)
BATCH = ("train.py(5): batch@6", MAIN)


def usual(number: int, train_ms: float, batch_ms: float) -> SampledStep:
    return SampledStep(number, ((train_ms, TRAIN), (batch_ms, BATCH)), whole=True, long=False)


def test_what_usual_steps_do_as_well_is_not_what_slow_ones_take_longer() -> None:
    """The batch takes 100 of 200 ms, as of a usual 150 or 140: training takes 50 more, or statistics do."""
    trains = SampledStep(20, ((100.0, BATCH), (100.0, TRAIN)), whole=True)
    assert slow_steps_code(run_of_ranks([usual(16, 50, 100), trains])) == "none"
    tracks = SampledStep(20, ((100.0, BATCH), (50.0, STATISTICS), (50.0, TRAIN)), whole=True)
    assert slow_steps_code(run_of_ranks([usual(16, 40, 100), tracks])) == "`track` (`train.py:50`)"


def test_what_all_steps_do_is_not_named_for_slow_ones_without_an_order() -> None:
    """The batch takes 200 ms, and 100 in usual steps: as if others had used the cores; 310 are its own."""
    for batch_ms, named in ((200.0, "none"), (310.0, "`batch` (`train.py:5`)")):
        slow = SampledStep(20, ((batch_ms, BATCH), (50.0, TRAIN)), whole=True)
        assert slow_steps_code(run_of_ranks([usual(16, 50, 100), slow])) == named


def test_a_rank_is_in_it_for_half_as_long_as_the_one_that_is_longest() -> None:
    """Of 100 ms rank 0 is in statistics for 60, rank 1 for 40 beside others' work, and rank 2 waits."""
    shares = ((60, 40), (40, 60), (10, 90))
    sampled = [[SampledStep(20, ((own, STATISTICS), (rest, TRAIN)))] for own, rest in shares]
    assert slow_steps_code(run_of_ranks(*sampled)) == "`track` (`train.py:50`) on ranks 0-1"


def test_from_one_step_on_only_what_came_then_counts() -> None:
    """From step 31 on statistics take 60 ms more; before, two steps of 300 wrote tensors."""
    saves = [SampledStep(number, ((200.0, SAVE),)) for number in (11, 21)]
    tracks = [
        SampledStep(31, ((50.0, STATISTICS), (10.0, TRAIN))),
        SampledStep(32, ((60.0, STATISTICS), (100.0, TRAIN)), whole=True),
        # It is no longer than those before it now, and sampled to compare with.
        SampledStep(36, ((60.0, STATISTICS), (100.0, TRAIN)), whole=True, long=False),
    ]
    lengths = tuple(300 if n in (11, 21) else 100 if n <= 30 else 160 for n in range(1, 51))
    run = run_of_ranks([usual(16, 100, 0.0), *saves, *tracks], lengths_ms=lengths)
    assert slow_steps_code(run) == "`track` (`train.py:50`)"


def test_at_equal_distances_only_those_count() -> None:
    """Every tenth step evaluates; one more was long by chance, in which the loop wrote tensors."""
    evaluate = ("train.py(70): evaluate@75", MAIN)
    sampled = [SampledStep(number, ((50.0, evaluate),)) for number in (10, 20, 30)]
    sampled.append(SampledStep(14, ((150.0, SAVE),)))
    lengths = tuple(150 if n % 10 == 0 else 250 if n == 14 else 100 for n in range(1, 51))
    assert slow_steps_code(run_of_ranks(sampled, lengths_ms=lengths)) == "`evaluate` (`train.py:70`)"


def test_a_thread_costs_what_steps_take_longer_than_those_in_which_it_does_not_run() -> None:
    """40 logged steps, of which 16 take 70 ms and the others 50: 58 on average.

    The two that were sampled while the thread hardly ran took 49 and 51 ms, that is 50 at the median.
    """
    steps = [
        SampledStep(16, ((49.0, TRAIN),), whole=True, long=False),
        SampledStep(18, ((51.0, TRAIN),), ((5.0, THREAD),), whole=True, long=False),
        SampledStep(22, ((70.0, TRAIN),), ((50.0, THREAD),), whole=True, long=False),
        SampledStep(24, ((160.0, TRAIN),), ((100.0, THREAD),), whole=True),
        SampledStep(30, ((30.0, TRAIN),)),
    ]
    random = Random(1)
    lengths = [70] * 16 + [50] * 24
    random.shuffle(lengths)
    run = run_of_ranks(steps, lengths_ms=(*[50] * 5, *lengths))
    assert slow_steps_pattern(run) == "none"
    assert slow_steps_cost_ms(run) == pytest.approx(8.0)
