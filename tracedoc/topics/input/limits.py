"""Facts of the run about why its data loader is slow, and how much of its batches is padding."""

from __future__ import annotations

from tracedoc.facts.catalog import digest_fact, manifest_fact, ranks_fact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.topics.input.rank import LOADERS, input_idle_ms, loader_kind
from tracedoc.topics.input.run import loader_index_frac, training_thread_busy_frac
from tracedoc.topics.step.long_steps import long_step_kind
from tracedoc.topics.step.rank import compute_ms, step_ms
from tracedoc.topics.step.slow_code import slow_code
from tracedoc.values import Unknown, Value, needed

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
