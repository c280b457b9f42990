"""Whatever the tables of the ranks hold, matching them keeps its promises."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.ranks.late_arrivals import collectives, late_arrivals
from tracedoc.ranks.bandwidth import Seat, group_curves, transfers
from tracedoc.ranks.matching import RankCollectives, match_collectives
from tracedoc.ranks.waiting import arrivals_by_rank, assign_blame, exposed_waits, split_exposed
from tracedoc.spans import Spans
from tracedoc.timeline.collective_table import CollectiveOp, CollectiveTable, StartDelay

OPS = ("all_reduce", "all_gather", "broadcast", "send", "recv", "all_to_all", "barrier", "unknown")
GROUPS = ((), (0, 1), (1, 2), (0, 1, 2, 3), (2, 0), (7, 8), (0, 0, 1))


def operation(
    draw: random.Random, ops: list[str], groups: list[tuple[int, ...]], numbers: tuple[int | None, ...]
) -> CollectiveOp:
    start = 10**18 + draw.randrange(draw.choice((10**7, 10**9)))
    group = draw.choice(groups)
    return CollectiveOp(
        op=draw.choice(ops),
        group=group,
        group_name="tp",
        group_size=draw.choice((None, len(group))),
        nbytes=draw.choice((1024, 1024, None, 0, 10**12)),
        dtype="Float",
        seq=draw.choice(numbers),
        stream=draw.choice((7, 20)),
        start_ns=start,
        end_ns=start + draw.choice((10**9, 10**9, 10**9, 10**6, 0)),
        launch_ns=draw.choice((None, start - 10**5)),
        step=draw.choice((None, 1, 1, 1)),
        peer=draw.choice((None, 0, 1, 9)),
        held=draw.choice(list(StartDelay)),
    )


@pytest.mark.parametrize("seed", range(80))
def test_matching_never_fails_and_its_parts_fit(seed: int) -> None:
    draw = random.Random(seed)
    ops, groups = draw.sample(OPS, draw.choice((1, 1, 3))), draw.sample(GROUPS, draw.choice((1, 2)))
    numbers = draw.choice(((None,), (1, 2, 3, 4, 5), (None, 1)))
    hosts = draw.choice((("a",), ("a",), ("",), ("", "a", "b")))
    ranks = [
        RankCollectives(
            rank,
            draw.choice(hosts),
            CollectiveTable.of(
                [operation(draw, ops, groups, numbers) for _ in range(draw.choice((0, 1, 20, 20, 20)))]
            ),
        )
        for rank in sorted(draw.sample(range(5), draw.randint(1, 5)))
    ]
    matching = match_collectives(ranks, draw.choice((None, 4, len(ranks))))
    parts = list(zip(matching.part_rank.tolist(), matching.part_row.tolist(), strict=True))
    assert len(set(parts)) == len(parts)
    for one in collectives(matching):
        assert len(set(one.ranks)) == len(one.ranks) >= 2
        assert set(one.ranks) <= set(one.group.ranks)
        assert one.complete == (len(one.ranks) == one.group.size)
    assert all(ns >= 0 for one in collectives(matching) for ns in one.wait_ns)
    arrivals = arrivals_by_rank(matching, ranks)
    waits = []
    for rank in ranks:
        exposed = Spans.of(rank.table.start_ns, rank.table.end_ns)
        waits.append(exposed_waits(exposed, rank.table, arrivals[rank.rank]))
        (split,) = split_exposed(exposed, rank.table, arrivals[rank.rank]).in_windows([0], [1 << 62])
        total = split.transfer_ns + split.wait_ns + split.pipeline_wait_ns + split.unsplit_ns
        assert total == exposed.total_ns
    blame = assign_blame(matching, ranks, waits)
    assert (blame.follows < np.arange(len(matching))).all()
    for late in late_arrivals(blame):
        assert late.chain[0].rank == late.collective.last_rank
    seats = {rank.rank: Seat("NVIDIA H200", "", 0) for rank in ranks}
    assert (transfers(matching, group_curves(matching, seats)).gbps >= 0).all()
