"""Places in the traces that findings point to, taken from the analysed steps of the digests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from tracedoc.diagnosis import Evidence
from tracedoc.facts.catalog import CATALOG, Fact
from tracedoc.facts.measure_run import Measurements
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest
from tracedoc.topics.straggler.late_ranks import gaps_of, stragglers, waits_for
from tracedoc.topics.straggler.run import straggler_cost_ms, straggler_pattern
from tracedoc.topics.straggler.uneven import uneven_ranks, uneven_work_steps
from tracedoc.values import Unknown

EvidenceCollector = Callable[[Measurements, str | None], tuple[Evidence, ...]]

MAX_PEERS = 4
"""Of the ranks that wait for a late one, these many are shown: those that wait longest."""

MAX_PLACES = 200
"""A finding lists at most this many intervals of one rank, the longest ones, in time order."""

MAX_FOUND = 3200
"""A finding on many ranks keeps this many places in all, shared evenly, but MIN_FOUND on each rank."""

MIN_FOUND = 8


def _of_fact(fact: Fact) -> EvidenceCollector:
    """Return the collector of the intervals that a fact is measured as."""

    def collect(measurements: Measurements, key: str | None) -> tuple[Evidence, ...]:
        run = measurements.run
        known = {str(one.rank): one for one in run.digests}
        digest = run.representative_digest if key is None else known.get(key)
        if digest is None or digest.judged_step is None:
            return ()
        of_run = fact.spans
        spans = digest.spans(fact.name) if of_run is None else of_run(run, digest, digest.judged_step)
        return () if isinstance(spans, Unknown) else _places(digest, spans, fact.interval)

    return collect


def _waits_for_straggler(
    measurements: Measurements, key: str | None, *, uneven: bool = False
) -> tuple[Evidence, ...]:
    """The place that made rank ``key`` late in its analysed step, and the places of the longest waits for it.

    ``None`` stands for every late rank, with ``uneven`` for those that had more work than others.
    """
    run = measurements.run
    chosen = uneven_ranks(run) if uneven else frozenset(digest.rank for digest in run.digests)
    found: list[Evidence] = []
    for late in stragglers(run):
        if late.rank not in chosen or key not in (None, str(late.rank)):
            continue
        own = run.digest(late.rank)
        if own.judged_step is not None:
            gaps = gaps_of(run, late).clip(own.judged_step.start_ns, own.judged_step.end_ns)
            found += _places(own, gaps, "the others wait for what happens here")
        for peer, waits in waits_for(run, late)[:MAX_PEERS]:
            if peer.judged_step is not None:
                inside = waits.clip(peer.judged_step.start_ns, peer.judged_step.end_ns)
                found += _places(peer, inside, f"waiting for rank {late.rank}")
    return tuple(found)


def _places(digest: RankDigest, spans: Spans, what: str) -> tuple[Evidence, ...]:
    step = digest.judged_step
    if step is None:
        return ()
    longest = sorted(sorted(spans.pairs(), key=lambda pair: pair[0] - pair[1])[:MAX_PLACES])
    return tuple(
        Evidence(
            rank=digest.rank,
            step=step.index,
            start_ns=start - digest.start_ns,
            end_ns=end - digest.start_ns,
            what=what,
            value=(end - start) / 1e6,
            unit="ms",
        )
        for start, end in longest
    )


def longest_places(evidence: Sequence[Evidence], ranks: int) -> tuple[Evidence, ...]:
    """Return the longest places of each rank, in the order in which they were; ``ranks`` share the room."""
    quota = max(MIN_FOUND, MAX_FOUND // ranks)
    by_rank: dict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(evidence):
        by_rank[place.rank].append(number)
    if all(len(numbers) <= quota for numbers in by_rank.values()):
        return tuple(evidence)
    lengths = [place.start_ns - place.end_ns for place in evidence]
    kept = [
        number for numbers in by_rank.values() for number in sorted(numbers, key=lengths.__getitem__)[:quota]
    ]
    return tuple(evidence[number] for number in sorted(kept))


_BEYOND_ONE_RANK: dict[str, EvidenceCollector] = {
    straggler_cost_ms.name: _waits_for_straggler,
    straggler_pattern.name: _waits_for_straggler,
    uneven_work_steps.name: partial(_waits_for_straggler, uneven=True),
}
"""Collectors of facts whose places lie on other ranks too, or are more than the fact counts."""


def collectors() -> dict[str, EvidenceCollector]:
    """Return the collectors by fact. The key is a rank; ``None`` is the one that stands for the run."""
    return {fact.name: _of_fact(fact) for fact in CATALOG.values() if fact.interval} | _BEYOND_ONE_RANK
