"""Read what a trace says about itself: rank, groups, devices, host, what was recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from tracedoc.trace.columns import Device, ProcessGroup, TraceInfo

_VENDOR_KEYS = (
    ("hip_", "amd"),
    ("roctracer", "amd"),
    ("rocprof", "amd"),
    ("cuda_", "nvidia"),
    ("cupti", "nvidia"),
)
_VENDOR_DEVICES = (
    ("nvidia", re.compile(r"NVIDIA|Tesla|GeForce|Quadro|\b[ABHV]\d00\b")),
    ("amd", re.compile(r"AMD|Instinct|Radeon|\bMI\d{2,3}")),
)
_VENDOR_CALLS = (("hip", "amd"), ("cuda", "nvidia"), ("cuL", "nvidia"))


_MAX_WORLD = 1_000_000
"""More ranks than any job has; a larger number is damage."""

_MOST_ELEMENTS = 1 << 39
"""More elements than any GPU can hold. Their bytes, gathered from a million ranks, fit 64 bits."""


def read_info(path: str, metadata: Mapping[str, object]) -> TraceInfo:
    """What the top-level keys of a trace say; what is absent or malformed is ``None`` or empty."""
    job = metadata.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    devices = tuple(_devices(metadata.get("deviceProperties")))
    return TraceInfo(
        source=path,
        rank=rank_count(job.get("rank"), least=0),
        world_size=rank_count(job.get("world_size"), least=1),
        backend=as_text(job.get("backend")),
        groups=tuple(_groups(job.get("pg_config"))),
        group_count=as_int(job.get("pg_count")),
        devices=devices,
        host=as_text(metadata.get("host_name")),
        has_shapes=bool(metadata.get("record_shapes")),
        has_memory=bool(metadata.get("profile_memory")),
        vendor=_vendor(metadata, devices),
    )


def base_ns_of(metadata: Mapping[str, object]) -> int:
    """The time from which a trace counts, in ns since 1970; 0, its own origin, where none can be."""
    base = as_int(metadata.get("baseTimeNanoseconds"))
    return base if base is not None and 0 <= base < 4_000_000_000_000_000_000 else 0


def rank_count(value: object, *, least: int) -> int | None:
    """Return a number of ranks, ``None`` for what cannot be one."""
    number = as_int(value)
    return number if number is not None and least <= number < _MAX_WORLD else None


def element_count(value: object) -> int | None:
    """Return a number of elements, ``None`` for what cannot be one."""
    number = as_int(value)
    return number if number is not None and 0 <= number < _MOST_ELEMENTS else None


def vendor_of_calls(names: Iterable[str]) -> str:
    """Return the vendor whose runtime is called ("amd", "nvidia"), "" if none is."""
    for name in names:
        for prefix, vendor in _VENDOR_CALLS:
            if name.startswith(prefix):
                return vendor
    return ""


def rank_list(value: object) -> tuple[int, ...]:
    """Return the ranks of a list or of its text ("[0, 1]").

    Empty for lists shortened with "...", and for those with a number that no rank can have.
    """
    if isinstance(value, str):
        return _listed_ranks(value)
    if isinstance(value, list) and all(isinstance(rank, int) and 0 <= rank < _MAX_WORLD for rank in value):
        return tuple(value)
    return ()


@lru_cache(maxsize=32)
def _listed_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that a text lists; each collective repeats that of its group."""
    return () if "..." in text else rank_list([as_int(number) for number in re.findall(r"\d+", text)[:65536]])


def as_int(value: object) -> int | None:
    """Return an int, or decimal text as an int; ``None`` for anything else or beyond int64."""
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else None
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"-?\d{1,19}", value) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return as_int(value) if type(value) is int else None


def as_text(value: object) -> str:
    """Return text or a number as text, "" for anything else."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def _devices(listed: object) -> Iterable[Device]:
    for position, entry in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(entry, dict):
            index = as_int(entry.get("id"))
            yield Device(
                index=position if index is None else index,
                name=as_text(entry.get("name")),
                memory_bytes=as_int(entry.get("totalGlobalMem")),
                compute_major=as_int(entry.get("computeMajor")),
                compute_minor=as_int(entry.get("computeMinor")),
                multiprocessors=as_int(entry.get("numSms")),
            )


def _groups(listed: object) -> Iterable[ProcessGroup]:
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict):
            ranks = rank_list(entry.get("ranks"))
            size = rank_count(entry.get("pg_size"), least=0)
            yield ProcessGroup(
                # Until 2024 groups had a "uid" and no description.
                name=as_text(entry.get("pg_name", entry.get("uid"))),
                description=as_text(entry.get("pg_desc")),
                ranks=ranks,
                size=len(ranks) if size is None else size,
            )


def _vendor(metadata: Mapping[str, object], devices: tuple[Device, ...]) -> str:
    for key in metadata:
        for prefix, vendor in _VENDOR_KEYS:
            if key.startswith(prefix):
                return vendor
    for device in devices:
        for vendor, pattern in _VENDOR_DEVICES:
            if pattern.search(device.name):
                return vendor
    return ""
