"""The name of the device that a rank ran on, and what the table of devices says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.timeline.build import RankTimeline
from tracedoc.trace.devices import (
    MEMORY_REACHED,
    TENSOR_SPEEDUPS,
    DevicePeak,
    device_peak,
    matrix_reached,
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


def tensor_speedup(timeline: RankTimeline) -> tuple[float, float] | Unknown:
    """How many times as fast 16 bits on tensor cores are as fp32 on plain ones: at the least and at the most.

    By the table of devices, else by the compute capability, which a whole family of devices shares.
    """
    peak = judged_peak(timeline)
    if not isinstance(peak, Unknown) and peak.fp32_tflops:
        half = peak.bf16_tflops or peak.fp16_tflops or 0.0
        return half / peak.fp32_tflops, half / peak.fp32_tflops
    devices = timeline.trace.info.devices
    mine = [one for one in devices if one.index == timeline.device] or devices[:1]
    # Turing was made without tensor cores as well.
    if not mine or timeline.trace.info.vendor != "nvidia" or "GTX" in mine[0].name:
        return peak if isinstance(peak, Unknown) else Unknown("the rate of its plain cores is not known")
    capability = (mine[0].compute_major or 0, mine[0].compute_minor or 0)
    return TENSOR_SPEEDUPS.get(capability) or unlisted(mine[0].name)


class Rates(msgspec.Struct, frozen=True):
    """What a device reaches in practice: operations a nanosecond by format of matrices, bytes a nanosecond.

    ``matrix`` holds the middle of what is known; 0 where a format is not supported or not listed.
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


def device_rates(timeline: RankTimeline) -> Rates | Unknown:
    """What the judged device reaches, from the table of devices and of what they reach of their peaks."""
    peak = judged_peak(timeline)
    if isinstance(peak, Unknown) or not peak.hbm_gbps:
        return peak if isinstance(peak, Unknown) else unlisted(device_name(timeline))
    share = sum(matrix_reached(device_name(timeline))) / 2
    peaks = {
        "bf16": peak.bf16_tflops,
        "fp16": peak.fp16_tflops,
        "tf32": peak.tf32_tflops,
        "fp8": peak.fp8_tflops,
        "fp32": peak.fp32_tflops,
    }
    return Rates(
        {name: 1e3 * share * (tflops or 0.0) for name, tflops in peaks.items()},
        MEMORY_REACHED * peak.hbm_gbps,
    )


def unlisted(device: str) -> Unknown:
    """The reason why the peaks, or the link, of a device are not known."""
    if device == UNNAMED:
        return Unknown("the trace does not name the device, so its peak rates are not known")
    if device_peak(device) is not None:
        return Unknown(f"what joins GPUs of the kind {device!r} differs between machines")
    return Unknown(f"{device!r} is not in the device table")
