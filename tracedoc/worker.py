"""Read one trace and measure it: the whole work of one worker, which imports nothing beyond that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from tracedoc.cache import Slot, slot_of
from tracedoc.errors import INTERNAL_ERROR, InputError, TracedocError, failure
from tracedoc.facts.catalog import computed
from tracedoc.run.remote import is_remote, open_remote, public_name
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, digest_timeline
from tracedoc.timeline.build import RankTimeline, build_timeline
from tracedoc.topics import load_rank_facts
from tracedoc.topics.host.rank import host_away_idle_ms
from tracedoc.trace.columns import Trace
from tracedoc.trace.kineto import read_trace
from tracedoc.trace.reader import reader_name
from tracedoc.values import Value

_FACTS = load_rank_facts()


def digest_file(
    path: str,
    on_bytes: Callable[[int], None] | None = None,
    *,
    steps: tuple[int, int] | None = None,
    strict: bool = False,
    max_bytes: int | None = None,
    cache: bool = False,
) -> RankDigest:
    """The digest of the trace in a file, behind a URL, or on standard input (``-``).

    ``cache`` takes what was kept of the same file before, and keeps what is made of it now.
    """
    slot = _slot(path, steps, strict, max_bytes) if cache else None
    kept = slot.load(RankDigest) if slot is not None else None
    if kept is not None:
        return kept
    read = partial(read_trace, strict=strict, max_bytes=max_bytes, on_bytes=on_bytes, long_frames=True)
    name = public_name(path)
    try:
        digest = _digest(path, read, steps)
    except (TracedocError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"{name} could not be measured, by a fault of tracedoc's ({failure(name, error)})",
            "--debug shows where; please report it",
        ) from error
    if slot is not None and not any(limit.code == INTERNAL_ERROR for limit in digest.limits):
        slot.store(digest)
    return digest


def _digest(path: str, read: Callable[..., Trace], steps: tuple[int, int] | None) -> RankDigest:
    if is_remote(path):
        with open_remote(path) as stream:
            trace = read(public_name(path), stream=stream)
    else:
        trace = read(path, stream=sys.stdin.buffer if path == "-" else None)
    return measure_rank(
        build_timeline(trace, steps=steps), rank=-1 if trace.info.rank is None else trace.info.rank
    )


def measure_rank(timeline: RankTimeline, *, rank: int) -> RankDigest:
    """The digest of a timeline, with all facts of its rank and their intervals."""
    values: dict[str, Value] = {}
    intervals: dict[str, Spans] = {}
    for fact in _FACTS.values():
        if fact.kind != "rank":
            continue
        value, spans = computed(fact, timeline)
        if spans is not None:
            intervals[fact.name] = spans
        if not isinstance(value, dict):
            values[fact.name] = value
    away = intervals.get(host_away_idle_ms.name, Spans.empty())
    return digest_timeline(timeline, values, intervals, host_away=away, rank=rank)


def kept_digest(
    path: str, *, steps: tuple[int, int] | None, strict: bool, max_bytes: int | None
) -> RankDigest | None:
    """The digest that was kept of a file as it is now, ``None`` where it is to be read."""
    slot = _slot(path, steps, strict, max_bytes)
    return slot.load(RankDigest) if slot is not None else None


def _slot(path: str, steps: tuple[int, int] | None, strict: bool, max_bytes: int | None) -> Slot | None:
    return None if path == "-" or is_remote(path) else slot_of(path, steps, strict, max_bytes, reader_name())
