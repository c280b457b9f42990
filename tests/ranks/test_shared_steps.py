"""The steps in which ranks are compared, and the ranks of which no step is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.testing import TraceBuilder

STEP_MS = 100.0


def run(
    folder: Path,
    last: Mapping[int, int],
    *,
    lost: Mapping[int, int] | None = None,
    first: Mapping[int, int] | None = None,
) -> Diagnosis:
    """Diagnose ranks that show steps 0 to ``last`` whole, but for the kernels of step ``lost[rank]``.

    Steps are numbered from ``first[rank]`` on, where that is given.
    """
    for rank, count in last.items():
        builder = TraceBuilder(rank, len(last))
        for index in range(count + 2):  # the last one only closes the one before
            start = STEP_MS * index
            builder.step(index + (first or {}).get(rank, 0), start, start + 99)
            for place in range(10):
                at = start + 10 + 5 * place
                if (lost or {}).get(rank) == index and place in (4, 5):
                    builder.runtime("cudaLaunchKernel", at - 5, at - 4.9)
                else:
                    builder.kernel("gemm", at, at + 5, launch_ms=at - 5)
        builder.write(folder / f"rank-{rank}.json")
    return diagnose([folder], Options(jobs=1))


def steps(diagnosis: Diagnosis) -> dict[int, list[int]]:
    return {rank.rank: [step.index for step in rank.steps if step.complete] for rank in diagnosis.ranks}


def test_ranks_are_compared_in_the_steps_that_all_show(tmp_path: Path) -> None:
    assert steps(run(tmp_path, {0: 4, 1: 2})) == {0: [0, 1, 2], 1: [0, 1, 2]}


def test_a_step_that_lost_kernels_on_one_rank_is_analysed_on_none(tmp_path: Path) -> None:
    found = run(tmp_path, {0: 4, 1: 4}, lost={1: 1})
    assert steps(found) == {0: [2, 3, 4], 1: [2, 3, 4]}
    (limit,) = [one for one in found.limits if one.code == "lost-kernels"]
    # Two of the sixty launches of rank 1.
    assert limit.message == "rank 1: 3 % of the launched kernels are not in the trace"


def test_a_rank_that_ended_before_a_step_was_whole_is_left_out(tmp_path: Path) -> None:
    found = run(tmp_path, {0: 3, 1: 3, 2: -1})
    assert steps(found) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert found.summary.startswith("Rank 2 is left out: its records end before a step")
    assert {one.severity for one in found.findings} <= {"note"}


def test_a_rank_whose_steps_are_others_than_those_of_most_is_left_out(tmp_path: Path) -> None:
    found = run(tmp_path, {0: 3, 1: 3, 2: 3}, first={2: 50})
    assert steps(found) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert found.summary.startswith("Rank 2 is left out: its steps 50-54 are none of the others'")
    assert {one.severity for one in found.findings} <= {"note"}
