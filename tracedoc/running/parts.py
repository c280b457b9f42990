"""Parts of the manifest while a job runs: its ranks as they are now, and ranks that another tool captured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tracedoc.run.manifest import COMPLETE, MANIFEST_SCHEMA, NOTHING, PART_SUFFIX, PARTIAL, Part, write_json

SECONDS_TO_CONNECT = 10.0
"""How long a server of a running job may take to accept a connection."""


def newest_ranks(parts: Sequence[Part]) -> list[Part]:
    """The parts of the ranks of the job's last start."""
    ranks = [part for part in parts if part.get("part") == "rank"]
    starts = [int(str(part.get("restart", 0))) for part in ranks]
    return [part for part, start in zip(ranks, starts, strict=True) if start == max(starts)]


def write_part(
    folder: Path,
    *,
    rank: int,
    world_size: int,
    host: str,
    server: str,
    seconds: float,
    name: str,
    reason: str,
    **more: object,
) -> None:
    """Write the part of a rank whose trace is the file ``name``, "" for none; ``reason`` is what is wrong."""
    part: dict[str, object] = {
        "schema": MANIFEST_SCHEMA,
        "part": "rank",
        "rank": rank,
        "world_size": world_size,
        "host": host,
        "level": "full",
        "state": NOTHING if not name else PARTIAL if reason else COMPLETE,
        "reason": reason,
        "captured_from": {"server": server, "seconds": seconds},
        "not_known": ["steps", "step_log", "environment", "framework", "clocks"],
        **more,
    }
    if name:
        part |= {"file": name, "bytes": (folder / name).stat().st_size}
    write_json(folder / f"rank-{rank}{PART_SUFFIX}", part)
