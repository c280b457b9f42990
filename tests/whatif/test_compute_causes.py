"""What of compute would go if kernels did the same another way, in the ledger of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tests.whatif.test_ledger import UPDATE, ledger_of, of, one_of
from tracedoc import Options
from tracedoc.testing import TraceBuilder
from tracedoc.testing.cases import write_job

PRODUCT = "nvjet_tst_128x128_gemm"
ADD = "void at::native::vectorized_elementwise_kernel<4, add>"
BF16 = ["c10::BFloat16", "c10::BFloat16"]


def drawn(*kernels: tuple):
    """Draw kernels one after the other, launched ahead: name, length in ms, and what else is said."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        at = start
        for number, (name, length, *said) in enumerate(kernels):
            words = said[0] if said else {}
            builder.kernel(name, at, at + length, launch_ms=start - 0.01 + 0.02 * number, **words)
            at += length
        builder.runtime("cudaDeviceSynchronize", start + 0.02 * len(kernels), at + 0.01)
        return at

    return draw


def test_a_chain_of_kernels_over_one_size_reads_again(tmp_path: Path) -> None:
    """Of four kernels of 6 ms three save a third and three a sixth: 9 ms, or half and half as much again."""
    chain = [(ADD, 6.0)] * 4
    fusion = one_of(ledger_of(tmp_path, drawn((PRODUCT, 30.0), *chain, (PRODUCT, 46.0))), "compute.fusion")
    assert fusion.alone_ms == pytest.approx((4.5, 9.0, 13.5), abs=0.05)


def test_kernels_over_other_sizes_are_no_chain(tmp_path: Path) -> None:
    other = {"grid": (264, 1, 1)}
    ledger = ledger_of(tmp_path, drawn((PRODUCT, 60.0), (ADD, 10.0), (ADD, 10.0, other), (PRODUCT, 20.0)))
    assert [one.id for one in ledger.causes if one.id == "compute.fusion"] == []


def test_what_stands_between_two_products_of_attention_goes(tmp_path: Path) -> None:
    batched, softmax = {"op": "aten::bmm"}, {"op": "aten::_softmax"}
    ledger = ledger_of(
        tmp_path,
        drawn((PRODUCT, 20.0), (PRODUCT, 20.0, batched), ("softmax_warp", 15.0, softmax),
              (PRODUCT, 20.0, batched), (PRODUCT, 25.0)),
    )  # fmt: skip
    assert one_of(ledger, "compute.attention").alone_ms[1] == pytest.approx(15.0, abs=0.05)


def test_reordering_for_convolutions_goes(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, drawn(("nchwToNhwcKernel", 7.0), (PRODUCT, 86.0), ("nhwcToNchwKernel", 7.0)))
    assert one_of(ledger, "compute.layout").alone_ms[1] == pytest.approx(14.0, abs=0.05)


def test_copies_that_make_tensors_contiguous_go(tmp_path: Path) -> None:
    """All of them likely, half of them surely."""
    contiguous = {"op": "aten::contiguous"}
    ledger = ledger_of(tmp_path, drawn((PRODUCT, 40.0), ("elementwise", 20.0, contiguous), (PRODUCT, 40.0)))
    assert one_of(ledger, "compute.layout").alone_ms == pytest.approx((10.0, 20.0, 20.0), abs=0.05)


def test_copies_between_two_orders_go(tmp_path: Path) -> None:
    """By the strides of what is copied, whichever operator asked for it."""
    words = {"dims": [[512, 512], [512, 512]], "types": BF16, "op": "aten::copy_"}
    transposed = words | {"strides": [[512, 1], [1, 512]]}
    plain = words | {"strides": [[512, 1], [1024, 1]]}
    ledger = ledger_of(
        tmp_path, drawn((PRODUCT, 40.0), (ADD, 20.0, transposed), (PRODUCT, 30.0), (ADD, 10.0, plain))
    )
    assert one_of(ledger, "compute.layout").alone_ms == pytest.approx((10.0, 20.0, 20.0), abs=0.05)


def test_a_fused_loss_takes_half(tmp_path: Path) -> None:
    softmax, loss = {"op": "aten::_log_softmax"}, {"op": "aten::nll_loss_forward"}
    ledger = ledger_of(
        tmp_path, drawn((PRODUCT, 80.0), ("cunn_SoftMaxForward", 16.0, softmax), ("nll_loss", 4.0, loss))
    )
    assert one_of(ledger, "compute.loss").alone_ms == pytest.approx((5.0, 10.0, 15.0), abs=0.05)


def test_32_bits_take_half_of_64(tmp_path: Path) -> None:
    """Of 20 ms on tensors of 64 bits; a number of Python has as many, and no dimensions."""
    wide = {"dims": [[512, 512], []], "types": ["double", "double"], "op": "aten::mul"}
    mixed = {"dims": [[512, 512], []], "types": ["float", "double"], "op": "aten::mul"}
    ledger = ledger_of(tmp_path, drawn((PRODUCT, 70.0), (ADD, 20.0, wide), (ADD, 10.0, mixed)))
    assert one_of(ledger, "compute.fp64").alone_ms == pytest.approx((5.0, 10.0, 15.0), abs=0.05)


def test_part_of_the_products_in_fp32(tmp_path: Path) -> None:
    """In 16 bits 6.7 times as fast, 3 of 20 ms in fp32 stay; the 80 ms in bf16 stay."""
    ledger = ledger_of(tmp_path, drawn((PRODUCT, 80.0), ("ampere_sgemm_128x128_tn", 20.0)))
    assert one_of(ledger, "compute.fp32").alone_ms == pytest.approx((14.45, 17.0, 19.55), abs=0.05)


def test_a_product_that_fits_no_tile_runs_at_the_usual_rate(tmp_path: Path) -> None:
    """60 ms for 4096 x 4096 x 150000, 40 ms for a third of it: at that rate 20.1 ms, give or take a half."""
    fitting = {"dims": [[4096, 4096], [4096, 150_000]], "types": BF16}
    misfit = {"dims": [[4096, 4096], [4096, 50_257]], "types": BF16}
    ledger = ledger_of(tmp_path, drawn((PRODUCT, 60.0, fitting), (PRODUCT, 40.0, misfit)))
    assert one_of(ledger, "compute.shapes").alone_ms == pytest.approx((9.95, 19.9, 29.8), abs=0.1)


def test_a_compiled_model_has_no_chains(tmp_path: Path) -> None:
    """The change gives what the ledger says of the chain."""
    ledger_of(tmp_path, drawn((PRODUCT, 30.0), *[(ADD, 6.0)] * 4, (PRODUCT, 46.0)))
    answer = tracedoc.predict([tmp_path], ["better-kernels of=fusion"], options=Options(jobs=1))
    assert answer.alone[0].gain_ms == pytest.approx((4.5, 9.0, 13.5), abs=0.05)


def test_what_kernels_reach_of_the_device(tmp_path: Path) -> None:
    """H100, 80.1 % of 989 TFLOPS: 2 x 4096 x 4096 x 150000 operations take 6.354 ms, 10.6 % of 60."""
    words = {"dims": [[4096, 4096], [4096, 150_000]], "types": BF16}
    ledger_of(tmp_path, drawn((PRODUCT, 60.0, words)))
    facts = tracedoc.measure([tmp_path]).measurements.facts
    assert facts["reached_frac"].value == pytest.approx(6.354 / 60, rel=0.001)
    first = tracedoc.diagnose(tmp_path).summary
    assert first.startswith("Compute-bound at 11 % of what this GPU reaches")


def test_the_first_line_says_what_compute_is_lost_to(tmp_path: Path) -> None:
    """H100: of 100 ms of compute 20 in fp32 lose 17, and a chain of 4 x 6 ms loses 9."""
    plain = ("ampere_sgemm_128x128_tn", 20.0)
    ledger_of(tmp_path, drawn((PRODUCT, 30.0), plain, *[(ADD, 6.0)] * 4, (PRODUCT, 26.0)))
    diagnosis = tracedoc.diagnose(tmp_path)
    assert diagnosis.summary.startswith(
        "Compute-bound (100 ms of the 101 ms step, communication is hidden): 17 % of the compute is lost to "
        "matrix products outside the tensor cores, 9 % to chains of unfused kernels. "
    )
    assert "Tensor cores" not in diagnosis.summary.partition(". ")[2]


def test_small_kernels_are_what_a_fused_one_saves(tmp_path: Path) -> None:
    """A run of 500 kernels of 4 us with gaps of 1 us, launched ahead, becomes one."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.kernel(PRODUCT, start, start + 10, launch_ms=start - 0.01)
        for one in range(500):
            at = start + 10.001 + 0.005 * one
            builder.kernel("void mul_kernel<float>()", at, at + 0.004, launch_ms=start + 0.004 * one)
        builder.runtime("cudaDeviceSynchronize", start + 2.1, start + 12.51)
        return start + 12.5

    small = one_of(ledger_of(tmp_path, draw), "compute.small_kernels")
    assert small.alone_ms[1] == pytest.approx(499 * 0.005, abs=0.1)


def test_small_products_are_not_fused_with_one_another(tmp_path: Path) -> None:
    """Of 250 pairs of a product and a sum of 4 us each nothing goes: a small sum follows no small sum."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.kernel(PRODUCT, start, start + 10, launch_ms=start - 0.01)
        for one in range(500):
            at, name = start + 10.001 + 0.005 * one, PRODUCT if one % 2 else "void add_kernel<float>()"
            builder.kernel(name, at, at + 0.004, launch_ms=start + 0.004 * one)
        builder.runtime("cudaDeviceSynchronize", start + 2.1, start + 12.51)
        return start + 12.5

    assert of(ledger_of(tmp_path, draw), "compute.small_kernels") == 0.0


def test_an_optimizer_of_single_operators_reads_its_values_again(tmp_path: Path) -> None:
    """Of 10 ms in kernels of 1 ms each, a fused one takes 45 %, give or take a quarter of what it saves.

    It also saves the 10 us between any two of them.
    """

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.backward(start - 0.02, start)
        builder.kernel(PRODUCT, start, start + 40, launch_ms=start - 0.01, thread="autograd")
        builder.optimizer(start + 0.01, start + 0.2)
        for one in range(10):
            at = start + 40 + 1.01 * one
            builder.kernel("void add_kernel<float>()", at, at + 1, launch_ms=start + 0.02 + 0.01 * one)
        builder.runtime("cudaDeviceSynchronize", start + 0.3, start + 50.10)
        return start + 50.09

    alone = one_of(ledger_of(tmp_path, draw), "compute.optimizer").alone_ms
    assert alone == pytest.approx((0.75 * 5.5 + 0.09, 5.5 + 0.09, 1.25 * 5.5 + 0.09), abs=0.02)
    (fix,) = tracedoc.predict([tmp_path], ["fuse-optimizer"]).alone
    assert fix.gain_ms == pytest.approx(alone, abs=0.02)


def test_padding_takes_a_share_of_both_passes(tmp_path: Path) -> None:
    """Half of each batch is padding: of 80 ms in both passes 40 go, and the optimizer stays.

    Of each of the two kernels 5 us may not grow with its work, at the most 50.
    """

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.kernel(PRODUCT, start, start + 40, launch_ms=start - 0.01)
        builder.backward(start + 0.02, start + 0.1)
        builder.kernel(PRODUCT, start + 40, start + 80, launch_ms=start + 0.03, thread="autograd")
        builder.optimizer(start + 0.15, start + 0.3)
        builder.kernel(UPDATE, start + 80, start + 100, launch_ms=start + 0.2)
        builder.runtime("cudaDeviceSynchronize", start + 0.35, start + 100.01)
        return start + 100.0

    window = {"loader": {"wall_us": 500_000, "tokens": [[60, 100], [40, 100]]}}
    write_job(tmp_path, (0, 1), {"window": window}, "")
    padding = one_of(ledger_of(tmp_path, draw), "compute.padding")
    assert padding.alone_ms == pytest.approx((39.99, 39.995, 40.0), abs=0.002)
    answer = tracedoc.predict([tmp_path], ["less-padding share=0.5"], options=Options(jobs=1))
    assert answer.alone[0].gain_ms == pytest.approx((39.95, 39.995, 40.0), abs=0.002)
    (told,) = [one for one in tracedoc.diagnose(tmp_path).findings if one.rule_id == "padding-waste"]
    assert (told.severity, told.gain.size_ms) == ("warning", pytest.approx(40.0, abs=0.2))


def test_products_on_the_tensor_cores_are_faster_than_reads_and_slower_than_rates_say(tmp_path: Path) -> None:
    """H100: 3 times for reading and writing, 989 / 67 for the rates: 6.7 times, so 15 of 100 ms stay."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.kernel("ampere_sgemm_128x128_tn", start, start + 100, launch_ms=start - 0.01)
        builder.runtime("cudaDeviceSynchronize", start + 0.1, start + 100.01)
        return start + 100.0

    plain = one_of(ledger_of(tmp_path, draw), "compute.fp32")
    assert plain.share_ms == pytest.approx(85.0, abs=1.0)


def test_no_fix_that_keeps_the_batch_takes_less_than_the_ideal_step(tmp_path: Path) -> None:
    """In 16 bits 100 ms take 15 likely, half of that at best; the ideal step has the 15."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.kernel("ampere_sgemm_128x128_tn", start, start + 100, launch_ms=start - 0.01)
        builder.runtime("cudaStreamSynchronize", start + 0.05, start + 100.1)
        return start + 100.0

    ideal_ms = ledger_of(tmp_path, draw).ideal_ms
    (plain,) = [one for one in tracedoc.diagnose(tmp_path).findings if one.rule_id == "idle-tensor-cores"]
    steps = [one.predicted.step_ms for one in plain.fixes if one.predicted and one.replays.endswith("by=6.7")]
    assert steps
    assert all(low == pytest.approx(ideal_ms, abs=0.01) for low, _, _ in steps)
