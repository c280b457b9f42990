"""Who waits for whom: told once, for the programs of steps and for the path between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import tracedoc
from tracedoc.step.graph import StepGraph, find_graph
from tracedoc.step.program import Call, Cause
from tracedoc.step.sync_path import Action, sync_path
from tracedoc.testing import TraceBuilder

US = 1e-3  # in ms


def graph_of(builder: TraceBuilder, folder: Path) -> StepGraph:
    trace = tracedoc.load(builder.write(folder / "rank-0.json"))
    graph = find_graph(tracedoc.build_timeline(trace))
    assert isinstance(graph, StepGraph)
    return graph


def reductions(folder: Path, early_us: Sequence[float]) -> StepGraph:
    """20 pieces of compute of 1 ms, each reduced after it: as early as is said for each, else 5 us later."""
    builder = TraceBuilder(0, 2).step(0, 0, 100)
    for number in range(20):
        begin = 1 + 4.0 * number
        builder.kernel("sgemm", begin, begin + 1, launch_ms=begin - 0.5)
        start = begin + 1 - (early_us[number] if number < len(early_us) else -5) * US
        builder.collective("allreduce", start, begin + 3, launch_ms=begin - 0.4)
    return graph_of(builder, folder)


@pytest.mark.parametrize(
    ("early_us", "follow"),
    [
        ([], 20),
        ([2] * 10, 20),  # a microsecond or two is rounding
        ([20], 19),  # one that does not fit says nothing of the others
        ([20] * 5, 0),  # they are called ahead of the compute before them
    ],
    ids=["all behind", "rounded", "one early", "a quarter early"],
)
def test_a_kind_is_called_ahead_where_a_share_of_it_starts_early(
    early_us: list[float], follow: int, tmp_path: Path
) -> None:
    graph = reductions(tmp_path, early_us)
    assert int(graph.waits.follows.sum()) == follow
    _, target = graph.waits.of(Cause.ISSUE)
    assert target.size == follow
    path = sync_path(graph)
    assert path is not None
    assert int(path.lag_ns[path.action == int(Action.READY)].sum()) == follow


def test_what_waits_for_a_collective_is_one_join_in_both(tmp_path: Path) -> None:
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.kernel("sgemm", 1, 2, launch_ms=0.5).collective("allgather", 2.005, 9, launch_ms=0.6)
    builder.kernel("sgemm", 9.005, 12, launch_ms=0.7)  # launched long before: the gather kept it
    graph = graph_of(builder, tmp_path)
    source, target = graph.waits.of(Cause.CROSS)
    gather = graph.device.row[source] >= 0
    assert (graph.device.start_ns[target] - graph.device.end_ns[source])[gather].tolist() == [5_000]
    path = sync_path(graph)
    assert path is not None
    assert (path.action == int(Action.JOIN)).sum() == 1


def test_what_follows_on_the_stream_of_a_collective_waits_for_it(tmp_path: Path) -> None:
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.kernel("sgemm", 1, 2, launch_ms=0.5)
    builder.collective("allreduce", 2.005, 9, launch_ms=0.6, stream=7).kernel(
        "sgemm", 9.2, 12, launch_ms=9.19
    )
    path = sync_path(graph_of(builder, tmp_path))
    assert path is not None
    assert (path.action == int(Action.JOIN)).sum() == 1


def test_a_call_that_waits_takes_what_is_left_of_it_after_the_return(tmp_path: Path) -> None:
    """It returns 40 us after the kernel, of which 15 at most are the way back: 25 us are its own."""
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.kernel("sgemm", 1, 10, launch_ms=0.5).runtime("cudaDeviceSynchronize", 0.6, 10.04)
    graph = graph_of(builder, tmp_path)
    source, target = graph.waits.of(Cause.SYNC)
    assert graph.device.end_ns[source].tolist() == [graph.calls.end_ns[target[0]] - 40_000]
    assert graph.calls.kind[target].tolist() == [int(Call.SYNC)]
    assert graph.waits.lag_ns[graph.waits.kind == int(Cause.SYNC)].tolist() == [15_000]
    assert graph.waits.own_ns[target].tolist() == [25_000]
    assert graph.waits.blocks[target].all()


def test_a_call_that_begins_when_all_is_done_waits_for_nothing(tmp_path: Path) -> None:
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.kernel("sgemm", 1, 2, launch_ms=0.5).runtime("cudaDeviceSynchronize", 3, 3.04)
    graph = graph_of(builder, tmp_path)
    assert graph.waits.of(Cause.SYNC)[0].size == 0
    assert not graph.waits.blocks.any()


def test_a_late_start_waited_for_what_ended_last_before_it(tmp_path: Path) -> None:
    """Of two kernels of other streams that ended before a start 1 ms late, the one that ended 5 us before."""
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.kernel("sgemm", 1, 2, launch_ms=0.5)
    builder.kernel("earlier", 2.1, 7.89, stream=11, launch_ms=0.6)
    builder.kernel("later", 2.1, 7.9, stream=12, launch_ms=0.7)
    builder.kernel("sgemm", 7.905, 9, launch_ms=6.9)
    graph = graph_of(builder, tmp_path)
    source, target = graph.waits.of(Cause.CROSS)
    late = graph.device.start_ns[target] == graph.device.start_ns.max()
    assert (graph.device.start_ns[target] - graph.device.end_ns[source])[late].tolist() == [5_000]


def test_a_late_start_waited_for_what_had_just_ended_and_not_for_what_still_runs(tmp_path: Path) -> None:
    """A copy 2 us after a kernel, on a stream of its own; the kernel behind that one ends 4 us later."""
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.kernel("used", 1, 2, launch_ms=0.5).kernel("next", 2.001, 2.006, launch_ms=0.55)
    builder.kernel("copy", 2.002, 3, stream=11, launch_ms=0.6)
    graph = graph_of(builder, tmp_path)
    source, target = graph.waits.of(Cause.CROSS)
    assert (graph.device.start_ns[target] - graph.device.end_ns[source]).tolist() == [2_000]


@pytest.mark.parametrize("ended", [4.0, 1.5], ids=["the host waits", "it has ended long before"])
def test_a_gather_waits_for_the_unit_before_the_last_whether_the_host_waits_or_not(
    ended: float, tmp_path: Path
) -> None:
    """Two gathers may be in flight: the third is called when the first unit has been computed."""
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.collective("allgather", 0.3, 0.9, launch_ms=0.2)
    builder.kernel("sgemm", 1, ended, launch_ms=0.5)
    builder.collective("allgather", 0.95, 1.2, launch_ms=0.6).kernel("sgemm", 4, 9, launch_ms=0.7)
    returns = max(ended, 3) + 0.01
    builder.host("FullyShardedDataParallel.rate_limiter", 2.9, returns + 0.1)
    builder.runtime("cudaEventSynchronize", 3, returns)
    builder.collective("allgather", returns + 0.3, 9, launch_ms=returns + 0.2)
    graph = graph_of(builder, tmp_path)
    source, target = graph.waits.of(Cause.LIMIT)
    assert graph.device.end_ns[source].tolist() == [graph.device.compute.ended_ns[0]]
    assert graph.calls.kind[target].tolist() == [int(Call.SYNC)]
    assert graph.waits.own_ns[target].tolist() == [0 if ended == 4.0 else 10_000]
    assert not graph.waits.of(Cause.SYNC)[0].size


def test_the_first_gathers_of_a_step_wait_for_no_update_and_no_batch(tmp_path: Path) -> None:
    """The unit's compute ends at 4 ms; the optimizer, and a batch behind it, hold no unit."""
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.collective("allgather", 0.3, 0.9, launch_ms=0.2).kernel("sgemm", 1, 4, launch_ms=0.5)
    builder.kernel("multi_tensor_apply_kernel<FusedAdamFunctor>", 4, 6, launch_ms=0.8)
    builder.copy("HtoD", 6.1, 6.2, 1 << 20, launch_ms=0.95)
    builder.collective("allgather", 6.3, 6.5, launch_ms=1.0)
    builder.host("FullyShardedDataParallel.rate_limiter", 6.9, 7.1)
    builder.runtime("cudaEventSynchronize", 7, 7.01)
    builder.collective("allgather", 7.3, 9, launch_ms=7.2)
    graph = graph_of(builder, tmp_path)
    source, _ = graph.waits.of(Cause.LIMIT)
    assert graph.device.end_ns[source].tolist() == [graph.device.compute.ended_ns[0]]


@pytest.mark.parametrize(("returns", "limits"), [(4.01, True), (4.5, False)], ids=["as it ends", "later"])
def test_a_gather_waits_for_an_earlier_unit_where_one_stays(
    returns: float, limits: bool, tmp_path: Path
) -> None:
    """Three units are gathered, of which the first is let go: it ends at 4 ms, the second at 9."""
    builder = TraceBuilder(0, 2).step(0, 0, 30)
    builder.collective("allgather", 0.3, 0.9, launch_ms=0.2).kernel("sgemm", 1, 4, launch_ms=0.5)
    builder.collective("allgather", 0.95, 1.2, launch_ms=0.6).kernel("sgemm", 4, 9, launch_ms=0.7)
    builder.collective("allgather", 1.25, 1.5, launch_ms=0.8).kernel("sgemm", 9, 12, launch_ms=0.9)
    builder.host("FullyShardedDataParallel.rate_limiter", 2.9, returns + 0.1)
    builder.runtime("cudaEventSynchronize", 3, returns)
    builder.collective("allgather", returns + 0.3, 12, launch_ms=returns + 0.2)
    graph = graph_of(builder, tmp_path)
    source, _ = graph.waits.of(Cause.LIMIT)
    assert graph.device.end_ns[source].tolist() == ([graph.device.compute.ended_ns[0]] if limits else [])


@pytest.mark.parametrize(("start", "needed"), [(5.2, True), (4.0, False)], ids=["behind it", "beside it"])
def test_what_is_copied_to_the_host_was_computed_before(start: float, needed: bool, tmp_path: Path) -> None:
    """Nothing but data holds up the copy on a stream of its own, once the host does not wait before it."""
    builder = TraceBuilder().step(0, 0, 20).kernel("sgemm", 1, 5, launch_ms=0.5)
    builder.copy("DtoH", start, start + 2, 1 << 24, stream=21, launch_ms=start - 0.1)
    graph = graph_of(builder, tmp_path)
    source, target = graph.waits.of(Cause.DATA)
    assert list(zip(source.tolist(), target.tolist(), strict=True)) == ([(0, 1)] if needed else [])
