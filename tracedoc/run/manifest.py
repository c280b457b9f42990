"""Read the manifest of a run directory: which file is which rank's.

Standard library only: the hook in the user's process imports this module too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tracedoc.errors import InputError

MANIFEST_NAME = "manifest.json"
MANIFEST_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ManifestRank:
    """One rank of a run: its trace, relative to the manifest, and the host it ran on ("" if unknown)."""

    rank: int
    file: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of one run directory."""

    path: str
    ranks: tuple[ManifestRank, ...]


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a directory, ``None`` where it has none.

    Raises :class:`InputError` if the file is there and is not a manifest of schema 1.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error}", "remove it; ranks are then told by file name"
        ) from None
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, path: str) -> Manifest:
    """Return the manifest that was read from ``path``, which the messages name."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read: {error}", "remove it; ranks are then told by file name"
        ) from None
    ranks = content.get("ranks") if isinstance(content, dict) else None
    if not isinstance(ranks, dict) or content.get("schema") != MANIFEST_SCHEMA:
        raise InputError(
            f"{path} is not a manifest of schema {MANIFEST_SCHEMA}",
            "remove it; ranks are then told by file name",
        )
    listed = []
    for rank, entry in ranks.items():
        if rank.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("file"), str):
            host = entry.get("host")
            listed.append(ManifestRank(int(rank), entry["file"], host if isinstance(host, str) else ""))
    return Manifest(path, tuple(sorted(listed, key=lambda r: r.rank)))
