"""Charts lie where their numbers say, and are left out where they would lie."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import hostile, sharded
from tracedoc.diagnosis import FactRecord, Gain, Verdict
from tracedoc.predicted import Predicted
from tracedoc.report.charts.bars import WORDED_STEPS, RangeBar, gain_bar, heat_map, waits_mostly_for
from tracedoc.report.charts.detail_tables import (
    MOST_LETTERS,
    by_category,
    grouped_values,
    short_name,
    step_words,
    unchecked,
)
from tracedoc.report.charts.drawing import draw
from tracedoc.report.charts.over_time import MOST_UNIT_ROWS, memory_chart, scatter, unit_chart
from tracedoc.report.render import render
from tracedoc.report.view import build_view
from tracedoc.tables import (
    KernelRow,
    MemoryCurve,
    PathStretch,
    TransferRow,
    TransferSpeeds,
    UnitCall,
    UnitTimeline,
    Waits,
)

WAITS = Waits((0, 1, 2), (4, 5), ((30.0, 10.0), (0.0, None), (15.0, 0.0)), ((1, 1), (None, None), (1, None)))


def test_heat_is_the_share_of_the_longest_wait():
    drawn = heat_map(WAITS)
    assert [[cell.level for cell in row.cells] for row in drawn.rows] == [[100, 33], [0, 0], [50, 0]]
    assert drawn.rows[0].cells[0].text == "rank 0, step 4: waits 30 ms, mostly for rank 1"
    assert drawn.rows[1].cells[1].text == "rank 1, step 5: not known"
    assert [row.waited_for_by for row in drawn.rows] == [0, 2, 0]


def test_long_waits_are_in_seconds():
    drawn = heat_map(replace(WAITS, wait_ms=((2000.0, 10.0), (0.0, None), (15.0, 0.0))))
    assert drawn.unit == "seconds"
    assert drawn.rows[0].cells[0].number == "2.00"


@pytest.mark.parametrize("ms", [0.0, 1e300, float("inf"), float("nan")])
def test_no_waiting_and_impossible_waiting_are_not_drawn(ms: float):
    assert heat_map(Waits((0,), (0,), ((ms,),), ((None,),))) is None
    assert heat_map(None) is None


def test_negative_waiting_is_not_drawn():
    assert heat_map(replace(WAITS, wait_ms=((30.0, -1e308), (0.0, None), (15.0, 0.0)))) is None


def test_cells_of_many_steps_keep_their_words_for_readers_only():
    steps = tuple(range(WORDED_STEPS + 1))
    drawn = heat_map(Waits((0,), steps, ((1.0,) * len(steps),), ((3,) * len(steps),)))
    assert not drawn.worded
    assert drawn.rows[0].cells[8].text == "rank 0, step 8: waits 1 ms, mostly for rank 3"


def test_picture_names_the_late_rank_and_who_waits_for_it():
    diagnosis = sharded()
    assert waits_mostly_for(diagnosis.detail.waits, 5, least_ms=90.0) == {0: 5}
    assert waits_mostly_for(diagnosis.detail.waits, 5, least_ms=90.1) == {}
    drawing = draw(diagnosis, build_view(diagnosis).findings)
    assert [(row.rank, row.cause, row.waits_for) for row in drawing.rows] == [
        (0, "", 5),
        (5, "Every rank waits for one rank", None),
    ]


def test_of_many_rows_the_few_that_matter_stand_first():
    """Of 20 ranks a finding names rank 5, and the path stays on rank 9 for 40 of 400 ms."""
    diagnosis = sharded()
    picture = diagnosis.detail.picture
    rows = tuple(replace(picture.rows[0], rank=rank) for rank in range(20))
    path = (PathStretch(9, "host", 0.0, 40.0), PathStretch(3, "host", 40.0, 79.0))
    for count, order, said in ((20, [5, 9, 0, 1, 2, 3], True), (16, [0, 1, 2, 3, 4, 5], False)):
        shown = replace(picture, rows=rows[:count], path=path)
        many = replace(diagnosis, detail=replace(diagnosis.detail, picture=shown))
        drawing = draw(many, build_view(many).findings)
        assert [row.rank for row in drawing.rows][:6] == order
        assert ("stand first" in drawing.caption) == said


def test_a_picture_that_was_thinned_says_so():
    diagnosis = sharded()
    for closed_ms, said in ((0.3, False), (8.0, True)):
        picture = replace(diagnosis.detail.picture, closed_ms=closed_ms)
        thinned = replace(diagnosis, detail=replace(diagnosis.detail, picture=picture))
        caption = draw(thinned, build_view(thinned).findings).caption
        assert ("thinned: gaps below 8 ms are not drawn" in caption) == said


def test_a_cause_on_most_ranks_is_no_name_for_any():
    diagnosis = sharded()
    late = replace(diagnosis.findings[0], ranks=(0, 1, 2, 4))
    view = build_view(replace(diagnosis, findings=(late,)))
    assert {row.cause for row in draw(view.diagnosis, view.findings).rows} == {""}


def test_dots_lie_on_logarithmic_scales():
    rows = (
        TransferRow("all_gather", 8, 2**10, 1, 1.0, 1.0, 1.0),
        TransferRow("all_gather", 8, 2**20, 2, 10.0, 10.0, 20.0, 80.0),
    )
    drawn = scatter(TransferSpeeds(rows))
    # From half of the smallest size to twice the largest: powers 9 to 21, so that 10 is at 1/12.
    assert [dot.left for dot in drawn.dots] == [8.33, 91.67]
    assert drawn.dots[0].top > drawn.dots[1].top > drawn.dots[1].high
    assert drawn.dots[1].text == (
        "all-gather of 8 ranks, 1 MiB: 10 GB/s of an expected 80 GB/s, median of 2 (10 GB/s to 20 GB/s)"
    )
    assert drawn.text == "2 kinds of messages; 1 of 1 with a known link lie too low"
    assert [label for _, label in drawn.y_ticks] == ["1 GB/s", "10 GB/s", "100 GB/s"]


def test_bandwidths_of_one_size_still_have_a_scale():
    """344 GB/s beside an expected 343: with 0.15 decades on both sides the scale goes from 243 to 486."""
    drawn = scatter(TransferSpeeds((TransferRow("all_gather", 4, 2**20, 1, 344.0, 344.0, 344.0, 343.0),)))
    assert [label for _, label in drawn.y_ticks] == ["300 GB/s", "400 GB/s"]


def test_expected_curve_passes_through_what_a_size_should_reach():
    drawn = scatter(sharded().detail.transfers)
    # 1 MiB, at a sixth of the width, should reach 160 * 1 / (1 + 1) = 80 GB/s. On a scale from 10 GB/s to
    # 110 GB/s, and 0.15 decades more on both sides, that is 0.288 of 1.341 decades from the top.
    x, y = 166.7, 215.0
    points = [tuple(map(float, point.split())) for point in drawn.curves[0][1:].split("L")]
    before, after = next((a, b) for a, b in pairwise(points) if a[0] <= x <= b[0])
    assert before[1] > y > after[1]


def test_transfers_that_cannot_be_are_not_drawn():
    assert scatter(None) is None
    assert scatter(TransferSpeeds(())) is None
    drawn = scatter(hostile().detail.transfers)
    assert len(drawn.dots) == 1
    assert drawn.curves == ()


def test_memory_fills_the_chart_up_to_the_device():
    drawn = memory_chart(MemoryCurve(0, (10.0, 20.0), (100, 200), (500, 1000), 2000), ())
    # The scale ends 5 % above the device's 2000 bytes: 1000 are at 52.4 % from the top.
    assert drawn.reserved == "M0 1000L0.0 761.9L1000.0 523.8L1000 1000Z"
    assert drawn.limit == 4.76
    assert [label for _, label in drawn.x_ticks] == ["0 ms", "2 ms", "4 ms", "6 ms", "8 ms", "10 ms"]


@pytest.mark.parametrize(
    "curve",
    [
        None,
        MemoryCurve(0, (1.0,), (1,), (1,)),
        MemoryCurve(0, (1.0, 1.0), (1, 1), (1, 1)),
        MemoryCurve(0, (1.0, 2.0), (1,), (1, 1)),
        MemoryCurve(0, (1.0, 2.0), (0, 0), (0, 0)),
        MemoryCurve(0, (0.0, 1.0), (1, 1), (0, 10**30)),
    ],
)
def test_memory_that_makes_no_picture_is_not_drawn(curve: MemoryCurve | None):
    assert memory_chart(curve, ()) is None


def test_units_have_gathers_and_stalls_where_they_happen():
    drawn = unit_chart(sharded().detail.unit_timeline)
    first, second = drawn.rows
    assert first.gathers == "M250.00 0H350.00V10H250.00Z"
    assert first.stalls == "M300.00 0H350.00V10H300.00ZM950.00 0H975.00V10H950.00Z"
    assert first.text == "layers.0: gathered for 40 ms, stalls 30 ms"
    assert second.stalls == ""


def test_of_very_many_units_those_that_stall_most_stay():
    calls = tuple(
        UnitCall(f"layers.{k}", "gather", "forward", 1.0, 2.0, 1.0, 1.0 + k / 100) for k in range(100)
    )
    drawn = unit_chart(UnitTimeline(0, 0, 10.0, calls))
    assert len(drawn.rows) == MOST_UNIT_ROWS
    assert drawn.left_out == 20
    assert drawn.rows[0].name == "layers.20"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "at::detail::Array<char*, 2> >(int, at::native::CUDAFunctor_add<float>)",
            "vectorized_elementwise_kernel<CUDAFunctor_add>",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::"
            "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}>>(int)",
            "elementwise_kernel<direct_copy_kernel_cuda>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, "
            "at::native::binary_internal::MulFunctor<float> > >(int)",
            "vectorized_elementwise_kernel<MulFunctor>",
        ),
        ("void at::native::(anonymous namespace)::GammaBeta<float, 32u>(long)", "GammaBeta"),
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllGather_RING_LL",
        ),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN"),
        ("<odd>", "<odd>"),
        ("", ""),
    ],
)
def test_kernels_have_short_names(name: str, short: str):
    assert short_name(name) == short


def test_a_short_name_is_short():
    assert len(short_name("k" * 300)) == MOST_LETTERS


def test_kernels_are_grouped_with_shares_of_all():
    rows = (KernelRow("a", "gemm", 2, 60.0), KernelRow("b", "copy", 1, 30.0), KernelRow("c", "gemm", 1, 10.0))
    assert by_category(rows) == (("gemm", [rows[0], rows[2]]), ("copy", [rows[1]]))
    page = render(replace(sharded(), detail=replace(sharded().detail, kernels=rows)), "html")
    assert (
        "</span>gemm</th>" + "".join(f'<td class="number">{text}</td>' for text in ("3", "70 ms", "70 %"))
        in page
    )
    assert [share for share in ("60 %", "10 %", "width:30.0%") if share not in page] == []


def test_gain_bars_show_what_is_saved_of_the_step():
    gain = Gain(10.0, 90.0, "ceiling")
    # 10 to 90 of 400 ms.
    assert gain_bar(gain, 400.0) == RangeBar(2.5, 20.0)
    assert gain_bar(replace(gain, mean_step_ms=500.0), 400.0) == RangeBar(2.0, 16.0)
    assert gain_bar(gain, 0.0) is None
    assert gain_bar(None, 400.0) is None
    fix = Predicted("no-sync", (300.0, 320.0, 360.0), (40.0, 80.0, 100.0), "compute", "high")
    assert gain_bar(gain, 400.0, fix) == RangeBar(10.0, 15.0)
    assert gain_bar(gain, 400.0, replace(fix, gain_ms=(0.0, 0.0, 0.0))) == RangeBar(2.5, 20.0)


def test_rules_without_an_answer_stand_with_their_reason():
    verdicts = [
        Verdict("a", "unknown", reason="no shapes"),
        Verdict("b", "unknown", reason="no manifest"),
        Verdict("c", "pass"),
        Verdict("d", "unknown", reason="no manifest"),
    ]
    assert list(unchecked(verdicts)) == [("no manifest", ("b", "d")), ("no shapes", ("a",))]


def test_values_of_many_ranks_stand_together_where_they_are_alike():
    values = {"0": 1.5, "1": 1.5, "2": {"unknown": "no launches"}, "3": 1.5}
    record = FactRecord("ms", "rank", 1.5, None, values)
    assert grouped_values(record) == "0-1, 3: 1.5 ms; 2: unknown: no launches"
    assert grouped_values(replace(record, values={"a<b": 2.0})) == "a<b: 2 ms"


def test_steps_say_how_much_they_differ():
    diagnosis = sharded()
    rank = diagnosis.ranks[0]
    steps = tuple(
        replace(rank.steps[0], step_ms=ms, complete=complete)
        for ms, complete in ((420.0, True), (400.0, True), (390.0, True), (50.0, False))
    )
    words = step_words(replace(diagnosis, ranks=(replace(rank, steps=steps),)))
    assert words == "3 complete steps: 390 ms to 420 ms, median 400 ms"
    assert step_words(replace(diagnosis, ranks=(replace(rank, steps=steps[:1]),))) == ""
