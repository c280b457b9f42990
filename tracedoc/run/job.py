"""What the manifest of a run says about the job beside its traces: settings, memory, times of other steps.

A manifest is written by many versions on many machines: what is missing or of another type is unknown.
Standard library only.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tracedoc.errors import Limit
from tracedoc.run.machine import Machine, Samples, Stacks, read_machine, read_samples, read_stacks
from tracedoc.run.manifest import Manifest, ManifestRank, StepTime
from tracedoc.run.steplog import StepLog, read_step_log
from tracedoc.run.untrusted import (
    Entry,
    MissingError,
    UnusableError,
    entries_at,
    entry_at,
    inside,
    texts_at,
    value_at,
    values_at,
)

STEPS_FOR_MEDIAN = 5
"""The median of fewer timed steps is not compared."""

MAX_LOGS = 64
"""The step logs of at most this many ranks are read: all ranks step together."""

_OF_A_PROCESS = (
    "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES RANK LOCAL_RANK GROUP_RANK ROLE_RANK "
    "WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE SLURM_JOB_ID SLURM_STEP_ID SLURM_LOCALID SLURM_NODEID "
    "SLURM_PROCID TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT"
)
NO_SETTINGS = frozenset(_OF_A_PROCESS.split())
"""Variables that name a process, a start or a device: they differ for no reason of the job's."""


@dataclass(frozen=True, slots=True)
class Loader:
    """The settings of a DataLoader, ``None`` where they are not known; ``batches`` are those of an epoch.

    ``sampler`` is the class that chooses samples, ``replicas`` among how many ranks it shares them out.
    """

    batch_size: int | None = None
    workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    batches: int | None = None
    sampler: str = ""
    replicas: int | None = None


@dataclass(frozen=True, slots=True)
class Buckets:
    """The settings of DistributedDataParallel; ``None`` where they are not known."""

    cap_bytes: int | None = None
    find_unused_parameters: bool | None = None
    static_graph: bool | None = None
    as_view: bool | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a rank's GPU at the end of the capture, in bytes; ``None`` where it is not known.

    ``host_total`` is that of its host, ``host_peak`` what the process took of it.
    """

    total: int | None = None
    peak_allocated: int | None = None
    retries: int | None = None
    host_total: int | None = None
    host_peak: int | None = None


@dataclass(frozen=True, slots=True)
class RankJob:
    """What one rank recorded about itself.

    ``before``, ``during`` and ``after`` are times of steps by the host's clock: without, with, and again
    without the profiler. ``frameworks`` are the wrappers in use, then the trainers around them;
    ``links`` are NCCL's channels by transport; ``throttled`` are shares of the captured time by reason,
    ``counters`` what the host's grew by in it; ``training_thread`` has ``steps`` of it, and for how many
    microseconds of these the thread ``ran_us`` and, ready to run, ``waited_us`` for a core; ``cores`` are
    those it may use, fewer under a quota, and ``affinity`` names them, which ranks may share; ``threads`` are
    those that torch uses for one operator. ``training``
    is what the live objects showed of it, by name; ``compiled`` are the counters of torch.compile.
    ``collecting`` is where long collections of garbage came, of which functions that call ``gc.collect``
    themselves have ``collect_calls_ms``.
    """

    rank: int
    host: str = ""
    world_size: int | None = None
    gpu: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, str] = field(default_factory=dict)
    before: StepTime | None = None
    during: StepTime | None = None
    after: StepTime | None = None
    memory: Memory = Memory()
    loader: Loader = Loader()
    buckets: Buckets = Buckets()
    frameworks: tuple[str, ...] = ()
    links: Mapping[str, int] = field(default_factory=dict)
    network: str = ""
    clocks_sampled: bool = False
    throttled: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    training_thread: Mapping[str, int] = field(default_factory=dict)
    cores: int | None = None
    affinity: str = ""
    threads: int | None = None
    json_bytes: int = 0
    source: str = ""
    log: StepLog | None = None
    compiled: Mapping[str, int] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)
    collecting: Stacks = ()
    collect_calls_ms: float = 0.0
    machine: Machine = field(default_factory=Machine)

    @property
    def unprofiled_ms(self) -> float | None:
        """The median of steps before the captured ones and of those after, weighted by their steps, in ms.

        ``None`` with fewer than five in all.
        """
        timed = [time for time in (self.before, self.after) if time is not None]
        steps = sum(time.steps for time in timed)
        if steps < STEPS_FOR_MEDIAN:
            return None
        return sum(time.median_ms * time.steps for time in timed) / steps

    @property
    def core_wait_ms(self) -> float | None:
        """Mean wait of the training thread for a free core in a captured step; ``None`` if unknown."""
        steps, waited = self.training_thread.get("steps", 0), self.training_thread.get("waited_us")
        return waited / 1000 / steps if steps > 0 and waited is not None else None


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks of a run recorded, in rank order: nothing without a manifest.

    ``limits`` are files of theirs that are not used.

    ``command`` is the line that started it, "" where it is not known; what may be a secret in it is ``***``.
    """

    ranks: tuple[RankJob, ...] = ()
    limits: tuple[Limit, ...] = ()
    command: str = ""

    @property
    def sources(self) -> dict[int, str]:
        """The path of the step that a rank recorded with Python stacks, for each that recorded one."""
        return {one.rank: one.source for one in self.ranks if one.source}

    def rank(self, rank: int) -> RankJob | None:
        """The record of one rank, ``None`` where it recorded nothing."""
        return next((one for one in self.ranks if one.rank == rank), None)

    @property
    def fair_cores(self) -> dict[int, int]:
        """Cores for each rank, at least 1, where known: ranks of a host that name the same share them."""
        sharing = Counter((one.host, one.affinity) for one in self.ranks)
        return {
            one.rank: max(one.cores // sharing[one.host, one.affinity], 1) for one in self.ranks if one.cores
        }

    def spare_cores(self, ranks: Sequence[int]) -> int | None:
        """Of its fair cores those that a rank's operators leave free, of the rank that has the fewest.

        0 where operators use more threads than that; ``None`` where a rank's cores or threads are not known.
        """
        fair, threads = self.fair_cores, {one.rank: one.threads for one in self.ranks}
        spare: list[int] = []
        for rank in ranks:
            used = threads.get(rank)
            if rank not in fair or used is None:
                return None
            spare.append(max(fair[rank] - used, 0))
        return min(spare, default=None)


def read_job(manifest: Manifest | None) -> Job:
    """The job of a manifest, without ranks where none recorded anything.

    Step logs are read from beside the manifest; behind a URL they are not.
    """
    if manifest is None:
        return Job()
    unusable: list[str] = []
    ranks = [
        _rank(entry, unusable, with_log=number < MAX_LOGS) for number, entry in enumerate(manifest.ranks)
    ]
    known = tuple(rank for rank in ranks if rank is not None)
    command = texts_at(manifest.nodes[0], "command") if manifest.nodes else ()
    return Job(known, tuple(_limits(unusable)), _command_line(command)) if known else Job()


_SECRET = re.compile(r"(--?)?[\w-]*(key|token|secret|password)", re.IGNORECASE)


def _command_line(words: Sequence[str]) -> str:
    """A command as a shell takes it, without the values of options that are named like a secret."""
    shown: list[str] = []
    hides = False
    for word in words:
        name, given, _ = word.partition("=")
        secret = _SECRET.fullmatch(name) is not None
        if hides and not word.startswith("-"):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if secret and given else shlex.quote(word))
        hides = secret and not given and word.startswith("-")
    return " ".join(shown)


def _limits(unusable: Sequence[str]) -> Iterator[Limit]:
    """Yield one limit for all files that were named and not used; it quotes the first."""
    if unusable:
        more = f", and {len(unusable) - 1} more such" if unusable[1:] else ""
        yield Limit("bad-job-file", f"{unusable[0]}{more}", "what it says about the job is unknown")


def _rank(entry: ManifestRank, unusable: list[str], *, with_log: bool) -> RankJob | None:
    part = entry.part
    if part is None or "environment" not in part:
        return None
    environment, framework = entry_at(part, "environment"), entry_at(part, "framework")
    nccl, window = entry_at(part, "nccl"), entry_at(part, "window")
    return RankJob(
        rank=entry.rank,
        host=entry.host,
        world_size=value_at(part, "world_size", int),
        gpu=value_at(entry_at(environment, "gpu"), "name", str) or "",
        versions=values_at(entry_at(environment, "versions"), str),
        variables=values_at(entry_at(environment, "variables"), str),
        training=training_settings(part),
        before=entry.before,
        during=entry.during,
        after=entry.after,
        memory=_memory(entry_at(part, "memory")),
        loader=_loader(entries_at(framework, "loaders")),
        buckets=_buckets(entries_at(framework, "ddp")),
        frameworks=_frameworks(framework),
        links=values_at(entry_at(nccl, "transports"), int),
        network=value_at(nccl, "network", str) or "",
        clocks_sampled=bool(entry_at(window, "clocks")),
        throttled=values_at(entry_at(entry_at(window, "clocks"), "throttled_frac"), float),
        counters=values_at(entry_at(window, "counters"), int),
        training_thread=values_at(entry_at(window, "training_thread"), int),
        cores=_cores(entry_at(environment, "host")),
        affinity=value_at(entry_at(environment, "host"), "affinity", str) or "",
        threads=value_at(entry_at(environment, "threads"), "torch", int),
        json_bytes=value_at(part, "json_bytes", int) or 0,
        source=str(_beside(entry, "source", unusable) or ""),
        log=step_log_of(entry, unusable) if with_log else None,
        compiled=values_at(entry_at(framework, "compile"), int) | values_at(entry_at(part, "compile"), int),
        samples=read_samples(entry_at(part, "samples")),
        collecting=read_stacks(entry_at(part, "collections")),
        collect_calls_ms=value_at(entry_at(part, "collections"), "asked_ms", float) or 0.0,
        machine=read_machine(part),
    )


def step_log_of(entry: ManifestRank, unusable: list[str]) -> StepLog | None:
    """The step log that a rank names, ``None`` without; why one is not used goes to ``unusable``."""
    path = _beside(entry, "step_log", unusable)
    if path is None:
        return None
    try:
        log = read_step_log(path)
        if log is None:
            raise UnusableError("is no log of steps")
    except UnusableError as error:
        unusable.append(f"the step_log of rank {entry.rank} {error}")
        return None
    return log


def _beside(entry: ManifestRank, key: str, unusable: list[str]) -> Path | None:
    """Return the path of a file that a rank names, ``None`` where it names none that may be read."""
    name = value_at(entry.part or {}, key, str)
    if not entry.folder or not name:
        return None
    try:
        return inside(Path(entry.folder), name)
    except MissingError:
        return None
    except UnusableError as error:
        unusable.append(f"the {key} of rank {entry.rank} {error}")
        return None


def _memory(entry: Entry) -> Memory:
    return Memory(
        total=value_at(entry, "total_bytes", int),
        peak_allocated=value_at(entry, "peak_allocated_bytes", int),
        retries=value_at(entry, "allocation_retries", int),
        host_total=value_at(entry, "host_total_bytes", int),
        host_peak=value_at(entry, "host_peak_bytes", int),
    )


def _cores(host: Entry) -> int | None:
    cores = value_at(host, "cpus_allowed", int) or value_at(host, "cpus", int)
    quota = value_at(host, "cgroup_cpus", float) or value_at(host, "cgroup_cpus", int)
    if cores is None or quota is None:
        return cores
    return max(min(cores, int(quota)), 1) if quota > 0 else cores


def _loader(entries: Sequence[Entry]) -> Loader:
    """Return the loader that feeds the training: of several, the one with most workers, then with a share."""
    loaders = [
        Loader(
            batch_size=value_at(entry, "batch_size", int),
            workers=value_at(entry, "num_workers", int),
            prefetch_factor=value_at(entry, "prefetch_factor", int),
            pin_memory=value_at(entry, "pin_memory", bool),
            persistent_workers=value_at(entry, "persistent_workers", bool),
            batches=value_at(entry, "batches", int),
            sampler=value_at(entry, "sampler", str) or "",
            replicas=value_at(entry, "sampler_replicas", int),
        )
        for entry in entries
    ]
    return max(loaders, key=lambda one: (one.workers or 0, one.replicas or 0), default=Loader())


def _buckets(entries: Sequence[Entry]) -> Buckets:
    for entry in entries:
        return Buckets(
            cap_bytes=value_at(entry, "bucket_bytes_cap", int),
            find_unused_parameters=value_at(entry, "find_unused_parameters", bool),
            static_graph=value_at(entry, "static_graph", bool),
            as_view=value_at(entry, "gradient_as_bucket_view", bool),
        )
    return Buckets()


_FRAMEWORKS = {
    "fsdp2": "FSDP2",
    "fsdp1": "FSDP1",
    "ddp": "DDP",
    "trainer": "Trainer",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
}


def _frameworks(framework: Entry) -> tuple[str, ...]:
    found = []
    for entry in entries_at(framework, "deepspeed"):
        stage = value_at(entry, "zero_optimization_stage", int)
        found.append(f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed")
    found += [name for key, name in _FRAMEWORKS.items() if framework.get(key)]
    return tuple(found)


def job_settings(job: Job) -> dict[str, str]:
    """Return the settings of the first rank that recorded any; empty without a manifest.

    What ranks set apart (their devices, ports) is left out.
    """
    return dict(_of_rank(job.ranks[0])) if job.ranks else {}


def _of_rank(rank: RankJob) -> Iterator[tuple[str, str]]:
    yield from rank.versions.items()
    yield from rank.machine.versions
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
        ("threads of an operator", rank.threads),
    ):
        if given is not None:
            yield name, _shown(given)


def _shown(value: int | bool) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


PARAMETERS, TRAINED = "parameters", "trained parameters"
BLOCKS, BLOCK_PARAMETERS, BLOCK_CLASS = "blocks", "parameters of a block", "class of the blocks"
HELD_DTYPE, MIXED_PRECISION = "type of parameters", "mixed precision"
OPTIMIZER, CHECKPOINTING = "optimizer", "gradient checkpointing"
ANOMALY_DETECTION = "torch.autograd.set_detect_anomaly"
MICRO_BATCH, SEQUENCE = "sequences of a micro-batch", "tokens of a sequence"
BATCH_SAMPLES = "samples of a batch"

_LONGEST_SETTING = 100


def training_settings(part: Entry) -> dict[str, str]:
    """The settings by name that one rank's part tells; what is missing or of another type is left out."""
    return dict(_settings(part))


def _settings(part: Entry) -> Iterator[tuple[str, str]]:
    framework = entry_at(part, "framework")
    model = entry_at(framework, "model")
    block = entry_at(model, "block")
    counts = (
        (PARAMETERS, model.get("parameters")),
        (TRAINED, model.get("trained_parameters")),
        (BLOCKS, block.get("count")),
        (BLOCK_PARAMETERS, block.get("parameters")),
    )
    for name, value in (*counts, *_batch(part)):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 60:
            yield name, str(value)
    first: Entry = next(iter(entries_at(framework, "optimizers")), {})
    dtypes = list(entry_at(model, "parameter_dtypes"))
    texts = (
        (BLOCK_CLASS, block.get("class")),
        (HELD_DTYPE, dtypes[0] if dtypes else None),
        (MIXED_PRECISION, _mixed_precision(framework)),
        (OPTIMIZER, first.get("inner") or first.get("name")),
    )
    for name, value in texts:
        if isinstance(value, str) and 0 < len(value) <= _LONGEST_SETTING:
            yield name, value
    checkpointing = value_at(model, "gradient_checkpointing", bool)
    if checkpointing is not None:
        yield CHECKPOINTING, _shown(checkpointing)
    if value_at(entry_at(framework, "precision"), "anomaly_detection", bool):
        yield ANOMALY_DETECTION, "True"


def _mixed_precision(framework: Entry) -> object:
    said = entry_at(framework, "accelerate").get("mixed_precision")
    trainer = entry_at(framework, "trainer")
    return next((short for short in ("bf16", "fp16") if said == short or trainer.get(short) is True), None)


def _batch(part: Entry) -> Iterator[tuple[str, object]]:
    """Yield the length of a batch if all its tensors have it, and the shape of its ids of tokens.

    These are the first tensor of whole numbers with two dimensions.
    """
    tensors = entries_at(part, "batch")
    shapes = [shape for one in tensors if isinstance(shape := one.get("shape"), list) and shape]
    if shapes and len({str(shape[0]) for shape in shapes}) == 1:
        yield BATCH_SAMPLES, shapes[0][0]
    for tensor in tensors:
        shape, dtype = tensor.get("shape"), str(tensor.get("dtype"))
        if isinstance(shape, list) and len(shape) == 2 and dtype.endswith(("int64", "int32")):
            yield MICRO_BATCH, shape[0]
            yield SEQUENCE, shape[1]
            return
