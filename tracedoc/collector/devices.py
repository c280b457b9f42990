"""Ask the GPU's driver about it: once for what it is, ten times a second for clocks, power and throttling.

NVML through ``pynvml`` where that can be imported; ``nvidia-smi`` and ``rocm-smi`` with a timeout. All of it
runs on threads of its own.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from typing import Any

from tracedoc.collector.probe import Plain, known, loaded, probe

SAMPLES_PER_SECOND = 10
MAX_SAMPLES = 6_000
"""Ten minutes of samples; a longer window keeps the first."""

COMMAND_SECONDS = 20.0

_QUERY = (
    "index,name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,"
    "clocks_throttle_reasons.active,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max,persistence_mode,mig.mode.current,compute_mode"
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "nvidia_smi": ("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"),
    "nvidia_topology": ("nvidia-smi", "topo", "-m"),
    "rocm_smi": ("rocm-smi", "--showproductname", "--showdriverversion", "--showclocks", "--csv"),
    "rocm_topology": ("rocm-smi", "--showtopo"),
}
"""What one rank of each host asks, where the programs exist."""

THROTTLE_REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000010: "sync boost",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "hardware power brake",
}
"""NVML's bits for clocks below what was asked; idle and settings by hand are none of them."""


class HostCommands:
    """Runs the programs that describe the GPUs of a host, off the training thread."""

    def __init__(self, commands: dict[str, tuple[str, ...]]) -> None:
        self._commands = commands
        self._answers: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="tracedoc-host", daemon=True)

    def begin(self) -> None:
        """Start where any of the programs exists."""
        if any(shutil.which(command[0]) for command in self._commands.values()):
            self._thread.start()

    def answers(self, wait_seconds: float = 0.0) -> dict[str, str]:
        """The answers so far, after waiting at most ``wait_seconds`` for the rest."""
        if self._thread.ident is not None:
            self._thread.join(wait_seconds)
        return dict(self._answers)

    def _run(self) -> None:
        for name, command in self._commands.items():
            if shutil.which(command[0]):
                text = probe(_output, command)
                if text:
                    self._answers[name] = text[:16_000]


def _output(command: tuple[str, ...]) -> str | None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMMAND_SECONDS,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


class DeviceSampler:
    """Samples the clocks, power, temperature and throttle reasons of one GPU during a window."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracedoc-nvml", daemon=True)
        self.samples: list[tuple[int | None, int | None, int | None, int | None]] = []

    def begin(self) -> None:
        """Start to sample."""
        self._thread.start()

    def end(self) -> Plain:
        """Stop, and return the summary: medians and extremes, and the share of samples for each reason."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)
        return summarise_samples(list(self.samples))

    def _run(self) -> None:
        nvml, handle = self._nvml, self._handle
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        while not self._stop.wait(1.0 / SAMPLES_PER_SECOND) and len(self.samples) < MAX_SAMPLES:
            clock = probe(nvml.nvmlDeviceGetClockInfo, handle, 1)  # NVML_CLOCK_SM
            power = probe(nvml.nvmlDeviceGetPowerUsage, handle)
            heat = probe(nvml.nvmlDeviceGetTemperature, handle, 0)  # NVML_TEMPERATURE_GPU
            self.samples.append((clock, power, heat, probe(reasons, handle) if reasons else None))


def summarise_samples(samples: list[tuple[int | None, int | None, int | None, int | None]]) -> Plain:
    """Return the summary of samples of clock (MHz), power (mW), temperature (C) and throttle bits."""
    if not samples:
        return {}
    clocks = sorted(sample[0] for sample in samples if sample[0] is not None)
    powers = sorted(sample[1] for sample in samples if sample[1] is not None)
    heats = [sample[2] for sample in samples if sample[2] is not None]
    reasons = [sample[3] for sample in samples if sample[3] is not None]
    throttled = {
        name: round(sum(bool(bits & mask) for bits in reasons) / len(reasons), 4)
        for mask, name in THROTTLE_REASONS.items()
        if any(bits & mask for bits in reasons)
    }
    return known(
        samples=len(samples),
        sm_clock_mhz_min=clocks[0] if clocks else None,
        sm_clock_mhz_median=clocks[len(clocks) // 2] if clocks else None,
        sm_clock_mhz_max=clocks[-1] if clocks else None,
        power_w_median=powers[len(powers) // 2] / 1000 if powers else None,
        power_w_max=powers[-1] / 1000 if powers else None,
        temperature_c_max=max(heats) if heats else None,
        throttled_frac=throttled,
    )


def open_device() -> tuple[Any, Any] | None:
    """Return NVML and the handle of the GPU that this process uses, ``None`` where either is missing."""
    torch = loaded("torch")
    if (
        torch is None
        or not probe(lambda: torch.cuda.is_initialized())
        or not probe(lambda: torch.version.cuda)
    ):
        return None
    nvml = probe(_nvml)
    if nvml is None:
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    handle = probe(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode()))
    if handle is None:
        bus = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        handle = probe(lambda: nvml.nvmlDeviceGetHandleByPciBusId(bus.encode()))
    return None if handle is None else (nvml, handle)


def _nvml() -> Any:
    from importlib import import_module

    nvml = import_module("pynvml")
    nvml.nvmlInit()
    return nvml


def describe_device(nvml: Any, handle: Any) -> Plain:
    """The properties of a GPU by NVML that do not change: driver, limits, NVLink, and its fabric's ids.

    GPUs with one cluster id and clique are joined by NVLink, also over hosts.
    """
    cluster, clique = probe(_fabric, nvml, handle) or (None, None)
    return known(
        driver=probe(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        uuid=probe(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        max_sm_clock_mhz=probe(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, 1)),
        power_limit_w=probe(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000),
        power_default_w=probe(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000),
        nvlinks_active=probe(lambda: _active_links(nvml, handle)),
        fabric_cluster=cluster,
        fabric_clique=clique,
    )


def describe_pcie(nvml: Any, handle: Any) -> Plain:
    """The generation and width of a GPU's PCIe link at this moment, and what the card and its slot allow.

    An idle GPU lowers its link: ask while it works.
    """
    return known(
        generation=probe(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        generation_max=probe(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        width=probe(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        width_max=probe(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    )


def _fabric(nvml: Any, handle: Any) -> tuple[str, int] | None:
    """Return cluster id and clique of a GPU in an NVLink fabric, ``None`` for one that is in none."""
    found = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(found))
    cluster = bytes(found.clusterUuid).hex()
    return (cluster, int(found.cliqueId)) if cluster.strip("0") else None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _active_links(nvml: Any, handle: Any) -> int:
    states = (probe(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(18))
    return sum(state == 1 for state in states)
