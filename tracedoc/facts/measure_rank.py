"""Measure every fact of one rank, in the worker."""

from __future__ import annotations

from tracedoc.facts.catalog import CATALOG, computed
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, digest_timeline
from tracedoc.timeline.build import RankTimeline
from tracedoc.values import Value


def measure_rank(timeline: RankTimeline, *, rank: int) -> RankDigest:
    """Compute all rank facts of a timeline, and return its digest with them and their intervals."""
    values: dict[str, Value] = {}
    intervals: dict[str, Spans] = {}
    for definition in CATALOG.values():
        if definition.kind != "rank":
            continue
        value, spans = computed(definition, timeline)
        if spans is not None:
            intervals[definition.name] = spans
        if not isinstance(value, dict):
            values[definition.name] = value
    return digest_timeline(timeline, values, intervals, rank=rank)
