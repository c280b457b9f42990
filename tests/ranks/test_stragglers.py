"""Stragglers of whole runs: a published one under skewed clocks and lost events, and one that changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.published_fsdp_run import LAYERS, REDUCE_SCATTER_MEAN_MS, waiting_share, write_run
from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.testing import TraceBuilder, parse_lanes


def judged(directory: Path) -> Diagnosis:
    return diagnose([directory], Options(jobs=1))


def straggler(diagnosis: Diagnosis) -> tuple[int, ...]:
    return next((f.ranks for f in diagnosis.findings if f.rule_id == "straggler-rank"), ())


def waits(diagnosis: Diagnosis) -> dict[int, float]:
    """Return the exposed waiting of each rank in its median step, in ms."""
    return {
        rank.rank: rank.budget.exposed_wait_ms
        for rank in diagnosis.ranks
        if rank.budget is not None and rank.budget.exposed_wait_ms is not None
    }


def expected_waits() -> dict[int, float]:
    return {r: LAYERS * mean * waiting_share(r) for r, mean in REDUCE_SCATTER_MEAN_MS.items()}


def test_the_published_run_waits_for_rank_4(tmp_path: Path) -> None:
    write_run(tmp_path)
    diagnosis = judged(tmp_path)
    assert straggler(diagnosis) == (4,)
    assert diagnosis.findings[0].rule_id == "straggler-rank"
    assert waits(diagnosis) == pytest.approx(expected_waits(), rel=1e-3, abs=0.01)
    shares = [waiting_share(rank) for rank in REDUCE_SCATTER_MEAN_MS if rank != 4]
    assert (round(min(shares), 2), round(max(shares), 2)) == (0.55, 0.84)
    # Without rank 4 the others wait for rank 5, which waits least for rank 4.
    assert diagnosis.facts["straggler_cost_ms"].values["4"] == pytest.approx(expected_waits()[5], rel=1e-3)


@pytest.mark.parametrize(
    ("damage", "limit"),
    [
        ({"skew_ms": {0: 3_000.0, 3: -7_000.0, 6: 12.0}, "hosts": True}, None),
        ({"skew_ms": {1: 5.0}, "drift": {1: 1e-4, 5: -5e-5}, "hosts": True}, None),
        ({"lost": (1, 4)}, None),
        ({"lost": (1, 4), "numbered": False}, None),
        ({"numbered": False, "skew_ms": {2: 900.0}, "hosts": True}, None),
        ({"without": (6,)}, "missing-ranks"),
    ],
    ids=[
        "clocks apart by seconds",
        "a drifting clock",
        "one event lost",
        "one event lost, no numbers",
        "no numbers, a clock apart",
        "one rank missing",
    ],
)
def test_the_same_straggler_and_the_same_waits(
    tmp_path: Path, damage: dict[str, object], limit: str | None
) -> None:
    write_run(tmp_path, **damage)  # type: ignore[arg-type]
    diagnosis = judged(tmp_path)
    assert straggler(diagnosis) == (4,)
    expected = {rank: expected_waits()[rank] for rank in waits(diagnosis)}
    assert len(expected) >= 7
    if "lost" in damage:  # rank 1 lost one of the waits of its judged step; nothing else moves
        expected[1] *= (LAYERS - 1) / LAYERS
    assert waits(diagnosis) == pytest.approx(expected, rel=0.02, abs=0.5)
    if limit is not None:
        assert limit in {one.code for one in diagnosis.limits}


def test_of_a_rank_that_is_cut_before_its_first_step_nothing_is_compared(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "rank-2.json"
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * 0.7)])  # its kernels come after that
    diagnosis = judged(tmp_path)
    assert diagnosis.summary.startswith("Rank 2 is left out: its file is cut off")
    assert straggler(diagnosis) == ()  # the others may have waited for rank 2
    assert {"truncated-trace", "rank-left-out"} <= {one.code for one in diagnosis.limits}


def write_changing(directory: Path, late: list[int]) -> None:
    """Draw steps of 100 ms on three ranks: 60 ms of compute, 85 ms on the rank that ``late`` names."""
    for rank in range(3):
        builder = TraceBuilder(rank, 3)
        for step, slow in enumerate([*late, -1]):
            now = 100.0 * step
            end = now + (85.0 if slow == rank else 60.0)
            builder.step(step, now - 20.0, now + 79.9)
            builder.kernel("gemm", now, end, launch_ms=now - 15.0)
            builder.collective("allreduce", end, now + 100.0, launch_ms=now - 10.0)
        builder.write(directory / f"rank-{rank}.json")


def test_a_rank_that_changes_every_step_is_jitter(tmp_path: Path) -> None:
    write_changing(tmp_path, [0, 1, 2] * 4)
    diagnosis = judged(tmp_path)
    (finding,) = [f for f in diagnosis.findings if f.topic == "straggler"]
    assert finding.rule_id == "rotating-straggler"
    assert finding.gain is not None
    assert finding.gain.high_ms == pytest.approx(25.0)


def test_a_few_steps_say_what_they_cost_and_that_the_late_rank_changes(tmp_path: Path) -> None:
    write_changing(tmp_path, [0, 1, 2, 0, 1])
    (finding,) = [f for f in judged(tmp_path).findings if f.topic == "straggler"]
    assert finding.rule_id == "rotating-straggler"
    assert "in 2 of 5 steps it is rank 0, in others rank 1-2" in finding.message


def test_one_rank_that_pauses_now_and_then_is_told_with_its_steps(tmp_path: Path) -> None:
    write_changing(tmp_path, [1, -1, 1, -1, -1, 1])
    (finding,) = [f for f in judged(tmp_path).findings if f.topic == "straggler"]
    assert finding.rule_id == "rotating-straggler"
    assert "rank 1 is late in steps 0, 2, 5; rank 1's kernels take longer then" in finding.message


@pytest.mark.parametrize(
    ("late", "outcome"),
    [
        ([0, -1, -1, 1, -1, -1, -1, -1], "finding"),  # 25 ms in two of eight steps are 6.25 % of 100 ms
        ([0, -1, -1, -1, -1, -1, -1, -1], "pass"),  # 3.1 %
        ([0, 0, 0, 0, 1, 2], "finding"),  # four of six steps
        ([0, 0, 0, 0, 0, 1], "pass"),  # five of six are a habit
    ],
)
def test_jitter_is_told_by_its_cost_and_by_who_is_late(tmp_path: Path, late: list[int], outcome: str) -> None:
    write_changing(tmp_path, late)
    (verdict,) = [one for one in judged(tmp_path).verdicts if one.rule_id == "rotating-straggler"]
    assert verdict.outcome == outcome


def test_on_a_busy_host_what_a_rank_does_in_every_step_is_its_cause(tmp_path: Path) -> None:
    """Rank 1 sleeps 30 ms a step; its operators also take 0, 70 and 70 ms longer, as on a shared core."""
    noise_ms = [0.0, 70.0, 70.0]
    for rank in range(2):
        builder, now = TraceBuilder(rank, 2, device=None), 0.0
        for step, noise in enumerate(noise_ms):
            slower, asleep = (noise, 30.0) if rank == 1 else (0.0, 0.0)
            end = now + 20.0 + noise + 30.0 + 20.0
            builder.step(step, now, end + 9.5)
            builder.host("aten::mm", now + 1.0, now + 20.0 + slower)
            begin = now + 20.0 + slower + asleep
            builder.host("aten::mul", begin, begin + 19.0)
            builder.backward(begin, begin + 19.5, node="MulBackward0")
            builder.collective("allreduce", begin + 20.0, end + 5.0, launch_ms=begin + 19.2)
            now = end + 10.0
        builder.step(len(noise_ms), now, now + 1.0)
        builder.write(tmp_path / f"rank-{rank}.json")
    (finding,) = [f for f in judged(tmp_path).findings if f.rule_id == "straggler-rank"]
    assert finding.ranks == (1,)
    assert "30 ms more than rank 0 in Python outside PyTorch's operators" in finding.message
    assert "rank 0 waits for it in most of 3 steps" in finding.message
    assert finding.gain is not None  # without the sleep the shared core may remain
    # Two runs on CPUs differ by a tenth of what is taken away.
    assert (finding.gain.low_ms, finding.gain.likely_ms) == pytest.approx((27.0, 30.0), abs=1.5)


def test_a_late_rank_costs_what_the_peers_of_its_own_groups_wait(tmp_path: Path) -> None:
    """Of two groups of two one waits 40 ms for rank 2, and the other for nobody."""
    lanes = """
        step: 100
        compute    0-40   x20
        allreduce  40-90  1MiB  ranks=0,1
        rank 2:
          compute    40-80  x20
          allreduce  80-90  1MiB  ranks=2,3
        rank 3:
          compute    0-40   x20
          allreduce  40-90  1MiB  ranks=2,3
    """
    for builder in parse_lanes(lanes, ranks=4, device=None):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    assert judged(tmp_path).facts["straggler_cost_ms"].values["2"] == pytest.approx(40.0)
