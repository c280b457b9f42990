"""Which ranks record a step with Python stacks, and which step that is."""

from __future__ import annotations

import pytest

from tracedoc.collector.options import Options
from tracedoc.collector.recorder import common_step, is_source_rank


def recording(world_size: int, **options: object) -> list[int]:
    chosen = Options(folder="", **options)  # type: ignore[arg-type]
    return [rank for rank in range(world_size) if is_source_rank(chosen, rank, world_size)]


@pytest.mark.parametrize(
    ("world_size", "ranks"),
    [
        (1, [0]),
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (9, [0, 2, 4, 6, 8]),
        (16, [0, 2, 4, 6, 8, 10, 12, 14]),
        (24, [0, 4, 8, 12, 16, 20]),
        (64, [0, 8, 16, 24, 32, 40, 48, 56]),
        (1024, [0, 128, 256, 384, 512, 640, 768, 896]),
    ],
)
def test_at_most_eight_ranks_record_and_the_first_of_a_node_before_others(
    world_size: int, ranks: list[int]
) -> None:
    assert recording(world_size) == ranks


def test_of_ranks_that_were_asked_for_at_most_eight_record() -> None:
    assert recording(1024, ranks="0,777") == [0, 777]
    assert recording(64, ranks="40-55") == [40, 42, 44, 46, 48, 50, 52, 54]
    assert recording(4, ranks="2,9") == [2]
    assert recording(4, ranks="9") == []


@pytest.mark.parametrize("options", [{"source_step": False}, {"with_stack": True}])
def test_no_rank_records_a_step_more_where_that_is_not_wanted(options: dict[str, bool]) -> None:
    assert recording(4, **options) == []


@pytest.mark.parametrize(
    ("ready", "step"), [(20, 22), (22, 22), (23, 26), (26, 26), (27, 30), (31, 38), (38, 38), (122, 150)]
)
def test_ranks_that_are_ready_at_about_the_same_time_record_the_same_step(ready: int, step: int) -> None:
    """22 is the earliest; then it may be 4, 8, 16, ... steps later."""
    assert common_step(22, ready) == step
