"""Who is to blame for waiting: chains worked out by hand."""

from __future__ import annotations

import pytest

from tests.ranks.late_arrivals import Link, late_arrivals
from tracedoc.ranks.matching import RankCollectives, match_collectives
from tracedoc.ranks.waiting import Blame, Lateness, arrivals_by_rank, assign_blame, exposed_waits
from tracedoc.spans import Spans
from tracedoc.timeline.collective_table import CollectiveOp, CollectiveTable, StartDelay

MS = 1_000_000


def operation(group: tuple[int, ...], start: int, end: int, launch: int, held: StartDelay) -> CollectiveOp:
    """Return an all-reduce of ``group`` with times in ms."""
    name = "_".join(map(str, group))
    return CollectiveOp(
        "all_reduce", group, name, len(group), 1024, "Float", None, 20, start * MS, end * MS, launch * MS, 1,
        held=held,
    )  # fmt: skip


def blame(*by_rank: list[CollectiveOp]) -> Blame:
    """Return the blame among ranks of one host, all of whose communication is exposed."""
    ranks = [RankCollectives(i, "a", CollectiveTable.of(listed)) for i, listed in enumerate(by_rank)]
    matching = match_collectives(ranks, len(ranks))
    arrivals = arrivals_by_rank(matching, ranks)
    exposed = [Spans.of(rank.table.start_ns, rank.table.end_ns) for rank in ranks]
    waits = [
        exposed_waits(e, rank.table, arrivals[rank.rank]) for e, rank in zip(exposed, ranks, strict=True)
    ]
    return assign_blame(matching, ranks, waits)


def test_a_rank_that_computed_longer_is_compute_late() -> None:
    found = blame(
        [operation((0, 1), 0, 12, 0, StartDelay.LAUNCH)],
        [operation((0, 1), 10, 12, 1, StartDelay.COMPUTE)],
    )
    (late,) = late_arrivals(found)
    assert late.chain == (Link(1, 0, Lateness.COMPUTE, 10 * MS),)
    assert (late.cost_ns, late.exposed_cost_ns) == ({0: 10 * MS}, {0: 10 * MS})
    assert found.exposed_cost_ns().tolist() == [0, 10 * MS]


def test_a_rank_whose_host_launched_after_the_peers_is_host_late() -> None:
    found = blame(
        [operation((0, 1), 0, 12, 0, StartDelay.LAUNCH)],
        [operation((0, 1), 10, 12, 9, StartDelay.COMPUTE)],
    )
    (late,) = late_arrivals(found)
    assert late.culprit.lateness == Lateness.HOST


def test_blame_goes_through_the_group_in_which_the_late_rank_was_waiting() -> None:
    # Tensor parallel pairs (0, 1) and (2, 3), data parallel pairs (0, 2) and (1, 3). Rank 3 computes until
    # 40 instead of 10, so that rank 2 waits for it; both come 30 ms late to their data parallel groups.
    found = blame(
        [operation((0, 1), 10, 12, 1, StartDelay.COMPUTE), operation((0, 2), 20, 53, 2, StartDelay.COMPUTE)],
        [operation((0, 1), 10, 12, 1, StartDelay.COMPUTE), operation((1, 3), 20, 53, 2, StartDelay.COMPUTE)],
        [operation((2, 3), 10, 42, 1, StartDelay.COMPUTE), operation((0, 2), 50, 53, 2, StartDelay.COMPUTE)],
        [operation((2, 3), 40, 42, 1, StartDelay.COMPUTE), operation((1, 3), 50, 53, 2, StartDelay.COMPUTE)],
    )
    chains = {late.collective.group.ranks: late.chain for late in late_arrivals(found)}
    assert [link.rank for link in chains[2, 3]] == [3]
    assert [link.rank for link in chains[0, 2]] == [2, 3]
    assert [link.rank for link in chains[1, 3]] == [3]
    assert found.exposed_cost_ns().tolist() == [0, 0, 0, 90 * MS]


def test_a_rank_behind_another_operation_of_its_stream_is_queued_and_that_one_is_followed() -> None:
    # Rank 1 stands behind an operation with rank 2, who came 30 ms late to it.
    found = blame(
        [operation((0, 1), 5, 42, 1, StartDelay.COMPUTE)],
        [
            operation((1, 2), 4, 40, 1, StartDelay.COMPUTE),
            operation((0, 1), 40, 42, 2, StartDelay.COMMUNICATION),
        ],
        [operation((1, 2), 34, 40, 34, StartDelay.LAUNCH)],
    )
    late = next(late for late in late_arrivals(found) if late.collective.group.ranks == (0, 1))
    assert [(link.rank, link.lateness) for link in late.chain] == [
        (1, Lateness.QUEUED),
        (2, Lateness.HOST),
    ]


def test_ranks_that_come_together_are_nobodys_fault() -> None:
    found = blame(
        [operation((0, 1), 0, 2, 0, StartDelay.LAUNCH)],
        [operation((0, 1), 0, 2, 0, StartDelay.LAUNCH)],
    )
    assert list(late_arrivals(found)) == []


def test_a_wait_that_the_median_peer_had_as_well_is_no_excuse() -> None:
    # Ranks 0, 1 and 2 each waited 10 ms for another one; then rank 0 computes 15 ms longer than its peers.
    everyone = (0, 1, 2, 3)
    waited = [
        [
            operation((rank, rank + 4), 1, 12, 0, StartDelay.LAUNCH),
            operation(everyone, 30, 50, 2, StartDelay.COMPUTE),
        ]
        for rank in (0, 1, 2)
    ]
    waited[0][1] = operation(everyone, 45, 50, 2, StartDelay.COMPUTE)
    found = blame(
        *waited,
        [operation((3, 7), 1, 2, 0, StartDelay.LAUNCH), operation(everyone, 30, 50, 2, StartDelay.COMPUTE)],
        *([operation((rank, rank + 4), 11, 12, 11, StartDelay.LAUNCH)] for rank in (0, 1, 2)),
        [operation((3, 7), 1, 2, 0, StartDelay.LAUNCH)],
    )
    late = next(late for late in late_arrivals(found) if late.collective.group.ranks == everyone)
    assert late.chain == (Link(0, late.chain[0].operation, Lateness.COMPUTE, 15 * MS),)


def test_a_wait_before_the_group_last_met_is_no_excuse() -> None:
    # Rank 0 waits 30 ms for rank 2 and meets rank 1 in time; then it computes until 70.
    pair = (0, 1)
    found = blame(
        [
            operation(pair, 0, 2, 0, StartDelay.LAUNCH),
            operation((0, 2), 5, 37, 1, StartDelay.COMPUTE),
            operation(pair, 38, 40, 2, StartDelay.COMPUTE),
            operation(pair, 70, 72, 3, StartDelay.COMPUTE),
        ],
        [
            operation(pair, 0, 2, 0, StartDelay.LAUNCH),
            operation(pair, 38, 40, 1, StartDelay.COMPUTE),
            operation(pair, 42, 72, 2, StartDelay.COMPUTE),
        ],
        [operation((0, 2), 35, 37, 1, StartDelay.COMPUTE)],
    )
    late = [late for late in late_arrivals(found) if late.collective.group.ranks == pair]
    assert [[link.rank for link in one.chain] for one in late] == [[0]]
    assert [one.cost_ns for one in late] == [{1: 28 * MS}]


@pytest.mark.parametrize(("launch", "lateness"), [(29, Lateness.COMPUTE), (30, Lateness.HOST)])
def test_a_rank_is_late_by_what_it_comes_after_the_median_of_the_others(
    launch: int, lateness: Lateness
) -> None:
    # The others come at 0, 10 and 20. From 10 to 50 are 40 ms; half of them have passed at 30.
    starts = [(0, 0), (10, 1), (20, 1), (50, launch)]
    found = blame(*([operation((0, 1, 2, 3), start, 60, at, StartDelay.COMPUTE)] for start, at in starts))
    (late,) = late_arrivals(found)
    assert late.chain == (Link(3, 0, lateness, 40 * MS),)


def test_of_two_others_the_first_one_is_the_median() -> None:
    starts = [0, 10, 50]
    found = blame(*([operation((0, 1, 2), start, 60, 0, StartDelay.COMPUTE)] for start in starts))
    (late,) = late_arrivals(found)
    assert late.chain == (Link(2, 0, Lateness.COMPUTE, 50 * MS),)
