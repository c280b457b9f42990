"""Ranks that meet in every fourth step only: who is late in the others is told, and what each step costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.testing.builder import TraceBuilder

PERIOD, OPERATORS_MS, TRANSFER_MS = 4, 20, 5


def averaged(folder: Path, *away_ms: tuple[float, ...], steps: int) -> Diagnosis:
    """Two ranks over gloo, each away before the 20 ms of operators of a step, that average in steps 0, 4, 8.

    ``away_ms`` repeats over the steps. Averaging takes 5 ms from when the later rank has come.
    """
    lengths = [[away[n % len(away)] + OPERATORS_MS for n in range(steps)] for away in away_ms]
    now, spans = [0.0 for _ in lengths], [[] for _ in lengths]  # type: ignore[var-annotated]
    for step in range(steps):
        began, now = now, [at + own[step] for at, own in zip(now, lengths, strict=True)]
        together = max(now) + TRANSFER_MS if step % PERIOD == 0 else None
        for rank, (start, end) in enumerate(zip(began, now, strict=True)):
            spans[rank].append((start, end, together or end))
        now = [together or at for at in now]
    for rank, mine in enumerate(spans):
        builder = TraceBuilder(rank=rank, device=None, world_size=len(spans))
        for step, (start, end, left) in enumerate(mine):
            for at in range(10):
                builder.host("aten::mm", end - OPERATORS_MS + 2 * at, end - OPERATORS_MS + 2 * at + 2)
            if left > end:
                builder.collective("allreduce", end, left, nbytes=1 << 20)
            builder.step(step, start, left)
        builder.host("aten::mm", left + 1, left + 2).step(steps, left, left + 3)
        builder.write(folder / f"rank-{rank}.json")
    return diagnose([folder], Options(jobs=1))


@pytest.mark.parametrize("steps", [9, 5])
def test_a_rank_that_is_late_between_meetings_costs_every_step(tmp_path: Path, steps: int) -> None:
    """Rank 1 is away for 30 ms of each step; rank 0 waits 120 ms in every fourth."""
    found = averaged(tmp_path, (0,), (30,), steps=steps)
    assert found.facts["straggler_cost_ms"].values == {"0": 0, "1": 30}
    assert found.facts["straggler_excess_ms"].values["1"] == 30
    # Four steps take 205 ms.
    assert found.ledger is not None
    meetings = (steps + PERIOD - 1) // PERIOD
    assert found.ledger.step_ms == pytest.approx(50 + meetings * TRANSFER_MS / steps)
    (first,) = [one for one in found.findings if one.rule_id == "straggler-rank"]
    assert first.told_ms == pytest.approx(30, rel=0.05)
    assert "rank 1 spends 30 ms more than rank 0" in found.summary


def test_ranks_that_are_late_by_turns_lose_nothing_between_meetings(tmp_path: Path) -> None:
    """Each is away for 30 ms in every second step: they come together to the meetings."""
    found = averaged(tmp_path, (30, 0), (0, 30), steps=8)
    assert found.facts["straggler_cost_ms"].values == {"0": 0, "1": 0}
    assert not any("traggler" in one.title for one in found.findings)


def test_ranks_that_are_alike_are_not_late_between_meetings(tmp_path: Path) -> None:
    found = averaged(tmp_path, (5,), (5,), steps=9)
    assert found.facts["straggler_cost_ms"].values == {"0": 0, "1": 0}
    assert [one for one in found.findings if one.severity != "note"] == []
