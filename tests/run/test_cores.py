"""Cores that ranks have for themselves, and those that their operators leave free."""

from __future__ import annotations

import pytest

from tracedoc.run.job import Job, RankJob


def _job(*ranks: tuple[str, int | None, str, int | None]) -> Job:
    """A job of ranks with a host, the number of their cores and their names, and threads of an operator."""
    return Job(
        tuple(
            RankJob(rank, host=host, cores=cores, affinity=affinity, threads=threads)
            for rank, (host, cores, affinity, threads) in enumerate(ranks)
        )
    )


def test_ranks_of_a_host_that_name_the_same_cores_share_them() -> None:
    job = _job(("a", 4, "0-3", 1), ("a", 4, "0-3", 1), ("a", 2, "4-5", 1), ("b", 4, "0-3", 1))
    assert job.fair_cores == {0: 2, 1: 2, 2: 2, 3: 4}
    crowd = _job(("a", 1, "0", 1), ("a", 1, "0", 1), ("a", None, "", 1))
    assert crowd.fair_cores == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("threads", "spare"),
    [((1, 1), 1), ((1, 2), 0), ((3, 1), 0), ((1, None), None)],
)
def test_a_core_is_spare_that_no_rank_s_operators_use(
    threads: tuple[int | None, int | None], spare: int | None
) -> None:
    """Two ranks share four cores, two each; a third was not captured."""
    job = _job(*(("a", 4, "0-3", one) for one in threads))
    assert job.spare_cores((0, 1)) == spare
    assert job.spare_cores((0, 2)) is None
