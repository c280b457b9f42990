"""Cut runs down to some hundred events a rank, so that thousands of mutants of each can be diagnosed."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PLACES = (REPOSITORY / "sample_traces", REPOSITORY.parent / "shared" / "traces")
MAX_EVENTS = 300
MAX_RANKS = 3
MAX_TEXT = 40_000_000

Json = dict[str, Any]


@dataclass(frozen=True)
class Seed:
    """A small run: the name of the folder that it comes from, and one document a rank."""

    name: str
    ranks: tuple[Json, ...]


def seeds() -> list[Seed]:
    """Return every run of the samples and of the shared traces that can be cut."""
    found = []
    for place in PLACES:
        for folder in sorted({path.parent for path in place.rglob("*.json*")}):
            documents = [cut for path in sorted(folder.glob("*.json*")) if (cut := _cut(path)) is not None]
            name = str(folder.relative_to(place.parent))
            if place.parts[-1] == "traces" and folder.name == "format_variants":
                found += [Seed(f"{name}[{i}]", (one,)) for i, one in enumerate(documents)]
            elif documents:
                found.append(Seed(name, tuple(documents[:MAX_RANKS])))
    return found


def _cut(path: Path) -> Json | None:
    """Return a trace with the events of a step or two, ``None`` for a file that is none."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        content = json.loads(text) if len(text) < MAX_TEXT else None
    except (OSError, ValueError, EOFError):
        return None
    if isinstance(content, list):
        content = {"traceEvents": content}
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not events:
        return None
    return {**content, "traceEvents": list(_few(events))}


def _few(events: Sequence[Json]) -> Iterator[Json]:
    """Yield metadata, and of the events from the second step on the first of each kind in turn."""
    timed = [event for event in events if isinstance(event, dict) and event.get("ph") != "M"]
    steps = sorted(_ts(event) for event in timed if str(event.get("name", "")).startswith("ProfilerStep#"))
    begin = steps[len(steps) // 2] if steps else 0.0
    kinds: dict[str, list[Json]] = defaultdict(list)
    for event in timed:
        if _ts(event) >= begin or str(event.get("name", "")).startswith("ProfilerStep#"):
            kinds[str(event.get("cat", ""))].append(event)
    share = MAX_EVENTS // max(1, len(kinds))
    names = {"process_name", "process_labels", "thread_name", "process_sort_index"}
    yield from [event for event in events if isinstance(event, dict) and event.get("name") in names][:40]
    chosen = {id(event) for listed in kinds.values() for event in sorted(listed, key=_ts)[:share]}
    yield from (event for event in timed if id(event) in chosen)


def _ts(event: Json) -> float:
    ts = event.get("ts")
    return float(ts) if isinstance(ts, int | float) else 0.0
