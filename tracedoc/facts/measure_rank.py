"""Measure every fact of one rank, in the worker."""

from __future__ import annotations

from tracedoc.digest.rank_digest import RankDigest, digest_timeline
from tracedoc.facts.catalog import CATALOG, computed
from tracedoc.timeline.build import RankTimeline


def measure_rank(timeline: RankTimeline, *, rank: int) -> RankDigest:
    """Compute all rank facts of a timeline, and return its digest with them."""
    values = {
        definition.name: value
        for definition in CATALOG.values()
        if definition.kind == "rank" and not isinstance(value := computed(definition, timeline), dict)
    }
    return digest_timeline(timeline, values, rank=rank)
