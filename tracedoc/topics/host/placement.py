"""Facts of the run about where the host puts its ranks: cores, memory, and what places them better."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.facts.catalog import NO_MANIFEST, job_of, manifest_fact, ranks_fact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.run.machine import Cpus, LoaderWindow
from tracedoc.step.rank_digest import RankDigest
from tracedoc.topics.host.run import cpu_throttled_frac, crowded
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value, needed

NO_CORES = Unknown("the manifest has no cores")
NO_NODES = Unknown("the manifest has no NUMA nodes")

BINDS_TO_NODES = (2, 9)
"""The version of torch from which torchrun knows ``--numa-binding``."""

MOST_ASLEEP = 0.5
"""Workers that want a core for less of the time leave it to the training thread mostly."""

CROWDS = (
    "quota",
    "pinned together",
    "pinned to few",
    "more ranks than cores",
    "threads",
    "loader workers",
    "others",
    "none",
)


@manifest_fact(unit="fraction")
def cores_at_gpu_frac(rank: RankJob) -> Value:
    """Share of the processors that the rank may use which are on the NUMA node of its GPU.

    1 on a host of one node. Unknown where the host does not say which node the GPU is on.
    """
    machine = rank.machine
    if not machine.nodes:
        # Older manifests name the nodes that a rank may use, and how many there are.
        if machine.gpu_node is None or not machine.allowed_nodes:
            return NO_NODES
        return float(machine.gpu_node in machine.allowed_nodes) / len(machine.allowed_nodes)
    if len(machine.nodes) == 1:
        return 1.0
    near = machine.nodes.get(-1 if machine.gpu_node is None else machine.gpu_node)
    if not near or not machine.allowed:
        return Unknown("the host does not say on which NUMA node the GPU is")
    return len(near & machine.allowed) / len(machine.allowed)


@manifest_fact(unit="fraction")
def far_memory_frac(rank: RankJob) -> Value:
    """Share of the rank's own memory on NUMA nodes where it may use no processor.

    From the beginning of ``/proc/self/numa_maps`` at its first step: the heap, and mappings before it.
    """
    machine, total = rank.machine, sum(rank.machine.memory.values())
    if not total or not machine.nodes:
        return Unknown("the manifest has no memory by NUMA node")
    near = {str(node) for node in machine.allowed_nodes}
    return sum(size for node, size in machine.memory.items() if node not in near) / total


@ranks_fact(unit="count")
def fair_cores(run: RunView, digest: RankDigest) -> Value:
    """Whole cores for each rank on a rank's processors, of which several may be threads of one core.

    Ranks of a host that share some of them share all; at least 1.
    """
    rank = needed(job_of(run, digest))
    own = rank.machine.allowed & rank.machine.first_threads
    return max(len(own) // len(_sharing(run, rank)), 1) if own else NO_CORES


@ranks_fact(unit="text", needs=(cpu_throttled_frac,), values=CROWDS)
def core_crowd(run: RunView, digest: RankDigest) -> Value:
    """Who takes the cores of a rank, as far as the manifest shows.

    The container's "quota"; ranks "pinned together" to processors of which the host has others, or
    "pinned to few" of those; "more ranks than cores"; operators with more "threads" than there are cores
    for each rank; "loader workers", as many as its cores or more, unless they were seen to sleep most of the
    time; "others" where it is none of these. "none" where its cores are not known.
    """
    rank = needed(job_of(run, digest))
    machine, ranks, sharing = rank.machine, _of_host(run, rank), _sharing(run, rank)
    throttled = cpu_throttled_frac(rank)
    if isinstance(throttled, float) and throttled > 0:
        return "quota"
    if not machine.allowed:
        return "none"
    taken = frozenset[int]().union(*(one.machine.allowed for one in ranks))
    each = len(machine.allowed) // len(sharing)
    if machine.usable - taken and each * len(ranks) < len(machine.usable):
        return "pinned together" if len(sharing) > 1 else "pinned to few"
    if len(ranks) > len(machine.usable or taken):
        return "more ranks than cores"
    if crowded(run, rank.rank):
        return "threads"
    crowding = (rank.loader.workers or 0) >= max(each, 1) and not _workers_sleep(machine.loader)
    return "loader workers" if crowding else "others"


def _workers_sleep(loader: LoaderWindow | None) -> bool:
    """Whether the workers of a loader together were seen to want less than half a core."""
    wanted = [one.get("ran_us", 0) + one.get("waited_us", 0) for one in loader.workers] if loader else []
    return loader is not None and bool(wanted) and sum(wanted) < MOST_ASLEEP * loader.wall_us


@run_fact(unit="text")
def placement_line(run: RunView) -> Value:
    """What places the ranks of the first host on cores of their own, beside their GPUs, as it can be pasted.

    By the launcher: a flag of torchrun from 2.9 on, a mask for srun, a prefix for one process, else a line
    of the script. Threads of one core stay together. Unknown without a manifest, or fewer cores than ranks.
    """
    if not run.job.ranks:
        return NO_MANIFEST
    ranks = _of_host(run, run.job.ranks[0])
    shares = [_share(one, ranks) for one in ranks]
    if not all(shares):
        return Unknown("the manifest has fewer cores than ranks")
    words, nodes = run.job.command.split(), ranks[0].machine.nodes
    launcher = words[0].rpartition("/")[2] if words else ""
    if len(ranks) == 1:
        own = shares[0]
        at = [node for node, cpus in nodes.items() if own <= cpus]
        near = f"numactl --physcpubind={_listed(own)} --membind={at[0]}" if len(nodes) > 1 and at else ""
        return f"{near or f'taskset -c {_listed(own)}'} {run.job.command or 'COMMAND'}"
    if launcher == "srun":
        masks = ",".join(hex(sum(1 << cpu for cpu in share)) for share in shares)
        return f"srun --cpu-bind=mask_cpu:{masks} {' '.join(words[1:])}"
    version = ranks[0].versions.get("torch", "").split(".")
    has_flag = all(one.isdecimal() for one in version[:2]) and tuple(map(int, version[:2])) >= BINDS_TO_NODES
    if launcher == "torchrun" and has_flag and len(nodes) > 1 and ranks[0].machine.gpu_node is not None:
        return f"torchrun --numa-binding=node {' '.join(words[1:])}"
    own_cpus = ", ".join(f'"{_listed(share)}"' for share in shares)
    return (
        "import os   # at the top of the script, before torch is imported\n"
        f'own = [{own_cpus}][int(os.environ["LOCAL_RANK"])].split(",")\n'
        'ends = [[int(end) for end in part.split("-")] for part in own]\n'
        "os.sched_setaffinity(0, {cpu for end in ends for cpu in range(end[0], end[-1] + 1)})"
    )


def _listed(cpus: Cpus) -> str:
    return format_ranges(cpus).replace(" ", "")


def _of_host(run: RunView, rank: RankJob) -> list[RankJob]:
    return [one for one in (run.job.ranks) if one.host == rank.host]


def _sharing(run: RunView, rank: RankJob) -> list[RankJob]:
    """The ranks of a rank's host that share a processor with it, itself among them."""
    return [one for one in _of_host(run, rank) if one.machine.allowed & rank.machine.allowed] or [rank]


def _share(rank: RankJob, ranks: Sequence[RankJob]) -> Cpus:
    """The processors for one of a host's ranks: an even part of those beside its GPU, else of all."""
    machine = rank.machine
    usable = machine.usable or machine.allowed
    near = machine.nodes.get(-1 if machine.gpu_node is None else machine.gpu_node, usable) & usable or usable
    beside = [one for one in ranks if near == usable or one.machine.gpu_node == machine.gpu_node]
    first = sorted(near & machine.first_threads) or sorted(near)
    each, place = len(first) // len(beside), beside.index(rank)
    own = first[place * each : (place + 1) * each]
    second = sorted(near - machine.first_threads) if machine.first_threads else []
    # Hosts list the second threads of all cores in the order of the first.
    return frozenset(own + (second[place * each : (place + 1) * each] if len(second) == len(first) else []))
