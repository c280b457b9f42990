"""Read what NCCL or RCCL says at its start: which links it chose between which ranks, and why.

The lines are those that ``NCCL_DEBUG=INFO`` with the subsystems INIT, GRAPH, ENV and NET writes. Lines that
are not known are passed over: their words differ between versions.
"""

from __future__ import annotations

import glob
import os
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from tracedoc.collector.probe import Plain, known, probe
from tracedoc.collector.variables import WITHHELD, looks_secret, names_secret

MAX_LOG_BYTES = 8 * 1024 * 1024
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
_THREAD = re.compile(r"[^\s:]+:\d+:\d+ \[")
_CARD = re.compile(r"NET/(\w+)/(\d+)")
_RING = re.compile(r"NCCL INFO (?:Channel (\d+)/\d+ :(?:\s+\d+)+\s*$|Ring (\d+) :)")
_CONNECTED = re.compile(r"NCCL INFO Connected all rings, use ring PXN (\d) GDR (\d)")
_CHANNELS = re.compile(
    r"NCCL INFO (\d+) coll channels(?:, \d+ collnet channels)?(?:, (\d+) nvls channels)?, (\d+) p2p channels"
)
_NVLS = re.compile(r"NCCL INFO NVLS multicast support is (not )?available")
_CHUNK = re.compile(r"NCCL INFO P2P Chunksize set to (\d+)")
_SETTING = re.compile(r"NCCL INFO ((?:NCCL|RCCL)_[A-Z0-9_]+) set (?:by environment )?to ([\w.,:^=+-]{1,80})")
_WARNING = re.compile(r"NCCL WARN (.+)")
# What NCCL only notes, and what still explains its choice.
_NOTICE = re.compile(
    r"NCCL INFO ((?:NET/IB : No device found|Failed to open libibverbs|P2P is disabled between|"
    r"Could not enable P2P|NET/\w+ : GPU Direct RDMA Disabled).*)"
)


_DEBUG, _FILE = "NCCL_DEBUG", "NCCL_DEBUG_FILE"
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_PASSING = ".tracedoc-nccl."
"""How the names of logs begin that are read and not kept."""


def debugging(file: Path) -> dict[str, str]:
    """The variables that have NCCL write what it chooses at its start to a file."""
    return {_DEBUG: "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV,NET", _FILE: str(file)}


def ask_nccl(environment: MutableMapping[str, str]) -> None:
    """Have NCCL write a log that :func:`read_nccl_log` removes, in the first rank of a node.

    It must not have begun. Nothing is done where the user has it write, by a variable or a file of NCCL's.
    """
    local = next((environment[name] for name in _LOCAL_RANKS if name in environment), "")
    if local != "0" or any(name.startswith(_DEBUG) for name in environment):
        return
    for file in (environment.get("NCCL_CONF_FILE", ""), "~/.nccl.conf", "/etc/nccl.conf"):
        if file and _DEBUG in (probe(Path(file).expanduser().read_text) or ""):
            return
    environment.update(debugging(Path(tempfile.gettempdir(), f"{_PASSING}%h.%p.log")))


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment as the user gave it: without what :func:`ask_nccl` has set."""
    ours = Path(environment.get(_FILE, "")).name.startswith(_PASSING)
    return {name: value for name, value in environment.items() if not (ours and name.startswith(_DEBUG))}


def read_nccl_log(environment: Mapping[str, str], pid: int) -> Plain:
    """Return the summary of the log that a process was asked to write, nothing where it wrote none."""
    pattern = environment.get("NCCL_DEBUG_FILE", "")
    if not pattern or pattern in ("/dev/stdout", "/dev/stderr"):
        return {}
    for path in log_files(pattern, pid):
        with open(path, encoding="utf-8", errors="replace") as file:
            found = summarise_log(file.read(MAX_LOG_BYTES).splitlines())
        if os.path.basename(path).startswith(_PASSING):
            os.unlink(path)
            return found
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
    """What the lines of a log show: version, network, links, rings, NVLS, settings and warnings.

    ``transports`` counts channels by way of transport (``P2P/CUMEM``, ``SHM/direct``, ``NET/IB``); ``links``
    lists each pair of ranks once. ``gdr`` is whether the network card reads GPU memory directly, ``cards``
    which of them the groups of so many ranks take.
    """
    seen = _Seen()
    for line in lines:
        _ = seen.link(line) or seen.group(line) or seen.setting(line)
    return known(
        **seen.said,
        adapters=seen.adapters,
        communicators=_communicators(seen.communicators),
        transports=dict(seen.transports.most_common()),
        links=[list(link) for link in sorted(seen.links)[:MAX_LINKS]],
        rings=len(seen.rings) or None,
        gdr=seen.gdr,
        cards={str(size): sorted(cards) for size, cards in sorted(seen.cards.items())},
        settings=seen.settings,
        warnings=seen.warnings,
    )


class _Seen:
    """What the lines read so far have shown; each method says whether the line was one of its own."""

    def __init__(self) -> None:
        self.said: Plain = {}
        self.adapters: dict[str, list[str]] = {}
        self.communicators: dict[tuple[int, ...], None] = {}
        self.transports: Counter[str] = Counter()
        self.links: dict[tuple[int, int, str], None] = {}
        self.rings: set[int] = set()
        self.cards: dict[int, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self.gdr: bool | None = None
        self.settings: dict[str, str] = {}
        self.warnings: list[str] = []

    def link(self, line: str) -> bool:
        """Which rank reaches which one, and how."""
        if match := _LINK.search(line):
            transport, direct = _transport(match[4])
            self.transports[transport] += 1
            self.links[int(match[2]), int(match[3]), transport] = None
            if transport.startswith("NET/"):
                self.gdr = bool(self.gdr) or direct
                self._card(line, match[4])
        elif match := _RING.search(line):
            self.rings.add(int(match[1] or match[2]))
        elif match := _CONNECTED.search(line):
            self.said["pxn"], self.gdr = match[1] == "1", match[2] == "1" or bool(self.gdr)
        return match is not None

    def _card(self, line: str, way: str) -> None:
        """Which card a group takes: the one that the thread of a line has begun last."""
        card, size = _CARD.match(way), self._sizes.get(_thread(line), 0)
        if card and size:
            known_cards = self.adapters.get(card[1], [])
            named = known_cards[int(card[2])] if int(card[2]) < len(known_cards) else f"{card[1]}/{card[2]}"
            self.cards.setdefault(size, set()).add(named)

    def group(self, line: str) -> bool:
        """The library, its network, and the groups of ranks."""
        if match := _VERSION.search(line):
            self.said |= {"library": f"{match[1]}CCL", "version": match[2]}
        elif match := _NETWORK.search(line):
            self.said["network"] = match[1].strip()
        elif match := _ADAPTERS.search(line):
            self.adapters[match[1]] = _ADAPTER.findall(match[2])
        elif match := _COMMUNICATOR.search(line):
            self.communicators[tuple(int(match[i]) for i in (2, 3, 4))] = None
            self._sizes[_thread(line)] = int(match[2])
        elif match := _START.search(line):
            self.communicators.setdefault((int(match[2]),))
            self._sizes[_thread(line)] = int(match[2])
        return match is not None

    def setting(self, line: str) -> bool:
        """What it chose, what it was told to choose, and what it warns of."""
        if match := _CHANNELS.search(line):
            nvls = int(match[2]) if match[2] else None
            self.said["channels"] = known(collective=int(match[1]), nvls=nvls, p2p=int(match[3]))
        elif match := _NVLS.search(line):
            self.said["nvls"] = match[1] is None
        elif match := _CHUNK.search(line):
            self.said["p2p_chunk_bytes"] = int(match[1])
        elif match := _SETTING.search(line):
            secret = names_secret(match[1]) or looks_secret(match[2])
            self.settings[match[1]] = WITHHELD if secret else match[2].rstrip(".")
        elif (match := _WARNING.search(line)) or (match := _NOTICE.search(line)):
            text = match[1].strip()[:200]
            if len(self.warnings) < MAX_WARNINGS and text not in self.warnings and not looks_secret(text):
                self.warnings.append(text)
        return match is not None


def _thread(line: str) -> str:
    """The host, process and thread that a line is of, "" where it does not say."""
    match = _THREAD.match(line)
    return match[0] if match else ""


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
