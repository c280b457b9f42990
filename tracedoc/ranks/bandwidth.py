"""Expected bandwidth of a collective by size and link, and the bandwidth that a run reached.

Bandwidth here is bus bandwidth as nccl-tests define it: bytes over transfer time, times a factor of the
operation, so that the link of one device is the bound whatever the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.ranks.matching import Group, Matching
from tracedoc.spans import Int64Array
from tracedoc.timeline.collective_table import NONE, boundaries
from tracedoc.trace.devices import device_peak
from tracedoc.trace.distinct import median
from tracedoc.trace.vocabulary import SYMMETRIC_OPS, busbw_factor

RING_SHARE = 0.80
"""What a ring over a switch reaches of the link (8x H200: 361 of 450 GB/s in all-gathers). An all-reduce in
the switch may exceed it."""

MESH_SHARE = 0.70
"""What devices wired pair by pair reach of their links (8x MI300X: 313 of 448 GB/s)."""

PCIE_SHARE = 0.50
"""What devices without links of their own reach of PCIe wherever they sit (8x RTX 5090: 28 of 63 GB/s). NCCL
counts on 24 of 31 GB/s below one socket, but on 10 to 24 between two (topo.h); a trace does not say which."""

FAST_GBPS = 100.0
"""NVLink and xGMI reach more; PCIe, and the network cards of a node, reach about as much as each other."""

REFERENCE_RANKS = 8
"""Ranks of the measured machines; a host seldom has more."""

HALF_RATE_MIB = ((0.0, 0.0), (450.0, 20.0), (900.0, 64.0))
"""Link rate (GB/s) and the size in MiB at which 8 ranks reach half of their all-reduce bandwidth.

Measured on 8x H200 (busbw of 40, 220, 276, 402 and 482 GB/s at 1, 16, 32, 128 MiB and 16 GiB) and 8x B200
(36, 255, 326, 568, 846); in proportion below (ml-engineering, network)."""

BASE_LATENCY_US = 8.4
HOP_LATENCY_US = 3.4
"""What NCCL counts for starting a ring and for each of its hops over NVLink (tuning.cc, simple protocol)."""

HOSTS_HALF_RATE_MIB = 120.0
HOSTS_GBPS = 382.0
HOSTS_REFERENCE_RANKS = 32
"""The same for 32 ranks on four hosts over EFA (5.4, 64, 91, 198, 382 GB/s)."""

FIT_SIZES = 3
FIT_SPREAD = 4
"""A line is fitted where a group has so many sizes, and the largest is so many times the smallest."""

FIT_RANGE = 16
"""A fitted latency this many times shorter or longer than the table's is noise. A link that moves bytes
slowly takes a call no longer, and reaches half of its rate with smaller messages."""


class SizeCurve(msgspec.Struct, frozen=True):
    """The bandwidth of one group by size: ``peak_gbps * size / (size + half-rate size)``.

    ``peak_gbps`` is ``None`` where the link is not known: between hosts, or of an unlisted device.
    ``most_gbps`` is what it may be at best, however devices are wired that are wired pair by pair.
    ``table_half_bytes`` is the half-rate size of measured machines, ``scaled_half_bytes`` what follows from
    it for a group of fewer ranks, ``fitted_half_bytes`` that of this run, ``None`` where it has too few
    sizes.
    """

    peak_gbps: float | None
    table_half_bytes: float
    scaled_half_bytes: float
    fitted_half_bytes: float | None = None
    most_gbps: float | None = None

    @property
    def half_bytes(self) -> float:
        """The size that reaches half of what larger ones reach."""
        return self.scaled_half_bytes if self.fitted_half_bytes is None else self.fitted_half_bytes

    def expected_gbps(self, nbytes: float, *, at_best: bool = False) -> float | None:
        """Return the bus bandwidth that a message of so many bytes should reach, or may ``at_best``.

        The larger of the table's and the run's half-rate size counts: a link that is slow at every size is
        at half of its own rate early, and so are small messages alone, which take a protocol of lower rate.
        The table's is not scaled here, so that nothing more is expected than was measured.
        """
        half = max(self.table_half_bytes, self.half_bytes)
        peak = self.most_gbps if at_best and self.most_gbps else self.peak_gbps
        return None if peak is None else peak * nbytes / (nbytes + half)


def size_curve(device: str, ranks: int, hosts: int = 1) -> SizeCurve | None:
    """Return the curve of a group on ``device`` from the table, ``None`` for an unlisted device.

    ``hosts`` is how many the group spans; over several the network's rate is not in the trace, and the
    half-rate size grows with the ranks. On one host that of 8 ranks stands for larger groups, and is scaled
    down for smaller ones.
    """
    peak = device_peak(device)
    if peak is None or peak.link_gbps is None or ranks < 2:
        return None
    rates, sizes = zip(*HALF_RATE_MIB, strict=True)
    half = float(np.interp(peak.link_gbps, rates, sizes)) * 2**20
    scaled = half * _half_rate_time(min(ranks, REFERENCE_RANKS)) / _half_rate_time(REFERENCE_RANKS)
    if hosts > 1:
        apart = HOSTS_HALF_RATE_MIB * 2**20 * (ranks - 1) / (HOSTS_REFERENCE_RANKS - 1)
        return SizeCurve(None, max(half, apart), max(scaled, apart))
    rate = ring_gbps(peak.link_gbps)
    if peak.peer_gbps is None:
        return SizeCurve(rate, half, scaled)
    # Some pairs may have several links, so that fewer devices reach as much as all.
    pairs = min(peak.link_gbps, peak.peer_gbps * (ranks - 1))
    # A call takes as long over few links, which move fewer bytes meanwhile.
    return SizeCurve(MESH_SHARE * pairs, half, scaled * pairs / peak.link_gbps, most_gbps=rate)


def ring_gbps(link_gbps: float) -> float:
    """What a ring within a host reaches over links of some rate."""
    return (RING_SHARE if link_gbps >= FAST_GBPS else PCIE_SHARE) * link_gbps


def _half_rate_time(ranks: int) -> float:
    """A time that the half-rate size is in proportion to, for an all-reduce in a ring of so many ranks.

    Its latency, over the ``2 (n - 1) / n`` times that each byte crosses a link.
    """
    hops = 2 * (ranks - 1)
    return (BASE_LATENCY_US + hops * HOP_LATENCY_US) * ranks / hops


class TransferLine(msgspec.Struct, frozen=True):
    """What a transfer takes by its size: ``latency_ns``, and ``ns_per_byte`` for each byte."""

    latency_ns: float
    ns_per_byte: float

    @property
    def half_bytes(self) -> float:
        """The size that reaches half of the rate of large ones; 0 without latency."""
        return max(self.latency_ns, 0.0) / self.ns_per_byte


def fit_line(
    sizes: npt.NDArray[np.number],
    transfer_ns: npt.NDArray[np.number],
    *,
    fewest: int = FIT_SIZES,
    spread: float = FIT_SPREAD,
) -> TransferLine | None:
    """The line through the median transfers of each size, of one operation in one group.

    Errors count in proportion, so that small messages tell as much as large ones. ``None`` with fewer than
    ``fewest`` sizes, where the largest is less than ``spread`` times the smallest, or takes no longer.
    """
    several = np.array(sorted(set(sizes.tolist())))
    if several.size < fewest or several[-1] < spread * several[0]:
        return None
    typical = np.array([median(transfer_ns[sizes == size]) for size in several], dtype=np.float64)
    slope, constant = np.polyfit(several.astype(np.float64), typical, 1, w=1.0 / np.maximum(typical, 1.0))
    return TransferLine(float(constant), float(slope)) if slope > 0 else None


class Transfers(msgspec.Struct, frozen=True, eq=False):
    """The operations of a matching whose transfer is known: complete, symmetric, with a size and a length.

    ``operation`` are their places in the matching; ``gbps`` is the bus bandwidth that each reached,
    ``expected_gbps`` what its size should reach on its link, NaN where that is not known.
    """

    operation: npt.NDArray[np.intp]
    nbytes: Int64Array
    transfer_ns: Int64Array
    gbps: npt.NDArray[np.float64]
    expected_gbps: npt.NDArray[np.float64]


class Seat(msgspec.Struct, frozen=True):
    """Where a rank runs: the name of its device, that of its host ("" if unknown), the device's number there.

    ``ordinal`` is ``None`` where the process sees one device alone, whatever its number is on the host.
    """

    device: str
    host: str
    ordinal: int | None


def group_curves(matching: Matching, seats: Mapping[int, Seat]) -> tuple[SizeCurve | None, ...]:
    """The size curve of each group of a matching, fitted to this run where it can be; ``seats`` by rank."""
    known = known_transfers(matching)
    group, op = matching.group[known], matching.op[known]
    sizes, transfer_ns = matching.nbytes[known], matching.transfer_ns[known]
    curves: list[SizeCurve | None] = []
    order = np.lexsort((op, group))
    edges = boundaries(group[order], op[order])
    halves: dict[int, list[float]] = defaultdict(list)
    slow: dict[int, list[float]] = defaultdict(list)
    table = [_from_table(members, seats) for members in matching.groups]
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        mine = order[begin:end]
        number = int(group[mine[0]])
        curve = table[number]
        if curve is None:
            continue
        factor = busbw_factor(matching.ops[int(op[mine[0]])], matching.groups[number].size)
        rate = (curve.peak_gbps or HOSTS_GBPS) / factor
        line = fit_line(sizes[mine], transfer_ns[mine])
        if line is None or line.latency_ns <= 0:
            slow[number] += _half_of_slow(curve, rate, sizes[mine], transfer_ns[mine])
        elif 1 / FIT_RANGE <= line.latency_ns * rate / curve.half_bytes <= FIT_RANGE:
            halves[number].append(line.half_bytes)
    for number, curve in enumerate(table):
        found = halves[number] or slow[number]
        if curve is not None and found:
            curve = replace(curve, fitted_half_bytes=float(median(found)))
        curves.append(curve)
    return tuple(curves)


def _half_of_slow(
    curve: SizeCurve, rate: float, sizes: npt.NDArray[np.number], transfer_ns: npt.NDArray[np.number]
) -> list[float]:
    """The half-rate size of a link that moves bytes more slowly than the table's ``rate``, in bytes a ns.

    A call takes it no longer. Nothing where messages are too small to tell: they may be slow for either.
    """
    large = sizes >= curve.half_bytes
    if not large.any():
        return []
    latency_ns = curve.half_bytes / rate
    reached = float(median(sizes[large] / np.maximum(transfer_ns[large] - latency_ns, 1.0)))
    return [latency_ns * reached] if reached < rate else []


def _from_table(group: Group, seats: Mapping[int, Seat]) -> SizeCurve | None:
    captured = [seats[rank] for rank in group.ranks if rank in seats]
    if not captured:
        return None
    named = {seat.host for seat in captured}
    # A rank that was not captured, or whose host is not known, may be on another host.
    surely_one = len(captured) == group.size and "" not in named
    surely_several = len(named) > 1 or _same_device_twice(captured)
    apart = surely_several or (not surely_one and group.size > REFERENCE_RANKS)
    return size_curve(captured[0].device, group.size, 2 if apart else 1)


def _same_device_twice(seats: Sequence[Seat]) -> bool:
    """Whether ranks of a group run on devices of one number: NCCL refuses that within a host."""
    numbered = [seat.ordinal for seat in seats if seat.ordinal is not None]
    return len(set(numbered)) < len(numbered)


def known_transfers(matching: Matching) -> npt.NDArray[np.intp]:
    """Return the operations whose transfer is known."""
    symmetric = np.array([op in SYMMETRIC_OPS for op in matching.ops] or [False], dtype=bool)
    return np.flatnonzero(
        symmetric[matching.op]
        & matching.complete
        & (matching.nbytes != NONE)
        & (matching.nbytes > 0)
        & (matching.transfer_ns > 2 * (matching.clock.residual_ns or 0))
    )


def transfers(matching: Matching, curves: Sequence[SizeCurve | None]) -> Transfers:
    """Return the bandwidth that the operations of a matching reached."""
    known = known_transfers(matching)
    nbytes, transfer_ns = matching.nbytes[known], matching.transfer_ns[known]
    factors = {
        (op, number): busbw_factor(matching.ops[op], matching.groups[number].size)
        for op, number in set(zip(matching.op[known].tolist(), matching.group[known].tolist(), strict=True))
    }
    pairs = zip(matching.op[known].tolist(), matching.group[known].tolist(), strict=True)
    factor = np.array([factors[pair] for pair in pairs], dtype=np.float64)
    numbers = matching.group[known].tolist()
    expected = [
        np.nan if (curve := curves[number]) is None else (curve.expected_gbps(size) or np.nan)
        for number, size in zip(numbers, nbytes.tolist(), strict=True)
    ]
    return Transfers(
        known, nbytes, transfer_ns, factor * nbytes / transfer_ns, np.array(expected, dtype=np.float64)
    )
