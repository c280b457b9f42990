"""Read where the host puts a rank: its cores and memory by NUMA node, and the interfaces of its network."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from tracedoc.collector.probe import Plain, known, probe

_SYSTEM = Path("/sys/devices/system")
_NETWORK = Path("/sys/class/net")
_PROCESS = Path("/proc/self")

MAX_INTERFACES = 32
MAX_MAP_BYTES = 256 * 1024
"""So much of ``numa_maps`` is read, the heap first: the kernel counts the pages of what is read."""

_PAGES = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB = re.compile(r"\bkernelpagesize_kB=(\d+)")


def ranges(numbers: set[int]) -> str:
    """Return sorted numbers as ``0-7,16-23``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def numbers(text: str) -> set[int]:
    """Return the numbers that :func:`ranges` wrote."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def describe_cores(allowed: set[int], cgroup_file: Callable[[str, str], Path | None]) -> Plain:
    """The cores of a rank as its host has them.

    ``usable`` are the processors that the container has, of which a rank may be ``allowed`` fewer; of
    processors that are threads of one core ``first_threads`` names one each.
    """
    return known(
        usable=probe(_usable, cgroup_file),
        first_threads=probe(_first_threads),
        numa_nodes=probe(_numa_nodes, allowed),
        memory_nodes=probe(_memory_nodes),
    )


def _usable(cgroup_file: Callable[[str, str], Path | None]) -> str:
    file = cgroup_file("cpuset.cpus.effective", "cpuset")
    return ranges(numbers((file or _SYSTEM / "cpu" / "online").read_text()))


def _first_threads() -> str:
    cores = _SYSTEM.glob("cpu/cpu[0-9]*/topology/thread_siblings_list")
    return ranges({min(numbers(core.read_text())) for core in cores})


def _numa_nodes(allowed: set[int]) -> Plain:
    """The number of the host's NUMA nodes, their processors, and the nodes that the process may run on."""
    cpus = {
        int(node.name.removeprefix("node")): numbers((node / "cpulist").read_text())
        for node in _SYSTEM.glob("node/node[0-9]*")
    }
    return {
        "count": len(cpus),
        "allowed": sorted(node for node, own in cpus.items() if own & allowed),
        "cpus": {str(node): ranges(cpus[node]) for node in sorted(cpus)[:64]},
    }


def _memory_nodes() -> dict[str, int]:
    """The bytes of the process's own memory on each NUMA node, of the mappings that were read."""
    with (_PROCESS / "numa_maps").open(encoding="utf-8", errors="replace") as file:
        lines = file.read(MAX_MAP_BYTES).splitlines()
    found: dict[str, int] = {}
    for line in lines[:-1] if len(lines) > 1 else lines:
        size = _PAGE_KIB.search(line)
        if " anon=" in line and size is not None:
            for node, pages in _PAGES.findall(line):
                found[node] = found.get(node, 0) + int(pages) * int(size[1]) * 1024
    return found


def describe_interfaces() -> dict[str, int]:
    """The speed in Mb/s of each network interface that is up and says it; virtual ones mostly do not."""
    found = {}
    for interface in sorted(_NETWORK.iterdir())[:MAX_INTERFACES]:
        speed = probe(lambda one: int((one / "speed").read_text()), interface)
        if speed is not None and speed > 0 and probe((interface / "operstate").read_text) != "down\n":
            found[interface.name] = speed
    return found


def affinity_of(pid: int) -> str:
    """The processors that a process of this host may use, as :func:`ranges` writes them."""
    return ranges(os.sched_getaffinity(pid))
