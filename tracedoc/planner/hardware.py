"""Read the tables of GPUs and links, find rows by names that people use, and keep what this machine has."""

from __future__ import annotations

import difflib
import os
import re
import socket
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError, did_you_mean


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU: memory as sold in GB (1e9 bytes), dense peaks in TFLOP/s, GB/s of memory, its own link.

    ``device_gb`` is what CUDA reports. ``matmul`` and ``attention`` are the shares of the peak that matrix
    products and fused attention reach in training, ``None`` where no run on this GPU was published
    (:attr:`shares` then has an estimate).
    ``network`` is what usually connects nodes of such GPUs.
    """

    name: str
    memory_gb: float
    half_tflops: float
    hbm_gbps: float
    link: str
    source: str
    fp32_tflops: float | None = None
    bf16: bool = True
    link_gbps: float | None = None
    device_gb: float | None = None
    matmul: float | None = None
    attention: float | None = None
    network: str = "roce-100g"

    @property
    def memory_bytes(self) -> float:
        """What a program can have: as CUDA reports it, else as sold."""
        return (self.device_gb or self.memory_gb) * 1e9

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of the peak that matrix products and fused attention reach in training.

        Where no run on this GPU was published they lie between those of A100 and H100, by the FLOPs that the
        peak has for each byte of memory traffic: what has more of them waits more.
        """
        if self.matmul and self.attention:
            return self.matmul, self.attention
        low, high = (gpu for gpu in gpus() if gpu.name in ("A100 SXM 80GB", "H100"))
        part = (self.intensity - low.intensity) / (high.intensity - low.intensity)
        part = min(1.0, max(0.0, part))
        near, far = low.shares, high.shares
        return near[0] + part * (far[0] - near[0]), near[1] + part * (far[1] - near[1])

    @property
    def usual_precision(self) -> str:
        """What one trains in: on CPUs what they were measured in."""
        if self.link == "gloo":
            return "fp32"
        return "bf16-mixed" if self.bf16 else "fp16-mixed"

    @property
    def intensity(self) -> float:
        """FLOPs of the peak in 16 bits for each byte of memory traffic."""
        return 1e3 * self.half_tflops / self.hbm_gbps

    @property
    def fp8(self) -> bool:
        """Whether matrices can be multiplied in 8 bits at twice the rate of 16."""
        return self.name.startswith(("H", "B", "GB", "GH", "L4", "RTX 40", "RTX 50", "RTX 6000", "MI3"))


GPUS_OF_A_SWITCH, GPUS_OF_A_CPU = 2, 4
"""GPUs of a usual server of eight that share a switch of PCIe, and that a CPU has on its own PCIe."""
CROSSING = 1.2
"""What all rings together send between two CPUs, in links of a GPU: an estimate."""


class LinkKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to connect GPUs or nodes.

    ``gbps`` is one-way, of a GPU inside a node, of a node's all adapters across nodes. ``efficiency`` is the
    share that large collectives reach, ``latency_us`` what each call costs beside its bytes.
    """

    name: str
    title: str
    across: bool
    gbps: float
    efficiency: float
    latency_us: float
    source: str
    measured: bool = False
    """Whether the bandwidth is that of collectives, of the run or from the user, and not a link's peak."""
    near: float | None = None
    """The share that GPUs of one CPU reach among themselves, where fewer are nearer."""
    pair: float | None = None
    """The share that GPUs of one switch reach between them."""

    exchanged: float = 1.0
    """What of that NCCL's all-to-all reaches: sends to each peer, which fill NVLink no more than so far."""

    def reached(self, group: int, distance: int = 1) -> float:
        """The GB/s that large collectives reach in a group of GPUs, each so far from the next.

        GPUs between them have groups of their own, which send at the same time: over PCIe those of a switch
        share what leads out of it, and all share what joins the CPUs.
        """
        if self.near is None:
            return self.gbps * self.efficiency
        span, pair = group * distance, self.pair or self.near
        share = self.near if span <= GPUS_OF_A_CPU else self.efficiency
        if span <= GPUS_OF_A_SWITCH:
            share = pair
        elif distance > 1:
            share = min(share, pair / GPUS_OF_A_SWITCH)
        if span > GPUS_OF_A_CPU:
            share = min(share, CROSSING / distance)
        return self.gbps * share


class Cluster(msgspec.Struct, frozen=True):
    """What the GPUs are and how they are connected; ``None`` where nothing was said."""

    gpu: Gpu | None
    inside: LinkKind | None
    across: LinkKind | None


class _Tables(msgspec.Struct, forbid_unknown_fields=True):
    gpu: list[Gpu]
    link: list[LinkKind]


@lru_cache(maxsize=1)
def _tables() -> _Tables:
    text = files("tracedoc.planner").joinpath("data/hardware.toml").read_bytes()
    return msgspec.toml.decode(text, type=_Tables)


def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the table."""
    return tuple(_tables().gpu)


def links() -> tuple[LinkKind, ...]:
    """Return every link of the table."""
    return tuple(_tables().link)


def find_gpu(name: str) -> Gpu:
    """Return the GPU that is meant by a name such as ``NVIDIA L4``, ``a100 80gb`` or ``H100``.

    The row whose words are all in the name and that has most words wins. Raises :class:`InputError`
    naming the nearest GPU.
    """
    found = gpu_of_device(name)
    if found is not None:
        return found
    raise InputError(
        f"no GPU is known as {name!r}{did_you_mean(_tidy(name), [gpu.name.lower() for gpu in gpus()])}",
        f"nearest: {', '.join(_nearest(_tidy(name)))}; or describe it: --gpu-memory 24GB",
    )


def _nearest(name: str) -> list[str]:
    """The three GPUs whose names have most words of this one, and are most like it."""

    def likeness(gpu: Gpu) -> tuple[int, float]:
        other = _tidy(gpu.name)
        common = len(set(name.split()) & set(other.split()))
        return common, difflib.SequenceMatcher(None, name, other).ratio()

    return [gpu.name for gpu in sorted(gpus(), key=likeness, reverse=True)[:3]]


def sold_as(memory_gb: float) -> float:
    """The bytes that programs have of a GPU sold with so many GB: the least in the table, else 1e9 each."""
    alike = (gpu.memory_bytes for gpu in gpus() if gpu.memory_gb == memory_gb)
    return min(alike, default=memory_gb * 1e9)


def gpu_of_device(name: str, memory_bytes: float | None = None) -> Gpu | None:
    """Return the GPU of a device name, ``None`` where the table has none like it.

    Where several rows fit a name ("NVIDIA H100"), the memory that it reports distinguishes them.
    """
    found = _gpu_by_words(name)
    if found is None or not memory_bytes:
        return found
    alike = [gpu for gpu in gpus() if gpu.name == found.name or gpu.name.startswith(f"{found.name} ")]
    alike = [gpu for gpu in alike if gpu.link == found.link]
    nearest = min(alike, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    return nearest if abs(nearest.memory_bytes / memory_bytes - 1) < 0.03 else found


def _gpu_by_words(name: str) -> Gpu | None:
    words = set(_tidy(name).split())
    if not words or words & {"laptop", "ti", "super", "d", "mig"}:
        return None
    fitting = [gpu for gpu in gpus() if set(_tidy(gpu.name).split()) <= words]
    if fitting:
        return max(fitting, key=lambda gpu: len(_tidy(gpu.name).split()))
    # "A100 80GB" fits "A100 SXM 80GB": one row with all the words; the first of several is the usual one.
    holding = [gpu for gpu in gpus() if words <= set(_tidy(gpu.name).split())]
    return holding[0] if holding else None


def find_link(name: str, *, across: bool) -> LinkKind:
    """Return a link by its name or bandwidth: ``nvlink4``, ``100Gbit/s``, ``20GB/s``.

    A bandwidth is taken for what large collectives reach inside a node, and across nodes for what all
    adapters of a node carry. Raises :class:`InputError` naming the nearest.
    """
    own = [link for link in links() if link.across == across]
    key = re.sub(r"[\s_-]+", "", name.lower())
    for link in own:
        if key == link.name.replace("-", ""):
            return link
    rate = _rate(name)
    if rate is not None:
        like = next(link for link in own if link.name == ("roce-100g" if across else "pcie4"))
        title = f"{'a network' if across else 'a link'} of {name.strip()}"
        efficiency = like.efficiency if across else 1.0
        return LinkKind(name, title, across, rate, efficiency, like.latency_us, "given", measured=not across)
    option = "network" if across else "link"
    names = [link.name for link in own]
    raise InputError(
        f"no {option} is called {name!r}{did_you_mean(name.lower(), names)}",
        f"known: {', '.join(names)}; or its bandwidth: --{option} {'100Gbit/s' if across else '20GB/s'}",
    )


def link_of(gpu: Gpu) -> LinkKind:
    """Return the link that a GPU has inside a node, with its own bandwidth."""
    link = next(link for link in links() if link.name == gpu.link)
    if gpu.name.startswith(_WITHOUT_PEERS):
        link = msgspec.structs.replace(link, near=_BY_THE_HOST, pair=None)
    return replace_gbps(link, gpu.link_gbps) if gpu.link_gbps else link


_WITHOUT_PEERS = ("RTX 30", "RTX 40", "RTX 50")
"""GPUs whose driver does not let them reach each other over PCIe: all they send goes through host memory."""
_BY_THE_HOST = 0.56
"""What four of these reach of PCIe: 35 GB/s of 63, and eight 28 (github.com/NVIDIA/nccl, issue 1639)."""


def network_of(name: str, gpus_per_node: int) -> LinkKind:
    """Return a network by its name: in the table that of a node of 8 GPUs, larger ones have more of it."""
    link = find_link(name, across=True)
    return replace_gbps(link, link.gbps * max(1.0, gpus_per_node / 8))


def replace_gbps(link: LinkKind, gbps: float, *, measured: bool = False) -> LinkKind:
    """Return the link with another bandwidth; a measured one is what collectives reached."""
    changed = {"efficiency": 1.0, "near": None, "pair": None, "measured": True} if measured else {}
    return msgspec.structs.replace(link, gbps=gbps, **changed)


_RATES = {"GB": 1.0, "Gb": 1 / 8, "Gbit": 1 / 8, "gbit": 1 / 8, "MB": 1e-3, "mb": 1e-3, "TB": 1e3, "tb": 1e3}


def _rate(text: str) -> float | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+?)(/s|ps)?\s*", text)
    if match is None or float(match[1]) <= 0:
        return None
    # GB and Gb differ by their case alone; "gbps", typed without care, is how networks are sold.
    unit = match[2] if match[2] in _RATES else match[2].lower()
    unit = "Gb" if unit == "gb" and match[3] == "ps" else unit
    return float(match[1]) * _RATES[unit] if unit in _RATES else None


def _tidy(name: str) -> str:
    text = name.lower().replace("nvidia", " ").replace("amd", " ").replace("geforce", " ")
    text = re.sub(r"(\d+) ?gi?b\b", r"\1gb", text)
    text = re.sub(r"\brtx(?=\d)", "rtx ", text)
    text = re.sub(r"[ -](16|24|32|40|48|80|94|96)$", r" \1gb", text)  # "A100-80"
    text = text.replace("pg509", "sxm 40gb")  # the board that some A100 are called after
    text = re.sub(r"\b(tesla|instinct|hbm\w*|tensor|core|gpu)\b", " ", text)
    return " ".join(re.sub(r"sxm\d?", "sxm", w) for w in re.split(r"[\s/_-]+", text) if w)


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
