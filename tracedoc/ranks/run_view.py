"""The run as run facts see it: the digests of all ranks, and their collectives matched."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from tracedoc.errors import Limit
from tracedoc.ranks.bandwidth import Seat, SizeCurve, group_curves
from tracedoc.ranks.group_guesses import with_guessed_groups
from tracedoc.ranks.matching import Matching, RankCollectives, match_collectives
from tracedoc.ranks.source_step import SourceStep
from tracedoc.ranks.strategy_kinds import may_be_pipeline
from tracedoc.ranks.waiting import (
    Arrivals,
    Blame,
    ExposedSplit,
    arrivals_by_rank,
    assign_blame,
    exposed_waits,
    split_exposed,
)
from tracedoc.run.job import Job
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_table import by_rank
from tracedoc.units import format_ms, format_ranges
from tracedoc.values import Value

EARLY_STEPS = 1.5
"""A rank ends early where the longest recording goes on for so many steps of the run."""


@dataclass(frozen=True, slots=True, eq=False)
class RunView:
    """All captured ranks.

    ``digests`` are in rank order. ``representative`` is the rank that stands for the run: in the step whose
    length is the median it waits least, so that the others wait for it; ``None`` where no rank has a step.
    ``splits`` holds the exposed communication of every step, by ``(rank, step number)``; ``arrivals`` say for
    each row of a rank's collectives when the last peer came, ``blame`` who came last to each matched
    operation, and what kept that rank; ``operations`` the operation of the matching (``NO_OPERATION`` where
    there is none). ``curves`` hold what each group of the matching should reach on its link, ``None`` where
    that is not known. ``meets_rarely`` says whether ranks communicate in some of their complete steps only.
    ``last_exposed_ns`` is, for each matched operation, how long its transfer is exposed on
    the rank that came last. ``job`` is the manifest's part about the job, without ranks where there is none;
    ``left_out`` are ranks with a trace of which no step is known that the others show; ``source_steps`` are
    the steps with Python stacks that were read, by rank.
    ``kept`` caches the results of functions with several callers (:func:`once`).
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
    meets_rarely: bool
    job: Job = field(default_factory=Job)
    left_out: tuple[int, ...] = ()
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

    @property
    def analysed_step(self) -> StepDigest | None:
        """The step that stands for the run."""
        digest = self.representative_digest
        return None if digest is None else digest.judged_step

    @property
    def common_steps(self) -> tuple[int, ...]:
        """The numbers of the steps that every rank captured whole, in order."""
        complete = [{step.index for step in digest.complete_steps} for digest in self.digests]
        return tuple(sorted(set.intersection(*complete))) if complete else ()

    def judged(self) -> list[tuple[RankDigest, StepDigest]]:
        """The ranks that have an analysed step, each with it."""
        return [(digest, step) for digest in self.digests if (step := digest.judged_step) is not None]

    def transfers(self, digest: RankDigest, rows: npt.NDArray[Any] | slice = slice(None)) -> Spans:
        """When some of a rank's collectives move data: from the last known arrival to their ends."""
        table = digest.collectives
        begins = self.arrivals[digest.rank].last_arrival_ns(table)
        return Spans.of(begins[rows], table.end_ns[rows])

    def exposed_transfer(self, digest: RankDigest, step: StepDigest, rows: npt.NDArray[Any]) -> Spans:
        """When they do so in a step with no compute beside them."""
        return (self.transfers(digest, rows) & digest.exposed_comm).clip(step.start_ns, step.end_ns)

    def by_rank(self, measure: Callable[[RankDigest, StepDigest], Value]) -> dict[str, Value]:
        """The values of ``measure`` by rank, as facts are keyed, of the ranks that have an analysed step."""
        return {str(digest.rank): measure(digest, step) for digest, step in self.judged()}


def build_run_view(
    digests: Sequence[RankDigest],
    world_size: int | None,
    job: Job | None = None,
    left_out: tuple[int, ...] = (),
    steps: tuple[int, int] | None = None,
) -> RunView:
    """Match the collectives of all ranks, of some ``steps``, and choose the rank that stands for the run."""
    ordered = tuple(sorted(digests, key=lambda digest: digest.rank))
    ranks = with_guessed_groups(
        [RankCollectives(d.rank, d.host, d.collectives, d.groups, d.is_cpu, steps) for d in ordered]
    )
    ordered = tuple(
        digest if rank.table is digest.collectives else structs.replace(digest, collectives=rank.table)
        for digest, rank in zip(ordered, ranks, strict=True)
    )
    staged = may_be_pipeline([digest.signs for digest in ordered])
    matching = structs.replace(match_collectives(ranks, world_size), staged=staged)
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
    rarely = _meet_rarely(ordered)
    return RunView(
        digests=ordered,
        world_size=world_size,
        matching=matching,
        splits=splits,
        arrivals=arrivals,
        blame=assign_blame(matching, ranks, waits),
        operations=arrivals.operations,
        last_exposed_ns=last_exposed,
        curves=group_curves(matching, {d.rank: Seat(d.device, d.host, d.ordinal) for d in ordered}),
        representative=_representative_rank(ordered, splits, rarely=rarely),
        meets_rarely=rarely,
        job=job or Job(),
        left_out=left_out,
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
        last_arrival_ns = arrivals[digest.rank].last_arrival_ns(table)[rows]
        found[mine] = digest.exposed_comm.covered_ns(last_arrival_ns, table.end_ns[rows])
    return found


def _representative_rank(
    digests: Sequence[RankDigest], splits: Mapping[tuple[int, int], ExposedSplit], *, rarely: bool
) -> int | None:
    """The rank that waits least for its peers in the step whose length is the lower median of all ranks'."""
    judged = {digest.rank: step for digest in digests if (step := digest.judged_step) is not None}
    lengths = sorted((step.budget.window_ns, rank, step.complete) for rank, step in judged.items())
    # Of parts of steps the longest shows most: a pipeline's last stage begins late and ends early.
    chosen = [entry for entry in lengths if entry[2]] or lengths[-1:]
    if not chosen:
        return None
    # In a step without a meeting the others wait later for the rank that takes longest.
    place = -1 if rarely else (len(chosen) - 1) // 2
    step = judged[chosen[place][1]]

    def waits(rank: int) -> tuple[int, bool, int]:
        split = splits[rank, step.index]
        wait_ns = split.wait_ns + split.pipeline_wait_ns + split.unsplit_ns
        return wait_ns, rank != chosen[place][1], rank

    return min((rank for _, rank, _ in chosen if judged[rank].index == step.index), key=waits)


def _meet_rarely(digests: Sequence[RankDigest]) -> bool:
    """Whether each of several ranks communicates in some of its complete steps, and in others does not."""
    return len(digests) > 1 and all(
        len({step.index in met for step in digest.complete_steps}) == 2
        for digest in digests
        for met in (set(digest.collectives.step.tolist()),)
    )


def habitual(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The lower quartile over steps, the first axis of ``values``: what holds in three steps of four."""
    return np.asarray(np.sort(values, axis=0)[(len(values) - 1) // 4])


def ranks_without_steps(digests: Sequence[RankDigest]) -> tuple[int, ...]:
    """The ranks of which no step is known that others show whole.

    They are cut, or ended before all others, or their steps are others altogether.
    """
    strangers = ranks_of_other_steps(digests)
    ended = _ended_before([digest for digest in digests if digest.rank not in strangers])
    return tuple(sorted({*strangers, *ended}))


def ranks_of_other_steps(digests: Sequence[RankDigest]) -> tuple[int, ...]:
    """The ranks none of whose numbered steps is one of those that more than half of the ranks show."""
    if any(digest.step_source != "profiler" for digest in digests):
        return ()
    numbers = {digest.rank: {step.index for step in digest.steps} for digest in digests}
    counts = Counter(number for mine in numbers.values() for number in mine)
    usual = {number for number, count in counts.items() if 2 * count > len(digests)}
    return tuple(rank for rank, mine in numbers.items() if usual and mine and not mine & usual)


def _ended_before(digests: Sequence[RankDigest]) -> tuple[int, ...]:
    """The ranks that are cut, or ended before a step that all others show whole; none without such a step."""
    known = {digest.rank: {step.index for step in digest.complete_steps} for digest in digests}
    others = [known[digest.rank] for digest in digests if not digest.cut and known[digest.rank]]
    whole = set.intersection(*others) if others else set().union(*known.values())
    if not whole:
        return ()
    # From the beginning of a capture to the end of the first step that is whole.
    least = min(
        step.end_ns - digest.steps[0].start_ns
        for digest in digests
        for step in digest.complete_steps
        if step.index in whole
    )
    return tuple(
        digest.rank
        for digest in digests
        if not known[digest.rank] & whole and (digest.cut or _length_ns(digest) < least)
    )


def shared_steps(digests: Sequence[RankDigest]) -> tuple[int, int] | None:
    """The first and the last of the steps that every rank captured whole, without a gap; ``None`` for all.

    Of a step that one rank shows and another does not, nothing is known across ranks: who came last, and how
    long the others waited, is what the other one would tell.
    """
    known = [{step.index for step in digest.complete_steps} for digest in digests]
    shared = sorted(set.intersection(*known)) if len(known) > 1 else []
    cut = any(digest.cut for digest in digests)
    numbered = len({digest.step_source for digest in digests}) == 1
    if not shared or not (cut or (numbered and any(one != known[0] for one in known))):
        return None
    listed = sorted({step.index for digest in digests for step in digest.steps})
    runs = [list(some) for whole, some in groupby(listed, lambda step: step in shared) if whole]
    longest = max(runs, key=len)
    return longest[0], longest[-1]


def ended_early(run: RunView) -> list[Limit]:
    """One limit for the ranks whose recording ends well before the others', none where all end together.

    They crashed, or were stopped, before the last step of the others or in it. Ranks are compared that were
    recorded from one step on, by the length of their recordings, but for those whose records are not known to
    their end.
    """
    known = [digest for digest in run.digests if digest.truncated or not digest.cut]
    lengths = {digest.rank: _length_ns(digest) for digest in known if _length_ns(digest)}
    first = {digest.first_step for digest in run.digests}
    representative = run.representative_digest
    if len(lengths) < 2 or len(first) != 1 or representative is None or run.meets_rarely:
        return []
    if any(digest.step_source != "profiler" for digest in run.digests):
        return []  # without marks of steps, each recording begins and ends where someone stopped it
    steps = [step.end_ns - step.start_ns for digest in run.digests for step in digest.complete_steps]
    if not steps:
        return []
    longest = max(lengths.values())
    last = max((one.last_step for one in run.digests if one.last_step is not None), default=0)
    whole = {one.rank for one in run.digests if one.last_step is not None and one.last_step >= last}
    long_before = longest - EARLY_STEPS * median(steps)
    early = [rank for rank, length in lengths.items() if length < long_before and rank not in whole]
    if not early:
        return []
    missing_ms = (longest - min(lengths[rank] for rank in early)) / 1e6
    who = f"rank {early[0]} ended" if len(early) == 1 else f"ranks {format_ranges(early)} ended"
    return [
        Limit(
            "ended-early",
            f"{who} up to {format_ms(missing_ms)} before the others, in the middle of the capture",
            "it crashed or was stopped: look at its log first; steps that all ranks have are analysed",
        )
    ]


def _length_ns(digest: RankDigest) -> int:
    return digest.capture.window_ns if digest.capture is not None and digest.step_source != "none" else 0
