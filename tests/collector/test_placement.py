"""What a host's own files say of cores, NUMA nodes, memory and interfaces: six kinds of machine, drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tracedoc.collector import environment
from tracedoc.run.machine import read_machine


@dataclass(frozen=True)
class Host:
    """A host as its files show it: processors of each node, threads of each core, memory by node."""

    nodes: dict[int, str]
    siblings: dict[int, str]
    usable: str
    maps: str = ""
    interfaces: dict[str, tuple[str, str]] = field(default_factory=dict)


TWO_SOCKETS = Host({0: "0-1,4-5", 1: "2-3,6-7"}, {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7"}, "0-7")
HOSTS = {
    "one socket, one thread a core": Host({0: "0-3"}, {n: str(n) for n in range(4)}, "0-3"),
    "two sockets, two threads a core": TWO_SOCKETS,
    "neighbours are threads of one core": Host({0: "0-3"}, {0: "0-1", 2: "2-3"}, "0-3"),
    "a container with half of the cores": Host(TWO_SOCKETS.nodes, TWO_SOCKETS.siblings, "0-1,4-5"),
    "a node of memory alone": Host({0: "0-3", 1: ""}, {n: str(n) for n in range(4)}, "0-3"),
    "a virtual machine without nodes": Host({}, {0: "0", 1: "1"}, "0-1"),
}


def draw(host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of a host, and have them read in place of this machine's."""

    def write(name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for node, cpus in host.nodes.items():
        write(f"system/node/node{node}/cpulist", cpus + "\n")
    for cpu, siblings in host.siblings.items():
        write(f"system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings + "\n")
    write("system/cpu/online", host.usable + "\n")
    write("process/numa_maps", host.maps)
    (folder / "net").mkdir()
    for name, (speed, state) in host.interfaces.items():
        write(f"net/{name}/speed", speed)
        write(f"net/{name}/operstate", state + "\n")
    monkeypatch.setattr(environment, "_SYSTEM", folder / "system")
    monkeypatch.setattr(environment, "_PROCESS", folder / "process")
    monkeypatch.setattr(environment, "_NETWORK", folder / "net")


@pytest.mark.parametrize(
    ("name", "allowed", "first_threads", "nodes"),
    [
        ("one socket, one thread a core", {0, 1, 2, 3}, "0-3", [0]),
        ("two sockets, two threads a core", {2, 6}, "0-3", [1]),
        ("two sockets, two threads a core", {0, 2}, "0-3", [0, 1]),
        ("neighbours are threads of one core", {0, 1}, "0,2", [0]),
        ("a container with half of the cores", {0, 1}, "0-3", [0]),
        ("a node of memory alone", {1}, "0-3", [0]),
        ("a virtual machine without nodes", {0}, "0-1", []),
    ],
)
def test_cores_and_nodes_are_those_of_the_host(
    name: str,
    allowed: set[int],
    first_threads: str,
    nodes: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw(HOSTS[name], tmp_path, monkeypatch)
    found = environment.describe_cores(allowed, lambda file, controller: None)
    assert (found["usable"], found["first_threads"]) == (HOSTS[name].usable, first_threads)
    assert found["numa_nodes"]["allowed"] == nodes
    machine = read_machine({"environment": {"host": {**found, "affinity": environment.ranges(allowed)}}})
    assert machine.allowed == allowed
    assert {node: environment.ranges(set(cpus)) for node, cpus in machine.nodes.items()} == HOSTS[name].nodes


def test_a_container_has_the_processors_of_its_cpuset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(TWO_SOCKETS, tmp_path, monkeypatch)
    (tmp_path / "effective").write_text("2-3\n")
    found = environment.describe_cores({2, 3}, lambda file, controller: tmp_path / "effective")
    assert found["usable"] == "2-3"


def test_own_memory_is_counted_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 pages of 4 KiB and 2 of 2 MiB are on node 1, 4 of 4 KiB on node 0; files are nobody's own."""
    maps = (
        "5500 default file=/usr/bin/python mapped=90 N0=90 kernelpagesize_kB=4\n"
        "5600 bind:1 heap anon=12 dirty=12 N0=4 N1=8 kernelpagesize_kB=4\n"
        "7f00 bind:1 anon=2 dirty=2 N1=2 kernelpagesize_kB=2048\n"
        "7fff default stack anon=3 N0="
    )
    draw(Host({0: "0", 1: "1"}, {}, "0-1", maps), tmp_path, monkeypatch)
    found = environment.describe_cores({0}, lambda file, controller: None)
    assert found["memory_nodes"] == {"0": 4 * 4096, "1": 8 * 4096 + 2 * 2048 * 1024}


def test_interfaces_that_are_up_tell_their_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {
        "eno1": ("1000", "up"),
        "ens3": ("100000", "up"),
        "ens4": ("100000", "down"),
        "veth0": ("-1", "up"),
        "lo": ("", "unknown"),
    }
    draw(Host({}, {}, "0", interfaces=interfaces), tmp_path, monkeypatch)
    assert environment.describe_interfaces() == {"eno1": 1000, "ens3": 100000}
