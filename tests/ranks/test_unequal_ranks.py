"""Ranks with unequal work and GPUs of unequal speed, in whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tracedoc.diagnosis import Diagnosis, Finding
from tracedoc.pipeline import Options, diagnose
from tracedoc.testing import TraceBuilder

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
PRODUCTS = ("nvjet_tst_128x256_64x4", "nvjet_tst_192x192_64x4", "nvjet_tst_256x128_64x3")
STEP_MS = 100.0
TOKENS = 1000
"""Thread blocks of an elementwise kernel in a step with a batch of the usual size."""


def write_run(
    directory: Path,
    ranks: int,
    compute_ms: Callable[[int, int], float],
    tokens: Callable[[int, int], int] = lambda rank, step: TOKENS,
    *,
    steps: int = 6,
    shapes: bool = False,
    group: str = "0",
) -> Path:
    """Draw steps of 100 ms: twelve products, one elementwise kernel, and an all-reduce that ends together.

    ``compute_ms(rank, step)`` is how long all kernels take, ``tokens(rank, step)`` what they work on.
    """
    for rank in range(ranks):
        builder = TraceBuilder(rank, ranks)
        for step in range(steps + 1):
            now, size = STEP_MS * step, tokens(rank, step)
            builder.step(step, now - 50.0, now + 49.9).backward(now - 20.0, now + 20.0)
            part = (compute_ms(rank, step) if step < steps else 60.0) / 13
            for number in range(13):
                dims = [[size, 512], [512, 512]] if shapes and number < 12 else None
                builder.kernel(
                    PRODUCTS[number % 3] if number < 12 else ELEMENTWISE,
                    now + number * part, now + (number + 1) * part, launch_ms=now - 45.0 + number * 0.05,
                    grid=(132, 1, 1) if number < 12 else (size, 1, 1), dims=dims,
                    op="aten::mm" if number < 12 else "aten::add",
                )  # fmt: skip
            builder.collective(
                "allreduce", now + 13 * part, now + STEP_MS,
                launch_ms=now - 10.0, group=group, ranks=range(ranks),
            )  # fmt: skip
        builder.write(directory / f"rank-{rank}.json")
    return directory


def judged(directory: Path) -> Diagnosis:
    return diagnose([directory], Options(jobs=1))


def about_ranks(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.rule_id: finding for finding in diagnosis.findings if finding.topic == "straggler"}


def outcome(diagnosis: Diagnosis, rule: str) -> str:
    return next(verdict.outcome for verdict in diagnosis.verdicts if verdict.rule_id == rule)


def long_batch(rank: int, step: int) -> bool:
    return rank == step % 3


def test_batches_of_unequal_length_are_the_cause_of_a_late_rank_that_changes(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        3,
        lambda rank, step: 85.0 if long_batch(rank, step) else 60.0,
        lambda rank, step: 1400 if long_batch(rank, step) else TOKENS,
        steps=12,
    )
    diagnosis = judged(tmp_path)
    assert list(about_ranks(diagnosis)) == ["uneven-work"]
    assert outcome(diagnosis, "rotating-straggler") == "yielded"
    finding = about_ranks(diagnosis)["uneven-work"]
    assert finding.gain is not None
    # 85, 60 and 60 ms of compute are 68.3 ms each if shared evenly.
    assert finding.gain.likely_ms == pytest.approx(85.0 - (85.0 + 60.0 + 60.0) / 3, rel=0.05)
    assert "In 12 of 12 steps" in finding.message
    assert "1.4 times the thread blocks" in finding.message


def test_a_late_rank_that_changes_with_equal_batches_is_jitter(tmp_path: Path) -> None:
    write_run(tmp_path, 3, lambda rank, step: 85.0 if long_batch(rank, step) else 60.0, steps=12)
    assert list(about_ranks(judged(tmp_path))) == ["rotating-straggler"]


def test_recorded_shapes_tell_the_work_where_grids_do_not(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        3,
        lambda rank, step: 84.0 if long_batch(rank, step) else 60.0,
        lambda rank, step: 1400 if long_batch(rank, step) else TOKENS,
        shapes=True,
    )
    finding = about_ranks(judged(tmp_path))["uneven-work"]
    assert "1.4 times the arithmetic" in finding.message


def test_slightly_more_work_does_not_explain_a_large_delay(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        3,
        lambda rank, step: 85.0 if long_batch(rank, step) else 60.0,
        lambda rank, step: 1100 if long_batch(rank, step) else TOKENS,
    )
    assert outcome(judged(tmp_path), "uneven-work") == "pass"


def test_one_odd_batch_is_no_habit(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        3,
        lambda rank, step: 85.0 if (rank, step) == (1, 3) else 60.0,
        lambda rank, step: 1400 if (rank, step) == (1, 3) else TOKENS,
    )
    assert {one.severity for one in about_ranks(judged(tmp_path)).values()} <= {"note"}


@pytest.mark.parametrize(("odd", "expected"), [(5, "pass"), (7, "finding")])
def test_odd_batches_are_a_habit_from_half_of_the_steps_on(tmp_path: Path, odd: int, expected: str) -> None:
    def is_odd(rank: int, step: int) -> bool:
        return step < odd and rank == step % 3

    write_run(
        tmp_path,
        3,
        lambda rank, step: 85.0 if is_odd(rank, step) else 60.0,
        lambda rank, step: 1400 if is_odd(rank, step) else TOKENS,
        steps=12,
    )
    assert outcome(judged(tmp_path), "uneven-work") == expected


def test_a_slow_gpu_is_the_cause_of_the_straggler(tmp_path: Path) -> None:
    write_run(tmp_path, 4, lambda rank, step: 75.0 if rank == 2 else 60.0)
    diagnosis = judged(tmp_path)
    found = about_ranks(diagnosis)
    assert set(found) == {"straggler-rank", "slow-gpu"}
    straggler, slow = found["straggler-rank"], found["slow-gpu"]
    assert straggler.ranks == slow.ranks == (2,)
    assert "its matrix products take 1.25x as long at the same shapes" in straggler.message
    assert "nvidia-smi" in straggler.fixes[0].change
    assert not any("same work" in fix.title for fix in straggler.fixes)
    assert slow.gain is None
    assert slow.severity == "note"
    assert diagnosis.facts["gemm_slowdown_ratio"].values["2"] == pytest.approx(1.25, rel=1e-4)
    assert diagnosis.facts["gemm_slowdown_ratio"].values["0"] == pytest.approx(1.0, rel=1e-4)
    assert diagnosis.facts["straggler_cause"].values["2"] == "slow GPU"


def test_a_rank_whose_other_kernels_are_slow_is_not_a_slow_gpu(tmp_path: Path) -> None:
    """Its products take 8 % longer, all of its compute 40 %: the products explain a fifth of that."""
    write_run(tmp_path, 4, lambda rank, step: 60.0)
    builder = TraceBuilder(2, 4)
    for step in range(7):
        now = STEP_MS * step
        builder.step(step, now - 50.0, now + 49.9).backward(now - 20.0, now + 20.0)
        part = 60.0 / 13 * (1.08 if step < 6 else 1.0)
        for number in range(12):
            builder.kernel(
                PRODUCTS[number % 3], now + number * part, now + (number + 1) * part,
                launch_ms=now - 45.0 + number * 0.05, grid=(132, 1, 1),
            )  # fmt: skip
        end = now + (84.0 if step < 6 else 60.0)
        builder.kernel(
            ELEMENTWISE, now + 12 * part, end,
            launch_ms=now - 44.0, grid=(TOKENS, 1, 1), op="aten::add",
        )  # fmt: skip
        builder.collective("allreduce", end, now + STEP_MS, launch_ms=now - 10.0)
    builder.write(tmp_path / "rank-2.json")
    diagnosis = judged(tmp_path)
    assert diagnosis.facts["gemm_slowdown_ratio"].values["2"] == pytest.approx(1.08, rel=1e-4)
    assert diagnosis.facts["straggler_cause"].values["2"] == "longer kernels"


def test_a_gpu_is_compared_with_the_median_of_unequal_peers(tmp_path: Path) -> None:
    """Products take as 60, 60, 66 and 75: rank 3 is 75/60 of its peers' median, rank 2 is 66/60."""
    write_run(tmp_path, 4, lambda rank, step: (60.0, 60.0, 66.0, 75.0)[rank])
    ratios = judged(tmp_path).facts["gemm_slowdown_ratio"].values
    assert ratios["3"] == pytest.approx(1.25, rel=1e-4)
    assert ratios["2"] == pytest.approx(1.1, rel=1e-4)
    assert ratios["0"] == pytest.approx(60 / 66, rel=1e-4)


def test_a_gpu_that_is_a_little_slower_is_the_cause_and_no_finding_of_its_own(tmp_path: Path) -> None:
    """3 % is within what equal GPUs differ by; it still is what the others wait for."""
    write_run(tmp_path, 4, lambda rank, step: 61.8 if rank == 2 else 60.0)
    diagnosis = judged(tmp_path)
    assert diagnosis.facts["straggler_cause"].values["2"] == "slow GPU"
    assert "slow-gpu" not in about_ranks(diagnosis)


def test_a_rank_with_larger_batches_is_late_for_its_work_and_not_for_its_gpu(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        4,
        lambda rank, step: 75.0 if rank == 2 else 60.0,
        lambda rank, step: 1250 if rank == 2 else TOKENS,
    )
    diagnosis = judged(tmp_path)
    assert list(about_ranks(diagnosis)) == ["straggler-rank"]
    straggler = about_ranks(diagnosis)["straggler-rank"]
    assert "as many as theirs, which work on more data" in straggler.message
    assert straggler.fixes[0].title == "Give every rank the same work"
    assert diagnosis.facts["uneven_work_ratio"].value == pytest.approx(1.25)
    assert outcome(diagnosis, "uneven-work") == "pass"
    assert outcome(diagnosis, "slow-gpu") == "unknown"


@pytest.mark.parametrize(("group", "shares"), [("context_parallel", True), ("data_parallel", False)])
def test_a_rank_that_attends_to_more_of_a_shared_sequence_is_told_as_that(
    tmp_path: Path, group: str, shares: bool
) -> None:
    write_run(
        tmp_path,
        4,
        lambda rank, step: 75.0 if rank == 3 else 60.0,
        lambda rank, step: 1250 if rank == 3 else TOKENS,
        group=group,
    )
    diagnosis = judged(tmp_path)
    title = about_ranks(diagnosis)["straggler-rank"].fixes[0].title
    assert title.startswith("Balance context parallelism") is shares
    assert diagnosis.facts["straggler_shares_sequence"].values["3"] is shares


def test_a_batch_that_grows_on_all_ranks_at_once_is_even_work(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        3,
        lambda rank, step: 50.0 + 5.0 * (step % 4),
        lambda rank, step: TOKENS + 100 * (step % 4),
    )
    diagnosis = judged(tmp_path)
    assert about_ranks(diagnosis) == {}
    assert diagnosis.facts["uneven_work_ratio"].value == 1.0


def test_stages_of_a_pipeline_are_not_compared(tmp_path: Path) -> None:
    """Stage 0 (ranks 0 and 1) has twice the layers of stage 1 (ranks 2 and 3), by design."""
    stages = {0: (0, 1), 1: (2, 3)}
    for rank in range(4):
        stage = rank // 2
        layers = 10 if stage == 0 else 5
        builder = TraceBuilder(rank, 4)
        for step in range(5):
            now = STEP_MS * step
            builder.step(step, now - 50.0, now + 49.9).backward(now - 20.0, now + 20.0)
            for layer in range(layers):
                begin = now + 6.0 * layer
                builder.kernel(PRODUCTS[layer % 3], begin, begin + 6.0, launch_ms=now - 45.0 + 0.05 * layer)
            end = now + 6.0 * layers
            builder.collective(
                "allreduce", end, now + 64.0, group=f"stage{stage}", ranks=stages[stage], launch_ms=now - 10.0
            )
            builder.collective("allreduce", now + 64.0, now + 66.0, nbytes=1 << 20, launch_ms=now - 9.0)
        builder.write(tmp_path / f"rank-{rank}.json")
    diagnosis = judged(tmp_path)
    assert outcome(diagnosis, "uneven-work") == "pass"
    assert diagnosis.facts["uneven_work_ratio"].value == 1.0


def test_waits_that_uneven_work_causes_through_another_group_count(tmp_path: Path) -> None:
    """Tensor pairs (0, 1) and (2, 3), data pairs (0, 2) and (1, 3); rank 3 has 1.5 times the blocks.

    Rank 2 waits 20 ms for it in the tensor pair, and rank 0 then for rank 2; rank 1 waits 10 ms. Rank 3
    itself came 20 and 10 ms late, for which its 20 ms of longer compute are enough.
    """
    for rank in range(4):
        builder = TraceBuilder(rank, 4)
        tensor, data = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        for step in range(7):
            now = STEP_MS * step
            builder.step(step, now - 50.0, now + 49.9).backward(now - 20.0, now + 20.0)
            own = now + (60.0 if rank == 3 else 40.0)
            together = now + (62.0 if rank >= 2 else 42.0)
            grid = (1500 if rank == 3 else TOKENS, 1, 1)
            builder.kernel(ELEMENTWISE, now, own, launch_ms=now - 45.0, grid=grid, op="aten::add")
            builder.collective(
                "allreduce", own, together,
                group=f"tensor{tensor[0]}", ranks=tensor, nbytes=1 << 20, launch_ms=now - 12.0,
            )  # fmt: skip
            builder.kernel(PRODUCTS[0], together, together + 8.0, launch_ms=now - 11.0)
            entered = now + 60.0 if rank == 1 else together + 8.0
            builder.collective(
                "allreduce", entered, now + 80.0,
                group=f"data{data[0]}", ranks=data, nbytes=64 << 20, launch_ms=now - 10.0,
            )  # fmt: skip
        builder.write(tmp_path / f"rank-{rank}.json")
    facts = judged(tmp_path).facts
    assert facts["uneven_work_ratio"].value == 1.5
    assert facts["uneven_work_steps"].value == 6


def test_a_late_rank_costs_what_the_next_one_waits_for_it(tmp_path: Path) -> None:
    """Ranks compute 60, 70, 66 and 85 ms: the peers of rank 3 wait 25, 15 and 19 ms for it."""
    write_run(tmp_path, 4, lambda rank, step: (60.0, 70.0, 66.0, 85.0)[rank])
    facts = judged(tmp_path).facts
    assert facts["straggler_cost_ms"].values["3"] == pytest.approx(15, abs=1e-3)
