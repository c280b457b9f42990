"""What one rank alone runs in few steps, while the others wait for it, is named with its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.testing.lanes import parse_lanes

STEPS = 7
LATE = """
step: 100
compute    0-30 x20  60-90 x10
allreduce  30-60 1MiB
rank 0 step 2:
  compute    30-60 x20
  allreduce  60-90 1MiB
rank 1 step 2:
  compute    0-30 x20
  allreduce  30-90 1MiB
rank 0 step 4:
  compute    30-60 x20
  allreduce  60-90 1MiB
rank 1 step 4:
  compute    0-30 x20
  allreduce  30-90 1MiB
"""


def diagnosed(folder: Path, ranges: dict[int, Sequence[tuple[float, float]]]) -> Diagnosis:
    """Diagnose two ranks of which rank 0 is 30 ms late in steps 2 and 4.

    ``ranges`` are the times in which each rank is in ``evaluate``.
    """
    for rank, builder in enumerate(parse_lanes(LATE, ranks=2, device=None, steps=STEPS)):
        for start, end in ranges.get(rank, ()):
            builder.host("evaluate", start, end, category="user_annotation")
        builder.write(folder / f"rank-{rank}.json")
    return diagnose([folder], Options(jobs=1))


@pytest.mark.parametrize(
    ("ranges", "steps"),
    [
        ([(200, 230), (400, 430)], "in steps 2, 4"),
        ([(195, 230), (395, 430)], "in steps 1, 3"),  # it begins as the step before ends
        ([(200, 230), (400, 430), (600, 602)], "every 2 steps (2, 4, 6)"),
    ],
)
def test_what_a_rank_alone_runs_while_the_others_wait(
    tmp_path: Path, ranges: list[tuple[float, float]], steps: str
) -> None:
    first = diagnosed(tmp_path, {0: ranges}).findings[0]
    assert first.rule_id == "occasional-rank-work"
    assert first.message.startswith(f"Rank 0 alone runs the range `evaluate` {steps}; rank 1 waits meanwhile")
    assert first.ranks == (0,)
    # 30 ms in two of seven steps
    assert first.gain is not None
    assert first.gain.size_ms == pytest.approx(60 / 7, rel=0.01)


@pytest.mark.parametrize(
    "ranges",
    [
        {},
        {1: [(200, 230), (400, 430)]},  # the rank that waits
        {0: [(100 * step, 100 * step + 30) for step in range(STEPS)]},  # a part of every step
        {0: [(200, 210), (400, 410)]},  # a third of what is waited
        {rank: [(200, 230), (400, 430)] for rank in (0, 1)},
    ],
)
def test_other_ranges_are_not_named(tmp_path: Path, ranges: dict[int, list[tuple[float, float]]]) -> None:
    diagnosis = diagnosed(tmp_path, ranges)
    assert set(diagnosis.facts["straggler_rare_code"].values.values()) <= {"none"}
    assert "occasional-rank-work" not in {one.rule_id for one in diagnosis.findings}


@pytest.mark.parametrize(("stacks", "named"), [((0,), False), ((0, 1), True)])
def test_a_function_is_compared_with_ranks_that_recorded_functions(
    tmp_path: Path, stacks: tuple[int, ...], named: bool
) -> None:
    for rank, builder in enumerate(parse_lanes(LATE, ranks=2, device=None, steps=STEPS)):
        if rank in stacks:
            builder.host("train.py(9): main", 0, 100 * STEPS, category="python_function")
        for start in (200, 400) if rank == 0 else ():
            builder.host("train.py(3): evaluate", start, start + 30, category="python_function")
        builder.write(tmp_path / f"rank-{rank}.json")
    told = {one.rule_id for one in diagnose([tmp_path], Options(jobs=1)).findings}
    assert ("occasional-rank-work" in told) == named
