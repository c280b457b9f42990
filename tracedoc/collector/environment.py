"""Describe where a rank runs: versions, processors, memory, limits, its GPU, and what the host counts."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tracedoc.collector.nccl import without_ours
from tracedoc.collector.probe import Plain, known, loaded, plain, probe
from tracedoc.collector.variables import kept_variables

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


_PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "numpy",
    "deepspeed",
    "accelerate",
    "transformers",
    "peft",
    "lightning",
    "pytorch_lightning",
    "bitsandbytes",
    "flash_attn",
    "transformer_engine",
    "torchao",
    "torchtitan",
    "apex",
)
"""Their versions are recorded where the process has imported them."""

_CGROUPS = Path("/sys/fs/cgroup")
_PRESSURE = Path("/proc/pressure")


def describe_environment() -> Plain:
    """The surroundings of a rank, as far as they are known without starting another process."""
    return known(
        variables=kept_variables(without_ours(os.environ)),
        versions=versions(),
        host=describe_host(),
        threads=describe_threads(),
        gpu=probe(describe_gpu),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, of the libraries in use, and of those that torch was built with."""
    torch = loaded("torch")
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in _PACKAGES:
        found[package] = probe(lambda name: str(sys.modules[name].__version__), package)
    found["cuda"] = probe(lambda: torch.version.cuda)
    found["hip"] = probe(lambda: torch.version.hip)
    if probe(lambda: torch.cuda.is_initialized()):
        found["nccl"] = probe(lambda: ".".join(map(str, torch.cuda.nccl.version())))
        found["cudnn"] = probe(lambda: str(torch.backends.cudnn.version()))
    return {name: str(value) for name, value in found.items() if value}


def describe_host() -> Plain:
    """Return the processors and the memory that this process may use."""
    allowed = probe(os.sched_getaffinity, 0) or set()
    return known(
        system=platform.system(),
        machine=platform.machine(),
        kernel=platform.release(),
        cpu_model=probe(_cpu_model),
        cpus=os.cpu_count(),
        cpus_allowed=len(allowed) or None,
        affinity=ranges(allowed),
        memory_bytes=probe(_host_total),
        shared_memory_bytes=probe(lambda: _total("/dev/shm")),
        cgroup_cpus=probe(_cgroup_cpus),
        cgroup_memory_bytes=probe(_cgroup_memory),
        open_files=probe(_open_files),
        **describe_cores(allowed, cgroup_file),
        interfaces=probe(describe_interfaces),
        in_container=probe(lambda: Path("/.dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ),
    )


def _cpu_model() -> str | None:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None


def _total(path: str) -> int:
    found = os.statvfs(path)
    return found.f_frsize * found.f_blocks


def cgroup_file(name: str, controller: str) -> Path | None:
    """Return a file of this process's control group: of version 2, else of ``controller`` in version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places = [_CGROUPS / path.lstrip("/") / name, _CGROUPS / name]
        elif controller in controllers.split(","):
            places = [_CGROUPS / controller / path.lstrip("/") / name, _CGROUPS / controller / name]
        else:
            continue
        for place in places:
            if place.is_file():
                return place
    return None


def _cgroup_cpus() -> float | None:
    file = cgroup_file("cpu.max", "cpu")
    if file is not None:
        quota, period = file.read_text().split()
        return None if quota == "max" else round(int(quota) / int(period), 3)
    file = cgroup_file("cpu.cfs_quota_us", "cpu")
    if file is None:
        return None
    limit = int(file.read_text())
    return round(limit / int((file.parent / "cpu.cfs_period_us").read_text()), 3) if limit > 0 else None


def _cgroup_memory() -> int | None:
    file = cgroup_file("memory.max", "memory") or cgroup_file("memory.limit_in_bytes", "memory")
    text = file.read_text().strip() if file is not None else "max"
    # Version 1 writes a number near 2**63 where there is no limit.
    return None if text == "max" or int(text) > 1 << 60 else int(text)


def _open_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def describe_threads() -> Plain:
    """The number of threads that each library uses for one operation."""
    torch = loaded("torch")
    return known(
        torch=probe(lambda: torch.get_num_threads()),
        torch_interop=probe(lambda: torch.get_num_interop_threads()),
        python=probe(lambda: len(sys._current_frames())),
    )


def describe_gpu() -> Plain:
    """Return the properties of the current GPU; a process that does not use CUDA is not made to."""
    torch = loaded("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    names = (
        "name",
        "total_memory",
        "multi_processor_count",
        "major",
        "minor",
        "gcnArchName",
        "L2_cache_size",
        "warp_size",
    )
    found = {name: plain(getattr(properties, name)) for name in names if hasattr(properties, name)}
    bus = probe(
        lambda: f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    )
    return known(
        **found,
        index=index,
        visible=probe(lambda: torch.cuda.device_count()),
        pci_bus=bus,
        numa_node=probe(lambda: int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())),
    )


def describe_memory() -> Plain:
    """Return the memory in use and its peaks, in bytes; of the GPU only where the process uses one."""
    torch = loaded("torch")
    found: Plain = known(host_peak_bytes=probe(_host_peak), host_total_bytes=probe(_host_total))
    if torch is None or not probe(lambda: torch.cuda.is_initialized()):
        return found
    statistics = probe(torch.cuda.memory_stats) or {}
    free, total = probe(torch.cuda.mem_get_info) or (None, None)
    return known(
        **found,
        total_bytes=total,
        free_bytes=free,
        peak_allocated_bytes=statistics.get("allocated_bytes.all.peak"),
        peak_reserved_bytes=statistics.get("reserved_bytes.all.peak"),
        allocated_bytes=statistics.get("allocated_bytes.all.current"),
        reserved_bytes=statistics.get("reserved_bytes.all.current"),
        inactive_split_bytes=statistics.get("inactive_split_bytes.all.current"),
        allocation_retries=statistics.get("num_alloc_retries"),
        out_of_memory=statistics.get("num_ooms"),
        device_allocations=statistics.get("num_device_alloc"),
        device_frees=statistics.get("num_device_free"),
    )


def _host_total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _host_peak() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


Counters = dict[str, int]

_INFINIBAND = Path("/sys/class/infiniband")

_PORT_COUNTERS = (
    "port_xmit_data",  # in units of four bytes
    "port_rcv_data",
    "port_xmit_wait",
    "port_rcv_errors",
    "port_xmit_discards",
    "symbol_error",
    "link_downed",
    "link_error_recovery",
)
_HARDWARE_COUNTERS = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "np_cnp_sent",
    "rp_cnp_handled",
    "roce_adp_retrans",
    "roce_slow_restart",
)
_INTERFACE_COUNTERS = ("rx_bytes", "tx_bytes", "rx_dropped", "tx_dropped", "rx_errors", "tx_errors")
_TCP_COUNTERS = ("OutSegs", "RetransSegs")
_CPU_COUNTERS = ("nr_periods", "nr_throttled", "throttled_usec", "throttled_time", "usage_usec")
_SWAP_COUNTERS = ("pswpin", "pswpout")
_MEMORY_EVENTS = ("high", "max", "oom", "oom_kill")


def read_counters() -> Counters:
    """Return the counters of this moment, by dotted name; what the host does not have is left out."""
    found: Counters = {}
    for read in (_process, _disk, _pressure, _cgroup, _network, _tcp, _infiniband):
        found |= probe(read) or {}
    return found


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> Counters:
    """The growth of each counter that grew; one that was set back is left out."""
    return {name: after[name] - value for name, value in before.items() if after.get(name, value) > value}


def link_rates() -> dict[str, str]:
    """The rate and layer of each active InfiniBand port: ``mlx5_0/1``, ``400 Gb/sec (4X NDR) InfiniBand``."""
    rates = {}
    for port in _ports():
        if "ACTIVE" not in (probe((port / "state").read_text) or "ACTIVE"):
            continue
        rate, layer = probe((port / "rate").read_text), probe((port / "link_layer").read_text)
        if rate:
            rates[f"{port.parent.parent.name}/{port.name}"] = (
                f"{rate.strip()} {(layer or '').strip()}".strip()
            )
    return rates


def _ports() -> list[Path]:
    return sorted(_INFINIBAND.glob("*/ports/*"))[:64]


def _process() -> Counters:
    import resource

    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "process.user_us": int(own.ru_utime * 1e6),
        "process.system_us": int(own.ru_stime * 1e6),
        "process.major_faults": own.ru_majflt,
        "process.voluntary_switches": own.ru_nvcsw,
        "process.involuntary_switches": own.ru_nivcsw,
    }


def _disk() -> Counters:
    """What the process read from disks, and what the host swapped, in pages."""
    io = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    host = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    found = {f"process.{name}": int(value) for name, value in io if name == "read_bytes"}
    return found | {f"swap.{name}": int(value) for name, value in host if name in _SWAP_COUNTERS}


def _pressure() -> Counters:
    """For how many us some task of the job's control group waited for reads and writes, or for memory.

    Of the whole host where the group does not count it.
    """
    found: Counters = {}
    for name in ("io", "memory"):
        file = cgroup_file(f"{name}.pressure", "") or _PRESSURE / name
        if text := probe(file.read_text):
            some = text.splitlines()[0].split()
            found[f"pressure.{name}_us"] = int(some[-1].removeprefix("total="))
    return found


def _cgroup() -> Counters:
    found: Counters = {}
    for prefix, name, controller, wanted in (
        ("cgroup.cpu", "cpu.stat", "cpu", _CPU_COUNTERS),
        ("cgroup.memory", "memory.events", "memory", _MEMORY_EVENTS),
    ):
        file = cgroup_file(name, controller)
        if file is not None:
            words = (line.split() for line in file.read_text().splitlines())
            found |= {f"{prefix}.{key}": int(value) for key, value in words if key in wanted}
    return found


def _network() -> Counters:
    found: Counters = {}
    for interface in sorted(_NETWORK.iterdir())[:MAX_INTERFACES]:
        found |= _files(f"net.{interface.name}", interface / "statistics", _INTERFACE_COUNTERS)
    return found


def _tcp() -> Counters:
    lines = [
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    counted = dict(zip(*lines, strict=True))
    return {f"tcp.{name}": int(counted[name]) for name in _TCP_COUNTERS if name in counted}


def _infiniband() -> Counters:
    found: Counters = {}
    for port in _ports():
        name = f"infiniband.{port.parent.parent.name}/{port.name}"
        found |= _files(name, port / "counters", _PORT_COUNTERS)
        found |= _files(name, port / "hw_counters", _HARDWARE_COUNTERS)
    return found


def _files(prefix: str, folder: Path, names: Iterable[str]) -> Counters:
    found: Counters = {}
    for name in names:
        value = probe(lambda file: int(file.read_text()), folder / name)
        if value is not None:
            found[f"{prefix}.{name}"] = value
    return found
