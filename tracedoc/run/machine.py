"""What a rank's part of the manifest says of its machine: cores, memory, network, loader and other threads.

What is missing or of another type is unknown, as everywhere in a manifest. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tracedoc.run.untrusted import Entry, entries_at, entry_at, items_at, texts_at, value_at, values_at

MOST_CPUS = 1 << 16
"""No host has more processors; a list that names more is damage."""

Cpus = frozenset[int]
Counted = Mapping[str, int]

Stacks = tuple[tuple[float, tuple[str, ...]], ...]
"""The ms of each stack, and its frames, innermost first."""


@dataclass(frozen=True, slots=True)
class LoaderWindow:
    """What a data loader did in the captured steps, and since the first one.

    Since then it handed out ``batches``; ``waits_ms`` is how long training waited for each worker ("-1": for
    nobody's), ``index_ms`` how long a sampler chose what comes next, ``starts`` how often an iterator was
    made, in ``starts_ms`` together. In the captured steps ``workers`` is what the kernel counted for each,
    ``fresh`` how many came. ``cpus`` are those that a worker may use, ``tokens`` the real ones and the places
    of each batch. ``stacks`` are those of workers that make batches, since each began: in ``made_ms``
    together, the busiest for ``made_frac`` of its time, and in ``disk_ms`` of it they waited for a disk.
    """

    wall_us: int = 0
    batches: int = 0
    waits_ms: Mapping[str, float] = field(default_factory=dict)
    index_ms: float | None = None
    workers: tuple[Counted, ...] = ()
    fresh: int = 0
    cpus: Cpus = frozenset()
    tokens: tuple[tuple[int, int], ...] = ()
    starts: int = 0
    starts_ms: float = 0.0
    stacks: Stacks = ()
    made_ms: float = 0.0
    disk_ms: float = 0.0
    made_frac: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a rank runs.

    ``allowed`` of the ``usable`` processors are its own; ``first_threads`` has one of each core of the host,
    ``nodes`` the processors of each NUMA node. ``memory`` are bytes of the rank by node, ``interfaces``
    speeds in Mb/s, ``ports`` rates of InfiniBand ports by name. ``pairs`` are ranks that NCCL joins, and how,
    ``cards`` those that its groups take, by how many ranks they have; ``settings`` and ``warnings`` are its
    log's. ``threads`` are us that other threads of the process ran in the captured steps; ``interpreter`` is
    how often its lock was ``asked`` for, and ``held`` for long. ``versions`` are those of the driver and of
    the network.
    """

    allowed: Cpus = frozenset()
    usable: Cpus = frozenset()
    first_threads: Cpus = frozenset()
    nodes: Mapping[int, Cpus] = field(default_factory=dict)
    allowed_nodes: tuple[int, ...] = ()
    gpu_node: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    interfaces: Counted = field(default_factory=dict)
    ports: Mapping[str, str] = field(default_factory=dict)
    pcie: Counted = field(default_factory=dict)
    nvlinks: int | None = None
    pairs: tuple[tuple[int, int, str], ...] = ()
    cards: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    loader: LoaderWindow | None = None
    threads: Counted = field(default_factory=dict)
    interpreter: Counted = field(default_factory=dict)
    versions: tuple[tuple[str, str], ...] = ()


def parse_cpus(text: str) -> Cpus:
    """The processors of ``0-7,16``; none of a text that is no such list."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or int(last or first) >= MOST_CPUS:
            return frozenset()
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _cpus(entry: Entry, key: str) -> Cpus:
    return parse_cpus(value_at(entry, key, str) or "")


def read_machine(part: Entry) -> Machine:
    """The machine of one rank's part."""
    environment, window = entry_at(part, "environment"), entry_at(part, "window")
    host, nccl = entry_at(environment, "host"), entry_at(part, "nccl")
    nodes, device, cards = entry_at(host, "numa_nodes"), entry_at(part, "device"), entry_at(nccl, "cards")
    cpus = values_at(entry_at(nodes, "cpus"), str)
    # Older manifests have it among what the card is.
    pcie = {
        name.removeprefix("pcie_"): size for name, size in values_at(device, int).items() if "pcie" in name
    }
    library, version = value_at(nccl, "library", str), value_at(nccl, "version", str)
    named = (
        ("driver", value_at(device, "driver", str)),
        (f"{library or 'NCCL'} in use", version),
        ("network of NCCL", value_at(nccl, "network", str)),
    )
    return Machine(
        allowed=_cpus(host, "affinity"),
        usable=_cpus(host, "usable"),
        first_threads=_cpus(host, "first_threads"),
        nodes={int(node): parse_cpus(text) for node, text in cpus.items() if node.isdecimal()},
        allowed_nodes=tuple(items_at(nodes, "allowed", int)),
        gpu_node=value_at(entry_at(environment, "gpu"), "numa_node", int),
        memory=values_at(entry_at(host, "memory_nodes"), int),
        interfaces=values_at(entry_at(host, "interfaces"), int),
        ports=values_at(entry_at(part, "infiniband"), str),
        pcie=pcie | values_at(entry_at(window, "pcie"), int),
        nvlinks=value_at(device, "nvlinks_active", int),
        pairs=tuple(_pairs(nccl)),
        cards={size: texts_at(cards, size) for size in cards if size.isdecimal()},
        settings=values_at(entry_at(nccl, "settings"), str),
        warnings=texts_at(nccl, "warnings"),
        loader=_loader(window, part) if "loader" in window else None,
        threads=values_at(entry_at(window, "threads"), int),
        interpreter=values_at(entry_at(part, "interpreter"), int),
        versions=tuple((name, text) for name, text in named if text),
    )


def _pairs(nccl: Entry) -> list[tuple[int, int, str]]:
    return [
        (one[0], one[1], one[2])
        for one in items_at(nccl, "links", list)
        if [type(part) for part in one] == [int, int, str]
    ]


def _loader(window: Entry, part: Entry) -> LoaderWindow:
    entry, job = entry_at(window, "loader"), entry_at(part, "loader")
    return LoaderWindow(
        wall_us=value_at(entry, "wall_us", int) or 0,
        batches=value_at(job, "batches", int) or 0,
        waits_ms=values_at(entry_at(job, "waits_ms"), float),
        index_ms=value_at(job, "index_ms", float),
        workers=tuple(values_at(one, int) for one in entries_at(entry, "workers")),
        fresh=value_at(entry, "fresh", int) or 0,
        cpus=frozenset().union(*map(parse_cpus, texts_at(entry, "cpus"))),
        tokens=tuple(
            (one[0], one[1])
            for one in items_at(entry, "tokens", list)
            if [type(n) for n in one] == [int, int] and 0 < one[0] <= one[1]
        ),
        starts=value_at(job, "starts", int) or 0,
        starts_ms=value_at(job, "starts_ms", float) or 0.0,
        stacks=read_stacks(entry),
        made_ms=value_at(entry, "made_ms", float) or 0.0,
        disk_ms=value_at(entry, "disk_ms", float) or 0.0,
        made_frac=value_at(entry, "made_frac", float),
    )


def read_stacks(entry: Entry) -> Stacks:
    """The stacks that an entry lists."""
    stacks = ((value_at(one, "ms", float), texts_at(one, "frames")) for one in entries_at(entry, "stacks"))
    return tuple((ms, frames) for ms, frames in stacks if ms and frames)


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Stacks of the thread that trains in one step: ms and frames, innermost first; some without frames.

    A frame reads ``train.py(12): main@15``, which runs line 15. ``number`` is that of the step log; ``whole``
    from its beginning on, else from when it took longer than usual; ``long`` if it took far longer.
    ``beside`` are stacks of other threads while they ran.
    """

    number: int
    stacks: Stacks
    beside: Stacks = ()
    whole: bool = False
    long: bool = True


@dataclass(frozen=True, slots=True)
class Samples:
    """Steps whose stacks were ``sampled``: of ``long`` ones of all ``steps`` some, and some to compare with.

    ``loop`` are the frames around every step, without the lines that they were in.
    """

    steps: int = 0
    long: int = 0
    loop: tuple[str, ...] = ()
    sampled: tuple[SampledStep, ...] = ()


def read_samples(entry: Entry) -> Samples:
    """The steps whose stacks an entry has."""
    return Samples(
        steps=value_at(entry, "steps", int) or 0,
        long=value_at(entry, "long", int) or 0,
        loop=tuple(frame.rpartition("@")[0] for frame in texts_at(entry, "loop")),
        sampled=tuple(_sampled(entry)),
    )


def _sampled(entry: Entry) -> Iterator[SampledStep]:
    """The sampled steps of an entry; a stack whose frames are not there has none."""
    frames = {
        str(place): texts_at({"frames": one}, "frames")
        for place, one in enumerate(items_at(entry, "frames", object))
    }

    def stacks(one: Entry, key: str) -> Stacks:
        times = values_at(entry_at(one, key), float)
        return tuple((ms, frames.get(place, ())) for place, ms in times.items())

    for one in entries_at(entry, "sampled"):
        whole, long = value_at(one, "whole", bool) is True, value_at(one, "long", bool) is True
        number = value_at(one, "step", int) or 0
        yield SampledStep(number, stacks(one, "stacks"), stacks(one, "beside"), whole, long)
