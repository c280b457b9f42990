"""What a device can do at best, by its name in ``deviceProperties``.

Figures are from the makers' data sheets, half of those that count on sparsity; ``planner/data/hardware.toml``
names the source of each device that a plan knows too, and a test holds the two tables equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

import msgspec


class DevicePeak(msgspec.Struct, frozen=True):
    """Dense peaks of one device as a trace lists it: TFLOP/s, and GB/s (1e9 bytes a second).

    ``link_gbps`` is the one-way bandwidth of NVLink or xGMI, of PCIe where there is none. ``peer_gbps`` is
    the part of it that leads to one peer, where the devices are wired pair by pair: a small group then has
    only some of the links. ``None`` is unsupported or not known.
    """

    bf16_tflops: float | None
    fp16_tflops: float | None
    tf32_tflops: float | None
    fp8_tflops: float | None
    fp32_tflops: float | None
    hbm_gbps: float | None
    link_gbps: float | None
    peer_gbps: float | None = None


def _tensor_peak(
    half: float,
    tf32: float | None,
    fp8: float | None,
    hbm: float,
    link: float | None,
    fp32: float | None = None,
    *,
    peer: float | None = None,
) -> DevicePeak:
    return DevicePeak(half, half, tf32, fp8, fp32, hbm, link, peer)


DEVICE_PEAKS: dict[str, DevicePeak] = {
    "a100": _tensor_peak(312, 156, None, 1555, 300, 19.5),
    "a100 80gb": _tensor_peak(312, 156, None, 2039, 300, 19.5),
    "a100 pcie": _tensor_peak(312, 156, None, 1555, 31, 19.5),
    "a100 pcie 80gb": _tensor_peak(312, 156, None, 1935, 31, 19.5),
    "a800": _tensor_peak(312, 156, None, 2039, 200, 19.5),
    "a30": _tensor_peak(165, 82, None, 933, 31, 10.3),
    "h100": _tensor_peak(989, 494, 1979, 3350, 450, 67),
    "h100 pcie": _tensor_peak(756, 378, 1513, 2000, 63, 51),
    "h100 nvl": _tensor_peak(835, 417, 1671, 3900, 300, 60),
    "h100 96gb": _tensor_peak(989, 494, 1979, 2400, 450, 67),
    "h200": _tensor_peak(989, 494, 1979, 4800, 450, 67),
    "h200 nvl": _tensor_peak(835, 417, 1671, 4800, 450, 60),
    # Boards of a GH200 differ in what joins the GPUs: NVLink pair by pair, a switch, or the network alone.
    "gh200": _tensor_peak(989, 494, 1979, 4000, None, 67),
    "gh200 144g": _tensor_peak(989, 494, 1979, 4900, None, 67),
    "h20": _tensor_peak(148, 74, 296, 4000, 450, 44),
    "h800": _tensor_peak(989, 494, 1979, 3350, 200, 67),
    "b200": _tensor_peak(2250, 1125, 4500, 8000, 900),
    "gb200": _tensor_peak(2500, 1250, 5000, 8000, 900),
    "gb300": _tensor_peak(2500, 1250, 5000, 8000, 900),
    "b300": _tensor_peak(2250, 1125, 4500, 8000, 900),
    # Volta has no bf16 tensor cores.
    "v100": DevicePeak(None, 125, None, None, 15.7, 900, 150, 25),
    "v100 pcie": DevicePeak(None, 112, None, None, 14.0, 900, 15.8),
    # Nor has Turing.
    "t4": DevicePeak(None, 65, None, None, 8.1, 320, 15.8),
    "a10": _tensor_peak(125, 62, None, 600, 31, 31.2),
    "a10g": _tensor_peak(70, 35, None, 600, 31, 31.5),
    "a40": _tensor_peak(150, 75, None, 696, 31, 37.4),
    "rtx a6000": _tensor_peak(155, 77, None, 768, 31, 38.7),
    "l40": _tensor_peak(181, 90, 362, 864, 31, 90.5),
    "l40s": _tensor_peak(362, 183, 733, 864, 31, 91.6),
    "l4": _tensor_peak(121, 60, 242, 300, 31, 30.3),
    "rtx 6000 ada": _tensor_peak(364, 182, 728, 960, 31, 91.1),
    "rtx 3080": _tensor_peak(59.5, 29.8, None, 760, 31, 29.8),
    "rtx 3090": _tensor_peak(71, 35.6, None, 936, 31, 35.6),
    "rtx 4080": _tensor_peak(97.5, 48.7, 195, 717, 31, 48.7),
    "rtx 4090": _tensor_peak(165, 82.6, 330, 1008, 31, 82.6),
    "rtx 5090": _tensor_peak(209, 104.8, 419, 1792, 63, 104.8),
    # A device in a trace is one of the two dies of the card.
    "mi250x": _tensor_peak(191.5, None, None, 1638, 350, peer=50),
    "mi210": _tensor_peak(181, None, None, 1638, 31),
    "mi250": _tensor_peak(181, None, None, 1638, 350, peer=50),
    "mi300x": _tensor_peak(1307, 654, 2615, 5300, 448, 163.4, peer=64),
    "mi325x": _tensor_peak(1300, 654, 2610, 6000, 448, 163.4, peer=64),
    "mi350x": _tensor_peak(2300, None, 4600, 8000, 535, peer=76),
    "mi355x": _tensor_peak(2500, None, 5000, 8000, 535, peer=76),
}
"""Peaks by the words that a device name must hold; the entry with most words wins."""


Range = tuple[float, float]


class Multiprocessor(msgspec.Struct, frozen=True):
    """What one multiprocessor (a compute unit of AMD's) of a kind does, for devices that are not listed.

    ``tensor`` and ``plain`` are operations a clock in 16 bits, dense, and in fp32 outside the tensor cores;
    TF32 and fp8 run at so many times the rate of 16 bits, at 0 where they are not supported.
    ``clock_ghz`` and ``memory_gbps`` are the least and the most that devices of the kind have, which a
    trace does not tell: the boost clock, and what of the memory's bandwidth comes to a multiprocessor.
    """

    tensor: int
    plain: int
    clock_ghz: Range
    memory_gbps: Range
    tf32: float = 0.5
    fp8: float = 2.0
    bf16: bool = True


MULTIPROCESSORS: dict[tuple[str, int, int], Multiprocessor] = {
    ("nvidia", 7, 0): Multiprocessor(1024, 128, (1.38, 1.63), (8.2, 14.2), 0.0, 0.0, bf16=False),
    ("nvidia", 7, 5): Multiprocessor(1024, 128, (1.36, 1.77), (8.0, 12.5), 0.0, 0.0, bf16=False),
    ("nvidia", 8, 0): Multiprocessor(2048, 128, (1.41, 1.44), (14.4, 18.9), fp8=0.0),
    ("nvidia", 8, 6): Multiprocessor(1024, 256, (1.2, 1.86), (8.2, 20.0), fp8=0.0),
    ("nvidia", 8, 9): Multiprocessor(1024, 256, (1.56, 2.61), (5.1, 11.4)),
    ("nvidia", 9, 0): Multiprocessor(4096, 256, (1.54, 1.98), (17.5, 37.5)),
    ("nvidia", 10, 0): Multiprocessor(8192, 256, (1.83, 2.07), (50.0, 55.0)),
    ("nvidia", 12, 0): Multiprocessor(1024, 256, (2.3, 2.64), (9.2, 16.0)),
    ("amd", 9, 0): Multiprocessor(1024, 256, (1.7, 1.7), (14.8, 15.8), 0.0, 0.0),
    ("amd", 9, 4): Multiprocessor(2048, 256, (2.1, 2.1), (17.4, 66.3)),
    ("amd", 9, 5): Multiprocessor(4096, 256, (2.2, 2.4), (31.2, 31.3), 0.0),
}
"""Multiprocessors by vendor and compute capability.

Operations are from the makers' papers on the architectures, clocks and bandwidths from the data sheets of the
smallest and the largest devices of each: V100 to Titan V, T4 to RTX 8000, A100 to A30, A2 and RTX A2000 to
RTX 3090 Ti, L4 to RTX 4060, H100 PCIe to H200, B200, RTX 5050 to RTX PRO 6000; MI250X to MI210, MI300X to
MI308X, MI350X to MI355X. Radeon cards are not here: what their fp32 units reach is not published.
"""

LAPTOPS: dict[tuple[int, int], tuple[Range, Range]] = {
    (8, 6): ((1.03, 1.74), (7.0, 12.0)),
    (8, 9): ((1.23, 2.37), (7.1, 10.7)),
    (12, 0): ((1.42, 2.64), (10.6, 19.2)),
}
"""Clock and bandwidth of multiprocessors in laptops.

Those of the 30 and 40 series are by NVIDIA's lists of GeForce laptops: the least boost clock is that of the
tightest power limit, the most that of the widest. Of the 50 series the least is that of the RTX 5070 at 50 W
(hmc-tech.com; those of the 5060 and 5050 are 1.46 and 1.5, fpsbench.com and hardwaredb.net), the most that of
cards; the RTX 5070 has 384 GB/s for 36 multiprocessors, the RTX 5050 as much for 20 (NVIDIA's announcements).
"""

CDNA2_BYTES = 60_000_000_000
"""Devices of AMD's capability 9.0 with less memory are of older kinds, with other matrix cores."""

GEFORCE_TENSOR = 1 / 2
"""Cards for gaming since Turing add up in fp32 at this part of the rate of those for work."""


def multiprocessor(vendor: str, name: str, major: int, minor: int, nbytes: int = 0) -> Multiprocessor | None:
    """Return the multiprocessor of a device by its compute capability and memory, ``None`` if not known.

    Nothing is known of older laptops, nor of Turing without tensor cores: GTX, MX, and T400 to T2000.
    """
    found, words = MULTIPROCESSORS.get((vendor, major, minor)), _words(name)
    if found is None or any(re.fullmatch(r"gtx|max|mobile|mx\d+|t\d{3,4}", one) for one in words):
        return None
    if vendor == "amd":
        return found if (major, minor) != (9, 0) or nbytes >= CDNA2_BYTES else None
    if "laptop" in words:
        if (major, minor) not in LAPTOPS:
            return None
        clock, memory = LAPTOPS[major, minor]
        found = msgspec.structs.replace(found, clock_ghz=clock, memory_gbps=memory)
    if (major, minor) < (7, 5) or "geforce" not in words:
        return found
    return msgspec.structs.replace(found, tensor=round(found.tensor * GEFORCE_TENSOR))


MATRIX_REACHED: dict[str, float] = {
    "a100": 0.859,
    "a100 pcie": 0.822,
    "h100": 0.801,
    "gh200": 0.830,
    "b200": 0.776,
    "mi250x": 0.767,
    "mi300x": 0.601,
}
"""The share of the dense peak in 16 bits that the best products of matrices reach, by the words of a name.

From the table of maximum achievable FLOPS of github.com/stas00/ml-engineering (compute/accelerator), which
searches shapes with torch.matmul. Other formats are taken to reach as much of their own peak.
"""

OTHERS_REACH = (min(MATRIX_REACHED.values()), max(MATRIX_REACHED.values()))
"""What devices of which none is published reach: as little as the least of these, or as much as the best."""

MEMORY_REACHED = 0.9
"""The share of the memory's bandwidth that large copies reach: 0.91 on H100 NVL, 0.92 on H100 SXM."""

# A slice of a device ("A100-SXM4-40GB MIG 1g.5gb") has a part of its peaks.
_OTHER_MODELS = frozenset({"laptop", "d", "ti", "super", "mig"})


@lru_cache(maxsize=256)
def device_peak(name: str) -> DevicePeak | None:
    """Return the peaks of a device by its name in ``deviceProperties``, ``None`` if it is not listed."""
    key = _closest(name, DEVICE_PEAKS)
    return DEVICE_PEAKS[key] if key else None


def matrix_reached(name: str) -> tuple[float, float]:
    """The share of its peak that the best products reach on a device: at the least and at the most."""
    key = _closest(name, MATRIX_REACHED)
    return (MATRIX_REACHED[key],) * 2 if key else OTHERS_REACH


def _closest(name: str, table: Iterable[str]) -> str:
    """The key of most words that a device name holds, "" where it holds all words of none."""
    words = _words(name)
    fitting = [] if words & _OTHER_MODELS else [key for key in table if words.issuperset(key.split())]
    return max(fitting, key=lambda key: len(key.split()), default="")


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s/_-]+", name.lower()))


_RACK_SCALE = frozenset({"gb200", "gb300", "gh200"})


def spans_hosts(name: str) -> bool:
    """True where NVLink of such a device may join several hosts: racks of GB200 and GB300, some GH200."""
    return bool(_RACK_SCALE & _words(name))
