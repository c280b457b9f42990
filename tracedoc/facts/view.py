"""The run as run facts see it: the digests of all ranks, and their collectives matched."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tracedoc.facts.digest import RankDigest, StepDigest
from tracedoc.timeline.matching import (
    ExposedSplit,
    Matching,
    RankCollectives,
    latest_starts_by_rank,
    match_collectives,
    split_exposed,
)


@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """All captured ranks.

    ``digests`` are in rank order. ``standing`` is the rank whose judged step is the lower median, which
    stands for the run; ``None`` where no rank has one. ``splits`` holds the exposed communication of every
    step, by ``(rank, step number)``; ``latest_starts`` those of matched operations on each rank's clock.
    """

    digests: tuple[RankDigest, ...]
    world_size: int | None
    matching: Matching
    splits: Mapping[tuple[int, int], ExposedSplit]
    latest_starts: Mapping[int, Mapping[tuple[str, int, int], int]]
    standing: int | None

    def digest(self, rank: int) -> RankDigest:
        """Return the digest of ``rank``; raises KeyError where it was not captured."""
        place = bisect_left(self.digests, rank, key=lambda digest: digest.rank)
        if place == len(self.digests) or self.digests[place].rank != rank:
            raise KeyError(rank)
        return self.digests[place]

    @property
    def standing_digest(self) -> RankDigest | None:
        """The digest of the rank that stands for the run."""
        return None if self.standing is None else self.digest(self.standing)

    def judged(self) -> list[tuple[RankDigest, StepDigest]]:
        """Return each rank that has a judged step, with it."""
        return [(digest, step) for digest in self.digests if (step := digest.judged_step) is not None]


def build_view(digests: Sequence[RankDigest], world_size: int | None) -> RunView:
    """Match the collectives of all ranks and choose the rank that stands for the run."""
    ordered = tuple(sorted(digests, key=lambda digest: digest.rank))
    ranks = [RankCollectives(digest.rank, digest.host, digest.collectives) for digest in ordered]
    matching = match_collectives(ranks, world_size)
    latest_starts = latest_starts_by_rank(matching, ranks)
    splits = {}
    for digest in ordered:
        known = latest_starts.get(digest.rank, {})
        for step in digest.steps:
            inside = [o for o in digest.collectives if o.end_ns > step.start_ns and o.start_ns < step.end_ns]
            splits[digest.rank, step.index] = split_exposed(step.exposed_comm, inside, known)
    return RunView(ordered, world_size, matching, splits, latest_starts, _standing_rank(ordered))


def _standing_rank(digests: Sequence[RankDigest]) -> int | None:
    lengths = sorted(
        (step.budget.window_ns, digest.rank, step.complete)
        for digest in digests
        if (step := digest.judged_step) is not None
    )
    whole = [entry for entry in lengths if entry[2]]
    chosen = whole or lengths
    return chosen[(len(chosen) - 1) // 2][1] if chosen else None
