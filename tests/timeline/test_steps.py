"""Where training steps come from, and which step each GPU event belongs to."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tracedoc.errors import InputError
from tracedoc.pipeline import diagnose
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.build import RankTimeline, build_timeline
from tracedoc.timeline.steps import find_host_steps
from tracedoc.timeline.windows import BEFORE
from tracedoc.trace.columns import Trace
from tracedoc.trace.kineto import read_trace

MS = 1_000_000


def read(folder: Path, builder: TraceBuilder) -> Trace:
    return read_trace(builder.write(folder / "rank-0.json"))


def timeline_of(folder: Path, builder: TraceBuilder) -> RankTimeline:
    return build_timeline(read(folder, builder))


def steps_of(folder: Path, builder: TraceBuilder) -> tuple[str, list[tuple[float, float, bool]]]:
    """Return the source of the host steps, and start, end (ms) and whether finished of each."""
    trace = read(folder, builder)
    origin = int(trace.ts_ns[trace.names.index("origin") == trace.name][0])
    host = find_host_steps(trace)
    return host.source, [
        ((step.start_ns - origin) / MS, (step.end_ns - origin) / MS, step.finished) for step in host.steps
    ]


def from_zero() -> TraceBuilder:
    return TraceBuilder().host("origin", 0, 1)


def training(builder: TraceBuilder, *starts: float) -> TraceBuilder:
    """Add ProfilerSteps of 99 ms with a backward pass each."""
    for index, start in enumerate(starts, 1):
        builder.step(index, start, start + 99).backward(start + 20, start + 40)
    return builder


def test_profiler_steps_are_taken_as_they_are(tmp_path: Path) -> None:
    builder = training(from_zero(), 100, 200).host("aten::add", 300, 310)
    assert steps_of(tmp_path, builder) == ("profiler", [(100, 199, True), (200, 299, True)])


def test_ranks_that_were_merged_into_one_file_are_refused(tmp_path: Path) -> None:
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "tid": 1, "ts": 0, "dur": 9}
    merged = tmp_path / "merged.json"
    merged.write_text(json.dumps({"traceEvents": [step | {"pid": "rank 0"}, step | {"pid": "rank 1"}]}))
    with pytest.raises(InputError, match="the steps of 2 processes"):
        find_host_steps(read_trace(merged))


def test_a_capture_in_which_nothing_ran_is_refused(tmp_path: Path) -> None:
    """As of a schedule that started over when the loop ended, with stacks."""
    builder = TraceBuilder().step(7, 0.0, 0.1)
    builder.host("train.py(3): <module>", 0.0, 0.2, category="python_function")
    with pytest.raises(InputError, match="the profiler stopped right after it began"):
        timeline_of(tmp_path, builder)


def test_functions_of_python_alone_are_refused_with_what_to_record(tmp_path: Path) -> None:
    builder = TraceBuilder().step(1, 0, 100).host("train.py(1): main", 0, 99, category="python_function")
    with pytest.raises(InputError, match="no operator and no kernel is recorded"):
        diagnose([builder.write(tmp_path / "rank-0.json")])


@pytest.mark.parametrize(("quiet_ms", "finished"), [(0.9, False), (1.1, True)])
def test_a_step_that_ends_within_1_ms_of_the_capture_was_cut(
    quiet_ms: float, finished: bool, tmp_path: Path
) -> None:
    builder = training(from_zero(), 100, 200).host("aten::add", 200, 299 + quiet_ms)
    assert steps_of(tmp_path, builder)[1][1] == (200, 299, finished)


@pytest.mark.parametrize(
    ("lengths", "source"), [((10.0, 100.0), "profiler"), ((9.0, 99.0), "inferred")], ids=["10x", "11x"]
)
def test_steps_that_differ_more_than_tenfold_are_no_clock(
    lengths: tuple[float, float], source: str, tmp_path: Path
) -> None:
    builder, start = from_zero(), 100.0
    for index, length in enumerate(lengths, 1):
        builder.loader(start, start + 1)
        builder.step(index, start, start + length).backward(start + 2, start + 3)
        if index == 2:
            builder.backward(start + 4, start + 5)  # twice the work: not the steps of one loop
        start += length + 10
    builder.loader(start, start + 1).host("aten::add", start, start + 20)
    assert steps_of(tmp_path, builder)[0] == source


def test_profiler_steps_without_a_backward_pass_are_rejected_and_that_is_said(tmp_path: Path) -> None:
    # The profiler steps every 50 ms, and a training step takes 100: each second range holds no backward pass.
    builder = from_zero()
    for index in range(1, 7):
        builder.step(index, 50 * index, 50 * index + 49)
    for start in (50, 150, 250):
        builder.backward(start + 10, start + 20).optimizer(start + 80, start + 90)
    trace = read(tmp_path, builder.host("aten::add", 350, 360))
    host = find_host_steps(trace)
    assert host.source == "optimizer"
    (limit,) = host.limits
    assert limit.code == "profiler-steps-rejected"
    assert "3 of 6 hold no backward pass" in limit.message


def test_optimizers_with_no_backward_pass_between_them_end_one_step(tmp_path: Path) -> None:
    builder = from_zero()
    for start in (100, 200, 300, 400):
        builder.backward(start + 20, start + 40)
        builder.optimizer(start + 50, start + 60).optimizer(start + 51, start + 59, "Inner")  # a wrapper
        builder.optimizer(start + 65, start + 70, "SGD")
    found = steps_of(tmp_path, builder.host("aten::add", 480, 490))
    # From the end of the last optimizer to the end of the next step's last one; the rest was cut.
    whole = [(170, 270, True), (270, 370, True), (370, 470, True)]
    assert found == ("optimizer", [*whole, (470, 490, False)])


def test_optimizers_of_a_capture_without_backward_passes_each_end_a_step(tmp_path: Path) -> None:
    builder = from_zero()
    for start in (100, 200, 300):
        builder.optimizer(start + 50, start + 60)
    assert steps_of(tmp_path, builder) == ("optimizer", [(160, 260, True), (260, 360, True)])


def test_steps_begin_where_gradients_are_zeroed(tmp_path: Path) -> None:
    builder = from_zero()
    for start in (100, 200, 300):
        for at in (start, start + 5):  # of two optimizers, one after the other
            builder.host("Optimizer.zero_grad#AdamW.zero_grad", at, at + 1, category="user_annotation")
        builder.loader(start + 50, start + 51).backward(start + 20, start + 40)
    found = steps_of(tmp_path, builder.host("aten::add", 380, 390))
    assert found == ("inferred", [(100, 200, True), (200, 300, True), (300, 390, False)])


def test_steps_begin_where_a_batch_is_fetched(tmp_path: Path) -> None:
    builder = from_zero()
    for start in (100, 200, 300):
        builder.loader(start, start + 5).loader(start + 8, start + 9)  # two micro-batches at once
        builder.backward(start + 20, start + 40)
    found = steps_of(tmp_path, builder.host("aten::add", 380, 390))
    assert found == ("inferred", [(100, 200, True), (200, 300, True), (300, 390, False)])


def test_one_optimizer_step_bounds_nothing(tmp_path: Path) -> None:
    builder = from_zero().backward(20, 40).optimizer(50, 60)
    assert steps_of(tmp_path, builder) == ("none", [])


def positions(timeline: RankTimeline) -> dict[str, int]:
    """Return the position of each GPU event's step, by the event's name."""
    trace, rows = timeline.trace, timeline.launches.gpu_rows
    names = [trace.row_name(row) for row in rows.tolist()]
    return dict(zip(names, timeline.step_position.tolist(), strict=True))


def test_a_kernel_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    builder = training(TraceBuilder(), 100, 200, 300)
    builder.kernel("early", 90, 95, launch_ms=89).kernel("first", 110, 150, launch_ms=105)
    builder.kernel("far behind", 210, 250, launch_ms=198)
    builder.kernel("at the border", 260, 265, launch_ms=200).kernel("third", 310, 320, launch_ms=305)
    builder.kernel("after", 410, 415, launch_ms=400)
    assert positions(timeline_of(tmp_path, builder)) == {
        "early": BEFORE,
        "first": 0,
        "far behind": 0,
        "at the border": 1,
        "third": 2,
        "after": 3,
    }


def test_what_is_not_linked_follows_its_stream(tmp_path: Path) -> None:
    builder = training(TraceBuilder(), 100, 200, 300)
    builder.kernel("first", 110, 120, launch_ms=105).kernel("third", 310, 320, launch_ms=305)
    builder.kernel("lost 0", 102, 104, linked=False)
    builder.kernel("lost 1", 180, 185, linked=False)
    builder.kernel("lost 2", 330, 340, linked=False)
    # On a stream of its own, between two launches of the second step.
    builder.kernel("side 1", 205, 206, launch_ms=201, stream=9)
    builder.kernel("lost side", 295, 296, linked=False, stream=9)
    builder.kernel("lost alone", 250, 251, linked=False, stream=11)
    assert positions(timeline_of(tmp_path, builder)) == {
        "lost 0": BEFORE,  # before anything that is linked
        "first": 0,
        "lost 1": 2,  # the next linked event of its stream
        "third": 2,
        "lost 2": 2,  # nothing after it: the one before
        "side 1": 1,
        "lost side": 1,
        "lost alone": BEFORE,
    }


def test_the_last_step_of_a_capture_does_not_last_until_the_next_capture(tmp_path: Path) -> None:
    """Steps 0 and 1, and after ten seconds 50 and 51, in one file; what runs between them is of no step."""
    builder = TraceBuilder()
    for index, at in ((0, 100), (1, 200), (50, 10_100), (51, 10_200)):
        builder.step(index, at, at + 100).backward(at + 20, at + 30)
        builder.kernel(f"k{index}", at + 10, at + 90)
    builder.kernel("between", 5_000, 5_010)
    timeline = timeline_of(tmp_path, builder)
    windows = {one.index: ((one.end_ns - one.start_ns) / 1e6, one.complete) for one in timeline.windows}
    assert windows == {0: (100, True), 1: (80, False), 50: (100, True), 51: (80, False)}
    assert positions(timeline)["between"] == BEFORE


def test_captures_of_the_same_steps_in_one_file_are_refused(tmp_path: Path) -> None:
    builder = training(TraceBuilder(), 100, 200).step(1, 5_100, 5_200)
    with pytest.raises(InputError, match=r"holds step 1 twice, 5 s apart: several captures were joined"):
        timeline_of(tmp_path, builder)


@pytest.mark.parametrize(("linked", "by_clock"), [(1, True), (2, False)], ids=["1 of 20", "2 of 20"])
def test_with_few_links_the_host_s_clock_decides(linked: int, by_clock: bool, tmp_path: Path) -> None:
    builder = training(TraceBuilder(), 100, 200, 300)
    for number in range(20):
        start = 210 + number
        builder.kernel(f"k{number}", start, start + 0.5, launch_ms=150 + number, linked=number < linked)
    timeline = timeline_of(tmp_path, builder)
    assert ("steps-by-host-clock" in {limit.code for limit in timeline.limits}) == by_clock
    # Launched in the first step, run during the second.
    assert set(timeline.step_position.tolist()) == ({1} if by_clock else {0})


def test_windows_tile_the_capture_from_first_kernel_to_first_kernel(tmp_path: Path) -> None:
    builder = training(TraceBuilder(), 100, 200, 300)
    for start in (100, 200, 300):
        # A copy on a side stream begins nothing; work of step n may run into the next window.
        builder.copy("HtoD", start + 1, start + 2, stream=9, launch_ms=start + 0.5)
        builder.kernel("first", start + 30, start + 40, launch_ms=start + 10)
        builder.kernel("last", start + 110, start + 120, launch_ms=start + 15)
    timeline = timeline_of(tmp_path, builder)
    found = [(w.index, (w.end_ns - w.start_ns) / MS, w.complete) for w in timeline.windows]
    # The third has no boundary after it: it lasts to its own last event, from 330 to 420.
    assert found == [(1, 100, True), (2, 100, True), (3, 90, False)]
    assert all(a.end_ns == b.start_ns for a, b in pairwise(timeline.windows))


def test_a_step_of_a_cpu_trace_lasts_until_the_next_one_starts(tmp_path: Path) -> None:
    builder = TraceBuilder(device=None)
    for index, start in enumerate((100, 200, 350), 1):
        builder.step(index, start, start + 90).backward(start + 20, start + 40)
    windows = timeline_of(tmp_path, builder).windows
    # The last one ends with the capture, before it was over.
    assert [(w.index, (w.end_ns - w.start_ns) / MS, w.complete) for w in windows] == [
        (1, 100, True),
        (2, 150, True),
        (3, 90, False),
    ]


def test_a_step_without_a_kernel_leaves_the_one_before_it_incomplete(tmp_path: Path) -> None:
    builder = training(TraceBuilder(), 100, 200, 300, 400)
    for start in (100, 300, 400):
        builder.kernel("first", start + 30, start + 40, launch_ms=start + 10)
    windows = timeline_of(tmp_path, builder).windows
    assert [(w.index, (w.end_ns - w.start_ns) / MS, w.complete) for w in windows] == [
        (1, 10, False),
        (3, 100, True),
        (4, 10, False),
    ]


def test_without_any_step_the_capture_is_judged_as_one_and_that_is_said(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("k", 10, 20).kernel("k", 50, 60)
    timeline = timeline_of(tmp_path, builder)
    assert timeline.judged is not None
    assert (timeline.judged.end_ns - timeline.judged.start_ns) / MS == 50
    messages = {limit.code: limit.message for limit in timeline.limits}
    assert messages["no-complete-step"].endswith("no training step was found")


def test_a_capture_of_one_step_says_that_it_is_not_whole(tmp_path: Path) -> None:
    builder = training(TraceBuilder(), 100).kernel("k", 110, 120, launch_ms=105)
    messages = {limit.code: limit.message for limit in timeline_of(tmp_path, builder).limits}
    assert messages["no-complete-step"].endswith("no complete step was captured")


def test_steps_with_the_same_work_are_a_clock_however_the_host_runs_ahead(tmp_path: Path) -> None:
    builder, start = from_zero(), 100.0
    for index, length in enumerate((5.0, 5.0, 99.0), 1):
        builder.loader(start, start + 1)
        builder.step(index, start, start + length).backward(start + 2, start + 3)
        start += length + 1
    builder.loader(start, start + 1).host("aten::add", start, start + 20)
    assert steps_of(tmp_path, builder)[0] == "profiler"


@pytest.mark.parametrize(
    ("optimizer", "last_end_ms", "window"),
    [
        (True, 70.0, (0, 80, True)),  # the whole range: loader, compute, and the host's end
        (True, 90.0, (0, 90, False)),  # its work goes on when the range has ended: a step may be longer
        (False, 70.0, (30, 70, False)),  # the profiler stopped before the optimizer ran
    ],
)
def test_a_lone_step_is_its_whole_host_range(
    optimizer: bool, last_end_ms: float, window: tuple[int, int, bool], tmp_path: Path
) -> None:
    builder = TraceBuilder().step(1, 0, 80).loader(0, 20).backward(40, 50)
    builder.kernel("gemm", 30, 60, launch_ms=29.99).kernel("adam", 62, last_end_ms, launch_ms=61.99)
    if optimizer:
        builder.optimizer(60, 65)
    timeline = build_timeline(read(tmp_path, builder))
    origin = int(timeline.trace.ts_ns[0])
    (found,) = timeline.windows
    assert ((found.start_ns - origin) / 1e6, (found.end_ns - origin) / 1e6, found.complete) == window
    assert timeline.idle is not None
    if window[2]:
        causes = timeline.idle.in_window(found.start_ns, found.end_ns)
        # 20-30, 60-62 and 70-80 nothing is launched that could run.
        assert {cause: ns / 1e6 for cause, ns in causes.items() if ns} == {"input": 20, "launch": 22}


def test_the_last_marked_step_is_complete_where_the_job_goes_on(tmp_path: Path) -> None:
    """Steps of half a ms: that the next one begins shows that the second was not cut."""
    builder = TraceBuilder()
    for number, start in enumerate((0.0, 0.5, 1.0), 1):
        if number < 3:
            builder.step(number, start, start + 0.48)
        builder.backward(start + 0.2, start + 0.25)
        for at in (0.05, 0.3):
            builder.kernel("gemm", start + at + 0.02, start + at + 0.1, launch_ms=start + at)
    timeline = build_timeline(read(tmp_path, builder))
    assert [one.index for one in timeline.windows if one.complete] == [1, 2]
