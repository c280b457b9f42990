"""What a rank did before a collective, and what its waits cost, on small traces worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tracedoc
from tracedoc.step.host_work import sync_totals
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.host import (
    PHASES,
    WORK,
    Work,
    host_phases,
    intervals_before,
    rank_work,
    work_before_collectives,
)

Build = Callable[[TraceBuilder], RankTimeline]


@pytest.fixture
def timeline_of(tmp_path: Path) -> Build:
    def built(builder: TraceBuilder) -> RankTimeline:
        return tracedoc.build_timeline(tracedoc.load(builder.write(tmp_path / "rank-0.json")))

    return built


def steps(builder: TraceBuilder, count: int = 3) -> TraceBuilder:
    """Add host steps of 100 ms, each with a kernel of 10 ms at its start that is launched just before."""
    for index in range(1, count + 1):
        builder.step(index, 100 * index, 100 * index + 99).backward(100 * index + 50, 100 * index + 60)
        builder.kernel("first", 100 * index + 10, 100 * index + 20, launch_ms=100 * index + 9)
    return builder


def work_of(timeline: RankTimeline) -> Work:
    work = rank_work(timeline)
    assert work is not None
    return work


def origin_of(timeline: RankTimeline) -> int:
    """Return where the builder's clock is zero: the first step begins at 100 ms."""
    trace = timeline.trace
    return int(trace.ts_ns[trace.name == trace.names.index("ProfilerStep#1")][0]) - 100_000_000


def places(timeline: RankTimeline, *times_ms: int) -> list[str]:
    """Return where in the step the host is at times of the builder's clock."""
    times = origin_of(timeline) + np.array(times_ms, dtype=np.int64) * 1_000_000
    return [PHASES[phase] for phase in host_phases(timeline).at(times)]


def causes(timeline: RankTimeline, start_ms: float, end_ms: float) -> dict[str, float]:
    """Return the milliseconds by cause between two times of the builder's clock."""
    origin = origin_of(timeline)
    row = work_of(timeline).within([origin + int(start_ms * 1e6)], [origin + int(end_ms * 1e6)])[0]
    return {name: ns / 1e6 for name, ns in zip(WORK, row.tolist(), strict=True) if ns}


def waits(timeline: RankTimeline) -> dict[str, tuple[int, int, float, float]]:
    return {
        total.operator: (total.count, total.draining, total.blocked_ns / 1e6, total.idle_ns / 1e6)
        for total in sync_totals(timeline, host_phases(timeline))
    }


def test_every_nanosecond_of_an_interval_has_one_cause(timeline_of: Build) -> None:
    builder = steps(TraceBuilder())
    builder.kernel("ampere_sgemm_128x64", 120, 150, launch_ms=119).loader(155, 175)
    builder.runtime("cudaMalloc", 180, 184).host("aten::add", 190, 196)
    found = causes(timeline_of(builder), 110, 210)
    assert found["matrix"] == 30
    assert found["compute"] == 10
    assert found["input"] == 20
    assert found["allocator"] == 4
    # 55 + 4 ms of late launch around: 6 in an operator that launches nothing, and the launch itself.
    assert found["operator"] == 6
    assert found["dispatch"] == pytest.approx(0, abs=0.05)
    assert sum(found.values()) == 100


def test_a_wait_that_drains_the_gpu_costs_the_idle_time_until_the_next_kernel(timeline_of: Build) -> None:
    builder = steps(TraceBuilder())
    builder.kernel("long", 120, 150, launch_ms=110)
    builder.host("aten::item", 120, 151).runtime("cudaStreamSynchronize", 121, 151)
    builder.kernel("next", 160, 170, launch_ms=159)
    # Blocked for 30 ms; the GPU is dry at 150, and the next kernel starts at 160. From 151 on the host calls
    # nothing for 8 ms: a cause of its own, and without the wait the kernel would start at 150 all the same.
    assert waits(timeline_of(builder)) == {"aten::item": (1, 1, 30.0, 10.0)}


def test_a_wait_costs_no_more_than_the_host_was_blocked(timeline_of: Build) -> None:
    builder = steps(TraceBuilder())
    builder.kernel("long", 120, 150, launch_ms=110)
    builder.host("aten::item", 148, 151).runtime("cudaStreamSynchronize", 149, 151)
    builder.kernel("next", 160, 170, launch_ms=159)
    assert waits(timeline_of(builder)) == {"aten::item": (1, 1, 2.0, 2.0)}


def test_a_wait_beside_queued_work_costs_nothing(timeline_of: Build) -> None:
    builder = steps(TraceBuilder())
    builder.kernel("long", 120, 150, launch_ms=110).kernel("queued", 152, 170, launch_ms=111)
    builder.host("aten::item", 120, 151).runtime("cudaEventSynchronize", 121, 149)
    # The gap of 2 ms after the wait is no one's: its kernel had been launched before.
    assert waits(timeline_of(builder)) == {"aten::item": (1, 0, 28.0, 0.0)}


def test_copy_and_synchronise_of_one_item_are_one_wait(timeline_of: Build) -> None:
    builder = steps(TraceBuilder())
    builder.kernel("long", 120, 150, launch_ms=110)
    builder.copy("DtoH", 150, 150.01, 4, pageable=True, launch_ms=130, stream=7)
    builder.runtime("cudaStreamSynchronize", 150.02, 150.03)
    builder.kernel("next", 151, 170, launch_ms=150.9)
    ((count, draining, blocked, idle),) = waits(timeline_of(builder)).values()
    assert (count, draining) == (1, 1)
    assert blocked == pytest.approx(20.02, abs=0.01)
    assert idle == pytest.approx(0.99)


def test_the_last_synchronise_of_the_profiler_is_no_wait_with_a_cost(timeline_of: Build) -> None:
    builder = steps(TraceBuilder()).runtime("cudaDeviceSynchronize", 311, 321)
    syncs = timeline_of(builder).syncs
    assert syncs is not None
    assert (syncs.blocked_ns.tolist(), syncs.idle_ns.tolist()) == ([10_000_000], [0])


def test_work_before_a_collective_starts_where_the_one_before_started(timeline_of: Build) -> None:
    builder = TraceBuilder(0, 2)
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start, start + 99).backward(start + 50, start + 60)
        builder.kernel("ampere_sgemm_128x64", start + 1, start + 20, launch_ms=start + 0.5)
        builder.collective("allreduce", start + 20, start + 30, launch_ms=start + 0.6)
        builder.kernel("ampere_sgemm_128x64", start + 30, start + 70, launch_ms=start + 0.7)
        builder.collective("allreduce", start + 75, start + 85, launch_ms=start + 74)
    timeline = timeline_of(builder)
    before = work_before_collectives(timeline, work_of(timeline), host_phases(timeline))
    by_name = [dict(zip(WORK, before.us(row).tolist(), strict=True)) for row in range(len(before.us_of))]
    # The first step's first collective: from the start of the step. The third step is not complete.
    assert by_name[0]["matrix"] == 19_000
    assert by_name[1]["matrix"] == 40_000
    assert by_name[1]["python"] + by_name[1]["dispatch"] == pytest.approx(4_000, abs=60)
    # From 75 of the step before: 10 ms of collective, 16 ms until the first kernel, then 19 ms of it.
    assert int(before.us(2).sum()) == pytest.approx(45_000, abs=5)
    assert by_name[2]["communication"] == pytest.approx(10_000, abs=5)
    assert before.kernels.tolist()[:4] == [1, 1, 1, 1]
    assert int(before.away_us[2]) == pytest.approx(15_500, abs=600)
    assert not before.us_of[4:].any()
    assert before.us_of.dtype == np.uint32
    assert {WORK[cause] for cause in before.causes} < set(WORK)  # only those that occur travel


def test_what_runs_beside_the_collective_before_is_work_before_this_one(timeline_of: Build) -> None:
    builder = steps(TraceBuilder(0, 2))
    builder.collective("allreduce", 120, 140).collective("allgather", 130, 150, stream=21)
    starts, ends = intervals_before(timeline_of(builder))
    assert (ends - starts)[1] == 10_000_000


def test_where_the_host_is_follows_from_the_phases_before_and_after(timeline_of: Build) -> None:
    builder = TraceBuilder()
    for index, start in ((1, 100), (2, 200)):
        builder.step(index, start, start + 99)
        builder.host("aten::linear", start + 1, start + 10).host("aten::linear", start + 20, start + 30)
        builder.host("aten::ones_like", start + 40, start + 40.1).backward(start + 40.5, start + 60)
        builder.host("aten::linalg_vector_norm", start + 70, start + 71)  # clipping: no phase of its own
        builder.optimizer(start + 80, start + 90)
        builder.host("aten::add_", start + 82, start + 84).host("aten::mul_", start + 86, start + 88)
        builder.kernel("add", start + 2, start + 95, launch_ms=start + 1.5)
    assert places(timeline_of(builder), 115, 135, 150, 165, 175, 185, 198) == [
        "the forward pass",
        "between forward and backward",
        "the backward pass",
        "between backward and optimizer",
        "between backward and optimizer",
        "the optimizer",
        "between two steps",
    ]


def test_what_follows_the_optimizer_before_the_model_is_called_lies_between_two_steps(
    timeline_of: Build,
) -> None:
    """A checkpoint copies tensors; what it waits for in between is not in the forward pass."""
    builder = TraceBuilder()
    for index, start in ((1, 100), (2, 200)):
        builder.step(index, start, start + 99)
        builder.host("aten::detach", start + 1, start + 2).host("aten::copy_", start + 18, start + 19)
        builder.host("aten::linear", start + 30, start + 40)
        builder.host("aten::ones_like", start + 49.5, start + 49.6).backward(start + 50, start + 60)
        builder.optimizer(start + 80, start + 90).kernel("add", start + 2, start + 95, launch_ms=start + 1.5)
    assert places(timeline_of(builder), 110, 145) == [
        "between two steps",
        "between forward and backward",
    ]


def test_without_a_backward_pass_no_phase_is_claimed(timeline_of: Build) -> None:
    builder = TraceBuilder().step(1, 100, 199).host("aten::linear", 110, 120).host("aten::linear", 150, 160)
    builder.kernel("add", 112, 140, launch_ms=111)
    assert places(timeline_of(builder), 130) == ["an unknown phase"]


def test_a_sleep_between_forward_and_backward_is_found_there(shared_traces: Path) -> None:
    late = []
    for rank in (0, 1):
        path = shared_traces / "cpu_gloo" / "patho_straggler" / f"rank{rank}.json.gz"
        timeline = tracedoc.build_timeline(tracedoc.load(path))
        before = work_before_collectives(timeline, work_of(timeline), host_phases(timeline))
        worst = int(np.argmax(before.away_us))
        late.append((int(before.away_us[worst]) / 1e3, PHASES[before.away_phase[worst]]))
    assert late[0][0] < 5
    assert late[1][0] == pytest.approx(30.2, abs=1)
    assert late[1][1] == "between forward and backward"
