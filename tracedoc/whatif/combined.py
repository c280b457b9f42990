"""Bound what several fixes give together: gains over the same time are not added."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tracedoc.diagnosis import Finding
from tracedoc.spans import Spans

Times = Mapping[str, Mapping[tuple[int, int | None], Spans]]
"""All that findings point to, by their ids: intervals by rank and step."""


SAME = 0.9
"""Two findings repeat each other where their times and gains agree to this share."""


def combined_gain_ms(findings: Sequence[Finding], times: Times) -> float:
    """Return a bound in ms for several fixes together: gains over the same time are not added.

    A finding claims its gain evenly from the time of all its evidence. Where several claim the same time the
    largest claim counts. Computed on each rank, the largest of them stands; never less than the largest gain.
    """
    gains = {finding.id: finding.gain.size_ms for finding in findings if finding.gain is not None}
    places: dict[int, dict[str, Spans]] = defaultdict(dict)
    for finding_id in gains:
        for (rank, _), spans in times.get(finding_id, {}).items():
            places[rank][finding_id] = places[rank].get(finding_id, Spans.empty()) | spans
    return max([*gains.values(), *(_claimed_ms(found, gains) for found in places.values())], default=0.0)


def repeats(one: Finding, other: Finding, times: Times) -> bool:
    """Return whether two findings speak of the same time and promise the same gain."""
    if one.gain is None or other.gain is None:
        return False
    least, most = sorted((one.gain.size_ms, other.gain.size_ms))
    if least < SAME * most:
        return False
    mine, theirs = times.get(one.id, {}), times.get(other.id, {})
    own_ns = sum(spans.total_ns for spans in mine.values())
    other_ns = sum(spans.total_ns for spans in theirs.values())
    shared_ns = sum((spans & theirs[place]).total_ns for place, spans in mine.items() if place in theirs)
    return own_ns > 0 and shared_ns >= SAME * max(own_ns, other_ns)


def _claimed_ms(places: Mapping[str, Spans], gains: Mapping[str, float]) -> float:
    """Return the bound for one rank; ``places`` holds the evidence on it by finding."""
    claims = []
    for finding, spans in places.items():
        if len(spans):
            claims.append((min(gains[finding] * 1e6 / spans.total_ns, 1.0), spans))
    total, taken = 0.0, Spans.empty()
    for share, spans in sorted(claims, key=lambda claim: -claim[0]):
        total += share * (spans - taken).total_ns
        taken = taken | spans
    return total / 1e6
