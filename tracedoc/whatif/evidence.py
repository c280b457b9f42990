"""Places in the traces that findings point to, taken from the judged steps of the digests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tracedoc.diagnosis import Evidence
from tracedoc.digest.rank_digest import RankDigest
from tracedoc.digest.step_table import StepDigest
from tracedoc.facts.measure_run import Measurements
from tracedoc.facts.per_run.exposed_communication import latency_bound_exposed
from tracedoc.facts.per_run.gradients import gradient_exposed
from tracedoc.facts.per_run.uneven import uneven_ranks
from tracedoc.facts.per_run.wrapping import fine_wrapping_spans, sharded_exposed_spans
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.shard_stalls import hideable_backward_stalls, hideable_stalls
from tracedoc.ranks.stragglers import gaps_of, stragglers, waits_for
from tracedoc.spans import Spans
from tracedoc.values import Unknown

MAX_PEERS = 4
"""Of the ranks that wait for a late one, these many are shown: those that wait longest."""

MAX_PLACES = 200
"""A finding lists at most this many intervals of one rank, the longest ones, in time order."""

MAX_FOUND = 3200
"""A finding on many ranks keeps this many places in all, shared evenly, but MIN_FOUND on each rank."""

MIN_FOUND = 8


def _from_spans(name: str, what: str) -> Callable[[Measurements, str | None], tuple[Evidence, ...]]:
    """Return a collector of the intervals of one named set in the judged step."""

    def collect(measurements: Measurements, key: str | None) -> tuple[Evidence, ...]:
        digest = _digest_of(measurements, key)
        return () if digest is None else _places(digest, digest.spans.get(name, Spans.empty()), what)

    return collect


def _small_collectives(measurements: Measurements, key: str | None) -> tuple[Evidence, ...]:
    digest = _digest_of(measurements, key)
    if digest is None or digest.judged_step is None:
        return ()
    spans = latency_bound_exposed(measurements.run, digest, digest.judged_step)
    return () if isinstance(spans, Unknown) else _places(digest, spans, "exposed latency-bound collective")


def _from_run(
    spans_of: Callable[[RunView, RankDigest, StepDigest], Spans], what: str, *, every_rank: bool = False
) -> Callable[[Measurements, str | None], tuple[Evidence, ...]]:
    """Return a collector of intervals of the judged step that take the whole run to find."""

    def collect(measurements: Measurements, key: str | None) -> tuple[Evidence, ...]:
        run, chosen = measurements.run, _digest_of(measurements, key)
        digests = run.digests if every_rank and key is None else (chosen,) if chosen is not None else ()
        return tuple(
            place
            for digest in digests
            if (step := digest.judged_step) is not None
            for place in _places(digest, spans_of(run, digest, step), what)
        )

    return collect


def _waits_for_straggler(
    measurements: Measurements, key: str | None, *, uneven: bool = False
) -> tuple[Evidence, ...]:
    """List where the late rank ``key`` came from in its judged step, and where those waited that waited most.

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
        waited = late.cost_ns.sum(axis=0)
        for place in np.argsort(-waited, kind="stable")[:MAX_PEERS].tolist():
            peer = run.digest(late.peers[place])
            if peer.judged_step is not None and waited[place] > 0:
                waits = waits_for(run, late, peer.rank)
                waits = waits.clip(peer.judged_step.start_ns, peer.judged_step.end_ns)
                found += _places(peer, waits, f"waiting for rank {late.rank}")
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
    by_rank: dict[int, list[Evidence]] = defaultdict(list)
    for place in evidence:
        by_rank[place.rank].append(place)
    if all(len(places) <= quota for places in by_rank.values()):
        return tuple(evidence)
    kept = {
        place
        for places in by_rank.values()
        for place in sorted(places, key=lambda place: place.start_ns - place.end_ns)[:quota]
    }
    return tuple(place for place in evidence if place in kept)


def _digest_of(measurements: Measurements, key: str | None) -> RankDigest | None:
    run = measurements.run
    if key is None:
        return run.representative_digest
    try:
        return run.digest(int(key))
    except (KeyError, ValueError):
        return None  # a key that is no rank, or none that was captured


EvidenceCollector = Callable[[Measurements, str | None], tuple[Evidence, ...]]

EVIDENCE: dict[str, EvidenceCollector] = {
    "exposed-communication": _from_spans("exposed_comm", "communication with no compute beside it"),
    "small-collectives": _small_collectives,
    "waits-for-late-rank": _waits_for_straggler,
    "waits-for-any-rank": _waits_for_straggler,
    "waits-for-uneven-work": partial(_waits_for_straggler, uneven=True),
    "gradient-reductions": _from_run(gradient_exposed, "exposed gradient reduction"),
    "late-launches": _from_spans("idle_launch_pace", "GPU idle: the next kernel is not launched yet"),
    "blocking-syncs": _from_spans("idle_sync", "GPU idle after the host waited for it"),
    "host-away": _from_spans("idle_host_away", "GPU idle: the host launches nothing for long"),
    "short-kernels": _from_spans("idle_short_kernels", "GPU idle after a kernel shorter than a launch"),
    "input-idle": _from_spans("idle_input", "GPU idle while the data loader is waited for"),
    "allocator-idle": _from_spans("idle_allocator", "GPU idle while device memory is allocated or freed"),
    "pageable-stall": _from_spans("pageable_stall", "copy from pageable memory, or idle during its call"),
    "gather-stalls": _from_run(hideable_stalls, "compute waits for a gather that could have come earlier"),
    "backward-gather-stalls": _from_run(
        hideable_backward_stalls,
        "compute of the backward pass waits for a gather that could have come earlier",
    ),
    "fine-wrapping": _from_run(
        fine_wrapping_spans, "latency of a small unit, or GPU idle under its hooks", every_rank=True
    ),
    "sharded-communication": _from_run(
        sharded_exposed_spans, "gather or reduce-scatter with no compute beside it"
    ),
    "offload": _from_spans(
        "offload_stall", "offload copy with nothing beside it, or GPU idle under the optimizer"
    ),
    "non-compute": _from_spans("non_compute", "no compute runs"),
}
"""Collectors by the names that rules use. The key is a rank; ``None`` is the one that stands for the run."""
