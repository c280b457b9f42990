"""What is said across ranks equals what a simulator of ranks knows, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from tests.ranks.late_arrivals import collectives, late_arrivals
from tests.ranks.simulator import Part, Simulated, balanced_program, delayed, simulate, uneven_program
from tracedoc.ranks.matching import Matching, RankCollectives, match_collectives
from tracedoc.ranks.waiting import (
    Blame,
    ExposedSplit,
    Lateness,
    arrivals_by_rank,
    assign_blame,
    exposed_waits,
    split_exposed,
)
from tracedoc.spans import Spans
from tracedoc.timeline.collective_table import CollectiveOp, CollectiveTable, StartDelay

MS = 1_000_000
SEEDS = range(8)
MESHES = ((2, 2), (2, 4), (3, 2), (1, 3))


@dataclass(frozen=True)
class Seen:
    """What tracedoc makes of a simulated run."""

    matching: Matching
    blame: Blame
    splits: dict[int, ExposedSplit]


ClockOf = Callable[[int], Callable[[int], int]]


def right_clock(rank: int) -> Callable[[int], int]:
    return lambda time: time


def operations(parts: Iterable[Part], clock: Callable[[int], int], *, numbered: bool) -> list[CollectiveOp]:
    counts: dict[tuple[int, ...], int] = {}
    found = []
    for part in parts:
        counts[part.group] = counts.get(part.group, 0) + 1
        late = part.start > part.issued
        found.append(
            CollectiveOp(
                op=part.op, group=part.group, group_name="-".join(map(str, part.group)),
                group_size=len(part.group), nbytes=part.nbytes, dtype="Float",
                seq=counts[part.group] if numbered else None, stream=20,
                start_ns=clock(part.start * MS), end_ns=clock(part.end * MS),
                launch_ns=clock(part.issued * MS - 100 * MS), step=part.step,
                held=StartDelay.COMMUNICATION if late else StartDelay.COMPUTE,
            )
        )  # fmt: skip
    return found


def seen(
    run: Simulated,
    *,
    numbered: bool = False,
    clock_of: ClockOf = right_clock,
    hosts: Mapping[int, str] | None = None,
    lost: Sequence[tuple[int, int]] = (),
    missing: Sequence[int] = (),
    cut_after: Mapping[int, int] | None = None,
) -> Seen:
    """Return what is made of a run: ``lost`` are (rank, place) of operations that left no event."""
    ranks, exposed = [], []
    for rank, parts in run.parts.items():
        if rank in missing:
            continue
        listed = operations(parts, clock_of(rank), numbered=numbered)
        kept = [o for place, o in enumerate(listed) if (rank, place) not in lost]
        if cut_after is not None and rank in cut_after:
            kept = kept[: cut_after[rank]]
        ranks.append(RankCollectives(rank, (hosts or {}).get(rank, "one"), CollectiveTable.of(kept)))
        clock = clock_of(rank)
        computing = Spans.from_pairs(
            (clock(t * MS), clock((t + 1) * MS)) for t in sorted(run.computing[rank])
        )
        exposed.append(Spans.from_pairs((o.start_ns, o.end_ns) for o in kept) - computing)
    matching = match_collectives(ranks, len(run.parts))
    arrivals = arrivals_by_rank(matching, ranks)
    splits, waits = {}, []
    for rank, spans in zip(ranks, exposed, strict=True):
        waits.append(exposed_waits(spans, rank.table, arrivals[rank.rank]))
        split = split_exposed(spans, rank.table, arrivals[rank.rank])
        (splits[rank.rank],) = split.in_windows([-(1 << 62)], [1 << 62])
    return Seen(matching, assign_blame(matching, ranks, waits), splits)


def true_split(run: Simulated, rank: int) -> tuple[int, int]:
    """Return the exposed ticks of a rank in which data moves, and in which it waits: tick by tick."""
    transfer = wait = 0
    for tick in range(max(part.end for part in run.parts[rank])):
        if tick in run.computing[rank]:
            continue
        running = [part for part in run.parts[rank] if part.start <= tick < part.end]
        arrived = [
            all(other.start <= tick for other in run.meeting(part.group, part.number).values())
            for part in running
        ]
        transfer += any(arrived)
        wait += bool(arrived) and not any(arrived)
    return transfer, wait


def true_waits(run: Simulated) -> set[tuple[tuple[int, ...], int, int, int]]:
    """Return (group, rank, start, wait) of every part, in ticks."""
    found = set()
    for rank, parts in run.parts.items():
        for part in parts:
            latest = max(other.start for other in run.meeting(part.group, part.number).values())
            found.add((part.group, rank, part.start, latest - part.start))
    return found


def seen_waits(what: Matching) -> set[tuple[tuple[int, ...], int, int, int]]:
    found = set()
    for one in collectives(what):
        for rank, start, wait in zip(one.ranks, one.start_ns, one.wait_ns, strict=True):
            found.add((one.group.ranks, rank, round(start / MS), round(wait / MS)))
    return found


def assert_all_is_true(run: Simulated, found: Seen) -> None:
    assert found.matching.limits == ()
    assert seen_waits(found.matching) == true_waits(run)
    for rank, split in found.splits.items():
        transfer, wait = true_split(run, rank)
        assert (round(split.transfer_ns / MS), round(split.wait_ns / MS)) == (transfer, wait)
        assert round(split.unsplit_ns / MS) == 0


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "by-order"])
def test_waits_transfers_and_exposure_are_exact(shape: tuple[int, int], numbered: bool) -> None:
    for seed in SEEDS:
        run = simulate(shape[0] * shape[1], uneven_program(seed, *shape))
        assert_all_is_true(run, seen(run, numbered=numbered))


@pytest.mark.parametrize("shape", MESHES)
def test_one_delay_explains_all_waiting_wherever_it_shows(shape: tuple[int, int]) -> None:
    for seed in SEEDS:
        program, late = delayed(balanced_program(seed, *shape), seed, shape[0] * shape[1], 30)
        found = seen(simulate(shape[0] * shape[1], program)).blame
        arrivals = list(late_arrivals(found))
        assert arrivals
        assert {arrival.culprit.rank for arrival in arrivals} == {late}
        assert {arrival.culprit.lateness for arrival in arrivals} == {Lateness.COMPUTE}


def test_seconds_between_clocks_and_slow_drift_change_nothing() -> None:
    def skewed(rank: int) -> Callable[[int], int]:
        # Host 1 is 3.2 s ahead and gains 100 us a second.
        return lambda time: time if rank < 2 else time + 3_200_000_000 + time // 10_000

    for seed in SEEDS:
        run = simulate(4, uneven_program(seed, 2, 2, steps=40))
        found = seen(run, clock_of=skewed, hosts={0: "a", 1: "a", 2: "b", 3: "b"})
        assert_all_is_true(run, found)


def test_unnamed_hosts_are_shifted_only_where_the_ends_demand_it() -> None:
    run = simulate(4, uneven_program(1, 2, 2))
    unnamed = dict.fromkeys(range(4), "")
    assert not seen(run, hosts=unnamed).matching.clock.errors
    apart = seen(run, hosts=unnamed, clock_of=lambda rank: lambda time: time + rank * 1_700_000_000)
    assert len(apart.matching.clock.errors) == 4
    assert_all_is_true(run, apart)


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "by-order"])
def test_one_lost_event_costs_that_event_only(numbered: bool) -> None:
    for seed in SEEDS:
        run = simulate(4, uneven_program(seed, 2, 2))
        for rank, place in ((0, 0), (3, 1), (2, len(run.parts[2]) // 2)):
            lost = run.parts[rank][place]
            found = seen(run, numbered=numbered, lost=[(rank, place)])
            expected = {w for w in true_waits(run) if not _is_part_of(run, w, lost)}
            whole = [one for one in collectives(found.matching) if one.complete]
            waits = {
                (one.group.ranks, r, round(s / MS), round(w / MS))
                for one in whole
                for r, s, w in zip(one.ranks, one.start_ns, one.wait_ns, strict=True)
            }
            assert waits == expected


def _is_part_of(run: Simulated, wait: tuple[tuple[int, ...], int, int, int], lost: Part) -> bool:
    meeting = run.meeting(lost.group, lost.number)
    return wait[0] == lost.group and wait[1] in meeting and meeting[wait[1]].start == wait[2]


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "by-order"])
def test_a_missing_rank_that_is_not_late_changes_no_wait_of_the_others(numbered: bool) -> None:
    for seed in SEEDS:
        program, late = delayed(balanced_program(seed, 2, 4), seed, 8, 30)
        run = simulate(8, program)
        missing = (late + 3) % 8
        full, part = seen(run, numbered=numbered), seen(run, numbered=numbered, missing=[missing])
        for rank, split in part.splits.items():
            assert split.wait_ns == pytest.approx(full.splits[rank].wait_ns, rel=0.02)
        roots = {arrival.culprit.rank for arrival in late_arrivals(part.blame)}
        # Where the way to the cause led through the missing rank, the chain ends before it.
        assert late in roots or missing in {r for a in late_arrivals(full.blame) for r in _ranks(a.chain)}
        partial = [one for one in collectives(part.matching) if not one.complete]
        assert {missing in one.group.ranks for one in partial} == {True}


def _ranks(chain: Sequence[object]) -> list[int]:
    return [link.rank for link in chain]  # type: ignore[attr-defined]


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "by-order"])
def test_a_truncated_rank_costs_only_what_it_lacks(numbered: bool) -> None:
    for seed in SEEDS:
        run = simulate(4, uneven_program(seed, 2, 2))
        kept = 2 * len(run.parts[1]) // 3
        found = seen(run, numbered=numbered, cut_after={1: kept})
        before = {part.number for part in run.parts[1][:kept]}
        for one in collectives(found.matching):
            assert one.complete == (1 not in one.group.ranks or 1 in one.ranks)
        whole = [one for one in collectives(found.matching) if one.complete and 1 in one.group.ranks]
        assert len(whole) == len(before)
        assert np.isin(np.concatenate([one.start_ns for one in whole]) // MS, list(_starts(run))).all()


def _starts(run: Simulated) -> set[int]:
    return {part.start for parts in run.parts.values() for part in parts}
