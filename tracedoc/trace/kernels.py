"""Tell from the name of a GPU kernel what it computes, or that it communicates."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache, lru_cache

import msgspec


class KernelCategory(str, Enum):
    """What a GPU kernel computes, by its name."""

    COMMUNICATION = "communication"
    ATTENTION = "attention"
    GEMM = "gemm"
    CONVOLUTION = "convolution"
    OPTIMIZER = "optimizer"
    NORMALISATION = "normalisation"
    SOFTMAX = "softmax"
    EMBEDDING = "embedding"
    REDUCTION = "reduction"
    COPY = "copy"
    QUANTISATION = "quantisation"
    ELEMENTWISE = "elementwise"
    OTHER = "other"


MATRIX = (KernelCategory.GEMM, KernelCategory.CONVOLUTION, KernelCategory.ATTENTION)
"""What multiplies matrices, on tensor cores where there are some."""

# Compute libraries whose kernels carry words such as "gather" or "reduce" without communicating, and
# kernels that Inductor names after the operators it fused ("triton_poi_fused_all_gather_into_tensor_3").
_NEVER_COMMUNICATION = re.compile(
    r"^(?:void )?(?:at::native::|at::cuda::|at_cuda_detail::|cub::|thrust::|cutlass|cudnn|"
    r"fbgemm_gpu::permute|triton_[a-z]+_fused|deep_ep::layout::|dpsk::ep::layout::|aten::|FSDP::)"
)


def _outside(word: str, *inner: str) -> str:
    """Return a pattern for ``word`` that does not follow any of the ``inner`` ones."""
    return word + "".join(f"(?<!{before}{word})" for before in inner)


# All patterns are for names in lower case, and each alternative begins with a letter: only then does the
# search pass quickly over the places where none can begin. What must not stand before it is looked up behind.
_WITHIN_GPU = ("warp", "warp_", "block", "block_", "quad", "thread")

COMMUNICATION_KERNELS: tuple[tuple[str, str], ...] = (
    ("NCCL and RCCL", r"nccl(?<![a-z]nccl)(?:x|symk?)?(?:dev)?kernel|rccl(?<![a-z]rccl)"),
    ("MSCCL and MSCCL++", r"msccl"),
    ("NVSHMEM and rocSHMEM", r"nvshmem|rocshmem"),
    (
        "DeepEP and its forks",
        r"deep_ep::|dpsk::ep|(?:inter|intra)node::(?:cached_)?(?:dispatch|combine|notify)",
    ),
    ("NCCLX ctran", r"ctran(?:kernel|::)"),
    ("torch symmetric memory", r"multimem_|symmetric_memory::|put_signal_kernel|wait_signal_kernel"),
    ("torch intra-node", r"hybridcubemeshallreduce"),
    ("vLLM, SGLang, aiter", r"cross_device_(?:reduce|store)|quickreduce::"),
    ("Transformer Engine userbuffers", r"userbuffers_"),
    (
        "oneCCL",
        r"oneccl|oneapi::ccl|ccl::(?<!\wccl::)|ccl_\w*(?:allreduce|allgather|reduce_scatter|alltoall)",
    ),
    (
        "custom all-reduce (TRT-LLM, FlashInfer, FBGEMM, torch one-shot and two-shot) and its kin",
        # Warp and block all-reduces stay inside one GPU.
        rf"{_outside('all', *_WITHIN_GPU)}_?(?:reduce|gather(?!ed)|to_?all)"
        rf"|{_outside('reduce_scatter_', *_WITHIN_GPU)}(?:kernel|out|cross)",
    ),
)
"""Whose communication kernels are recognised, by which regular expression of their names in lower case."""

_COMMUNICATION = re.compile("|".join(pattern for _, pattern in COMMUNICATION_KERNELS))
_NCCL_FUNCTION = re.compile(r"nccl[A-Z]")

# Inductor names its kernels triton_<shape>_fused_<operators>_<n>; the shape says more than the operators.
_INDUCTOR = re.compile(r"^triton_(poi|red|per|tem|for|mm|bmm|split)_")
_INDUCTOR_NORM = re.compile(r"(?:layer|rms|batch|group)_norm")
_INDUCTOR_SOFTMAX = re.compile(r"softmax|nll_loss|cross_entropy")
_INDUCTOR_ADAM = re.compile(r"adam|sgd|lamb")

_KERNEL_PATTERNS: tuple[tuple[KernelCategory, str], ...] = (
    (
        KernelCategory.ATTENTION,
        r"flash_?(?:fwd|bwd|attn|attention|mla)|flash::(?<![a-z]flash::)|pytorch_flash|fmha|attention|"
        r"attn_(?<![a-z]attn_)(?:fwd|bwd|kernel)|cudnn.*mha|aiter.*mha|mha_(?<![a-z]mha_)|sdpa",
    ),
    (
        KernelCategory.OPTIMIZER,
        r"multi_tensor_apply|fused_?adam|adamw?_(?!_)|lamb(?<![a-z]lamb)(?!da)|"
        r"fused(?<![a-z]fused)_?sgd|sgd_|fusedoptimizer|koptimizer",
    ),
    (
        KernelCategory.NORMALISATION,
        r"layer_?norm|rms_?norm|batch_?norm|bn_(?<![a-z]bn_)(?:fw|bw)|group_?norm|instance_?norm|"
        r"gammabeta|ln_(?<![a-z]ln_)(?:fwd|bwd)",
    ),
    (
        # "conv" also begins "convert"; xmma and cutlass convolutions say fprop, dgrad or wgrad.
        KernelCategory.CONVOLUTION,
        r"conv(?!ert|ers)|implicit_?gemm|winograd|wgrad|dgrad|fprop|scudnn|hcudnn|"
        r"igemm_(?:fwd|bwd|wrw)|cudnn::(?!bn)|im2col|col2im|miopen(?!.*norm)",
    ),
    (
        KernelCategory.GEMM,
        r"gemm(?<!fbgemm)|nvjet|cublas|cutlass|xmma|cijk_|split_?k_?reduce|wgmma|gemv|dot_kernel|matmul|"
        r"mm_(?<![a-z]mm_)(?!and)|bmm_(?<![a-z]bmm_)(?!and)|wvsplitk|hipblas|rocblas",
    ),
    (KernelCategory.SOFTMAX, r"soft_?max|cross_?entropy|nll_?loss|nllcriterion"),
    (
        KernelCategory.EMBEDDING,
        r"embedding(?<!rotary_embedding)|"
        r"index_?(?:select|put|copy|add|fill|func|elementwise|kernel|backward)|indexing_backward|"
        r"linearize_index|scatter|gather|bounds_check_indices|fbgemm_gpu::|pooled_embs",
    ),
    (KernelCategory.REDUCTION, r"reduce_kernel|device(?:segmented)?reduce|reducebykey"),
    (
        KernelCategory.COPY,
        r"catarraybatchedcopy|direct_copy|copy_?kernel|copybuffer|split_with_sizes|chunk_cat|transpose|"
        r"nchwto|nhwcto|tofloat32_copy|float8_copy",
    ),
    (
        KernelCategory.QUANTISATION,
        r"quantize|dequant|kgemm_4bit|quant_kernel|_quant_|cast_to_fp8",
    ),
    (
        KernelCategory.ELEMENTWISE,
        r"elementwise|vectorized|unrolled|fillfunctor|fillbuffer|dropout|subtensorop|optensor|rotary|"
        r"act_and_mul|activation|silu|gelu|relu|swiglu",
    ),
)
# Normalisation and optimizer stand before the library names because their kernels may live in cudnn::
# or mention conv in a template argument, never the other way round.


@cache
def _kernel_table() -> tuple[tuple[KernelCategory, re.Pattern[str]], ...]:
    # Not as the module is imported: to compile them takes 3 ms, and not every process asks.
    return tuple((category, re.compile(pattern)) for category, pattern in _KERNEL_PATTERNS)


@lru_cache(maxsize=65536)
def kernel_category(name: str) -> KernelCategory:
    """The category of the kernel of this name; the first table that knows it decides."""
    if is_communication_kernel(name):
        return KernelCategory.COMMUNICATION
    inductor = _INDUCTOR.match(name)
    if inductor:
        return _inductor_category(inductor.group(1), name)
    lowered = name.lower()
    for category, pattern in _kernel_table():
        if pattern.search(lowered):
            return category
    return KernelCategory.OTHER


def _inductor_category(shape: str, name: str) -> KernelCategory:
    if shape == "tem":
        return KernelCategory.ATTENTION if "attention" in name else KernelCategory.GEMM
    if shape in ("mm", "bmm"):
        return KernelCategory.GEMM
    if shape in ("red", "per", "split"):
        if _INDUCTOR_NORM.search(name):
            return KernelCategory.NORMALISATION
        return KernelCategory.SOFTMAX if _INDUCTOR_SOFTMAX.search(name) else KernelCategory.REDUCTION
    if shape == "for" and _INDUCTOR_ADAM.search(name):
        return KernelCategory.OPTIMIZER
    return KernelCategory.ELEMENTWISE


def is_communication_kernel(name: str) -> bool:
    """True for a kernel that moves data between GPUs, whoever wrote it."""
    if _NEVER_COMMUNICATION.match(name):
        return False
    return _NCCL_FUNCTION.match(name) is not None or _COMMUNICATION.search(name.lower()) is not None


def is_rocm_copy_kernel(name: str) -> bool:
    """Tell the kernels by which ROCm copies memory; its fill kernels are a memset and do not count."""
    return name.startswith("__amd_rocclr_copy")


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
