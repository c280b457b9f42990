"""The arguments with which a recipe's data loader gets its samples: those that the job's own loader has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracedoc.run.job import Job, Loader, RankJob
from tracedoc.topics.input.run import samples_in_code
from tracedoc.values import Unknown


def run_of(loader: Loader | None, ranks: int = 2) -> Any:
    job = Job(tuple(RankJob(rank, loader=loader) for rank in range(ranks) if loader is not None))
    return SimpleNamespace(job=job, world_size=ranks, kept={}, digests=(), meets_rarely=False)


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (run_of(Loader(32, 0, sampler="DistributedSampler", replicas=2)), "batch_size, sampler=sampler"),
        (run_of(None), "batch_size, sampler=sampler"),
        # torch's own samplers draw from all data: the script has no sampler to hand over.
        (run_of(Loader(32, 2, sampler="RandomSampler")), "batch_size"),
        (run_of(Loader(32, 0, sampler="RandomSampler"), ranks=1), "batch_size"),
    ],
)
def test_a_sampler_is_handed_over_where_the_job_has_one(run: Any, code: str) -> None:
    assert samples_in_code(run) == code


def test_a_loader_without_a_batch_size_gets_none() -> None:
    """A batch sampler, or batch_size=None: torch takes no batch size beside it."""
    assert isinstance(samples_in_code(run_of(Loader(None, 0, sampler="SequentialSampler"))), Unknown)
