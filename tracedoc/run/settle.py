"""Settle which file is which rank's, and which cycle of the profiler is diagnosed."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tracedoc.errors import InputError, Limit
from tracedoc.run.discover import natural_key
from tracedoc.units import format_ranges


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trace that was read, and all that hints at its place in the run.

    ``file_rank``, ``world_size`` and ``backend`` come from its distributedInfo; ``first_step`` is the N
    of its first ProfilerStep. ``order_hint`` and ``group_hint`` are those of the file's name. ``span_ns`` is
    when it was captured, and ``communicates`` whether it takes part in a collective.
    """

    path: str
    file_rank: int | None = None
    manifest_rank: int | None = None
    name_rank: int | None = None
    world_size: int | None = None
    first_step: int | None = None
    order_hint: int | None = None
    group_hint: str = ""
    backend: str = ""
    span_ns: tuple[int, int] = (0, 0)
    communicates: bool = False


@dataclass(frozen=True, slots=True)
class RankFile:
    """The trace that stands for one rank."""

    rank: int
    path: str


@dataclass(frozen=True, slots=True)
class Settled:
    """One file a rank, in order of rank.

    ``cycles`` are the first steps of all cycles found, or their numbers from 0 where steps do not tell
    them apart; ``cycle`` is the one chosen. Both are empty where each rank has one file.
    """

    files: tuple[RankFile, ...]
    world_size: int | None
    cycle: int | None
    cycles: tuple[int, ...]
    limits: tuple[Limit, ...]


def settle(candidates: Sequence[Candidate], cycle: int | None = None) -> Settled:
    """Return one file for each rank, of one cycle.

    The newest cycle common to most ranks is chosen unless ``cycle`` names one. Raises
    :class:`InputError` where the files are of different jobs, where two files claim one rank and nothing
    tells them apart, and where ``cycle`` was not recorded.
    """
    if not candidates:
        raise InputError("no trace could be read", "see the limits above for each file")
    limits: list[Limit] = []
    ranks = _ranks(candidates, limits)
    _refuse_mixed_jobs(candidates)
    world_size = next((c.world_size for c in candidates if c.world_size is not None), None)
    by_rank: dict[int, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_rank[ranks[candidate.path]].append(candidate)
    if world_size is not None and max(by_rank) >= world_size:
        worst = by_rank[max(by_rank)][0]
        raise InputError(
            f"{worst.path} is rank {max(by_rank)} of a job with {world_size} ranks",
            "pass the traces of one job",
        )
    chosen, cycle, cycles = _choose_cycle(by_rank, cycle, limits)
    _note_missing(chosen, world_size, limits)
    files = tuple(RankFile(rank, chosen[rank].path) for rank in sorted(chosen))
    return Settled(files, world_size, cycle, cycles, tuple(limits))


# Ranks.


def _ranks(candidates: Sequence[Candidate], limits: list[Limit]) -> dict[str, int]:
    """Return the rank of each path: its own word, then the manifest's, then the name's, else a number."""
    candidates = _distrust_equal_ranks(candidates, limits)
    known: dict[str, int] = {}
    unknown: dict[str, list[Candidate]] = defaultdict(list)  # the files of one process share a number
    for candidate in candidates:
        ranks = (candidate.file_rank, candidate.manifest_rank, candidate.name_rank)
        rank = next((value for value in ranks if value is not None), None)
        if rank is None:
            unknown[candidate.group_hint or candidate.path].append(candidate)
        else:
            known[candidate.path] = rank
    if not known:
        _refuse_unrelated(list(unknown.values()))
    taken = set(known.values())
    free = (number for number in range(len(candidates) + len(taken) + 1) if number not in taken)
    for group in sorted(unknown, key=natural_key):
        number = next(free)
        known.update((one.path, number) for one in unknown[group])
    if unknown and len(set(known.values())) > 1:
        limits.append(
            Limit(
                "rank-assumed",
                f"{len(unknown)} {_plural(len(unknown), 'trace does', 'traces do')} not tell the rank, "
                f"neither inside nor by name: numbered in order of name",
                "ranks in this report may not be those of the job"
                if any(_is_of_several(one) for one in candidates)
                else "nothing ties them together: they may be of different jobs, each to be read alone",
            )
        )
    return known


def _is_of_several(candidate: Candidate) -> bool:
    """Whether a trace is of a job of several ranks, by what it says or by a collective in it."""
    return candidate.communicates or (candidate.world_size or 1) > 1


def _refuse_unrelated(processes: Sequence[Sequence[Candidate]]) -> None:
    """Raise for processes that were captured one after the other, and that nothing ties together."""
    files = [one for process in processes for one in process]
    if any(map(_is_of_several, files)):
        return
    spans = sorted(
        (min(one.span_ns[0] for one in process), max(one.span_ns[1] for one in process), process[-1].path)
        for process in processes
    )
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start > end:
            raise InputError(
                f"{first} and {second} are no ranks of one job: one was captured after the other, neither "
                "communicates, and neither tells a rank",
                f"pass one of them, as {second}",
            )


def _distrust_equal_ranks(candidates: Sequence[Candidate], limits: list[Limit]) -> Sequence[Candidate]:
    """Go by the names where every file claims one rank of a job of one, and the names differ."""
    inside = {c.file_rank for c in candidates}
    outside = {c.name_rank if c.manifest_rank is None else c.manifest_rank for c in candidates}
    alone = all(c.world_size in (None, 1) for c in candidates)
    if len(candidates) < 2 or len(inside) != 1 or None in inside or not alone:
        return candidates
    if None in outside or len(outside) != len(candidates):
        return candidates
    limits.append(
        Limit(
            "rank-assumed",
            f"all {len(candidates)} traces say that they are rank {next(iter(inside))}, so "
            "they are separated by name",
            "ranks in this report may not be those of the job",
        )
    )
    return [replace(c, file_rank=None) for c in candidates]


def _refuse_mixed_jobs(candidates: Sequence[Candidate]) -> None:
    sizes = {c.world_size: c.path for c in reversed(candidates) if c.world_size is not None}
    if len(sizes) > 1:
        words = " and ".join(f"{sizes[size]} ({size} ranks)" for size in sorted(sizes))
        raise InputError(f"these are traces of different jobs: {words}", "pass the traces of one job")
    backends = {c.backend: c.path for c in reversed(candidates) if c.backend}
    if len(backends) > 1:
        words = " and ".join(f"{backends[name]} ({name})" for name in sorted(backends))
        raise InputError(
            f"these are traces of jobs with different backends: {words}", "pass the traces of one job"
        )


# Cycles.


MOST_NAMED_CYCLES = 6
"""So many of the cycles that are not analysed are named."""


def _choose_cycle(
    by_rank: Mapping[int, list[Candidate]], wanted: int | None, limits: list[Limit]
) -> tuple[dict[int, Candidate], int | None, tuple[int, ...]]:
    if all(len(files) == 1 for files in by_rank.values()):
        single = {rank: files[0] for rank, files in by_rank.items()}
        return _only_cycle(single, wanted, limits)
    numbered = {rank: _number_cycles(rank, files, by_rank) for rank, files in by_rank.items()}
    count = Counter(number for files in numbered.values() for number in files)
    cycles = tuple(sorted(count))
    if wanted is None:
        wanted = max(count, key=lambda number: (count[number], number))
    elif wanted not in count:
        raise InputError(f"cycle {wanted} was not recorded", f"choose one of: {', '.join(map(str, cycles))}")
    others = [str(number) for number in cycles if number != wanted]
    if others:
        more = len(others) - MOST_NAMED_CYCLES
        named = ", ".join(others if more <= 1 else [*others[:MOST_NAMED_CYCLES], f"and {more} more"])
        limits.append(
            Limit(
                "other-cycles",
                f"{len(cycles)} profiler cycles were recorded: this is cycle {wanted}, "
                f"the {_plural(len(others), 'other is', 'others are')} {named}",
                "only one cycle is analysed; choose another with --cycle",
            )
        )
    return {rank: files[wanted] for rank, files in numbered.items() if wanted in files}, wanted, cycles


def _only_cycle(
    single: dict[int, Candidate], wanted: int | None, limits: list[Limit]
) -> tuple[dict[int, Candidate], int | None, tuple[int, ...]]:
    steps = {c.first_step for c in single.values() if c.first_step is not None}
    if wanted is not None and wanted not in steps:
        known = ", ".join(str(step) for step in sorted(steps)) or "none"
        raise InputError(f"cycle {wanted} was not recorded", f"first steps recorded: {known}")
    if len(steps) > 1:
        limits.append(
            Limit(
                "different-steps",
                f"the ranks were recorded from different steps on: {', '.join(map(str, sorted(steps)))}",
                "collectives match only where the recordings overlap",
            )
        )
    return single, None, ()


def _number_cycles(
    rank: int, files: list[Candidate], by_rank: Mapping[int, list[Candidate]]
) -> dict[int, Candidate]:
    """Return the files of one rank by first step, or by their order where steps do not differ."""
    if all(_steps_differ(others) for others in by_rank.values()):
        return {int(c.first_step): c for c in files if c.first_step is not None}
    if len(files) == 1:
        return {0: files[0]}
    orders = {c.order_hint for c in files}
    if None in orders or len(orders) != len(files):
        first, second = sorted((c.path for c in files), key=natural_key)[:2]
        runs, hint = "", "pass one of them, or name the files after their ranks"
        if all(c.file_rank is not None and (c.world_size or 1) > 1 for c in files):
            hint = "they say so themselves, as two captures do: pass one file of each rank"
        folders = len({os.path.dirname(c.path) for c in files})
        if folders > 1:
            runs, hint = f"these are {folders} runs: ", "pass one of the folders"
        raise InputError(f"{runs}{first} and {second} are both rank {rank}", hint)
    return dict(enumerate(sorted(files, key=lambda c: c.order_hint or 0)))


def _steps_differ(files: Sequence[Candidate]) -> bool:
    steps = {c.first_step for c in files}
    return None not in steps and len(steps) == len(files)


# Gaps.


def _note_missing(present: Mapping[int, Candidate], world_size: int | None, limits: list[Limit]) -> None:
    expected = range(world_size if world_size is not None else max(present) + 1)
    missing = [rank for rank in expected if rank not in present]
    # A single trace that tells no world size is a job of its own, whatever number its name bears.
    if not missing or (world_size is None and len(present) == 1):
        return
    limits.append(
        Limit(
            "missing-ranks",
            f"{_plural(len(missing), 'rank', 'ranks')} {format_ranges(missing)} of {len(expected)} "
            f"{_plural(len(missing), 'is', 'are')} missing",
            "one rank alone shows neither waiting nor who is late"
            if len(present) == 1
            else f"waiting and late ranks are known among ranks {format_ranges(present)} at most",
        )
    )


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
