"""Facts of the run about data loaders: settings, code, and how many workers a rank has cores for."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

from tracedoc.facts.catalog import manifest_fact, ranks_fact, run_fact
from tracedoc.ranks.code_places import NAMED_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.run.machine import LoaderWindow
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.script_code import CodePlace, place_of_frame, place_of_stack
from tracedoc.topics.capture.run import recorded
from tracedoc.topics.host.run import place_in_idle_time
from tracedoc.topics.input.rank import LOADERS, input_idle_ms, loader_kind, loading_ms
from tracedoc.topics.step.rank import step_ms
from tracedoc.values import Unknown, Value, needed, needed_number

MOST_WORKERS = 8
"""So many workers of a rank are suggested at most."""

SPARE = 2.0
"""Workers for a thread's loader make batches so many times as fast as the step of today takes them: some take
longer than others, and mended steps are shorter."""

LEAST_BUSY = 1 / MOST_WORKERS
"""Of a thread that is busy less, more than the most workers would be suggested."""


@manifest_fact(unit="fraction")
def training_thread_busy_frac(rank: RankJob) -> Value:
    """Share of the captured steps in which the rank's training thread ran, or was ready to run.

    From the Linux scheduler (schedstat): (ran + waited for a core) / length of the steps. In the rest the
    thread slept: for a device, a disk, a lock, or another process.
    """
    thread = rank.training_thread
    busy_us = thread.get("ran_us", 0) + thread.get("waited_us", 0)
    steps = thread.get("steps", 0)
    if steps <= 0 or busy_us <= 0 or rank.during is None or rank.during.median_ms <= 0:
        return Unknown("the manifest has no times of the training thread")
    return min(busy_us / 1000 / (steps * rank.during.median_ms), 1.0)


@ranks_fact(
    unit="count",
    needs=(loader_kind, loading_ms, input_idle_ms, step_ms, training_thread_busy_frac),
)
def suggested_loader_workers(run: RunView, digest: RankDigest) -> Value:
    """Workers that make batches as fast as training takes them, at most as many as a rank has cores for.

    A batch takes as long as the training thread is in its loader (:func:`loading_ms`), or as workers take
    from one to the next where training waits for them; this (of a thread twice) / the step without waiting,
    rounded up. A rank has its share of the cores that it may use, less one for training itself; ranks of a
    host that name the same cores share them evenly. Samples that the training thread makes while it sleeps
    most of the time (``training_thread_busy_frac``) need no core of their own: then as many workers share
    one. From 1 to 8.
    """
    return min(_needed_workers(run, digest), _room(run, digest))


def _room(run: RunView, digest: RankDigest) -> int:
    """Workers for which a rank has cores."""
    one = run.job.rank(digest.rank)
    if one is None or one.cores is None:
        return MOST_WORKERS
    sharing = sum((other.host, other.affinity) == (one.host, one.affinity) for other in run.job.ranks)
    busy = training_thread_busy_frac(one) if loader_kind.of(digest) == LOADERS["single_process"] else 1.0
    free = max(one.cores // sharing - 1, 1)
    share = 1.0 if isinstance(busy, Unknown) else max(float(busy), LEAST_BUSY)
    return min(int(free / share), MOST_WORKERS)


def _needed_workers(run: RunView, digest: RankDigest) -> int:
    """Workers that keep up with training, by the analysed step; the most where it does not tell."""
    length, idle, makes = (fact.of(digest) for fact in (step_ms, input_idle_ms, loading_ms))
    if not isinstance(length, float) or not isinstance(idle, float) or not isinstance(makes, float):
        return MOST_WORKERS
    if loader_kind.of(digest) == LOADERS["single_process"]:
        makes *= SPARE
    else:
        today = _workers_of_today(run, digest)
        if isinstance(today, Unknown):
            return MOST_WORKERS
        makes = today * length
    return max(ceil(makes / max(length - idle, length / MOST_WORKERS)), 1)


def _workers_of_today(run: RunView, digest: RankDigest) -> int | Unknown:
    """How many processes make a rank's batches: its workers, or the training thread alone."""
    kind = loader_kind.of(digest)
    if isinstance(kind, Unknown):
        return kind
    rank = run.job.rank(digest.rank)
    today = 1 if kind != LOADERS["workers"] else rank.loader.workers if rank is not None else None
    return today or Unknown("the manifest has no DataLoader")


@run_fact(unit="text")
def samples_in_code(run: RunView) -> Value:
    """The arguments of a data loader that say which samples make a batch, as code.

    With a sampler where several ranks have samples of their own; unknown for a loader without a batch size,
    which another argument takes the place of.
    """
    several = run.world_size is not None and run.world_size > 1
    first = run.job.ranks[0] if run.job.ranks else None
    if first is not None and first.loader.workers is not None and first.loader.batch_size is None:
        return Unknown("the loader has no batch size")
    whole = first is not None and _reads_all(first) is True
    return "batch_size, sampler=sampler" if several and not whole else "batch_size"


@ranks_fact(unit="fraction", needs=(loader_kind, suggested_loader_workers))
def suggested_loader_interval_frac(run: RunView, digest: RankDigest) -> Value:
    """Time between two batches with the suggested workers, as a share of today's.

    The workers of today / ``suggested_loader_workers``, where the training thread counts as one worker; at
    most 1. Unknown where the workers of today are not known.
    """
    today = needed(_workers_of_today(run, digest))
    return min(today / needed_number(suggested_loader_workers(run, digest)), 1.0)


# -- settings of the loader


@manifest_fact(unit="count")
def loader_workers(rank: RankJob) -> Value:
    """``num_workers`` of the data loader; of several loaders, of the one with most."""
    return recorded(rank.loader.workers, _NO_LOADER)


@manifest_fact(unit="count")
def loader_prefetch_factor(rank: RankJob) -> Value:
    """``prefetch_factor`` of that data loader, batches made ahead by each worker; unknown without workers."""
    return recorded(rank.loader.prefetch_factor, _NO_LOADER)


@manifest_fact(unit="count")
def loader_batches(rank: RankJob) -> Value:
    """Batches of that data loader in an epoch, on one rank; unknown for a data set without a length."""
    return recorded(rank.loader.batches, "the manifest has no number of batches")


@manifest_fact(unit="bool")
def loader_restarts(rank: RankJob) -> Value:
    """Whether that data loader starts its workers anew for every epoch: ``persistent_workers=False``."""
    loader = rank.loader
    if loader.persistent_workers is None or loader.workers is None:
        return Unknown(_NO_LOADER)
    return loader.workers > 0 and not loader.persistent_workers


@manifest_fact(unit="bool")
def reads_all_data(rank: RankJob) -> Value:
    """Whether that data loader draws from the whole data set on every rank.

    By its sampler, one of torch's own that knows no ranks. Unknown for others, and under trainers, which
    share batches out behind the sampler.
    """
    return _reads_all(rank)


def _reads_all(rank: RankJob) -> bool | Unknown:
    loader = rank.loader
    if loader.sampler not in ("RandomSampler", "SequentialSampler"):
        return Unknown("no sampler of torch's own chooses the samples") if not loader.replicas else False
    shared = {"Accelerate", "Trainer", "Lightning"} & set(rank.frameworks)
    return Unknown("the trainer may share batches out") if shared else True


@manifest_fact(unit="fraction")
def loader_index_frac(rank: RankJob) -> Value:
    """Share of the training thread's time in its data loader in which a sampler chooses what comes next.

    Of all steps since the first one. The thread that trains does so however many workers there are.
    """
    window = rank.machine.loader
    total = sum(window.waits_ms.values()) if window is not None else 0.0
    if window is None or window.index_ms is None or total <= 0:
        return Unknown("the manifest does not say how long samplers chose")
    return min(window.index_ms / total, 1.0)


_NO_LOADER = "the manifest has no DataLoader"


# -- the function of the script


@ranks_fact(unit="text", needs=("host_ops", input_idle_ms))
def loader_code(run: RunView, digest: RankDigest) -> Value:
    """The function of the script that takes most of the loader's time, as "`__getitem__` (`data.py:12`)".

    From Python stacks, or a range that ``record_function`` names; "none" where neither shows half of
    :func:`input_idle_ms`. Of worker processes the function in which they make batches for half of their time
    or more. The line is where the function begins.
    """
    found, rank = place_in_idle_time(run, digest, input_idle_ms, loading=True), run.job.rank(digest.rank)
    if found == "none" and rank is not None and rank.machine.loader is not None:
        return worker_code(rank.machine.loader)
    return found


def worker_code(loader: LoaderWindow) -> str:
    """The function in which workers make batches for half of their time or more, else "none"."""
    by_place: dict[CodePlace, float] = defaultdict(float)
    for ms, frames in loader.stacks:
        place = place_of_stack(frames, ()) or place_of_frame(frames[0].rpartition("@")[0])
        if place is not None:
            by_place[place] += ms
    longest = max(by_place, key=lambda one: by_place[one], default=None)
    total = sum(ms for ms, _ in loader.stacks)
    return str(longest) if longest and by_place[longest] >= NAMED_SHARE * total else "none"
