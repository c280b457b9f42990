"""The name of the device that a rank ran on, and what the table of devices says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.timeline.build import RankTimeline
from tracedoc.trace.columns import Device
from tracedoc.trace.devices import (
    MEMORY_REACHED,
    DevicePeak,
    Multiprocessor,
    device_peak,
    matrix_reached,
    multiprocessor,
)
from tracedoc.values import Unknown

Floats = npt.NDArray[np.float64]

UNNAMED = "GPU"
"""What a device is called that the trace does not name."""


def device_name(timeline: RankTimeline) -> str:
    """Return the name of the judged device: "CPU" in a CPU trace, "GPU" where the file names none."""
    if timeline.is_cpu:
        return "CPU"
    named = {device.index: device.name for device in timeline.trace.info.devices}
    if timeline.device in named:
        return named[timeline.device]
    return next(iter(named.values()), UNNAMED if timeline.device is not None else "unknown device")


def device_ordinal(timeline: RankTimeline) -> int | None:
    """The number of the judged device among those that the process sees, ``None`` where it sees one alone."""
    return timeline.device if len(timeline.trace.info.devices) > 1 and not timeline.is_cpu else None


def judged_peak(timeline: RankTimeline) -> DevicePeak | Unknown:
    """Return the peaks of the judged device."""
    name = device_name(timeline)
    return device_peak(name) or unlisted(name)


def half_tflops(timeline: RankTimeline) -> float | Unknown:
    """Return the dense peak of the judged device in 16 bits: bf16, on Volta and Turing fp16."""
    peak = judged_peak(timeline)
    if isinstance(peak, Unknown):
        return peak
    return peak.bf16_tflops or peak.fp16_tflops or Unknown("the device has no 16-bit tensor cores")


def tensor_speedup(timeline: RankTimeline) -> float | Unknown:
    """How many times as fast 16 bits on tensor cores are as fp32 on plain ones.

    By the table of devices, else by the compute capability, which a whole family of devices shares.
    """
    peak = judged_peak(timeline)
    if not isinstance(peak, Unknown) and peak.fp32_tflops:
        return (peak.bf16_tflops or peak.fp16_tflops or 0.0) / peak.fp32_tflops
    one = _multiprocessor(timeline)
    if one is not None:
        return one.tensor / one.plain
    return peak if isinstance(peak, Unknown) else Unknown("the rate of its plain cores is not known")


def _judged(timeline: RankTimeline) -> Device | None:
    """What the trace says of the judged device."""
    devices = timeline.trace.info.devices
    mine = [one for one in devices if one.index == timeline.device] or devices[:1]
    return mine[0] if mine else None


def _multiprocessor(timeline: RankTimeline) -> Multiprocessor | None:
    one, vendor = _judged(timeline), timeline.trace.info.vendor
    if one is None:
        return None
    capability = one.compute_major or 0, one.compute_minor or 0
    return multiprocessor(vendor, one.name, *capability, one.memory_bytes or 0)


AMPERE = 8
"""NVIDIA's compute capability from which on tensor cores know bf16 and TF32."""


def is_before_ampere(timeline: RankTimeline) -> bool:
    """True for a device of NVIDIA whose tensor cores know neither bf16 nor TF32."""
    device = _judged(timeline)
    return (
        device is not None
        and timeline.trace.info.vendor == "nvidia"
        and 0 < (device.compute_major or 0) < AMPERE
    )


class Rates(msgspec.Struct, frozen=True):
    """What a device reaches in practice: operations a nanosecond by format of matrices, bytes a nanosecond.

    A format that is not supported or not listed has 0.
    """

    matrix: Mapping[str, float]
    memory: float

    def least_ns(self, flops: Floats, nbytes: Floats, formats: Sequence[str]) -> Floats:
        """The time that work takes at these rates: of its arithmetic or its bytes, whichever is longer.

        A format of "" does no arithmetic that counts; NaN where a rate or the work is not known.
        """
        rate = np.array([self.matrix.get(one, 0.0) if one else np.inf for one in formats])
        arithmetic = np.divide(flops, rate, out=np.full(rate.size, np.nan), where=rate > 0)
        least: Floats = np.maximum(arithmetic, np.nan_to_num(nbytes / self.memory))
        return least


def device_rates(timeline: RankTimeline) -> tuple[Rates, Rates] | Unknown:
    """What the judged device reaches at the most and at the least.

    From the tables of devices and of what they reach of their peaks. Of a device that is not listed, from its
    compute capability and how many multiprocessors it has.
    """
    peak, name = judged_peak(timeline), device_name(timeline)
    least, most = matrix_reached(name)
    if not isinstance(peak, Unknown):
        return (_rates(peak, most), _rates(peak, least)) if peak.hbm_gbps else unlisted(name)
    device, one = _judged(timeline), _multiprocessor(timeline)
    if device is None or one is None or not device.multiprocessors:
        return peak
    (slow, fast), (narrow, wide) = one.clock_ghz, one.memory_gbps
    count = device.multiprocessors
    return _rates(_peak_of(one, count, fast, wide), most), _rates(_peak_of(one, count, slow, narrow), least)


def _peak_of(one: Multiprocessor, count: int, ghz: float, gbps: float) -> DevicePeak:
    """The peaks of a device of so many multiprocessors, at a clock and with so much bandwidth for each."""
    half = count * one.tensor * ghz / 1e3
    return DevicePeak(
        bf16_tflops=half if one.bf16 else None,
        fp16_tflops=half,
        tf32_tflops=one.tf32 * half,
        fp8_tflops=one.fp8 * half,
        fp32_tflops=count * one.plain * ghz / 1e3,
        hbm_gbps=count * gbps,
        link_gbps=None,
    )


def _rates(peak: DevicePeak, share: float) -> Rates:
    peaks = {name: getattr(peak, f"{name}_tflops") for name in ("bf16", "fp16", "tf32", "fp8", "fp32")}
    matrix = {name: 1e3 * share * (tflops or 0.0) for name, tflops in peaks.items()}
    return Rates(matrix, MEMORY_REACHED * (peak.hbm_gbps or 0.0))


def unlisted(device: str) -> Unknown:
    """The reason why the peaks, or the link, of a device are not known."""
    if device == UNNAMED:
        return Unknown("the trace does not name the device, so its peak rates are not known")
    if device_peak(device) is not None:
        return Unknown(f"what joins GPUs of the kind {device!r} differs between machines")
    return Unknown(f"{device!r} is not in the device table")
