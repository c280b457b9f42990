"""What a rank's manifest says of its loader's workers and of the tokens of its batches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tracedoc.run.job import Job, Loader, RankJob
from tracedoc.run.machine import LoaderWindow, Machine
from tracedoc.topics.input.run import (
    batch_tokens,
    io_wait_frac,
    loader_cold_frac,
    loader_start_ms,
    memory_wait_frac,
    slowest_worker,
    slowest_worker_frac,
    uneven_tokens,
    worker_code,
)
from tracedoc.values import Unknown


def rank_of(number: int = 0, count: int = 3, **window: Any) -> RankJob:
    return RankJob(number, loader=Loader(workers=count), machine=Machine(loader=LoaderWindow(**window)))


@pytest.mark.parametrize(
    ("waits", "batches", "worker"),
    [
        ({"0": 10.0, "1": 80.0, "2": 10.0}, 6, "worker 1"),
        ({"0": 40.0, "1": 35.0, "2": 25.0}, 6, "none"),
        ({"0": 10.0, "1": 80.0, "2": 10.0}, 5, None),  # one of them made one batch
        ({"-1": 80.0}, 60, None),
    ],
)
def test_a_worker_is_slow_that_is_waited_for_most(
    waits: dict[str, float], batches: int, worker: str | None
) -> None:
    found = slowest_worker(rank_of(waits_ms=waits, batches=batches))
    assert isinstance(found, Unknown) if worker is None else found == worker


def test_of_two_workers_none_is_said_to_be_the_slow_one() -> None:
    rank = rank_of(count=2, waits_ms={"0": 1.0, "1": 9.0}, batches=60)
    assert (slowest_worker(rank), slowest_worker_frac(rank)) == ("none", 0.9)


def test_bytes_come_from_the_disk_or_from_memory() -> None:
    workers = ({"rchar": 600, "read_bytes": 100}, {"rchar": 400, "read_bytes": 400})
    assert loader_cold_frac(rank_of(workers=workers)) == 0.5


@pytest.mark.parametrize(
    ("counters", "shares"),
    [
        ({"pressure.io_us": 400_000, "pressure.memory_us": 100_000}, (0.8, 0.2)),
        ({"pressure.io_us": 600_000}, (1.0, 0.0)),
        ({"swap.pswpin": 5000}, None),
    ],
)
def test_waiting_for_a_disk_or_for_memory_is_what_the_kernel_counts(
    counters: dict[str, int], shares: tuple[float, float] | None
) -> None:
    """In half a second; a counter that did not grow is not kept, and without any it is not known."""
    rank = replace(rank_of(wall_us=500_000), counters=counters)
    found = io_wait_frac(rank), memory_wait_frac(rank)
    assert all(isinstance(one, Unknown) for one in found) if shares is None else found == shares


def test_the_function_of_workers_takes_half_of_the_time_in_which_they_make_batches() -> None:
    decoding = (60.0, ("PIL/ImageFile.py(9): load@12", "data.py(4): decode@6", "data.py(1): __getitem__@2"))
    collating = (39.0, ("torch/utils/data/_utils/collate.py(5): stack@7",))
    reading = (22.0, ("data.py(20): read@21",))

    def code(*stacks: tuple[float, tuple[str, ...]]) -> str:
        return worker_code(LoaderWindow(stacks=stacks))

    assert code(decoding, collating) == "`decode` (`data.py:4`)"
    assert code(decoding, collating, reading) == "none"
    assert code(collating) == "`stack` (`torch/utils/data/_utils/collate.py:5`)"
    assert code() == "none"


def test_starts_are_told_on_average() -> None:
    assert loader_start_ms(rank_of(starts=4, starts_ms=200.0)) == 50.0
    assert isinstance(loader_start_ms(rank_of()), Unknown)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ((100, 100, 150), "the batches of rank 2 hold 1.5 times the tokens of the median rank's"),
        ((100, 100, 105), "none"),
        ((100, None, None), None),
    ],
)
def test_uneven_tokens_name_the_rank_with_most(tokens: tuple[int | None, ...], words: str | None) -> None:
    ranks = tuple(
        rank_of(number, tokens=((one, 200),) if one is not None else ()) for number, one in enumerate(tokens)
    )
    run: Any = SimpleNamespace(job=Job(ranks), digests=[SimpleNamespace(rank=one.rank) for one in ranks])
    found = uneven_tokens(run)
    assert isinstance(found, Unknown) if words is None else found == words


def test_tokens_of_a_batch_are_the_mean_of_those_that_are_no_padding() -> None:
    assert batch_tokens(rank_of(tokens=((40, 100), (51, 100), (30, 100)))) == 40
    assert isinstance(batch_tokens(rank_of()), Unknown)
