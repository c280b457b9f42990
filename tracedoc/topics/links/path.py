"""Facts of the run about the path of its messages: the network, cards and links that they take, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations

import numpy as np

from tracedoc.facts.catalog import NO_MANIFEST, manifest_fact, run_fact
from tracedoc.ranks.bandwidth import FAST_GBPS
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.step.rank_digest import RankDigest
from tracedoc.trace.devices import device_peak
from tracedoc.trace.distinct import is_among
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value, needed

NO_LOG = Unknown("no log of NCCL: collect without --no-nccl-log, and without an NCCL_DEBUG of the job's own")
ONE_HOST = Unknown("all ranks are on one host, or the manifest names none")

LEAST_PORT_GBITS = 25.0
"""A port of InfiniBand or RoCE below this rate is down, or no data network."""

USED = 0.1
"""A card is used that sends this share of what the busiest one of its host sends."""

ENOUGH_BYTES = 1 << 20
"""Interfaces that send less in the captured steps carry no messages of training."""

_OFF = ("1", "true", "yes", "on")
_PORT_RATE = re.compile(r"\s*([\d.]+) Gb/sec")
_REFUSED = re.compile(r"P2P is disabled between|Could not enable P2P")


def _hosts(run: RunView) -> dict[str, list[RankJob]]:
    found: dict[str, list[RankJob]] = {}
    for rank in run.job.ranks:
        found.setdefault(rank.host, []).append(rank)
    return found


@run_fact(unit="text")
def nccl_network(run: RunView) -> Value:
    """The network by which NCCL joins most ranks of different hosts: "IB", "Socket", a plugin; or "none"."""
    if not run.job.ranks:
        return NO_MANIFEST
    ways: Counter[str] = Counter()
    for rank in run.job.ranks:
        ways.update({way[4:]: count for way, count in rank.links.items() if way.startswith("NET/")})
    if not ways and not any(rank.links for rank in run.job.ranks):
        return NO_LOG
    return ways.most_common(1)[0][0] if ways else "none"


@run_fact(unit="count")
def infiniband_ports(run: RunView) -> Value:
    """Active ports of InfiniBand or RoCE with 25 Gb/s or more, on the host that has fewest."""
    if not run.job.ranks:
        return NO_MANIFEST
    return min(len(_ports(ranks)) for ranks in _hosts(run).values())


def _ports(ranks: Iterable[RankJob]) -> dict[str, float]:
    """The ports of a host with its highest rate, in Gb/s."""
    rates = {
        port: float(rate[1])
        for rank in ranks
        for port, text in rank.machine.ports.items()
        if (rate := _PORT_RATE.match(text)) and float(rate[1]) >= LEAST_PORT_GBITS
    }
    return {port: rate for port, rate in rates.items() if rate == max(rates.values())}


@run_fact(unit="count")
def network_cards(run: RunView) -> Value:
    """InfiniBand ports that a host has for its ranks: those of its highest rate, one a rank at most."""
    return needed(_cards(run))[1]


@run_fact(unit="count")
def network_cards_used(run: RunView) -> Value:
    """How many of the ports of :func:`network_cards` send in the captured steps, on the host with fewest.

    By their counters: a tenth or more of what the busiest one sends.
    """
    return needed(_cards(run))[0]


def _cards(run: RunView) -> tuple[int, int] | Unknown:
    """The used and the present cards of the host that leaves most of them idle."""
    found = []
    for ranks in _hosts(run).values():
        ports = _ports(ranks)
        sent = [_sent(ranks, f"infiniband.{port}.port_xmit_data") for port in ports]
        if any(sent):
            found.append((sum(one >= USED * max(sent) for one in sent), min(len(ports), len(ranks))))
    if len(_hosts(run)) < 2:
        return ONE_HOST
    return min(found, key=lambda one: one[0] - one[1]) if found else Unknown("no InfiniBand port sent data")


def _sent(ranks: Iterable[RankJob], counter: str) -> int:
    return max((rank.counters.get(counter, 0) for rank in ranks), default=0)


@run_fact(unit="text")
def network_interface(run: RunView) -> Value:
    """The interface that sends most in the captured steps, of those whose speed its host tells."""
    return _of_interfaces(run, 0)


@run_fact(unit="gbps")
def network_interface_gbps(run: RunView) -> Value:
    """The speed of :func:`network_interface`."""
    return _of_interfaces(run, 1)


@run_fact(unit="gbps")
def fastest_interface_gbps(run: RunView) -> Value:
    """The speed of :func:`fastest_interface`."""
    return _of_interfaces(run, 3)


@run_fact(unit="text")
def fastest_interface(run: RunView) -> Value:
    """The fastest interface that is up on the host of :func:`network_interface`."""
    return _of_interfaces(run, 2)


def _of_interfaces(run: RunView, place: int) -> Value:
    return needed(_interface(run))[place]


def _interface(run: RunView) -> tuple[str, float, str, float] | Unknown:
    """Name and speed of the busiest and of the fastest interface, on the host where these differ most."""
    found = []
    for ranks in _hosts(run).values():
        speeds = {name: mbps / 8000 for rank in ranks for name, mbps in rank.machine.interfaces.items()}
        sent = {name: _sent(ranks, f"net.{name}.tx_bytes") for name in speeds}
        busiest = max(sent, key=lambda name: sent[name], default="")
        if busiest and sent[busiest] >= ENOUGH_BYTES:
            fastest = max(speeds, key=lambda name: speeds[name])
            found.append((busiest, speeds[busiest], fastest, speeds[fastest]))
    if len(_hosts(run)) < 2:
        return ONE_HOST
    if not found:
        return Unknown("no interface whose speed is known sent data in the captured steps")
    return min(found, key=lambda one: one[1] / one[3])


DETOURS = ("none", "switched off", "refused", "unused")


@run_fact(unit="text", values=DETOURS)
def host_memory_path(run: RunView) -> Value:
    """Why NCCL copies through host memory between GPUs of one host that could reach each other, or "none".

    "switched off" by a setting, "refused" by the driver, as NCCL's log notes, or "unused" beside NVLink. GPUs
    on PCIe alone may be too far apart: there it is "none".
    """
    if not run.job.ranks:
        return NO_MANIFEST
    if not any(rank.links for rank in run.job.ranks):
        return NO_LOG
    ways = [_detour(rank) for rank in run.job.ranks if any(way == "SHM" for way in _ways(rank))]
    return min(ways, key=DETOURS[1:].index) if any(ways) and (ways := [w for w in ways if w]) else "none"


def _ways(rank: RankJob) -> Iterator[str]:
    return (way.partition("/")[0] for _, _, way in rank.machine.pairs)


def _detour(rank: RankJob) -> str:
    settings = {**rank.variables, **rank.machine.settings}
    off = settings.get("NCCL_P2P_DISABLE", "").lower() in _OFF or settings.get("NCCL_P2P_LEVEL") in (
        "0",
        "LOC",
    )
    peak = device_peak(rank.gpu)
    wired = rank.machine.nvlinks or (peak is not None and (peak.link_gbps or 0) >= FAST_GBPS)
    if off and re.search(r"RTX 40\d\d", rank.gpu) is None:
        return "switched off"
    if any(_REFUSED.search(one) for one in rank.machine.warnings):
        return "refused"
    return "unused" if wired and not off else ""


@manifest_fact(unit="fraction")
def pcie_rate_frac(rank: RankJob) -> Value:
    """The rate of the GPU's PCIe link as a share of what the card and its slot allow, while it works."""
    have, most = _lanes(rank, ""), _lanes(rank, "_max")
    return Unknown("the manifest has no PCIe link") if not have or not most else min(have / most, 1.0)


@manifest_fact(unit="text")
def pcie_link(rank: RankJob) -> Value:
    """That link in words, as "x8 of generation 4, where card and slot allow x16 of generation 4"."""
    pcie = rank.machine.pcie
    if not _lanes(rank, "") or not _lanes(rank, "_max"):
        return Unknown("the manifest has no PCIe link")
    return (
        f"x{pcie['width']} of generation {pcie['generation']}, where card and slot allow"
        f" x{pcie['width_max']} of generation {pcie['generation_max']}"
    )


def _lanes(rank: RankJob, of: str) -> float:
    """Lanes times the rate of one, which doubles with each generation."""
    pcie = rank.machine.pcie
    return (
        pcie.get(f"width{of}", 0) * 2.0 ** pcie.get(f"generation{of}", 0) if f"generation{of}" in pcie else 0
    )


@run_fact(
    unit="text",
    needs=(
        nccl_network,
        infiniband_ports,
        network_cards,
        network_cards_used,
        network_interface,
        network_interface_gbps,
        fastest_interface_gbps,
        host_memory_path,
    ),
)
def path_reason(run: RunView) -> Value:
    """What of the path of messages explains their rate, in words, or "none".

    Sockets beside InfiniBand, cards that send nothing, an interface below half the speed of another, copies
    through host memory, groups that take one card at the same time.
    """
    if not run.job.ranks:
        return NO_MANIFEST
    if nccl_network(run) == "Socket" and _number(infiniband_ports(run)) > 0:
        return f"NCCL uses sockets, and {infiniband_ports(run)} InfiniBand ports are idle"
    used, cards = _number(network_cards_used(run)), _number(network_cards(run))
    if used < cards:
        return f"{used:.0f} of {cards:.0f} network cards send"
    if _number(network_interface_gbps(run)) < _number(fastest_interface_gbps(run)) / 2:
        return f"messages take the slow interface {network_interface(run)}"
    detour = host_memory_path(run)
    if detour in DETOURS[1:]:
        return f"NCCL copies through host memory ({detour})"
    return next((shared for digest in run.digests if (shared := _shared_card(run, digest))), "none")


TOGETHER_FRAC = 0.25
"""Two groups that send together for less of the shorter one's time slow each other by an eighth at most."""


def _shared_card(run: RunView, digest: RankDigest) -> str:
    """Which two groups of a rank take one card at the same time, in words, "" where none do.

    Groups of one size are told apart by nothing in NCCL's log: they count as one.
    """
    rank, table = run.job.rank(digest.rank), digest.collectives
    cards = {} if rank is None else {int(n): one[0] for n, one in rank.machine.cards.items() if len(one) == 1}
    sends = {}
    for size in sorted(cards):
        kinds = [place for place, kind in enumerate(table.kinds) if kind.group_size == size]
        rows = np.flatnonzero(is_among(table.kind, kinds))
        names = ", ".join(dict.fromkeys(table.kinds[one].group_name or f"of {size} ranks" for one in kinds))
        sends[size] = (names, run.transfers(digest, rows))
    for one, other in combinations(sends, 2):
        (first, sent), (second, also) = sends[one], sends[other]
        least = min(sent.total_ns, also.total_ns)
        if cards[one] == cards[other] and least and (sent & also).total_ns >= TOGETHER_FRAC * least:
            share = format_percent((sent & also).total_ns / least)
            return f"the groups {first} and {second} share {cards[one]}, {share} of the time at once"
    return ""


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
