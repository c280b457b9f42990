"""How long ranks waited for cores that the job itself had, as far as others did not have them."""

from __future__ import annotations

from collections.abc import Container

from tracedoc.run.job import Job


def core_waits(job: Job, ranks: Container[int]) -> tuple[float, float]:
    """Of the time in which training threads could run, what they waited for cores that the job's had.

    The least and the most, as shares. Most is all that they waited; least what is left if they waited for as
    large a share as other processes had of the host, 0 where that is not counted.
    """
    known = [one for one in job.ranks if one.rank in ranks]
    waited = sum(one.training_thread.get("waited_us", 0) for one in known)
    could = waited + sum(one.training_thread.get("ran_us", 0) for one in known)
    if not could:
        return 0.0, 0.0
    taken = max(_taken_frac(job, host) for host in {one.host for one in known})
    return max(waited / could - taken, 0.0), waited / could


def _taken_frac(job: Job, host: str) -> float:
    """The share of a host's processors that others than ranks and their loaders had, 1 if unknown."""
    ranks = [one for one in job.ranks if one.host == host]
    time, idle, user, system = (
        sum(one.counters.get(name, 0) for one in ranks)
        for name in ("host.cpu_us", "host.idle_us", "process.user_us", "process.system_us")
    )
    loaders = [one.machine.loader for one in ranks if one.machine.loader is not None]
    workers = sum(worker.get("ran_us", 0) for one in loaders for worker in one.workers)
    # Each rank counted the host.
    own = (user + system + workers) * len(ranks)
    return max(time - idle - own, 0) / time if time else 1.0
