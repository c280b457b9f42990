"""Runs on CPUs are replayed: the host's time is the work, and it waits for gloo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tracedoc
from tracedoc.play.run_replay import RunReplay, replay_run
from tracedoc.predicted import Predicted
from tracedoc.step.cpu_program import _after_waits
from tracedoc.testing import TraceBuilder
from tracedoc.whatif.changes.ranks import usual_host

FOLDERS = ("ac", "acc", "comp", "ddp", "ds2", "ds3", "fsdp1", "fsdp2", "fsdp2_mp", "hsdp", "nw_acc", "pp",
           "tp")  # fmt: skip


def write_rank(folder: Path, rank: int, *, work_ms: float, step_ms: float) -> None:
    """Write four steps: work, 20 ms more, an all-reduce of 20 ms after the last rank, and 20 ms of work."""
    builder = TraceBuilder(rank, 2, device=None)
    for number in range(4):
        begin = number * step_ms
        issued, reduced = begin + work_ms + 20, begin + step_ms - 20
        builder.step(number, begin, begin + step_ms)
        builder.host("aten::mm", begin, begin + work_ms)
        builder.host("aten::addmm", begin + work_ms, issued)
        builder.collective("allreduce", issued, reduced, nbytes=64 << 20, launch_ms=issued)
        builder.host("aten::mul", reduced, begin + step_ms)
    builder.write(folder / f"rank-{rank}.json")


@pytest.fixture
def late_rank(tmp_path: Path) -> Path:
    write_rank(tmp_path, 0, work_ms=40, step_ms=140)
    write_rank(tmp_path, 1, work_ms=80, step_ms=140)
    return tmp_path


def test_a_late_rank_made_even_costs_nothing_more(late_rank):
    answer = tracedoc.predict([late_rank], ["even-rank rank=1"])
    assert answer.replay.replayed_ms == pytest.approx(140, abs=0.1)
    even = answer.alone[0]
    assert isinstance(even, Predicted)
    assert even.step_ms[1] == pytest.approx(100, abs=0.2)


def test_the_path_leads_over_the_late_rank(late_rank):
    path = tracedoc.predict([late_rank]).replay
    # 100 ms of work on rank 1, 20 ms of transfer, 20 ms of work on either.
    assert path.path["compute"] == pytest.approx(120 / 140, abs=0.01)
    assert path.path["communication"] == pytest.approx(20 / 140, abs=0.01)
    assert path.path_ranks["1"] >= 100 / 140


def test_the_host_cannot_be_made_faster_than_its_work(late_rank):
    for change in ("no-sync", "faster-host by=0.5", "capture-graph", "fuse-optimizer"):
        (answer,) = tracedoc.predict([late_rank], [change]).alone
        assert not isinstance(answer, Predicted), change


def test_gradients_of_two_passes_are_reduced_once(tmp_path):
    """Twice 40 ms of work and 20 ms of all-reduce: 120 ms, and 100 without the first.

    Its threads may have slowed the 40 ms before it: by all of them at the most, by half of them likely. The
    host
    pauses meanwhile, which may leave what follows cold for 2 ms.
    """
    for rank in (0, 1):
        builder = TraceBuilder(rank, 2, device=None)
        for number in range(4):
            builder.step(number, 120 * number, 120 * number + 120)
            for begin in (120 * number, 120 * number + 60):
                builder.host("aten::addmm", begin, begin + 20)
                builder.backward(begin + 20, begin + 40)
                builder.collective(
                    "allreduce", begin + 40, begin + 60, nbytes=64 << 20, launch_ms=begin + 39.9
                )
        builder.write(tmp_path / f"rank-{rank}.json")
    (once,) = tracedoc.predict([tmp_path], ["reduce-once"]).alone
    assert isinstance(once, Predicted)
    assert once.step_ms == pytest.approx((54, 80, 104), abs=0.5)


def test_a_send_and_a_receive_of_one_thread_wait_for_their_other_ends_only(tmp_path):
    """Both send, and receive before what they send has arrived: one after 10 ms of work, one after 18."""
    for rank, work_ms in enumerate((10, 18)):
        builder = TraceBuilder(rank, 2, device=None)
        for number in range(4):
            begin = 40.0 * number
            builder.step(number, begin, begin + 40)
            builder.host("aten::mm", begin, begin + work_ms)
            builder.collective("send", begin + work_ms, begin + 20, nbytes=64, peer=1 - rank)
            builder.collective("recv", begin + work_ms + 0.5, begin + 20, nbytes=64, peer=1 - rank)
            builder.host("aten::mul", begin + 20, begin + 40)
        builder.write(tmp_path / f"rank-{rank}.json")
    answer = tracedoc.predict([tmp_path], ["even-rank rank=1"])
    assert answer.replay.replayed_ms == pytest.approx(40, abs=0.1)
    (even,) = answer.alone
    assert isinstance(even, Predicted)
    assert even.step_ms[1] == pytest.approx(32, abs=0.6)


@pytest.mark.parametrize("name", FOLDERS)
def test_real_jobs_are_met_within_5_percent(name, shared_traces):
    found = replay_run(tracedoc.measure([shared_traces / "cpu_gloo" / name]).measurements.run)
    assert isinstance(found, RunReplay), found
    assert found.model_error_frac <= 0.05
    assert found.confidence == "low"


def test_steps_at_one_time_cannot_be_replayed(tmp_path):
    for rank in (0, 1):
        builder = TraceBuilder(rank, 2, device=None)
        for number, begin, end in [(0, 0, 20), (1, 20, 40), (2, 20, 40), (3, 40, 60)]:
            builder.step(number, begin, end).host("aten::mm", begin + 1, end - 1)
        builder.write(tmp_path / f"rank-{rank}.json")
    diagnosis = tracedoc.diagnose(tmp_path)
    assert not [limit.message for limit in diagnosis.limits if "failed" in limit.message]


def test_what_begins_while_the_host_waits_begins_after_the_wait():
    begin, end = np.array([10, 40]), np.array([20, 50])
    assert _after_waits(np.array([5, 10, 15, 20, 45]), begin, end).tolist() == [5, 20, 20, 20, 50]
    nothing = np.array([], dtype=np.int64)
    assert _after_waits(np.array([5]), nothing, nothing).tolist() == [5]


def test_ranks_with_other_numbers_of_calls_are_compared_in_each_part_of_the_step():
    # Rank 0 sleeps 70 in part 2, and works 2 where its peer works 5: only the sleep is too long.
    column = np.array([1, 70, 2, 1, 2, 2, 3])
    part = np.array([0, 2, 1, 0, 2, 1, 1], dtype=np.uint8)
    base = np.array([0, 3, 7])
    found = usual_host(column, part, base, (0,), np.arange(base.size - 1), share=0.1)
    assert found.tolist() == [1, 2, 2, 1, 2, 2, 3]
