"""The name of the device that a rank ran on, and what the table of devices says of it."""

from __future__ import annotations

from tracedoc.timeline.build import RankTimeline
from tracedoc.trace.devices import TENSOR_SPEEDUPS, DevicePeak, device_peak
from tracedoc.values import Unknown

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


def unlisted(device: str) -> Unknown:
    """The reason why the peaks, or the link, of a device are not known."""
    if device == UNNAMED:
        return Unknown("the trace does not name the device, so its peak rates are not known")
    if device_peak(device) is not None:
        return Unknown(f"what joins GPUs of the kind {device!r} differs between machines")
    return Unknown(f"{device!r} is not in the device table")
