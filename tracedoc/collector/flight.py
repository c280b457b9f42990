"""Keep what torch's flight recorder remembers of the collectives, where a build has one."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from tracedoc.collector.probe import Plain, loaded, probe

MAX_ENTRIES = 2_000
"""The newest entries that are kept."""

MAX_BYTES = 32 * 1024 * 1024
"""A dump beyond this size is not kept."""


def dump_flight_record(path: Path) -> Plain:
    """Write the recorder's newest entries to ``path`` as gzipped JSON, and return what was kept.

    Nothing is written where the build has no recorder or the recorder is empty. The dump asks no other
    rank and waits for no device.
    """
    bindings = loaded("torch._C._distributed_c10d") or probe(lambda: loaded("torch")._C._distributed_c10d)
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        ask = getattr(bindings, name, None)
        text = probe(ask) if ask is not None else None
        if not text or len(text) > MAX_BYTES:
            continue
        record = probe(json.loads, text)
        entries = record.get("entries") if isinstance(record, dict) else None
        if entries:
            return _write(path, record, entries, name)
    return {}


def _write(path: Path, record: dict[str, Any], entries: list[Any], source: str) -> Plain:
    record["entries"] = entries[-MAX_ENTRIES:]
    part = path.with_name(path.name + ".part")
    with gzip.open(part, "wt", compresslevel=5, encoding="utf-8") as file:
        json.dump(record, file, separators=(",", ":"))
    os.replace(part, path)
    return {
        "file": path.name,
        "source": source.strip("_"),
        "entries": len(record["entries"]),
        "entries_seen": len(entries),
    }
