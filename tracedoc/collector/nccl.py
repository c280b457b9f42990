"""Read what NCCL or RCCL says at its start: which links it chose between which ranks, and why.

The lines are those that ``NCCL_DEBUG=INFO`` with the subsystems INIT, GRAPH and ENV writes. Lines that are
not known are passed over: their words differ between versions.
"""

from __future__ import annotations

import glob
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tracedoc.collector.probe import Plain, known

MAX_BYTES = 8 * 1024 * 1024
"""At most this much of a log is read: its start lists the links."""

MAX_LINKS = 256
MAX_WARNINGS = 10

_VERSION = re.compile(r"\b(N|R)CCL version ([\w.+-]+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_ADAPTERS = re.compile(r"NCCL INFO NET/(\w+) : Using (.+)")
_ADAPTER = re.compile(r"\[\d+\]([\w.-]+)")
_COMMUNICATOR = re.compile(r"NCCL INFO comm 0x\w+ rank (\d+) nRanks (\d+) nNodes (\d+) localRanks (\d+)")
_START = re.compile(r"NCCL INFO ncclCommInitRank\w* comm 0x\w+ rank (\d+) nranks (\d+) .*Init START")
_LINK = re.compile(
    r"NCCL INFO (?:NVLS )?Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] "
    r"(?:\[(?:send|receive)\] )?via (NET/AWS Libfabric\S*|\S+)"
)
_RING = re.compile(r"NCCL INFO (?:Channel (\d+)/\d+ :(?:\s+\d+)+\s*$|Ring (\d+) :)")
_CONNECTED = re.compile(r"NCCL INFO Connected all rings, use ring PXN (\d) GDR (\d)")
_CHANNELS = re.compile(
    r"NCCL INFO (\d+) coll channels(?:, \d+ collnet channels)?(?:, (\d+) nvls channels)?, (\d+) p2p channels"
)
_NVLS = re.compile(r"NCCL INFO NVLS multicast support is (not )?available")
_CHUNK = re.compile(r"NCCL INFO P2P Chunksize set to (\d+)")
_SETTING = re.compile(r"NCCL INFO ((?:NCCL|RCCL)_[A-Z0-9_]+) set (?:by environment )?to ([\w.,:^=+-]{1,80})")
_WARNING = re.compile(r"NCCL WARN (.+)")


def read_nccl_log(environment: Mapping[str, str], pid: int) -> Plain:
    """Return the summary of the log that a process was asked to write, nothing where it wrote none."""
    pattern = environment.get("NCCL_DEBUG_FILE", "")
    if not pattern or pattern in ("/dev/stdout", "/dev/stderr"):
        return {}
    for path in log_files(pattern, pid):
        with open(path, encoding="utf-8", errors="replace") as file:
            found = summarise_log(file.read(MAX_BYTES).splitlines())
        if found:
            return {"file": os.path.basename(path), **found}
    return {}


def log_files(pattern: str, pid: int) -> list[str]:
    """Return the files that ``NCCL_DEBUG_FILE`` stands for: ``%h`` is the host, ``%p`` the process."""
    hosts = (socket.gethostname(), socket.gethostname().split(".")[0])
    named = [pattern.replace("%h", host).replace("%p", str(pid)) for host in dict.fromkeys(hosts)]
    found = [name for name in named if Path(name).is_file()]
    # A library in a container may know the host by another name.
    return found or sorted(glob.glob(glob.escape(pattern).replace("%h", "*").replace("%p", str(pid))))


def summarise_log(lines: Iterable[str]) -> Plain:
    """Return what the lines of a log show: version, network, links, rings, NVLS, settings and warnings.

    ``transports`` counts channels by way of transport (``P2P/CUMEM``, ``SHM/direct``, ``NET/IB``); ``links``
    lists each pair of ranks once. ``gdr`` is whether the network card reads GPU memory directly.
    """
    library = version = network = ""
    adapters: dict[str, list[str]] = {}
    communicators: dict[tuple[int, ...], None] = {}
    transports: Counter[str] = Counter()
    links: dict[tuple[int, int, str], None] = {}
    rings: set[int] = set()
    channels: Plain = {}
    settings: dict[str, str] = {}
    warnings: list[str] = []
    gdr = pxn = nvls = chunk = None
    for line in lines:
        if match := _LINK.search(line):
            transport, direct = _transport(match[4])
            transports[transport] += 1
            links[int(match[2]), int(match[3]), transport] = None
            if transport.startswith("NET/"):
                gdr = bool(gdr) or direct
        elif match := _RING.search(line):
            rings.add(int(match[1] or match[2]))
        elif match := _CONNECTED.search(line):
            pxn, gdr = match[1] == "1", match[2] == "1" or bool(gdr)
        elif match := _VERSION.search(line):
            library, version = f"{match[1]}CCL", match[2]
        elif match := _NETWORK.search(line):
            network = match[1].strip()
        elif match := _ADAPTERS.search(line):
            adapters[match[1]] = _ADAPTER.findall(match[2])
        elif match := _COMMUNICATOR.search(line):
            communicators[tuple(int(match[i]) for i in (2, 3, 4))] = None
        elif match := _START.search(line):
            communicators.setdefault((int(match[2]),))
        elif match := _CHANNELS.search(line):
            channels = known(
                collective=int(match[1]), nvls=int(match[2]) if match[2] else None, p2p=int(match[3])
            )
        elif match := _NVLS.search(line):
            nvls = match[1] is None
        elif match := _CHUNK.search(line):
            chunk = int(match[1])
        elif match := _SETTING.search(line):
            settings[match[1]] = match[2].rstrip(".")
        elif (match := _WARNING.search(line)) and len(warnings) < MAX_WARNINGS:
            warnings.append(match[1].strip()[:200])
    return known(
        library=library,
        version=version,
        network=network,
        adapters=adapters,
        communicators=_communicators(communicators),
        transports=dict(transports.most_common()),
        links=[list(link) for link in sorted(links)[:MAX_LINKS]],
        rings=len(rings) or None,
        gdr=gdr,
        pxn=pxn,
        nvls=nvls,
        channels=channels,
        p2p_chunk_bytes=chunk,
        settings=settings,
        warnings=warnings,
    )


def _transport(way: str) -> tuple[str, bool]:
    """Return ``P2P/CUMEM`` of ``P2P/CUMEM/read``, and whether a network card reads GPU memory directly."""
    parts = way.split("/")
    if parts[0] == "NET":
        # NET/IB/0/GDRDMA, NET/AWS Libfabric/1/GDRDMA; a space ends the word.
        return "/".join(parts[:2]), "GDRDMA" in way
    return "/".join(parts[:2]), False


def _communicators(found: Iterable[tuple[int, ...]]) -> list[Plain]:
    sized = sorted(found, reverse=True)
    with_nodes = {one[0] for one in sized if len(one) == 3}
    return [
        {"ranks": one[0], "nodes": one[1], "local_ranks": one[2]} if len(one) == 3 else {"ranks": one[0]}
        for one in sized
        if len(one) == 3 or one[0] not in with_nodes
    ][:32]
