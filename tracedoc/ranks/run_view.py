"""The run as run facts see it: the digests of all ranks, and their collectives matched."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tracedoc.digest.rank_digest import RankDigest, StepDigest
from tracedoc.ranks.bandwidth import SizeCurve, group_curves
from tracedoc.ranks.blame import Blame, assign_blame
from tracedoc.ranks.exposure import (
    Arrivals,
    ExposedSplit,
    arrivals_by_rank,
    exposed_waits,
    split_exposed,
)
from tracedoc.ranks.group_guesses import with_guessed_groups
from tracedoc.ranks.matching import Matching, RankCollectives, match_collectives
from tracedoc.run.job import Job
from tracedoc.spans import Int64Array
from tracedoc.timeline.collective_table import by_rank
from tracedoc.timeline.script_code import SourceStep
from tracedoc.values import Value

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """All captured ranks.

    ``digests`` are in rank order. ``representative`` is the rank whose analysed step is the lower median,
    which stands for the run; ``None`` where no rank has one. ``splits`` holds the exposed communication of
    every step, by ``(rank, step number)``; ``arrivals`` say for each row of a rank's collectives when the
    last peer came, ``blame`` who came last to each matched operation, and what kept that rank; ``operations``
    the operation of the matching (``NO_OPERATION`` where there is none). ``curves`` hold what each group of
    the matching should reach on its link, ``None`` where that is not known. ``last_exposed_ns`` is, for each
    matched operation, how long its transfer is exposed on the rank that came last. ``job`` is the manifest's
    part about the job, ``None`` without one; ``source_steps`` are the steps with Python stacks that were
    read, by rank. ``kept`` caches the results of functions with several callers (:func:`once`).
    """

    digests: tuple[RankDigest, ...]
    world_size: int | None
    matching: Matching
    splits: Mapping[tuple[int, int], ExposedSplit]
    arrivals: Mapping[int, Arrivals]
    blame: Blame
    operations: Mapping[int, npt.NDArray[np.int32]]
    curves: tuple[SizeCurve | None, ...]
    last_exposed_ns: Int64Array
    representative: int | None
    job: Job | None = None
    source_steps: Mapping[int, SourceStep] = field(default_factory=dict)
    kept: dict[Callable[[RunView], Any], Any] = field(default_factory=dict, init=False, repr=False)

    def digest(self, rank: int) -> RankDigest:
        """Return the digest of ``rank``; raises KeyError where it was not captured."""
        place = bisect_left(self.digests, rank, key=lambda digest: digest.rank)
        if place == len(self.digests) or self.digests[place].rank != rank:
            raise KeyError(rank)
        return self.digests[place]

    @property
    def representative_digest(self) -> RankDigest | None:
        """The digest of the rank that stands for the run."""
        return None if self.representative is None else self.digest(self.representative)

    def judged(self) -> list[tuple[RankDigest, StepDigest]]:
        """Return each rank that has a analysed step, with it."""
        return [(digest, step) for digest in self.digests if (step := digest.judged_step) is not None]

    def by_rank(self, measure: Callable[[RankDigest, StepDigest], Value]) -> dict[str, Value]:
        """Return what ``measure`` says of each rank that has a analysed step, by rank as facts are keyed."""
        return {str(digest.rank): measure(digest, step) for digest, step in self.judged()}


def once(measure: Callable[[RunView], Result]) -> Callable[[RunView], Result]:
    """Call a function once for each run; its result is kept with the run."""

    @wraps(measure)
    def asked(run: RunView) -> Result:
        if measure not in run.kept:
            run.kept[measure] = measure(run)
        kept: Result = run.kept[measure]
        return kept

    return asked


def build_run_view(
    digests: Sequence[RankDigest],
    world_size: int | None,
    job: Job | None = None,
) -> RunView:
    """Match the collectives of all ranks and choose the rank that stands for the run."""
    ordered = tuple(sorted(digests, key=lambda digest: digest.rank))
    ranks = with_guessed_groups(
        [RankCollectives(d.rank, d.host, d.collectives, d.groups, d.is_cpu) for d in ordered]
    )
    matching = match_collectives(ranks, world_size)
    arrivals = arrivals_by_rank(matching, ranks)
    splits: dict[tuple[int, int], ExposedSplit] = {}
    waits = []
    for digest in ordered:
        exposed = digest.exposed_comm
        mine = arrivals[digest.rank]
        waits.append(exposed_waits(exposed, digest.collectives, mine))
        spans = split_exposed(exposed, digest.collectives, mine)
        found = spans.in_windows(
            [step.start_ns for step in digest.steps], [step.end_ns for step in digest.steps]
        )
        splits |= {(digest.rank, step.index): split for step, split in zip(digest.steps, found, strict=True)}
    last_exposed = _exposed_at_last(matching, ordered, arrivals)
    return RunView(
        digests=ordered,
        world_size=world_size,
        matching=matching,
        splits=splits,
        arrivals=arrivals,
        blame=assign_blame(matching, ranks, waits),
        operations=arrivals.operations,
        last_exposed_ns=last_exposed,
        curves=group_curves(matching, {d.rank: d.device for d in ordered}, {d.rank: d.host for d in ordered}),
        representative=_representative_rank(ordered),
        job=job,
    )


def with_source_steps(run: RunView, steps: Mapping[int, SourceStep]) -> RunView:
    """Return the view with steps that were recorded with Python stacks, by rank.

    What was worked out of it stays: nothing that is kept rests on stacks.
    """
    found = replace(run, source_steps=steps)
    found.kept.update(run.kept)
    return found


def _exposed_at_last(
    matching: Matching, digests: Sequence[RankDigest], arrivals: Mapping[int, Arrivals]
) -> Int64Array:
    last = matching.last_part
    found = np.zeros(len(matching), dtype=np.int64)
    for mine, digest in zip(by_rank(matching.part_rank[last], len(digests)), digests, strict=True):
        rows, table = matching.part_row[last[mine]], digest.collectives
        turn = arrivals[digest.rank].last_arrival_ns(table)[rows]
        found[mine] = digest.exposed_comm.covered_ns(turn, table.end_ns[rows])
    return found


def _representative_rank(digests: Sequence[RankDigest]) -> int | None:
    lengths = sorted(
        (step.budget.window_ns, digest.rank, step.complete)
        for digest in digests
        if (step := digest.judged_step) is not None
    )
    whole = [entry for entry in lengths if entry[2]]
    chosen = whole or lengths
    return chosen[(len(chosen) - 1) // 2][1] if chosen else None
