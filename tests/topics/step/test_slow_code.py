"""What steps far longer than usual are in: a function, a loader, or a thread beside training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracedoc.run.job import Job, RankJob, Samples, Stacks
from tracedoc.topics.step.slow_steps import slow_steps_code, slow_steps_code_ms, slow_steps_doing
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
    """One rank with these stacks of 4 long steps of 40."""
    samples = Samples(steps=40, long=4, loop=(MAIN,), stacks=stacks, beside=beside)
    return SimpleNamespace(job=Job((RankJob(0, samples=samples),)), kept={})


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
    assert (slow_steps_code(run), slow_steps_doing(run), slow_steps_code_ms(run)) == (code, doing, ms)


@pytest.mark.parametrize("beside", [(), ((150.0, THREAD),), ((300.0, (TORCH,)),)])
def test_a_thread_that_ran_for_less_than_half_is_not_named(beside: Stacks) -> None:
    """400 ms of long steps in torch; torch's own threads are nobody's either."""
    run = run_of((400.0, (TORCH, MAIN)), beside=beside)
    assert slow_steps_code(run) == "none"
    assert isinstance(slow_steps_doing(run), Unknown)
