"""What of the waits for cores is the job's own: not what other processes may have had."""

from __future__ import annotations

import pytest

from tracedoc.play.joins import core_waits
from tracedoc.run.job import Job, RankJob
from tracedoc.run.machine import LoaderWindow, Machine


def _waiting(waited_us: int, counters: dict[str, int], workers: tuple[dict[str, int], ...] = ()) -> Job:
    """Two ranks of a host, each of which ran for 600 ms in the window, and waited for a core as well."""
    thread = {"steps": 5, "ran_us": 600_000, "waited_us": waited_us}
    machine = Machine(loader=LoaderWindow(workers=workers))
    return Job(
        tuple(
            RankJob(rank, host="a", training_thread=thread, counters=counters, machine=machine)
            for rank in (0, 1)
        )
    )


COUNTED = {
    **{"host.cpu_us": 4_000_000, "host.idle_us": 400_000},
    **{"process.user_us": 1_200_000, "process.system_us": 200_000},
}
"""Of 4 s of the host's processors 0.4 s are idle, and each of two ranks has 1.4: others have 0.8, a fifth."""


def test_waits_for_cores_that_others_may_have_had_are_perhaps_not_the_job_s() -> None:
    assert core_waits(_waiting(400_000, COUNTED), (0, 1)) == pytest.approx((0.2, 0.4))
    assert core_waits(_waiting(100_000, COUNTED), (0, 1)) == pytest.approx((0.0, 1 / 7))
    assert core_waits(_waiting(400_000, {}), (0, 1)) == pytest.approx((0.0, 0.4))
    assert core_waits(Job((RankJob(0),)), (0,)) == (0.0, 0.0)


def test_workers_of_loaders_are_the_job_s() -> None:
    """Each of four ran for 0.1 s of those that nobody else is known to have had."""
    workers = ({"ran_us": 100_000}, {"ran_us": 100_000})
    assert core_waits(_waiting(400_000, COUNTED, workers), (0, 1)) == pytest.approx((0.3, 0.4))
