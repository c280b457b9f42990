"""Facts of the run about data loaders: settings, code, workers, why they are slow, and what is padding."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

from tracedoc.facts.catalog import digest_fact, manifest_fact, ranks_fact, run_fact
from tracedoc.ranks.code_places import NAMED_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.run.machine import LoaderWindow
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.script_code import CodePlace, place_of_frame, place_of_stack
from tracedoc.topics.capture.run import recorded
from tracedoc.topics.host.run import place_in_idle_time
from tracedoc.topics.input.rank import LOADERS, input_idle_ms, loader_kind, loading_ms
from tracedoc.topics.step.long_steps import long_step_kind
from tracedoc.topics.step.rank import compute_ms, step_ms
from tracedoc.topics.step.slow_code import slow_code
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


LIMITS = (
    "choosing",
    "restarts",
    "swap",
    "memory",
    "one worker",
    "few cores",
    "CPU",
    "disk",
    "waiting",
    "none",
)

NO_WINDOW = Unknown("the manifest does not say what the loader did in the captured steps")
FEW_BATCHES = Unknown("too few batches were counted to compare the workers")

SWAPPED_PAGES = 256
"""A host that swaps in a MiB in the captured steps is short of memory."""

MOST_WAITING = 0.7
"""A worker of three or more that is waited for so much of the time is slower than the others."""

LEAST_INPUT_IDLE = 0.1
"""Where training waits for so much of the step its workers are never done: what they do limits them."""

BUSY = 0.5
"""A thread that runs for half of the time is limited by its core, else by what it waits for."""

READ_BYTES = 1 << 20

MORE_TOKENS = 1.1


@manifest_fact(unit="text")
def slowest_worker(rank: RankJob) -> Value:
    """The worker of three or more for which training waits most of the time, as "worker 2", or "none"."""
    found = needed(_waits(rank))
    worst = max(found, key=lambda one: found[one])
    late = _workers(rank) > 2 and found[worst] >= MOST_WAITING * sum(found.values())
    return f"worker {worst}" if late else "none"


@manifest_fact(unit="fraction")
def slowest_worker_frac(rank: RankJob) -> Value:
    """Share of the waiting for workers since the first step that is for the slowest one.

    Unknown with fewer than two batches a worker.
    """
    found = needed(_waits(rank))
    return max(found.values()) / sum(found.values())


def _waits(rank: RankJob) -> dict[str, float] | Unknown:
    window = rank.machine.loader
    if window is None:
        return NO_WINDOW
    waits = {worker: ms for worker, ms in window.waits_ms.items() if worker != "-1" and ms > 0}
    return waits if waits and window.batches >= 2 * _workers(rank) else FEW_BATCHES


def _workers(rank: RankJob) -> int:
    window = rank.machine.loader
    return max(len(window.workers) if window is not None else 0, rank.loader.workers or 0)


@ranks_fact(unit="bool")
def workers_idle(run: RunView, digest: RankDigest) -> Value:
    """Whether no worker makes batches for half of its time: they are ready, but taking one takes time.

    A process that runs, or waits for a core, may be copying a batch. False where nobody looked.
    """
    rank = run.job.rank(digest.rank)
    window = rank.machine.loader if rank is not None else None
    if window is None or window.made_frac is None or not window.workers or not window.wall_us:
        return False
    busy_us = max(one.get("ran_us", 0) + one.get("waited_us", 0) for one in window.workers)
    return max(busy_us / window.wall_us, window.made_frac) < BUSY


@manifest_fact(unit="fraction")
def io_wait_frac(rank: RankJob) -> Value:
    """Share of the captured steps in which some task of the job waits for a read or write to be done.

    By the pressure that Linux counts for the job's control group, else for its host: also where a disk is
    throttled, or a file system is on the network.
    """
    return _pressed_frac(rank, "io")


@manifest_fact(unit="fraction")
def memory_wait_frac(rank: RankJob) -> Value:
    """Share of the captured steps in which some task of the job waits for memory, as :func:`io_wait_frac`.

    Its pages are fetched from swap or read again, or others must be freed first.
    """
    return _pressed_frac(rank, "memory")


def _pressed_frac(rank: RankJob, what: str) -> Value:
    """Counters that did not grow are not kept: where one is, the other did not."""
    window, waited = rank.machine.loader, rank.counters
    if window is None or not window.wall_us or not any(name.startswith("pressure.") for name in waited):
        return NO_WINDOW
    return min(waited.get(f"pressure.{what}_us", 0) / window.wall_us, 1.0)


@digest_fact(
    unit="text",
    values=LIMITS,
    needs=(
        *(loader_kind, training_thread_busy_frac, input_idle_ms, step_ms, compute_ms),
        *(slowest_worker, io_wait_frac, memory_wait_frac, loader_index_frac),
    ),
)
def loader_limit(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """What keeps the data loader from being faster, where training waits for it.

    A sampler that takes most of the time to choose what comes next ("choosing"), which is the training
    thread's work however many workers there are; workers that are started anew ("restarts") in the captured
    steps; a host that swaps ("swap"), or takes
    pages back that are still used ("memory"), where the job waits for that half as long as training for the
    loader, as far as the kernel counts it; "one worker"
    that is waited for most; else what workers do for most of the time: run ("CPU"), wait for a core
    ("few cores"), or sleep, half of that for a disk ("disk") or less ("waiting"); "none" of these. Of a
    loader without workers the training thread is judged: a "disk" is then one that it reads, or that some
    task of the job waits for half of the time.
    """
    rank = run.job.rank(digest.rank)
    if rank is None or rank.machine.loader is None:
        return NO_WINDOW
    window = rank.machine.loader
    chooses = loader_index_frac(rank)
    if isinstance(chooses, float) and chooses > BUSY:
        return "choosing"
    if short := _short_of_memory(rank, digest):
        return short
    kind = loader_kind.of(digest)
    if kind == LOADERS["single_process"]:
        return _of_thread(rank, digest)
    if kind != LOADERS["workers"]:
        return "none"
    if window.fresh:
        return "restarts"
    if not window.workers:
        return NO_WINDOW
    late, idle, length = slowest_worker(rank), input_idle_ms.of(digest), step_ms.of(digest)
    if isinstance(late, str) and late != "none":
        return "one worker"
    if not (isinstance(idle, int | float) and isinstance(length, float) and idle > LEAST_INPUT_IDLE * length):
        return "none"
    ran, waited = (sum(one.get(name, 0) for one in window.workers) for name in ("ran_us", "waited_us"))
    slept = len(window.workers) * window.wall_us - ran - waited
    if window.made_ms:
        for_disk = window.disk_ms / window.made_ms * len(window.workers) * window.wall_us >= BUSY * slept
    else:
        for_disk = _reads(rank, sum(one.get("read_bytes", 0) for one in window.workers))
    parts = {"CPU": ran, "few cores": waited, "disk" if for_disk else "waiting": slept}
    return max(parts, key=lambda part: parts[part])


def _short_of_memory(rank: RankJob, digest: RankDigest) -> str:
    """How a lack of memory that a loader waits for shows: "swap" or "memory"; "" where it waits for none."""
    swaps = rank.counters.get("swap.pswpin", 0) >= SWAPPED_PAGES
    waits, idle, length = memory_wait_frac(rank), input_idle_ms.of(digest), step_ms.of(digest)
    if not isinstance(waits, float) or not isinstance(idle, int | float) or not isinstance(length, float):
        return "swap" if swaps else ""
    enough = waits * length >= BUSY * idle
    if swaps:
        return "swap" if enough else ""
    return "memory" if enough and idle > LEAST_INPUT_IDLE * length else ""


def _reads(rank: RankJob, nbytes: int) -> bool:
    """Whether a loader that sleeps waits for a disk, by what it reads, or some task of the job waits for."""
    pressed = io_wait_frac(rank)
    return nbytes >= READ_BYTES or (isinstance(pressed, float) and pressed >= BUSY)


def _of_thread(rank: RankJob, digest: RankDigest) -> Value:
    """Whether the training thread runs or sleeps in its loader, where one of these is certain.

    Outside the loader it may do either; a CPU's operators run on it.
    """
    facts = (
        training_thread_busy_frac(rank),
        input_idle_ms.of(digest),
        step_ms.of(digest),
        compute_ms.of(digest),
    )
    known = [float(one) for one in facts if isinstance(one, int | float)]
    if len(known) < len(facts) or known[1] <= 0:
        return NO_WINDOW
    share, loads, length, computes = known
    elsewhere = max(length - loads, 0.0)
    if (1.0 - share) * length - (elsewhere - computes * digest.is_cpu) >= BUSY * loads:
        return "disk" if _reads(rank, rank.counters.get("process.read_bytes", 0)) else "waiting"
    return "CPU" if share * length - elsewhere >= BUSY * loads else "none"


@manifest_fact(unit="count")
def loader_cores(rank: RankJob) -> Value:
    """Processors that the workers of the data loader may use, which may be fewer than those of the host."""
    window = rank.machine.loader
    return len(window.cpus) if window is not None and window.cpus else NO_WINDOW


@manifest_fact(unit="ms")
def loader_start_ms(rank: RankJob) -> Value:
    """How long it takes on average to make an iterator of the data loader, with its workers."""
    window = rank.machine.loader
    return window.starts_ms / window.starts if window is not None and window.starts else NO_WINDOW


@manifest_fact(unit="count")
def host_cores(rank: RankJob) -> Value:
    """Processors that the rank's host, or its container, has for all of its processes."""
    return len(rank.machine.usable) or Unknown("the manifest has no cores")


@manifest_fact(unit="fraction")
def loader_cold_frac(rank: RankJob) -> Value:
    """Share of the bytes that the loader's workers read which came from a disk, not from the page cache."""
    workers = rank.machine.loader.workers if rank.machine.loader is not None else ()
    total = sum(one.get("rchar", 0) for one in workers)
    disk = sum(one.get("read_bytes", 0) for one in workers)
    return min(disk / total, 1.0) if total else NO_WINDOW


@run_fact(unit="bool", needs=(long_step_kind,))
def slow_loading_captured(run: RunView) -> bool:
    """Whether slow steps of the log wait for workers of the loader, and so does the longest captured one."""
    found = slow_code(run)
    return found is not None and found.doing == "loading" and long_step_kind(run) == "input"


# -- padding


NO_TOKENS = Unknown("no batch of the loader shows its real tokens: no attention mask, lengths or bounds")


@manifest_fact(unit="fraction")
def padding_frac(rank: RankJob) -> Value:
    """Share of the places for tokens in the captured batches that are padding.

    By attention masks, ``lengths`` or ``cu_seqlens`` that pass through the data loader, on the host.
    """
    tokens = rank.machine.loader.tokens if rank.machine.loader is not None else ()
    return 1.0 - sum(real for real, _ in tokens) / sum(of for _, of in tokens) if tokens else NO_TOKENS


@manifest_fact(unit="count")
def batch_tokens(rank: RankJob) -> Value:
    """Real tokens of a captured batch, on average."""
    tokens = rank.machine.loader.tokens if rank.machine.loader is not None else ()
    return round(sum(real for real, _ in tokens) / len(tokens)) if tokens else NO_TOKENS


@run_fact(unit="text", needs=(batch_tokens,))
def uneven_tokens(run: RunView) -> Value:
    """The rank whose batches hold more real tokens than those of the median rank, by a tenth, or "none"."""
    known = {rank: one for rank, one in batch_tokens.by_rank(run).items() if isinstance(one, int)}
    if len(known) < 2:
        return NO_TOKENS
    most = max(known, key=lambda rank: known[rank])
    ratio = known[most] / max(sorted(known.values())[(len(known) - 1) // 2], 1)
    words = f"the batches of rank {most} hold {ratio:.1f} times the tokens of the median rank's"
    return words if ratio >= MORE_TOKENS else "none"
