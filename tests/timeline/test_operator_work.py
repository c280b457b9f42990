"""What operators compute and move, worked out by hand, and as TraceLens has it for a trace of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.operator_work import Work, work_of
from tracedoc.trace.columns import Shapes, Trace
from tracedoc.trace.part import _SHAPED_OPS

BF16, F32, I64, BOOL = "c10::BFloat16", "float", "long int", "bool"

# A query of 2 x 3 heads x 5 tokens x 11, keys and values of 7 tokens: 2 x 3 x 5 x 7 = 210 pairs of tokens.
Q, K, G = [2, 3, 5, 11], [2, 3, 7, 11], [2, 3, 5, 11]
QS, KS = [2, 5, 3, 11], [2, 7, 3, 11]
CONV = ("", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
UP = ("", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "True", "[1, 1]", "1")
GROUPED = ("", "", "", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "4")
X, W, OUT = [8, 16, 10, 10], [32, 16, 3, 3], [8, 32, 5, 5]  # with stride 2 and padding 1
WIDE, NARROW = [16, 32, 3, 3], [32, 4, 3, 3]

CASES = [
    # products: 2 M N K, both matrices read, one written
    ("aten::mm", [[3, 5], [5, 7]], [BF16] * 2, 210, 2 * (15 + 35 + 21)),
    ("aten::mm", [[3, 5], [5, 7]], [F32] * 2, 210, 4 * (15 + 35 + 21)),
    ("aten::addmm", [[7], [3, 5], [5, 7]], [BF16] * 3, 210, 2 * (7 + 15 + 35 + 21)),
    ("aten::bmm", [[2, 3, 5], [2, 5, 7]], [BF16] * 2, 420, 2 * 2 * (15 + 35 + 21)),
    ("aten::baddbmm", [[2, 3, 7], [2, 3, 5], [2, 5, 7]], [BF16] * 3, 420, 2 * 2 * (21 + 15 + 35 + 21)),
    # 8-bit inputs, a 16-bit result
    ("aten::_scaled_mm", [[3, 5], [5, 7]], ["c10::Float8_e4m3fn"] * 2, 210, 15 + 35 + 2 * 21),
    # 6 rows in groups, each times one of two matrices 5 x 7
    ("aten::_grouped_mm", [[6, 5], [2, 5, 7], [2]], [BF16, BF16, "int"], 420, 2 * (30 + 70 + 42)),
    ("aten::_scaled_grouped_mm", [[6, 5], [2, 5, 7]], ["c10::Float8_e4m3fn"] * 2, 420, 30 + 70 + 2 * 42),
    # its gradient: 6 rows are summed over in two groups, for each a matrix 5 x 7
    ("aten::_grouped_mm", [[5, 6], [6, 7], [2]], [BF16, BF16, "int"], 420, 2 * (30 + 42 + 2 * 35)),
    ("aten::mv", [[3, 5], [5]], [F32] * 2, 30, 4 * (15 + 5 + 3)),
    ("aten::addmv_", [[3], [3, 5], [5]], [F32] * 3, 30, 4 * (3 + 15 + 5 + 3)),
    ("aten::dot", [[5], [5]], [F32] * 2, 10, 4 * (5 + 5 + 1)),
    ("aten::linear", [[2, 3, 5], [7, 5], [7]], [BF16] * 3, 420, 2 * (30 + 35 + 7 + 42)),
    # attention: two products of 210 x 11, five backward
    ("aten::_scaled_dot_product_flash_attention", [Q, K, K], [BF16] * 3, 9240, 2 * (330 + 462 + 462 + 330)),
    ("aten::_scaled_dot_product_efficient_attention", [Q, K, K], [F32] * 3, 9240, 4 * 1584),
    ("aten::_scaled_dot_product_cudnn_attention", [Q, K, K], [BF16] * 3, 9240, 2 * (330 + 462 + 462 + 330)),
    (
        "aten::_scaled_dot_product_flash_attention_backward", [G, Q, K, K, G], [BF16] * 5, 23100,
        2 * (330 + 330 + 462 + 462 + 330 + 330 + 462 + 462),
    ),
    # heads behind the sequence
    ("flash_attn::_flash_attn_forward", [QS, KS, KS], [BF16] * 3, 9240, 3168),
    ("flash_attn_3::fwd", [QS, KS, KS], [BF16] * 3, 9240, 3168),
    ("flash_attn_3::bwd", [QS, QS, KS, KS], [BF16] * 4, 23100, 2 * 3168),
    ("flash_attn::_flash_attn_backward", [QS, QS, KS, KS], [BF16] * 4, 23100, 2 * 3168),
    # 8 x 5 x 5 places, each 32 x 16 x 3 x 3 products
    ("aten::convolution", [X, W], [BF16] * 2, 2 * 200 * 4608, 2 * (12800 + 4608 + 6400), CONV),
    # input and weight gradients
    ("aten::convolution_backward", [OUT, X, W], [BF16] * 3, 4 * 200 * 4608, 4 * (6400 + 12800 + 4608)),
    # each input value spreads over 3 x 3 x 32 outputs: 8 x 10 x 10 x 16 x 32 x 9 products; 20 x 20 outputs
    ("aten::convolution", [X, WIDE], [BF16] * 2, 2 * 800 * 4608, 2 * (12800 + 4608 + 8 * 32 * 400), UP),
    # four groups of 4 channels: 8 x 8 x 8 places, 32 x 4 x 3 x 3 products
    ("aten::convolution", [X, NARROW], [BF16] * 2, 2 * 512 * 1152, 2 * (12800 + 1152 + 16384), GROUPED),
    # normalisation: in and out, and the small weights
    ("aten::native_layer_norm", [[4, 6], [], [6], [6]], [BF16, "", BF16, BF16], 168, 2 * (24 + 12 + 24)),
    ("aten::native_layer_norm_backward", [[4, 6], [4, 6]], [BF16] * 2, 13 * 24, 2 * 3 * 24),
    ("aten::_fused_rms_norm", [[4, 6], [], [6]], [BF16, "ScalarList", BF16], 4 * 24, 2 * (24 + 6 + 24)),
    ("aten::native_batch_norm", [[2, 3, 4, 4], [3], [3]], [F32] * 3, 7 * 96, 4 * (96 + 6 + 96)),
    ("aten::cudnn_batch_norm_backward", [[2, 3, 4, 4], [2, 3, 4, 4]], [F32] * 2, 13 * 96, 4 * 3 * 96),
    ("aten::native_group_norm", [[2, 3, 4, 4]], [F32], 7 * 96, 4 * 2 * 96),
    # softmax and losses
    ("aten::_softmax", [[4, 6]], [BF16], 5 * 24, 2 * 48),
    ("aten::_log_softmax", [[4, 6]], [F32], 5 * 24, 4 * 48),
    ("aten::_softmax_backward_data", [[4, 6], [4, 6]], [BF16] * 2, 4 * 24, 2 * 72),
    ("aten::nll_loss_forward", [[4, 6], [4]], [F32, I64], 4, 4 * 4 + 4 * 8),
    ("aten::nll_loss_backward", [[], [4, 6], [4]], [F32, F32, I64], 4, 24 * 4 + 4 * 8),
    # a difference, its square and a sum; backward two factors more
    ("aten::mse_loss", [[4, 6], [4, 6]], [F32] * 2, 3 * 24, 4 * 48),
    ("aten::mse_loss_backward", [[], [4, 6], [4, 6]], [F32] * 3, 3 * 24, 4 + 4 * 72),
    ("aten::max_pool2d_with_indices", [[2, 3, 4, 4]], [F32], 96, 4 * 96),
    # tables: 10 rows of 16 become 3 sums
    ("aten::_embedding_bag", [[100, 16], [10], [3]], [BF16, I64, I64], 160, 13 * 8 + 2 * (160 + 48)),
    ("aten::embedding", [[100, 16], [2, 5]], [BF16, I64], 0, 10 * 8 + 2 * 2 * 160),
    ("aten::index_select", [[100, 16], [], [10]], [BF16, "Scalar", I64], 0, 10 * 8 + 2 * 2 * 160),
    ("aten::embedding_dense_backward", [[2, 5, 16], [2, 5]], [BF16, I64], 160, 2 * 2 * 160 + 10 * 8),
    ("aten::gather", [[4, 6], [], [4, 2]], [F32, "Scalar", I64], 0, 8 * 8 + 2 * 8 * 4),
    # elementwise: a bias is read once; comparisons write bytes; a number does not change the type
    ("aten::gelu", [[4, 6]], [BF16], 24, 2 * 48),
    ("aten::add", [[4, 6], [6]], [BF16] * 2, 24, 2 * (24 + 6 + 24)),
    ("aten::mul_", [[4, 6], [4, 6]], [BF16] * 2, 24, 2 * 72),
    ("aten::mul", [[4, 6], []], [BF16, "double"], 24, 2 * 48 + 8),
    ("aten::eq", [[4, 6], [4, 6]], [F32] * 2, 24, 4 * 48 + 24),
    ("aten::addcmul_", [[4, 6]] * 3, [F32] * 3, 48, 4 * 96),
    ("aten::where", [[4, 6]] * 3, [BOOL, F32, F32], 24, 24 + 4 * 72),
    ("aten::native_dropout", [[4, 6]], [BF16], 48, 2 * 48 + 24),
    ("aten::threshold_backward", [[4, 6], [4, 6]], [BF16] * 2, 24, 2 * 72),
    # reductions are read; what they write is small
    ("aten::sum", [[4, 6]], [F32], 24, 96),
    ("aten::var_mean", [[4, 6]], [F32], 72, 96),
    ("aten::cumsum", [[4, 6]], [F32], 24, 2 * 96),
    # copies change types; filling only writes
    ("aten::copy_", [[4, 6], [4, 6]], [BF16, F32], 0, 24 * 2 + 24 * 4),
    ("aten::fill_", [[4, 6]], [F32], 0, 96),
    ("aten::cat", [[[4, 6], [4, 2]]], ["float"], 0, 2 * 4 * 32),
    # 24 + 6 parameters, whose type a list does not tell
    ("aten::_foreach_add_", [[[4, 6], [6]]], ["TensorList"], 30, None),
    ("aten::_foreach_add_", [[[4, 6], [6]]] * 2, [F32] * 2, 30, 4 * 3 * 30),
    ("aten::_foreach_mul_", [[[4, 6], [6]], []], [F32, "Scalar"], 30, 4 * 2 * 30),
    ("aten::_foreach_copy_", [[[4, 6], [6]]] * 2, [F32] * 2, 0, 4 * 2 * 30),
    ("aten::_fused_adamw_", [[[4, 6], [6]]] * 4, ["TensorList"] * 4, 15 * 30, None),
    ("aten::_fused_adamw_", [[[4, 6], [6]]] * 4, [F32] * 4, 15 * 30, 4 * 7 * 30),
    ("triton_poi_fused_add_gelu_3", [[4, 6], [4, 6], []], [BF16, BF16, "Scalar"], 0, 2 * 48),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_work_follows_from_shapes(case: tuple) -> None:
    name, dims, types, flops, nbytes, *values = case
    work = work_of(name, Shapes(tuple(dims), tuple(types), tuple(values[0]) if values else ()))
    assert work is not None
    assert (work.flops, work.nbytes) == (flops, nbytes)


def with_strides(name: str, dims: list, strides: list, types: list | None = None) -> Work:
    work = work_of(name, Shapes(tuple(dims), tuple(types or [BF16] * len(dims)), (), tuple(strides)))
    assert work is not None
    return work


def test_what_is_expanded_is_read_once() -> None:
    """A bias of 6 values, expanded to four rows, and one matrix for a batch of eight."""
    added = with_strides("aten::add", [[4, 6], [4, 6]], [[6, 1], [0, 1]])
    assert (added.flops, added.nbytes) == (24, 2 * (24 + 6 + 24))
    batched = with_strides("aten::bmm", [[8, 3, 5], [8, 5, 7]], [[15, 5, 1], [0, 7, 1]])
    assert (batched.flops, batched.nbytes) == (8 * 210, 2 * (8 * 15 + 35 + 8 * 21))


@pytest.mark.parametrize(
    ("name", "dims", "strides", "types", "reorders"),
    [
        ("transposed", [[4, 6], [4, 6]], [[6, 1], [1, 4]], None, True),
        ("NHWC to NCHW", [[2, 3, 4, 5]] * 2, [[60, 20, 5, 1], [60, 1, 15, 3]], None, True),
        (
            "heads swapped with the sequence",
            [[2, 3, 5, 8]] * 2,
            [[120, 40, 8, 1], [120, 8, 24, 1]],
            None,
            True,
        ),
        ("rows cut out of wider ones", [[4, 6], [4, 6]], [[6, 1], [12, 1]], None, False),
        ("both transposed", [[4, 6], [4, 6]], [[1, 4], [1, 4]], None, False),
        ("a dimension of one element", [[4, 1, 6]] * 2, [[6, 6, 1], [6, 1, 1]], None, False),
        ("spread over rows", [[4, 6], [4, 6]], [[6, 1], [0, 1]], None, False),
        ("changed in type as well", [[4, 6], [4, 6]], [[6, 1], [1, 4]], [BF16, F32], False),
        ("without strides", [[4, 6], [4, 6]], [], None, False),
    ],
)
def test_a_copy_between_two_orders_only_reorders(
    name: str, dims: list, strides: list, types: list | None, reorders: bool
) -> None:
    assert with_strides("aten::copy_", dims, strides, types).reorders == reorders, name


@pytest.mark.parametrize(
    ("dims", "strides", "misfit"),
    [
        # 1003 rows lie one after the other in both, and in the result: rows are 64, 128 and 128 long
        ([[1003, 64], [64, 128]], [[64, 1], [128, 1]], False),
        ([[1003, 64], [64, 128]], [], True),
        # of a weight gradient the 1003 are summed over: its first factor lies transposed
        ([[64, 1003], [1003, 128]], [[1, 64], [128, 1]], False),
        ([[64, 1003], [1003, 128]], [[1003, 1], [128, 1]], True),
        # the head of a vocabulary of 50,257: the result has rows of that length, or is read along them
        ([[64, 128], [128, 50257]], [[128, 1], [1, 128]], True),
        ([[64, 50257], [50257, 128]], [[50257, 1], [128, 1]], True),
        # padded to 50,304: rows begin at multiples of 8, but are no longer than they were
        ([[64, 50257], [50257, 128]], [[50304, 1], [128, 1]], True),
        # a slice of wider rows, which begin anywhere
        ([[64, 64], [64, 128]], [[100, 1], [128, 1]], True),
    ],
)
def test_rows_in_memory_decide_whether_a_product_fits(dims: list, strides: list, misfit: bool) -> None:
    assert with_strides("aten::mm", dims, strides).misfit == misfit


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("aten::mm", [[3, 5], [6, 7]]),
        ("aten::mm", [[3, 5]]),
        ("aten::mm", [[3, None], [5, 7]]),
        ("aten::_scaled_dot_product_flash_attention", [Q, [2, 3, 7]]),
        ("aten::convolution", [X, W]),  # its stride is not known
        ("flash_attn::_flash_attn_varlen_forward", [[10, 3, 11], [10, 3, 11], [10, 3, 11]]),
        ("aten::sort", [[4, 6]]),
        ("my_library::attention", [Q, K, K]),
    ],
)
def test_what_shapes_do_not_tell_is_unknown(name: str, dims: list) -> None:
    assert work_of(name, Shapes(tuple(dims), (BF16,) * len(dims))) is None


def test_shapes_are_kept_of_what_is_counted() -> None:
    assert [name for name, *_ in CASES if not _SHAPED_OPS.match(name)] == []


# GFLOP and MiB that TraceLens publishes for a call in these traces (resnet_act_checkpoint_recompute on MI300X
# and gaunernst_bert-small-uncased on H100 in tests/traces of AMD-AGI/TraceLens, MIT licence).
PUBLISHED = [
    ("aten::mm", [[10, 1000], [1000, 512]], 0.01024, 1.005401611328125),
    ("aten::addmm", [[1000], [10, 512], [512, 1000]], 0.01025, 1.0073089599609375),
    ("aten::convolution", [[10, 64, 56, 56], [64, 64, 3, 3]], 2.31211008, 7.7265625),
    ("aten::convolution", [[10, 512, 7, 7], [512, 512, 3, 3]], 2.31211008, 5.45703125),
    ("aten::convolution_backward", [[10, 64, 56, 56]] * 2 + [[64, 64, 3, 3]], 4.62422016, 15.453125),
    ("aten::convolution_backward", [[10, 512, 7, 7]] * 2 + [[512, 512, 3, 3]], 4.62422016, 10.9140625),
    ("aten::clamp_min_", [[10, 64, 56, 56]], 0.00200704, 7.65625),
    ("aten::add_", [[10, 64, 56, 56], [10, 64, 56, 56]], 0.00200704, 11.484375),
    ("aten::threshold_backward", [[10, 128, 28, 28], [10, 128, 28, 28]], 0.00100352, 5.7421875),
    ("aten::convolution", [[10, 256, 14, 14], [256, 256, 3, 3]], 2.31211008, 3.0390625),
    ("aten::convolution", [[10, 128, 28, 28], [128, 128, 3, 3]], 2.31211008, 4.109375),
    ("aten::sum", [[10, 1000]], 1e-5, 0.019075393676757812),
    ("aten::mean", [[10, 512, 7, 7]], 0.00025088, 0.4785175323486328),
    # TraceLens counts an operation for each element that is copied, and five, not seven, in a normalisation.
    ("aten::copy_", [[512, 512, 3, 3], [512, 512, 3, 3]], 0.0, 9.0),
    ("aten::native_batch_norm", [[10, 64, 56, 56]], 0.010035584 * 7 / 5, 7.656982421875),
    ("aten::native_batch_norm_backward", [[10, 64, 56, 56]] * 2, 0.01806336 * 13 / 9, 11.48486328125),
    ("aten::native_batch_norm_backward", [[10, 64, 112, 112]] * 2, 0.07225344 * 13 / 9, 45.93798828125),
]  # fmt: skip
PUBLISHED_H100 = [
    ("aten::addmm", [[512], [141, 512], [512, 512]], 0.0739968, 0.7763671875),
    ("aten::addmm", [[30522], [141, 512], [512, 30522]], 4.41119205, 38.211021423339844),
    ("aten::addmm", [[512], [141, 2048], [2048, 512]], 0.295770624, 2.689453125),
    ("aten::addmm", [[2048], [141, 512], [512, 2048]], 0.2959872, 2.6923828125),
    ("aten::_flash_attention_forward", [[1, 141, 8, 64]] * 3, 0.040716288, 0.55078125),
    ("aten::add", [[1, 141, 512]] * 2, 7.2192e-05, 0.4130859375),
    ("aten::add_", [[1, 141, 512]] * 2, 7.2192e-05, 0.4130859375),
    # TraceLens counts 12 bytes a channel, as a batch norm's; a layer norm reads a weight and a bias of 2.
    ("aten::native_layer_norm", [[1, 141, 512]], 0.000364032 * 7 / 5, 0.28125 - 512 * 8 / 2**20),
]


@pytest.fixture(scope="module")
def resnet(shared_traces: Path) -> Trace:
    return tracedoc.load(shared_traces / "ddp_resnet_mi300_8rank_r0/resnet_act_checkpoint.json.gz")


@pytest.fixture(scope="module")
def bert(shared_traces: Path) -> Trace:
    return tracedoc.load(shared_traces / "format_variants/h100_bert-small.json.gz")


@pytest.mark.parametrize(
    ("of", "published"),
    [("resnet", one) for one in PUBLISHED] + [("bert", one) for one in PUBLISHED_H100],
    ids=lambda one: one if isinstance(one, str) else f"{one[0]}-{one[1][0]}",
)
def test_calls_do_and_move_what_tracelens_says(
    of: str, published: tuple, request: pytest.FixtureRequest
) -> None:
    name, dims, gflop, mib = published
    trace: Trace = request.getfixturevalue(of)
    work = tracedoc.build_timeline(trace).work
    assert work is not None
    places = [
        place
        for place, row in enumerate(work.operators.rows.tolist())
        if trace.row_name(row) == name and list(trace.shapes[row].dims[: len(dims)]) == dims
    ]
    assert places
    assert work.operators.flops[places[0]] == pytest.approx(gflop * 1e9, rel=0.01)
    assert work.operators.nbytes[places[0]] == pytest.approx(mib * 2**20, rel=0.01)


def test_kernels_that_reorder_do_none_of_a_convolution(resnet: Trace) -> None:
    work = tracedoc.build_timeline(resnet).work
    assert work is not None
    convolutions = [
        row for row in work.operators.rows.tolist() if resnet.row_name(row) == "aten::convolution"
    ]
    mine = [place for place, row in enumerate(work.operator.tolist()) if row == convolutions[0]]
    names = [resnet.row_name(row) for row in work.rows[mine].tolist()]
    shares = work.share[mine].tolist()
    assert any(name.startswith("batched_transpose") for name in names)
    assert [share for name, share in zip(names, shares, strict=True) if "transpose" in name] == [
        0.0 for name in names if "transpose" in name
    ]
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("operator", "functor", "mib"),
    [
        ("aten::_fused_adamw_", "FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>", 7 * 4),
        ("aten::_foreach_copy_", "CopyFunctor<c10::BFloat16, float, 2, 1, 1>", 2 + 4),
        ("aten::_foreach_add_", "BinaryOpListAlphaFunctor<c10::BFloat16, 2, 2, 0>", 3 * 2),
    ],
)
def test_lists_have_the_types_that_their_kernels_are_named_after(
    operator: str, functor: str, mib: int, tmp_path: Path
) -> None:
    """Lists of 2^20 elements: Adam reads four numbers of each and writes three, a copy two of two types."""
    kernel = f"void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, at::native::{functor}>"
    builder = TraceBuilder().step(1, 0, 100)
    builder.kernel(
        kernel, 10, 20, launch_ms=1, op=operator, dims=[[[1024, 512]] * 2] * 2, types=["TensorList"] * 2
    )
    builder.write(tmp_path / "rank-0.json")
    work = tracedoc.build_timeline(tracedoc.load(tmp_path / "rank-0.json")).work
    assert work is not None
    assert work.operators.nbytes.tolist() == [mib * 2**20]
