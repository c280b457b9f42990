"""Tell from the name of a matrix kernel its number format, and whether it runs on tensor cores."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec


class MatrixFormat(msgspec.Struct, frozen=True):
    """What a matrix kernel multiplies, and with what.

    ``dtype`` is "bf16", "fp16", "fp8", "int8", "tf32", "fp32" or "fp64", "" where the name does not show it.
    ``tensor_cores`` is ``None`` where the name does not show it. AMD's matrix cores count as tensor cores.
    """

    dtype: str
    tensor_cores: bool | None


# Helpers of a product: they add up its parts and multiply nothing.
_HELPER = re.compile(
    r"(?i)split_?k_?reduce|reduce_?kernel|reduction::|transpose|nchwTo|nhwcTo|im2col|col2im|scalePacked"
)

_TENSOR_CORES = re.compile(
    r"(?i)tensorop|wmma|wgmma|gmma|(?<![a-z])[hib]mma|nvjet|tensor\d+x\d+x\d+|"
    r"(?<![a-z])[shib](?:8816|884|1688|16816|16832|161616|161632)(?![0-9])|"
    r"884(?:gemm|cudnn)|xmma_\w*(?:tf32|bf16|f16f16|e4m3|e5m2)|warpgroupsize|"
    r"xdl(?:ops)?|mfma|_MI\d+x\d+x\d+|igemm_\w+gtcx|"
    r"flash|sdpa|fmha_cutlass\w*_(?:b?f16)|scaled_mm|deep_?gemm|marlin"
)
# Single-precision products in plain CUDA cores, by NVIDIA's, cuDNN's and ROCm's names.
_NO_TENSOR_CORES = re.compile(
    r"(?i)(?<![a-z])(?:[sdcz]gemm|gemvx?|gemv\w*|gemmSN|gemmk1|dot_kernel)|simt|scudnn|hcudnn|winograd|"
    r"convolve_[sh]gemm|[dw]grad\w*_(?:alg|engine)|dgrad_engine|wgrad2d|conv2d_grouped|conv_depthwise|"
    r"naive_conv|f32f32_f32f32"
)

_DTYPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("fp8", re.compile(r"(?i)e4m3|e5m2|fp8|float8|_F8|_B8F8")),
    ("int8", re.compile(r"(?i)imma|i8816|i16832|s8s8|_i8|int8|_I8")),
    ("bf16", re.compile(r"(?i)bf16|bfloat16|_tst_|Cijk_\w*_(?:BBS|B)_|nv_bfloat")),
    (
        "fp16",
        re.compile(r"(?i)fp16|(?<!b)f16(?!32)|half|_hsh_|_h(?:884|1688|16816)|Cijk_\w*_(?:HHS|HH|H)_|s884"),
    ),
    ("tf32", re.compile(r"(?i)tf32|tensorop_s1688(?!\d)|xf32|Cijk_\w*_S_MX")),
    ("fp64", re.compile(r"(?i)(?<![a-z])dgemm|f64|double")),
    (
        "fp32",
        re.compile(r"(?i)(?<![a-z])sgemm|_sgemm|scudnn|f32f32_f32f32|<float|float,|Cijk_\w*_(?:SB|S)_|simt"),
    ),
)


@lru_cache(maxsize=4096)
def matrix_format(name: str) -> MatrixFormat | None:
    """Return the format of a matrix product, convolution or attention kernel, ``None`` for its helpers."""
    if _HELPER.search(name):
        return None
    dtype = next((dtype for dtype, pattern in _DTYPES if pattern.search(name)), "")
    if _NO_TENSOR_CORES.search(name) and not re.search(r"(?i)tensorop|wmma|xdl", name):
        return MatrixFormat(dtype, False)
    if _TENSOR_CORES.search(name) or dtype in ("tf32", "fp8"):
        return MatrixFormat(dtype, True)
    return MatrixFormat(dtype, None)
