"""Names of vendors, frameworks and torch versions mean what they should."""

from __future__ import annotations

import re

import pytest

from tracedoc.trace.columns import Kind
from tracedoc.trace.kernels import KernelCategory, is_rocm_copy_kernel, kernel_category
from tracedoc.trace.vocabulary import (
    DTYPE_BYTES,
    CopyKind,
    RuntimeRole,
    busbw_factor,
    collective_op,
    copy_kind,
    data_loader,
    dtype_bytes,
    event_kind,
    gloo_op,
    is_backward_node,
    is_compile_range,
    kind_of,
    nccl_annotation,
    optimizer_step_class,
    payload_bytes,
    runtime_role,
    step_number,
    updates_in_backward_pass,
)

C = KernelCategory


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "broadcast"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
        ("ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)", "all_gather"),
        ("ncclSymDevKernel_ReduceScatter_LDMC_sum_bf16(ncclSymDevArgs)", "reduce_scatter"),
        ("mscclKernel_Sum_float_Simple_false", "unknown"),
        ("void mscclpp::allreduce5<float>(float*)", "all_reduce"),
        ("void nvshmemi_transfer_put_signal<int>(int*)", "unknown"),
        ("void deep_ep::internode::dispatch<false, 4, false>(int4*)", "all_to_all"),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8>(int)", "all_to_all"),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*)", "unknown"),
        (
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
            "all_reduce",
        ),
        ("void c10d::symmetric_memory::multimem_one_shot_all_reduce_kernel<float, 8>(float*)", "all_reduce"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>(aiter::RankData*)", "all_reduce"),
        ("void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot>(half*)", "all_reduce"),
        ("void tensorrt_llm::kernels::twoShotAllReduceKernel<float, 8, false>(int)", "all_reduce"),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>()",
            "all_reduce",
        ),
        ("userbuffers_fp16_sum_inplace_gpu_rw_ag<4>", "unknown"),
        ("oneccl_allreduce_small_kernel", "all_reduce"),
    ],
)
def test_communication_kernels_of_every_vendor_are_recognised(name: str, op: str) -> None:
    assert kernel_category(name) is C.COMMUNICATION
    assert collective_op(name) == op


@pytest.mark.parametrize(
    ("name", "category"),
    [
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>(int)",
            C.REDUCTION,
        ),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", C.EMBEDDING),
        ("void at::native::_scatter_gather_elementwise_kernel<128, 4, ReduceAdd>(int)", C.EMBEDDING),
        ("triton_poi_fused_all_gather_into_tensor_wait_tensor_3", C.ELEMENTWISE),
        ("triton_red_fused_all_reduce_native_layer_norm_2", C.NORMALISATION),
        ("void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)", C.OTHER),
        ("void SoftmaxWarpAllReduce<float>(float*)", C.SOFTMAX),
        ("void cub::DeviceReduceSingleTileKernel<Policy>(float*)", C.REDUCTION),
        ("void at::native::split_with_sizes_copy_out_contiguous_kernel(char**)", C.COPY),
        ("void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>(float**)", C.COPY),
        ("void rotary_embedding_kernel<c10::BFloat16, true>(long const*)", C.ELEMENTWISE),
        ("void at::native::elementwise_kernel<128, 2, gpu_kernel_impl<{lambda(int)#1}>>(int)", C.ELEMENTWISE),
    ],
)
def test_compute_kernels_with_the_words_of_collectives_are_not_communication(name: str, category: C) -> None:
    assert kernel_category(name) is category
    assert collective_op(name) is None


@pytest.mark.parametrize(
    ("name", "category"),
    [
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>()",
            C.ATTENTION,
        ),
        ("triton_tem_fused_flex_attention_0", C.ATTENTION),
        ("triton_for_fused__fused_adamw_1", C.OPTIMIZER),
        ("triton_for_fused_0", C.ELEMENTWISE),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", C.GEMM),
        ("ampere_sgemm_128x64_nn", C.GEMM),
        ("Cijk_Ailk_Bjlk_BBS_BH_Bias_HAS_SAV_UserArgs_MT128x64x32", C.GEMM),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc", C.CONVOLUTION),
        (
            "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128>()",
            C.CONVOLUTION,
        ),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt64x128x32", C.CONVOLUTION),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>>()",
            C.OPTIMIZER,
        ),
        ("void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>()", C.NORMALISATION),
        (
            "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long)",
            C.NORMALISATION,
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>()",
            C.SOFTMAX,
        ),
        ("void split_embedding_codegen_forward_kernel<float>(fbgemm_gpu::Params)", C.EMBEDDING),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>()", C.COPY),
        ("__amd_rocclr_copyBuffer", C.COPY),
        ("__amd_rocclr_fillBufferAligned", C.ELEMENTWISE),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)", C.QUANTISATION),
        ("", C.OTHER),
    ],
)
def test_compute_kernels_are_sorted_by_what_they_compute(name: str, category: C) -> None:
    assert kernel_category(name) is category


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("wait", None),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::recv_any_source_", "recv"),
        ("c10d::monitored_barrier_", "barrier"),
        ("_c10d_functional::wait_tensor", None),
        ("_c10d_functional::all_gather_into_tensor", "all_gather"),
        ("nccl:all_reduce", "all_reduce"),
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:send 0->1", "send"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("nccl:coalesced", "unknown"),
        ("gloo:all_gather", "all_gather"),
        ("gloo:recvAnySource", "recv"),
        ("gloo:sparse_all_reduce", "all_reduce"),
        ("aten::gather", None),
        ("aten::scatter_add_", None),
        ("FSDP::all_gather (layers.0)", None),
        ("DistributedDataParallel.forward", None),
    ],
)
def test_one_operation_has_one_name(name: str, op: str | None) -> None:
    assert collective_op(name) == op


def test_annotations_of_one_backend_are_told_from_the_other() -> None:
    assert gloo_op("gloo:all_reduce") == "all_reduce"
    assert gloo_op("nccl:all_reduce") is None
    assert nccl_annotation("nccl:broadcast") == "broadcast"


def test_payload_is_the_full_buffer() -> None:
    assert payload_bytes("all_gather", 256, 1024, "BFloat16") == 2048
    assert payload_bytes("reduce_scatter", 1024, 256, "Float") == 4096
    assert payload_bytes("all_reduce", 1000, 1000, "c10::Half") == 2000
    assert payload_bytes("all_to_all", 10, 30, "Long") == 240
    assert payload_bytes("all_gather", 256, None, "Float") is None
    assert payload_bytes("all_reduce", 1000, 1000, "Quaternion") is None


@pytest.mark.parametrize(
    ("name", "size"),
    [("Float", 4), ("float", 4), ("c10::BFloat16", 2), ("Float8_e4m3fn", 1), ("c10::complex<float>", 8),
     ("long int", 8), ("Byte", 1), ("TensorList", None), ("", None)],
)  # fmt: skip
def test_size_of_an_element(name: str, size: int | None) -> None:
    assert dtype_bytes(name) == size


WORD_BYTES = {
    "bool": 1, "byte": 1, "char": 1, "short": 2, "half": 2, "int": 4, "float": 4, "long": 8, "double": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_an_element_is_as_large_as_its_name_says(name: str) -> None:
    word = re.sub(r"^(un)?signed |^complex<?|>$", "", name).split()[0]
    if bits := re.search(r"(?:int|float)(\d+)", word):
        values = 2 if word.endswith("_x2") else 1
        assert dtype_bytes(name) == values * int(bits[1]) // 8
    else:
        assert dtype_bytes(name) == WORD_BYTES[word] * (2 if name.startswith("complex") else 1)


def test_bus_bandwidth_factors_are_those_of_nccl_tests() -> None:
    assert busbw_factor("all_reduce", 8) == 1.75
    assert busbw_factor("all_gather", 4) == 0.75
    assert busbw_factor("broadcast", 8) == 1.0
    assert busbw_factor("all_reduce", 1) == 0.0


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("cudaLaunchKernel", RuntimeRole.LAUNCH),
        ("cudaLaunchKernelExC_v11060", RuntimeRole.LAUNCH),
        ("cuLaunchKernelEx", RuntimeRole.LAUNCH),
        ("hipExtModuleLaunchKernel", RuntimeRole.LAUNCH),
        ("cudaLaunchHostFunc", RuntimeRole.OTHER),
        ("cudaGraphLaunch", RuntimeRole.GRAPH_LAUNCH),
        ("hipGraphLaunch", RuntimeRole.GRAPH_LAUNCH),
        ("cudaMemcpyAsync", RuntimeRole.COPY),
        ("hipMemcpyWithStream", RuntimeRole.COPY),
        ("cudaMemsetAsync", RuntimeRole.COPY),
        ("cudaDeviceSynchronize", RuntimeRole.SYNC),
        ("hipStreamSynchronize", RuntimeRole.SYNC),
        ("cuStreamSynchronize", RuntimeRole.SYNC),
        ("cudaStreamWaitEvent", RuntimeRole.EVENT),
        ("cudaEventQuery", RuntimeRole.EVENT),
        ("cudaMalloc", RuntimeRole.ALLOCATION),
        ("cudaFree", RuntimeRole.ALLOCATION),
        ("cudaHostAlloc", RuntimeRole.ALLOCATION),
        ("hipMalloc", RuntimeRole.ALLOCATION),
        ("cuMemMap", RuntimeRole.ALLOCATION),
        ("cuMemUnmap", RuntimeRole.ALLOCATION),
        ("cudaMallocAsync", RuntimeRole.OTHER),
        ("cudaFreeAsync", RuntimeRole.OTHER),
        ("cuModuleLoadData", RuntimeRole.MODULE_LOAD),
        ("cudaStreamIsCapturing", RuntimeRole.OTHER),
        ("INVALID", RuntimeRole.OTHER),
    ],
)
def test_runtime_calls_have_one_role_on_every_vendor(name: str, role: RuntimeRole) -> None:
    assert runtime_role(name) is role


def test_copies_say_where_they_go() -> None:
    assert copy_kind("Memcpy HtoD (Pageable -> Device)") == CopyKind("HtoD", "Pageable")
    assert copy_kind("Memcpy DtoH (Device -> Host)") == CopyKind("DtoH", "Device")
    assert copy_kind("CopyHostToDevice") == CopyKind("HtoD", "Host")
    assert copy_kind("Memcpy Unknown (Unknown -> Unknown)").direction == "unknown"
    assert copy_kind("anything").direction == "unknown"
    assert is_rocm_copy_kernel("__amd_rocclr_copyBufferAligned.kd")
    assert not is_rocm_copy_kernel("__amd_rocclr_fillBufferAligned")


def test_host_ranges_are_read_from_their_names() -> None:
    assert step_number("ProfilerStep#12") == 12
    assert step_number("ProfilerStep#12 (extra)") is None
    assert step_number("ProfilerStep#999999999") == 999_999_999
    assert step_number(f"ProfilerStep#{10**30}") is None
    assert optimizer_step_class("Optimizer.step#AdamW.step") == "AdamW"
    assert data_loader("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__") == "single_process"
    assert data_loader("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__") == "workers"
    assert data_loader("enumerate(DataPipe)#MapperIterDataPipe") == "pipe"
    assert data_loader("DataLoader") is None
    assert is_backward_node("autograd::engine::evaluate_function: AddmmBackward0")
    assert is_backward_node("CudnnConvolutionBackward")
    assert not is_backward_node("aten::threshold_backward")
    assert is_compile_range("_compile.compile_inner (dynamo_timed)")
    assert not is_compile_range("Torch-Compiled Region: 0/0")


def test_categories_of_every_age_are_known() -> None:
    assert kind_of("cpu_op") is Kind.CPU_OP
    assert kind_of("Operator") is Kind.CPU_OP
    assert kind_of("Memcpy") is Kind.MEMCPY
    assert kind_of("mtia_ccp_events") is Kind.ACCELERATOR
    assert kind_of("cuda_event") is Kind.SYNC
    assert kind_of("ac2g") is None
    assert kind_of("forward-compute") is None


def test_host_ranges_with_the_category_of_operators_are_annotations() -> None:
    assert event_kind("Operator", "ProfilerStep#5") is Kind.ANNOTATION
    assert event_kind("Operator", "Optimizer.step#SGD.step") is Kind.ANNOTATION
    assert event_kind("Operator", "aten::add") is Kind.CPU_OP
    assert event_kind("gpu_user_annotation", "ProfilerStep#5") is Kind.GPU_ANNOTATION


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function", True),
        ("fbgemm::split_embedding_nobag_codegen_lookup_adam_function", True),
        ("fbgemm::split_embedding_codegen_lookup_sgd_function_pt2", True),
        ("fbgemm::split_embedding_codegen_lookup_none_function", False),
        ("fbgemm::dense_embedding_codegen_lookup_function", False),
    ],
)
def test_embeddings_that_are_updated_in_the_backward_pass(name: str, fused: bool) -> None:
    assert (updates_in_backward_pass(name) is not None) is fused
