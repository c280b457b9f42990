"""Formats and tensor cores of matrix kernels, by names as profilers wrote them."""

from __future__ import annotations

import pytest

from tracedoc.trace.kernels import MatrixFormat, matrix_format


@pytest.mark.parametrize(
    ("name", "dtype", "tensor_cores"),
    [
        ("volta_sgemm_128x32_nt", "fp32", False),
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "fp16", True),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "bf16", True),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(cutlass)", "tf32", True),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32>(x)", "bf16", True),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(x)", "fp32", False),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize", "tf32", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1", "bf16", True),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "bf16", True),
        ("cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1", "fp32", False),
        ("void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false>(int)", "fp32", False),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0", "bf16", True),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1", "bf16", True),
        (
            "void pytorch_flash::flash_fwd_kernel<traits<64, 128, 128, 4, cutlass::bfloat16_t>>(x)",
            "bf16",
            True,
        ),
        ("a_kernel_that_nobody_knows", "", None),
    ],
)
def test_names_tell_format_and_tensor_cores(name: str, dtype: str, tensor_cores: bool | None) -> None:
    assert matrix_format(name) == MatrixFormat(dtype, tensor_cores)


@pytest.mark.parametrize(
    "name",
    [
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(x)",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(x)",
    ],
)
def test_helpers_of_a_product_have_no_format(name: str) -> None:
    assert matrix_format(name) is None
