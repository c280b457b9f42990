"""What a job was started with, as texts by name: versions, variables, training, loader and buckets."""

from __future__ import annotations

from collections.abc import Iterator

from tracedoc.run.job import Job, RankJob

NO_SETTINGS = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *(
            "RANK",
            "LOCAL_RANK",
            "GROUP_RANK",
            "ROLE_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "GROUP_WORLD_SIZE",
        ),
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    }
)
"""Variables that name a process, a start or a device: they differ for no reason of the job's."""


def job_settings(job: Job | None) -> dict[str, str]:
    """Return the settings of the first rank that recorded any; empty without a manifest.

    What ranks set apart (their devices, ports) is left out.
    """
    return dict(_of_rank(job.ranks[0])) if job is not None and job.ranks else {}


def _of_rank(rank: RankJob) -> Iterator[tuple[str, str]]:
    yield from rank.versions.items()
    for name, value in rank.variables.items():
        if name not in NO_SETTINGS:
            yield name, value
    yield from rank.training.items()
    loader, buckets = rank.loader, rank.buckets
    for name, given in (
        ("batch size of the loader", loader.batch_size),
        ("loader workers", loader.workers),
        ("loader prefetch factor", loader.prefetch_factor),
        ("loader pins memory", loader.pin_memory),
        ("loader workers persist", loader.persistent_workers),
        ("DDP bucket bytes", buckets.cap_bytes),
        ("DDP finds unused parameters", buckets.find_unused_parameters),
        ("DDP static graph", buckets.static_graph),
        ("DDP gradients as bucket view", buckets.as_view),
        ("CPU cores of a rank", rank.cores),
    ):
        if given is not None:
            yield name, _shown(given)


def _shown(value: int | bool) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
