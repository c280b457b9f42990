"""Keep what this machine was measured to reach, and give a plan that for the table's rates."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tracedoc.planner.hardware import GPUS_OF_A_CPU, GPUS_OF_A_SWITCH, Cluster, Gpu, gpu_of_device


class Gathered(msgspec.Struct, frozen=True):
    """What large all-gathers of ``gpus`` reached: GB/s sent by each, and the seconds that a call costs."""

    gpus: int
    gbps: float
    latency: float


class Machine(msgspec.Struct, frozen=True):
    """One measured machine: products of a transformer's block, copies that read and write, and all-gathers.

    ``product_tflops`` is sustained for seconds, in 16 bits, in fp32 where the ``device`` is a process on
    "cpu"; ``copy_gbps`` counts what is read and written.
    """

    host: str
    day: str
    device: str
    memory_bytes: float
    product_tflops: float
    copy_gbps: float
    gathered: tuple[Gathered, ...] = ()


def kept_in() -> Path:
    """The file of this host."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "tracedoc" / "machines" / f"{socket.gethostname()}.json"


def keep(machine: Machine) -> Path:
    """Write what was measured to the file of this host, and return that."""
    file = kept_in()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(machine)))
    return file


def this_machine() -> Machine | None:
    """What was measured on this host, ``None`` where nothing was or the file cannot be read."""
    try:
        return msgspec.json.decode(kept_in().read_bytes(), type=Machine)
    except (OSError, msgspec.DecodeError):
        return None


def measured_gpu(machine: Machine | None = None) -> Gpu | None:
    """The GPU of this machine with the rates that it reached, ``None`` where none of the table was measured.

    Of its attention the table's share stays, as far as products reach theirs. On CPUs, of which there is no
    table, a process stands for a GPU, and attention is taken to be as fast as products.
    """
    machine = machine or this_machine()
    if machine is not None and machine.device == "cpu":
        rate, memory_gb = machine.product_tflops, machine.memory_bytes / 1e9
        return Gpu(
            f"CPU process of {machine.host}", memory_gb, rate, machine.copy_gbps, "gloo",
            f"measured on {machine.host}", fp32_tflops=rate, matmul=1.0, attention=1.0,
        )  # fmt: skip
    gpu = gpu_of_device(machine.device, machine.memory_bytes) if machine else None
    if machine is None or gpu is None:
        return None
    matmul, attention = gpu.shares
    share = min(1.0, machine.product_tflops / gpu.half_tflops)
    return replace(
        gpu,
        device_gb=machine.memory_bytes / 1e9,
        matmul=share,
        attention=min(1.0, attention * share / matmul),
        hbm_gbps=machine.copy_gbps,
        source=f"measured on {machine.host}",
    )


def on_this_machine(cluster: Cluster, *, keeps_link: bool) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with what was measured here, if it is of the same GPUs, and a note that says so."""
    machine = this_machine()
    gpu = measured_gpu(machine) if machine else None
    if machine is None or gpu is None or cluster.gpu is None or gpu.name != cluster.gpu.name:
        return cluster, ()
    inside = cluster.inside
    if inside is not None and machine.gathered and not keeps_link:
        every = max(machine.gathered, key=lambda one: one.gpus)
        of = {one.gpus: one.gbps / every.gbps for one in machine.gathered if one is not every}
        inside = replace(
            inside,
            gbps=every.gbps,
            efficiency=1.0,
            near=of.get(GPUS_OF_A_CPU) if inside.near else None,
            pair=of.get(GPUS_OF_A_SWITCH) if inside.near else None,
            latency_us=every.latency * 1e6,
            measured=True,
            source="measured here",
        )
    note = f"Products, memory and link as measured on {machine.host} on {machine.day}."
    return replace(cluster, gpu=gpu, inside=inside), (note,)
