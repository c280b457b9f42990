"""Cut runs down to some hundred events a rank, and simulate small ones, to mutate them many times."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.simulated.draws import FAULTS, draw_capture, draw_job  # noqa: E402
from tests.simulated.traces import write_traces  # noqa: E402
from tests.simulated.truth import Truth  # noqa: E402

PLACES = (REPOSITORY / "sample_traces", REPOSITORY.parent / "shared" / "traces")
MAX_EVENTS = 300
MAX_STEP_EVENTS = 1500
MAX_RANKS = 3
MAX_SIMULATED = 5000
"""Events of a simulated job, whose ranks are taken all and whole."""
SIMULATED_SEEDS = range(2_000_000, 2_000_040)
MAX_TEXT = 40_000_000

Json = dict[str, Any]
Cut = Callable[[Sequence[Json]], Iterator[Json]]


@dataclass(frozen=True)
class Seed:
    """A small run: the name of the folder that it comes from, and one document a rank.

    ``ranks`` have a few events of each kind; ``steps`` hold two steps from end to end, in which facts and
    replays find more to work on, and which take longer.
    """

    name: str
    ranks: tuple[Json, ...]
    steps: tuple[Json, ...]


def seeds() -> list[Seed]:
    """Return every run of the samples and of the shared traces that can be cut."""
    found = []
    for place in PLACES:
        for folder in sorted({path.parent for path in place.rglob("*.json*")}):
            read = [
                document for path in sorted(folder.glob("*.json*")) if (document := _read(path)) is not None
            ]
            name = str(folder.relative_to(place.parent))
            if folder.name == "format_variants":
                found += [_seed(f"{name}[{i}]", [one]) for i, one in enumerate(read)]
            elif read:
                found.append(_seed(name, read[:MAX_RANKS]))
    return [*found, *_simulated()]


def _simulated() -> Iterator[Seed]:
    """Yield simulated jobs that are small enough: pipelines, tensor parallelism, faults on some rank."""
    faults = sorted(FAULTS)
    for number in SIMULATED_SEEDS:
        fault = faults[number % len(faults)] if number % 4 else None
        job = draw_job(number, fault)
        with tempfile.TemporaryDirectory(prefix="seed-") as folder:
            write_traces(Truth(job).played, job.ranks, Path(folder), draw_capture(number, job))
            ranks = tuple(json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json")))
        if sum(len(rank["traceEvents"]) for rank in ranks) <= MAX_SIMULATED:
            yield Seed(f"simulated {number}, {fault or 'healthy'}", ranks, ranks)


def _seed(name: str, documents: Sequence[Json]) -> Seed:
    few = tuple(_cut(document, _few) for document in documents)
    return Seed(name, few, tuple(_cut(document, _two_steps) for document in documents))


def _read(path: Path) -> Json | None:
    """Return a trace, ``None`` for a file that is none."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        content = json.loads(text) if len(text) < MAX_TEXT else None
    except (OSError, ValueError, EOFError):
        return None
    if isinstance(content, list):
        content = {"traceEvents": content}
    events = content.get("traceEvents") if isinstance(content, dict) else None
    return content if isinstance(events, list) and events else None


def _cut(document: Json, choose: Cut) -> Json:
    """Return a trace with its metadata and the events that ``choose`` yields, in their order."""
    events = [event for event in document["traceEvents"] if isinstance(event, dict)]
    names = {"process_name", "process_labels", "thread_name", "process_sort_index"}
    metadata = [event for event in events if event.get("name") in names][:40]
    timed = [event for event in events if event.get("ph") != "M"]
    chosen = {id(event) for event in choose(timed)}
    return {**document, "traceEvents": metadata + [event for event in timed if id(event) in chosen]}


def _few(timed: Sequence[Json]) -> Iterator[Json]:
    """Yield of the events from the middle step on the first of each kind."""
    steps = _step_starts(timed)
    begin = steps[len(steps) // 2] if steps else 0.0
    kinds: dict[str, list[Json]] = defaultdict(list)
    for event in timed:
        if _ts(event) >= begin or _is_step(event):
            kinds[str(event.get("cat", ""))].append(event)
    share = MAX_EVENTS // max(1, len(kinds))
    for listed in kinds.values():
        yield from sorted(listed, key=_ts)[:share]


def _two_steps(timed: Sequence[Json]) -> Iterator[Json]:
    """Yield the events of two steps, or of some time in the middle; of a launch and its kernel both or none.

    Where there are too many, every so many launches and operators are left out, and no communication.
    """
    starts = _step_starts(timed)
    times = sorted(_ts(event) for event in timed)
    middle = max(0, len(starts) // 2 - 1)
    if len(starts) >= 3:
        begin, end = starts[middle], starts[min(middle + 2, len(starts) - 1)]
    elif starts:
        begin, end = starts[0], times[-1]
    else:
        half = len(times) // 2
        begin, end = times[half], times[min(half + MAX_STEP_EVENTS, len(times) - 1)]
    inside = [event for event in timed if begin <= _ts(event) <= end and not _is_stack(event)]
    launched = {link for event in inside if (link := _link(event)) is not None}
    seen = {id(event) for event in inside}
    inside += [event for event in timed if _link(event) in launched and id(event) not in seen]
    keep_one_in = -(-len(inside) // MAX_STEP_EVENTS)
    for number, event in enumerate(inside):
        link = _link(event)
        if _matters(event) or (link if link is not None else number) % keep_one_in == 0:
            yield event


def _matters(event: Json) -> bool:
    """Return whether an event has a part in what steps and collectives are made of."""
    words = f"{event.get('cat', '')} {event.get('name', '')}".lower()
    told = event.get("args")
    named = isinstance(told, dict) and "Collective name" in told
    return named or any(
        word in words for word in ("annotation", "nccl", "gloo", "c10d", "param_comms", "sync")
    )


def _link(event: Json) -> int | None:
    told = event.get("args")
    link = told.get("correlation") if isinstance(told, dict) else None
    return link if isinstance(link, int) and not isinstance(link, bool) and link else None


def _is_step(event: Json) -> bool:
    return str(event.get("name", "")).startswith("ProfilerStep#")


def _is_stack(event: Json) -> bool:
    return event.get("cat") == "python_function"


def _step_starts(timed: Sequence[Json]) -> list[float]:
    """Return when the steps begin on the host."""
    found = {
        _ts(event) for event in timed if _is_step(event) and not str(event.get("cat", "")).startswith("gpu")
    }
    return sorted(found)


def _ts(event: Json) -> float:
    ts = event.get("ts")
    return float(ts) if isinstance(ts, int | float) else 0.0
