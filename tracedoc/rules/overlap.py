"""The time that findings point at, and how much of it others cover."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tracedoc.diagnosis import Evidence
from tracedoc.spans import Spans

Times = Mapping[tuple[int, int | None], Spans]
"""The intervals that evidence points to, by rank and step."""


def overlap(own: Times, others: Sequence[Times]) -> tuple[int, int]:
    """Return the length of ``own`` evidence and how much of it the others cover, in nanoseconds.

    Evidence without a step covers its interval in all.
    """
    theirs: dict[int, list[tuple[int | None, Spans]]] = defaultdict(list)
    for other in others:
        for (rank, step), spans in other.items():
            theirs[rank].append((step, spans))
    total_ns = covered_ns = 0
    for (rank, step), spans in own.items():
        cover = Spans.empty()
        for their_step, their_spans in theirs.get(rank, ()):
            if step is None or their_step is None or their_step == step:
                cover = cover | their_spans
        total_ns += spans.total_ns
        covered_ns += (spans & cover).total_ns
    return total_ns, covered_ns


def spans_by_place(evidence: Iterable[Evidence]) -> dict[tuple[int, int | None], Spans]:
    """Return the time that evidence covers, by rank and step."""
    pairs: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
    for place in evidence:
        pairs.setdefault((place.rank, place.step), []).append((place.start_ns, place.end_ns))
    return {key: Spans.from_pairs(intervals) for key, intervals in pairs.items()}
