"""Read counters of the host before and after a window: throttling, network, InfiniBand, this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tracedoc.collector.environment import cgroup_file
from tracedoc.collector.probe import probe

Counters = dict[str, int]

_INFINIBAND = Path("/sys/class/infiniband")
_NETWORK = Path("/sys/class/net")

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
_MEMORY_EVENTS = ("high", "max", "oom", "oom_kill")


def read_counters() -> Counters:
    """Return the counters of this moment, by dotted name; what the host does not have is left out."""
    found: Counters = {}
    for read in (_process, _cgroup, _network, _tcp, _infiniband):
        found |= probe(read) or {}
    return found


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> Counters:
    """Return what was added to each counter, where anything was; one that was set back is left out."""
    return {name: after[name] - value for name, value in before.items() if after.get(name, value) > value}


def link_rates() -> dict[str, str]:
    """Return the rate and layer of each InfiniBand port: ``mlx5_0/1``, ``400 Gb/sec (4X NDR) InfiniBand``."""
    rates = {}
    for port in _ports():
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
    for interface in sorted(_NETWORK.iterdir())[:32]:
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
