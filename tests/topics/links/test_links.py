"""What is matched over ranks, and how far their clocks agree."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.collector.nccl import summarise_log
from tracedoc.ranks.matching import Matching
from tracedoc.testing import TraceBuilder
from tracedoc.testing.cases import write_job
from tracedoc.topics.links.path import path_reason


def matched(folder: Path, builders: list[TraceBuilder]) -> Matching:
    for builder in builders:
        builder.write(folder / f"rank-{builder.rank}.json")
    return tracedoc.measure([folder]).measurements.run.matching


def test_a_collective_that_one_rank_lost_is_not_matched(tmp_path: Path) -> None:
    builders = []
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in (1, 2, 3):
            start = 100 * index
            builder.step(index, start, start + 99).backward(start + 50, start + 60)
            builder.kernel("k", start + 10, start + 20)
            for number in range(2):
                if (rank, index, number) != (1, 2, 1):
                    at = start + 30 + 10 * number
                    builder.collective("allreduce", at, at + 5, seq=2 * index + number)
        builders.append(builder)
    # 6 + 5 collectives, of which one has no partner.
    assert matched(tmp_path, builders).part_row.size == 10


def test_what_remains_between_two_clocks(tmp_path: Path) -> None:
    builders = []
    for rank, ahead_ms in enumerate((0.0, 700.0)):
        builder = TraceBuilder(rank, 2, host=f"node{rank}")
        for index in (1, 2, 3):
            start = 100 * index + ahead_ms
            builder.step(index, start, start + 99).backward(start + 50, start + 60)
            builder.kernel("k", start + 10, start + 20)
            # Rank 1 leaves 0, 0.01 and 0.04 ms later than its clock's distance alone.
            end = start + 40 + (0.0, 0.01, 0.04)[index - 1] * rank
            builder.collective("allreduce", start + 30, end)
        builders.append(builder)
    # The median is 0.01 ms more than the distance; what is left is 0.01, 0 and 0.03 ms.
    assert matched(tmp_path, builders).clock.residual_ns == 10_000


SHARED = "the groups tp and dp share mlx5_0, 50 % of the time at once"


def log_of(cards: dict[int, list[int]]) -> list[str]:
    """The lines of NCCL 2.21 for groups of so many ranks, each of which takes some of two cards."""
    lines = ["a:4:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB bond0:10.1.0.4<0>"]
    for size, taken in cards.items():
        group = f"comm 0x{size} rank 0 nranks {size} cudaDev 0 commId 0x{size}"
        lines.append(f"a:4:{size} [0] NCCL INFO ncclCommInitRankConfig {group} - Init START")
        for card in taken:
            link = f"Channel 0{card}/0 : 0[0] -> 1[1] [send] via NET/IB/{card}/GDRDMA"
            lines.append(f"a:4:{size} [0] NCCL INFO {link}")
    return lines


@pytest.mark.parametrize(
    ("cards", "begins_ms", "reason"),
    [
        ({2: [0], 4: [0]}, 40, SHARED),
        ({2: [0], 4: [0]}, 55, "none"),
        ({2: [0], 4: [1]}, 40, "none"),
        ({2: [0], 4: [0, 1]}, 40, "none"),
        ({}, 40, "none"),
    ],
    ids=["at once", "one after the other", "a card each", "two cards of one", "no log"],
)
def test_two_groups_share_a_card(
    cards: dict[int, list[int]], begins_ms: float, reason: str, tmp_path: Path
) -> None:
    """The first sends from 30 to 50 ms, the second for 20 ms from when it begins."""
    for rank in range(4):
        builder = TraceBuilder(rank, 4)
        for index in (1, 2, 3):
            start = 100 * index
            builder.step(index, start, start + 99).backward(start + 5, start + 8)
            builder.kernel("k", start + 10, start + 20)
            mine = (0, 1) if rank < 2 else (2, 3)
            pair, begin = "tp" if rank < 2 else "tp2", start + begins_ms
            builder.collective("allreduce", start + 30, start + 50, group=pair, ranks=mine)
            builder.collective("allreduce", begin, begin + 20, group="dp", ranks=range(4), stream=21)
        builder.write(tmp_path / f"rank-{rank}.json")
    write_job(tmp_path, range(4), {"nccl": summarise_log(log_of(cards))}, "")
    assert path_reason(tracedoc.measure([tmp_path]).measurements.run) == reason
