"""Collectives of several ranks, matched by hand."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from tests.ranks.late_arrivals import collectives
from tracedoc.ranks.group_guesses import with_guessed_groups
from tracedoc.ranks.matching import RankCollectives, match_collectives, pipeline_pairs
from tracedoc.ranks.waiting import Arrivals, arrivals_by_rank, split_exposed
from tracedoc.spans import Spans
from tracedoc.timeline.collective_table import NO_TIME, CollectiveOp, CollectiveTable
from tracedoc.trace.columns import ProcessGroup

MS = 1_000_000
REDUCE = CollectiveOp("all_reduce", (0, 1), "0", 2, 1024, "Float", None, 20, 0, 0, None, 1)


def operation(start: int, end: int, **changes: object) -> CollectiveOp:
    return replace(REDUCE, start_ns=start * MS, end_ns=end * MS, **changes)  # type: ignore[arg-type]


def ranks(
    first: list[CollectiveOp], second: list[CollectiveOp], hosts: tuple[str, str] = ("a", "a")
) -> list[RankCollectives]:
    tables = [CollectiveTable.of(listed) for listed in (first, second)]
    return [RankCollectives(0, hosts[0], tables[0]), RankCollectives(1, hosts[1], tables[1])]


def test_the_early_rank_waits_and_both_transfer() -> None:
    matching = match_collectives(ranks([operation(0, 10)], [operation(8, 10)]), 2)
    (found,) = collectives(matching)
    assert found.wait_ns == (8 * MS, 0)
    assert found.transfer_ns == 2 * MS
    assert found.last_rank == 1


def test_one_lost_event_does_not_shift_the_rest() -> None:
    first = [operation(0, 2), operation(3, 5), operation(6, 9), operation(10, 12, step=2)]
    second = [operation(0, 2), operation(7, 9), operation(11, 12, step=2)]
    matching = match_collectives(ranks(first, second), 2)
    assert [(c.step, c.start_ns) for c in collectives(matching)] == [
        (1, (0, 0)),
        (1, (6 * MS, 7 * MS)),
        (2, (10 * MS, 11 * MS)),
    ]


def test_threads_may_begin_operations_of_two_sizes_in_either_order() -> None:
    """The first of 1 KiB returns late on the second rank: its end is nearer to that of the next one."""
    first = [operation(0, 5), operation(1, 6, nbytes=4096), operation(6, 12)]
    second = [operation(2, 6, nbytes=4096), operation(3, 11), operation(10, 12)]
    found = collectives(match_collectives(ranks(first, second), 2))
    assert sorted(one.start_ns for one in found) == [(0, 3 * MS), (1 * MS, 2 * MS), (6 * MS, 10 * MS)]


def test_a_different_lost_event_on_each_rank_is_seen_by_the_ends() -> None:
    first = [operation(0, 2), operation(3, 5)]
    second = [operation(4, 5), operation(7, 9)]
    (found,) = collectives(match_collectives(ranks(first, second), 2))
    assert found.start_ns == (3 * MS, 4 * MS)


def test_sequence_numbers_survive_a_lost_event() -> None:
    first = [operation(0, 2, seq=7), operation(3, 5, seq=8)]
    second = [operation(4, 5, seq=8)]
    (found,) = collectives(match_collectives(ranks(first, second), 2))
    assert found.start_ns == (3 * MS, 4 * MS)


def test_a_group_with_a_missing_rank_is_matched_in_part() -> None:
    first, second = [operation(0, 10, group=(0, 1, 2))], [operation(4, 10, group=(0, 1, 2))]
    (found,) = collectives(match_collectives(ranks(first, second), 3))
    assert (found.complete, found.wait_ns) == (False, (4 * MS, 0))


def test_operations_that_end_before_their_peer_starts_are_no_match() -> None:
    first = [operation(start, start + 2) for start in (0, 10, 20)]
    second = [operation(start + 5, start + 7) for start in (0, 10, 20)]
    matching = match_collectives(ranks(first, second), 2)
    assert collectives(matching) == ()
    assert [limit.code for limit in matching.limits] == ["collectives-not-matched"]


def test_clocks_of_two_hosts_are_brought_together_by_the_ends() -> None:
    skew = 3_000  # ms: the second host's clock is three seconds ahead
    first = [operation(0, 10), operation(20, 30), operation(40, 50)]
    second = [
        operation(skew + 6, skew + 10),
        operation(skew + 28, skew + 30),
        operation(skew + 41, skew + 50),
    ]
    everyone = ranks(first, second, ("a", "b"))
    matching = match_collectives(everyone, 2)
    assert [c.wait_ns for c in collectives(matching)] == [(6 * MS, 0), (8 * MS, 0), (1 * MS, 0)]
    arrivals = arrivals_by_rank(matching, everyone)
    assert arrivals[0].latest_ns[0] == 6 * MS
    assert arrivals[1].latest_ns[0] == (skew + 6) * MS


def test_hosts_whose_ends_scatter_are_not_aligned() -> None:
    first = [operation(start, start + 10) for start in (0, 100, 200, 300)]
    second = [operation(start, start + 10) for start in (5, 150, 280, 302)]
    matching = match_collectives(ranks(first, second, ("a", "b")), 2)
    assert not matching.clock.aligned
    assert [limit.code for limit in matching.limits] == ["clocks-not-aligned"]


def test_exposed_time_splits_exactly_and_transfer_comes_first() -> None:
    waiting = operation(0, 10)  # the peer came at 6
    unknown = operation(4, 8, op="broadcast", stream=21)
    arrivals = Arrivals(np.array([6 * MS, NO_TIME]), np.array([True, False]), np.array([False, False]))
    spans = split_exposed(Spans.from_pairs([(0, 12 * MS)]), CollectiveTable.of([waiting, unknown]), arrivals)
    (split,) = spans.in_windows([0], [12 * MS])
    # 0-4 wait, 4-6 the broadcast runs beside the wait, 6-10 transfer, 10-12 belongs to no operation.
    assert (split.wait_ns, split.transfer_ns, split.unsplit_ns) == (4 * MS, 4 * MS, 4 * MS)


@pytest.mark.parametrize("world_size", [4, 8])
def test_without_groups_a_part_of_the_world_is_not_taken_for_all(world_size: int) -> None:
    bare = [operation(0, 10, group=(), group_name="", group_size=None)]
    assert collectives(match_collectives(ranks(bare, bare), world_size)) == ()
    assert len(collectives(match_collectives(ranks(bare, bare), 2))) == 1


def test_a_group_that_gloo_does_not_name_is_the_one_in_which_nobody_leaves_too_early() -> None:
    # Four ranks: pairs (0, 1) and (2, 3) gather at different times; the world reduces at 100.
    shard = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    everyone = []
    for rank, members in shard.items():
        late = 0 if rank < 2 else 20
        listed = [
            operation(
                start + late, start + late + 5, op="all_gather", group=(), group_name="", group_size=None
            )
            for start in (0, 40, 80)
        ]
        groups = (ProcessGroup("0", "default_pg", (0, 1, 2, 3), 4), ProcessGroup("1", "shard", members, 2))
        everyone.append(RankCollectives(rank, "a", CollectiveTable.of(listed), groups))
    filled = with_guessed_groups(everyone)
    assert [rank.table.kinds[0].group for rank in filled] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert len(match_collectives(filled, 4)) == 6
    assert len(match_collectives(everyone, 4)) == 0


def ending(ends: list[float], stream: int, size: int | None = None) -> list[CollectiveOp]:
    """Operations of 2 ms that end then, in ms, without a group, as of PyTorch before 2.2."""
    last = operation(0, 0, group=(), group_name="", group_size=size, stream=stream)
    return [replace(last, start_ns=int((end - 2) * MS), end_ns=int(end * MS)) for end in ends]


@pytest.mark.parametrize(("size", "pairs"), [(None, True), (2, True), (4, False)])
def test_where_no_group_is_listed_it_is_the_ranks_that_leave_together(size: int | None, pairs: bool) -> None:
    """Layers are split over pairs, the second of which takes 3 ms longer; then gradients are reduced."""
    layers, reduced = [10.0 * number for number in range(1, 9)], [[95.0, 97, 99], [95.0, 98, 99]]
    later = [end + number % 4 for number, end in enumerate(layers)]
    everyone = [
        RankCollectives(
            rank,
            "a",
            CollectiveTable.of(ending(ends, 20, size) + ending(reduced[rank % 2], 21)),
        )
        for rank, ends in enumerate((layers, layers, later, later))
    ]
    groups = [
        {kind.stream: kind.group for kind in rank.table.kinds} for rank in with_guessed_groups(everyone)
    ]
    assert [one[20] for one in groups] == ([(0, 1), (0, 1), (2, 3), (2, 3)] if pairs else [()] * 4)
    assert [one[21] for one in groups] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_ranks_whose_clocks_go_apart_leave_together() -> None:
    """The clock of the other host is 7 ms ahead, and gains 0.1 ms in each 10."""
    ends = [10.0 * number for number in range(1, 9)]
    drifting = [7 + 1.01 * end for end in ends]
    everyone = [
        RankCollectives(
            rank, host, CollectiveTable.of(ending(times, 20) + ending([one + 3 for one in times], 21))
        )
        for rank, (host, times) in enumerate([("a", ends), ("a", ends), ("b", drifting), ("b", drifting)])
    ]
    assert with_guessed_groups(everyone) == everyone


def p2p(op: str, peer: int, start: int, end: int) -> CollectiveOp:
    return operation(start, end, op=op, group=(0, 1), peer=peer)


def test_a_receive_waits_for_its_send_and_the_pair_forms_a_pipeline() -> None:
    first = [p2p("send", 1, 10, 12), p2p("recv", 1, 13, 30)]
    second = [p2p("recv", 0, 0, 12), p2p("send", 0, 28, 30)]
    everyone = ranks(first, second)
    matching = match_collectives(everyone, 2)
    assert [(c.op, c.ranks, c.wait_ns) for c in collectives(matching)] == [
        ("send_recv", (0, 1), (0, 10 * MS)),
        ("send_recv", (0, 1), (15 * MS, 0)),
    ]
    arrivals = arrivals_by_rank(matching, everyone)
    spans = split_exposed(Spans.from_pairs([(0, 12 * MS)]), everyone[1].table, arrivals[1])
    (split,) = spans.in_windows([0], [12 * MS])
    assert (split.pipeline_wait_ns, split.wait_ns, split.transfer_ns) == (10 * MS, 0, 2 * MS)


def test_a_ring_that_passes_data_one_way_is_no_pipeline() -> None:
    everyone = []
    for rank in range(3):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        listed = [
            replace(p2p("send", after, 10 + rank, 20), group=(0, 1, 2), stream=20),
            replace(p2p("recv", before, 10 + rank, 20), group=(0, 1, 2), stream=21),
        ]
        everyone.append(RankCollectives(rank, "a", CollectiveTable.of(listed)))
    matching = match_collectives(everyone, 3)
    assert len(matching) == 3
    assert not any(arrivals.pipeline.any() for arrivals in arrivals_by_rank(matching, everyone).values())


def test_ranks_that_disagree_on_an_operation_are_a_limit() -> None:
    first = [operation(0, 10, seq=1), operation(20, 30, seq=2)]
    second = [operation(0, 10, seq=1), operation(20, 30, seq=2, op="broadcast")]
    matching = match_collectives(ranks(first, second), 2)
    assert len(matching) == 1
    assert "collectives-disagree" in [limit.code for limit in matching.limits]


def test_a_broadcast_has_no_latest_start() -> None:
    first, second = [operation(0, 10, op="broadcast")], [operation(8, 10, op="broadcast")]
    everyone = ranks(first, second)
    matching = match_collectives(everyone, 2)
    assert len(matching) == 1
    assert not arrivals_by_rank(matching, everyone)[0].known.any()


@pytest.mark.parametrize(("members", "known"), [((0, 1), True), ((0, 1, 2), False)])
def test_the_sender_of_a_broadcast_of_gloo_waits_for_the_only_receiver(
    members: tuple[int, ...], known: bool
) -> None:
    """To more than one it sends by way of others, of which it does not wait for all."""
    everyone = [
        RankCollectives(
            rank, "a", CollectiveTable.of([operation(8 * rank, 20, op="broadcast", group=members)]), gloo=True
        )
        for rank in members
    ]
    matching = match_collectives(everyone, len(members))
    assert matching.has_latest_start.tolist() == [known]
    assert collectives(matching)[0].wait_ns[0] == 8 * (len(members) - 1) * MS


def test_ranks_that_disagree_on_a_size_are_a_limit_and_still_matched() -> None:
    first, second = [operation(0, 10, seq=1)], [operation(8, 10, seq=1, nbytes=4096)]
    matching = match_collectives(ranks(first, second), 2)
    assert [one.nbytes for one in collectives(matching)] == [4096]
    assert [limit.code for limit in matching.limits] == ["collectives-disagree"]


@pytest.mark.parametrize(
    "different",
    [
        {"op": "all_to_all", "nbytes": 4096},  # each rank sends what its peers need
        {"nbytes": None},  # one of the files does not say it
    ],
    ids=["all-to-all", "unknown on one rank"],
)
def test_sizes_that_may_differ_are_no_disagreement(different: dict[str, object]) -> None:
    op = different.get("op", "all_reduce")
    first, second = [operation(0, 10, seq=1, op=op)], [operation(8, 10, seq=1, **different)]
    matching = match_collectives(ranks(first, second), 2)
    assert len(matching) == 1
    assert matching.limits == ()


@pytest.mark.parametrize(("operations", "matched"), [(10, 10), (9, 8)])
def test_one_impossible_pair_in_ten_is_borne_and_one_in_nine_is_not(operations: int, matched: int) -> None:
    # The peer's second operation begins 0.5 ms after this rank has left it. By their ends it has no partner.
    first = [operation(10 * place, 10 * place + 2) for place in range(operations)]
    second = [operation(10 * place + 1, 10 * place + 2) for place in range(operations)]
    second[1] = replace(second[1], start_ns=12 * MS + MS // 2, end_ns=13 * MS)
    assert len(match_collectives(ranks(first, second), 2)) == matched


def test_broadcasts_tell_nothing_of_impossible_pairs() -> None:
    # One of five all-reduces is impossible; ten broadcasts beside them do not make it one of fifteen.
    first = [operation(10 * place, 10 * place + 2) for place in range(5)]
    second = [operation(10 * place + 1, 10 * place + 2) for place in range(5)]
    second[1] = replace(second[1], start_ns=12 * MS + MS // 2, end_ns=13 * MS)
    others = [operation(100 + 10 * place, 102 + 10 * place, op="broadcast") for place in range(10)]
    matching = match_collectives(ranks(first + others, second + others), 2)
    assert [one.op for one in collectives(matching)].count("all_reduce") == 4


def test_a_receive_whose_send_is_not_known_is_neither_waiting_nor_transfer() -> None:
    arrivals = Arrivals(np.array([NO_TIME]), np.array([False]), np.array([True]))
    table = CollectiveTable.of([p2p("recv", 0, 0, 12)])
    (split,) = split_exposed(Spans.from_pairs([(0, 12 * MS)]), table, arrivals).in_windows([0], [12 * MS])
    assert (split.pipeline_wait_ns, split.transfer_ns, split.unsplit_ns) == (0, 0, 12 * MS)


def bare(start: int, end: int, op: str, nbytes: int, peer: int | None = None) -> CollectiveOp:
    return operation(start, end, op=op, group=(), group_name="", group_size=None, nbytes=nbytes, peer=peer)


def test_groups_that_gloo_does_not_name_are_told_apart_by_the_sizes_in_them() -> None:
    """Tensor groups (0, 1) and (2, 3), data groups (0, 2) and (1, 3), of one description."""
    everyone = []
    for rank, (tensor, data) in enumerate(
        [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))]
    ):
        late = 30 if rank > 1 else 0
        listed = [bare(start + late, start + late + 5, "all_reduce", 4096) for start in (0, 100, 200)]
        listed += [
            bare(60 + start + rank % 2 * 20, 75 + start + rank % 2 * 20, "all_reduce", 8)
            for start in (0, 100, 200)
        ]
        groups = (ProcessGroup("1", "undefined", tensor, 2), ProcessGroup("3", "undefined", data, 2))
        everyone.append(RankCollectives(rank, "a", CollectiveTable.of(listed), groups))
    filled = with_guessed_groups(everyone)
    found = {(rank.rank, row.nbytes, row.group) for rank in filled for row in rank.table}
    assert {(rank, size): group for rank, size, group in found} == {
        **{(0, 4096): (0, 1), (1, 4096): (0, 1), (2, 4096): (2, 3), (3, 4096): (2, 3)},
        **{(0, 8): (0, 2), (1, 8): (1, 3), (2, 8): (0, 2), (3, 8): (1, 3)},
    }


def test_ranks_of_gloo_sends_are_counted_within_the_group_in_which_all_are_received() -> None:
    """Two pipelines of two stages: ranks 0 and 2, 1 and 3; rank 1 of their groups is the second stage."""
    everyone = []
    for rank in range(4):
        stages = (rank % 2, rank % 2 + 2)
        there, back = ("send", "recv") if rank < 2 else ("recv", "send")
        peer = 1 if rank < 2 else 0
        listed = [
            bare(start, start + 5, op, 64, peer)
            for start, op in ((0, there), (10, there), (20, back), (30, back))
        ]
        groups = (ProcessGroup("0", "default_pg", (0, 1, 2, 3), 4), ProcessGroup("1", "pp", stages, 2))
        everyone.append(RankCollectives(rank, "a", CollectiveTable.of(listed), groups))
    filled = with_guessed_groups(everyone)
    matching = match_collectives(filled, 4)
    assert {group.ranks for group in matching.groups} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert len(matching) == 8


def chain(*, peers: bool, late_ms: int = 0) -> list[RankCollectives]:
    """Three stages that pass three micro-batches on and gradients back, on hosts ``late_ms`` apart."""
    found = []
    for rank in range(3):
        listed = []
        for number in range(3):
            at = 100 * number + late_ms * rank
            for op, other, end in (
                ("recv", rank - 1, 20 * rank), ("send", rank + 1, 20 * rank + 20),
                ("recv", rank + 1, 90 - 10 * rank), ("send", rank - 1, 100 - 10 * rank),
            ):  # fmt: skip
                start = end - (2 if op == "send" else 15)
                if 0 <= other < 3:
                    way = 2 * (other > rank) + (op == "send")
                    one = bare(at + start, at + end, op, 4096, other if peers else None)
                    listed.append(replace(one, stream=way, step=number))
        found.append(RankCollectives(rank, "a", CollectiveTable.of(listed)))
    return found


@pytest.mark.parametrize("peers", [True, False], ids=["peers are named", "ends tell the peers"])
def test_sends_that_name_no_group_find_their_receives(peers: bool) -> None:
    matching = match_collectives(with_guessed_groups(chain(peers=peers)), 3)
    assert {group.ranks for group in matching.groups} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert len(matching) == 12


def test_without_peers_nothing_is_known_on_hosts_whose_clocks_differ() -> None:
    assert len(match_collectives(with_guessed_groups(chain(peers=False, late_ms=3)), 3)) == 0


def test_an_exchange_joins_the_neighbours_that_also_send_one_way() -> None:
    first = [p2p("send", 1, 0, 5), p2p("send_recv", 1, 8, 20), p2p("recv", 1, 25, 30)]
    second = [p2p("recv", 0, 1, 5), p2p("send_recv", 0, 15, 20), p2p("send", 0, 28, 30)]
    matching = match_collectives(ranks(first, second), 2)
    assert [(c.op, c.wait_ns) for c in collectives(matching)] == [
        ("send_recv", (MS, 0)), ("send_recv", (7 * MS, 0)), ("send_recv", (3 * MS, 0)),
    ]  # fmt: skip
    assert pipeline_pairs(matching.groups) == [True, True, True]
    alone = match_collectives(ranks(first[1:2], second[1:2]), 2)
    assert pipeline_pairs(alone.groups) == [False]  # as two ranks of a ring do it
