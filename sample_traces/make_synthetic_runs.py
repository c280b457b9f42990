"""Make the synthetic GPU runs of this folder: ``python sample_traces/make_synthetic_runs.py [NAME...]``.

Nothing here ran on a GPU. The models and the ways to train them are below; ``simulated_job`` decides when
each event happens. The seed is fixed: the same version of both files writes the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from sample_traces.simulated_job import COMPUTE, GATHER, RANKS, REDUCE, SCATTER, Job  # noqa: E402
from tracedoc.testing import TraceBuilder  # noqa: E402

STEPS = 5  # the last one is cut off by the end of the capture: four are complete

GEMM_TFLOPS = 600.0  # bf16 matrix products that fill an H100 (989 dense at most)
HBM_GBPS = 2600.0  # element-wise kernels


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer and the tokens that one GPU takes per step."""

    layers: int
    hidden: int
    kv: int
    mlp: int
    vocabulary: int
    tokens: int

    @property
    def linears(self) -> list[tuple[str, int, int]]:
        """Name, inputs and outputs of each matrix of a layer."""
        return [
            ("self_attn.q_proj", self.hidden, self.hidden),
            ("self_attn.k_proj", self.hidden, self.kv),
            ("self_attn.v_proj", self.hidden, self.kv),
            ("self_attn.o_proj", self.hidden, self.hidden),
            ("mlp.gate_proj", self.hidden, self.mlp),
            ("mlp.up_proj", self.hidden, self.mlp),
            ("mlp.down_proj", self.mlp, self.hidden),
        ]

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: its matrices and two norms."""
        return sum(rows * columns for _, rows, columns in self.linears) + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, head, last norm."""
        return 2 * self.vocabulary * self.hidden + self.hidden


WIDE = Model(layers=16, hidden=4096, kv=1024, mlp=14336, vocabulary=32000, tokens=4096)
WIDE_SHORT = Model(layers=16, hidden=4096, kv=1024, mlp=14336, vocabulary=32000, tokens=2048)
NARROW = Model(layers=10, hidden=1024, kv=256, mlp=2048, vocabulary=32000, tokens=4096)
SMALL = Model(layers=12, hidden=768, kv=768, mlp=3072, vocabulary=32000, tokens=128)


def gemm_ms(tokens: int, inputs: int, outputs: int) -> float:
    """Return how long one matrix product takes; 4 us at least."""
    return max(2.0 * tokens * inputs * outputs / (GEMM_TFLOPS * 1e9), 0.004)


def stream_ms(nbytes: float) -> float:
    """Return how long a kernel takes that only moves ``nbytes`` through memory; 2 us at least."""
    return max(nbytes / (HBM_GBPS * 1e6), 0.002)


# What a layer launches -----------------------------------------------------------------------------

_RMS_NORM = "void (anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int, float)"
_ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>,"
    " std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
_SILU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel,"
    " std::array<char*, 2ul> >(int, at::native::(anonymous namespace)::silu_kernel, std::array<char*, 2ul>)"
)
_FLASH_FORWARD = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Flash_fwd_params)"
)
_FLASH_BACKWARD = (
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"
    "<Flash_bwd_kernel_traits<128, 64, 128, 8> >(Flash_bwd_params)"
)
_GEMM = {
    "forward": "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
    "input": "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    "weight": "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nt_align8>()",
}
_SOFTMAX = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, float>(float*)"
)
_COPY_OUT = "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel<BatchedCopyParam>(char**)"
_CHUNK_CAT = "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**, float*, long)"
_ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel"
    "<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>,"
    " at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (ADAM_MODE)1> >(float)"
)


def attention_ms(model: Model) -> float:
    """Return the time of the attention kernel, forward: causal, so half of 4 x tokens^2 x hidden."""
    return max(2.0 * model.tokens**2 * model.hidden / (GEMM_TFLOPS * 0.7 * 1e9), 0.006)


def linear_forward(
    job: Job, model: Model, inputs: int, outputs: int, *, after: list[float] | None = None
) -> None:
    """Multiply by one weight matrix."""
    job.kernel(
        _GEMM["forward"], gemm_ms(model.tokens, inputs, outputs), "aten::mm",
        dims=[[model.tokens, inputs], [inputs, outputs]], after=after,
    )  # fmt: skip


def linear_backward(
    job: Job, model: Model, inputs: int, outputs: int, *, after: list[float] | None = None
) -> list[float]:
    """Multiply for the gradients of input and weight; return when they are there."""
    with job.node("MmBackward0"):
        ms = gemm_ms(model.tokens, inputs, outputs)
        job.kernel(
            _GEMM["weight"],
            ms,
            "aten::mm",
            dims=[[outputs, model.tokens], [model.tokens, inputs]],
            after=after,
        )
        done = job.kernel(_GEMM["input"], ms, "aten::mm", dims=[[model.tokens, outputs], [outputs, inputs]])
    with job.node("torch::autograd::AccumulateGrad"):
        job.pause(0.004)
    return done


def norm(job: Job, model: Model) -> None:
    """Normalise the activations."""
    job.kernel(_RMS_NORM, stream_ms(4.0 * model.tokens * model.hidden), "aten::rms_norm")


def between(job: Job, model: Model, name: str, *, backward: bool = False) -> None:
    """Launch what stands between the matrices: attention after v_proj, SiLU after up_proj, residuals."""
    activation = 2.0 * model.tokens * model.hidden
    if name.endswith("v_proj"):
        heads = [1, model.hidden // 128, model.tokens, 128]
        if backward:
            with job.node("ScaledDotProductFlashAttentionBackward0"):
                job.kernel(
                    _FLASH_BACKWARD, 2.5 * attention_ms(model),
                    "aten::_scaled_dot_product_flash_attention_backward", dims=[heads] * 4,
                )  # fmt: skip
        else:
            job.kernel(
                _FLASH_FORWARD,
                attention_ms(model),
                "aten::_scaled_dot_product_flash_attention",
                dims=[heads] * 3,
            )
    elif name.endswith("up_proj"):
        job.kernel(_SILU, stream_ms(3 * 2.0 * model.tokens * model.mlp), "aten::silu")
    elif name.endswith(("o_proj", "down_proj")):
        job.kernel(_ELEMENTWISE, stream_ms(3 * activation), "aten::add")


def head_forward(job: Job, model: Model) -> list[float]:
    """Compute the logits and the loss; return when the loss is there."""
    linear_forward(job, model, model.hidden, model.vocabulary)
    return job.kernel(_SOFTMAX, stream_ms(4.0 * model.tokens * model.vocabulary), "aten::_log_softmax")


def adam(job: Job, parameters: int, after: list[float]) -> None:
    """Step a fused AdamW: 16 bytes read and 14 written a parameter."""
    with job.range("Optimizer.step#AdamW.step"):
        job.pause(0.1)
        job.kernel(_ADAM, stream_ms(30.0 * parameters), "aten::_fused_adamw_", after=after)
    with job.range("Optimizer.zero_grad#AdamW.zero_grad"):
        job.pause(0.05)


# FSDP2 ---------------------------------------------------------------------------------------------

UNIT_HOST_MS = 0.06  # hooks of one unit and pass, beside its collectives


def gather(job: Job, label: str, parameters: int, after: list[float]) -> list[float]:
    """All-gather one unit's bf16 parameters; return when they are there."""
    with job.range(f"FSDP::all_gather{label}"):
        return job.collective("allgather", 2 * parameters, stream=GATHER, after=after)


def copy_out(job: Job, label: str, parameters: int, gathered: list[float]) -> list[float]:
    """Spread a gathered unit over its parameters, on the compute stream."""
    with job.range(f"FSDP::all_gather_copy_out{label}"):
        return job.kernel(
            _COPY_OUT, stream_ms(4.0 * parameters), "fsdp::split_with_sizes_copy", after=gathered
        )


def scatter(job: Job, label: str, parameters: int, after: list[float]) -> list[float]:
    """Reduce-scatter one unit's gradients in fp32."""
    with job.range(f"FSDP::post_backward_reduce{label}"):
        ready = job.kernel(_CHUNK_CAT, stream_ms(6.0 * parameters), "fsdp::chunk_cat", after=after)
        return job.collective("reducescatter", 4 * parameters, stream=SCATTER, after=ready, dtype="Float")


def layer_units(model: Model, layer: int, *, fine: bool) -> list[tuple[str, list[tuple[str, int, int]], int]]:
    """Return the FSDP units of a layer as (label, matrices, parameters)."""
    name = f"layers.{layer}"
    if not fine:
        return [(f" ({name})", model.linears, model.layer_parameters)]
    return [(f" ({name}.{linear[0]})", [linear], linear[1] * linear[2]) for linear in model.linears]


def fsdp2(job: Job, model: Model, *, fine: bool) -> None:
    """Train with FSDP2: one unit a layer, or one a matrix."""
    units = [unit for layer in range(model.layers) for unit in layer_units(model, layer, fine=fine)]
    root = model.root_parameters
    for index in range(STEPS):
        with job.step(index):
            job.fetch_batch(model.tokens)
            with job.range("FSDP::root_pre_forward"):
                job.pause(UNIT_HOST_MS)
            with job.range("FSDP::pre_forward"):
                free = list(job.free.get(COMPUTE, [0.0] * RANKS))
                copied = copy_out(job, "", root, gather(job, "", root, free))
            for label, linears, parameters in units:
                with job.range(f"FSDP::pre_forward{label}"):
                    job.pause(UNIT_HOST_MS)
                    # One gather buffer: the next gather waits for the copy out of this one, not for compute.
                    copied = copy_out(job, label, parameters, gather(job, label, parameters, copied))
                for name, inputs, outputs in linears:
                    if name.endswith(("q_proj", "gate_proj")):
                        norm(job, model)
                    linear_forward(job, model, inputs, outputs)
                    between(job, model, name)
                with job.range(f"FSDP::post_forward{label}"):
                    job.pause(UNIT_HOST_MS / 2)
            loss = head_forward(job, model)
            with job.autograd():
                linear_backward(job, model, model.hidden, model.vocabulary)
                label, _, parameters = units[-1]
                gathered = gather(job, label, parameters, loss)
                for position in range(len(units) - 1, -1, -1):
                    label, linears, parameters = units[position]
                    with job.range(f"FSDP::pre_backward{label}"):
                        job.pause(UNIT_HOST_MS)
                        copied = copy_out(job, label, parameters, gathered)
                        if position:
                            following, _, size = units[position - 1]
                            with job.range(f"FSDP::backward_prefetch for {following[2:-1]}"):
                                gathered = gather(job, following, size, copied)
                    done = copied
                    for name, inputs, outputs in reversed(linears):
                        between(job, model, name, backward=True)
                        done = linear_backward(job, model, inputs, outputs)
                        if name.endswith(("q_proj", "gate_proj")):
                            norm(job, model)
                    reduced = scatter(job, label, parameters, done)
                reduced = scatter(job, "", root, done)
            if fine:
                # Gradient clipping reads the norm, so the hosts of all ranks meet here.
                job.wait("cudaStreamSynchronize", reduced)
            adam(job, (root + model.layers * model.layer_parameters) // RANKS, reduced)
            # The loss is read as soon as the forward pass has it: the host stays one backward pass ahead.
            job.wait("cudaEventSynchronize", loss)


# DeepSpeed ZeRO-3 ----------------------------------------------------------------------------------


def zero3(job: Job, model: Model) -> None:
    """Train with ZeRO-3 whose prefetch is off: a layer is gathered when the one before has finished."""
    size = 2 * model.layer_parameters
    for index in range(STEPS):
        with job.step(index):
            job.fetch_batch(model.tokens)
            done = list(job.free.get(COMPUTE, [0.0] * RANKS))
            for _ in range(model.layers):
                gathered: list[float] | None = job.collective("allgather", size, stream=GATHER, after=done)
                for name, inputs, outputs in model.linears:
                    if name.endswith(("q_proj", "gate_proj")):
                        done = job.kernel(
                            _RMS_NORM, stream_ms(4.0 * model.tokens * model.hidden), "aten::rms_norm",
                            after=gathered,
                        )  # fmt: skip
                    with job.range("LinearFunctionForZeroStage3", "cpu_op"):
                        linear_forward(job, model, inputs, outputs)
                    between(job, model, name)
                done = list(job.free[COMPUTE])
                with job.range("PreBackwardFunctionForModule", "cpu_op"):
                    job.pause(0.02)
            loss = head_forward(job, model)
            with job.autograd():
                done = linear_backward(job, model, model.hidden, model.vocabulary)
                for _ in range(model.layers):
                    with job.node("PreBackwardFunctionForModuleBackward"):
                        gathered = job.collective("allgather", size, stream=GATHER, after=done)
                    for name, inputs, outputs in reversed(model.linears):
                        done = linear_backward(job, model, inputs, outputs, after=gathered)
                        gathered = None
                        between(job, model, name, backward=True)
                    done = list(job.free[COMPUTE])
                    reduced = job.collective("reducescatter", size, stream=SCATTER, after=done)
            adam(job, model.layers * model.layer_parameters // RANKS, reduced)
            job.wait("cudaEventSynchronize", loss)


# DDP -----------------------------------------------------------------------------------------------

BUCKET_BYTES = 25 * 2**20


def ddp(job: Job, model: Model) -> None:
    """Train with DDP: fp32 gradients in buckets of 25 MiB, reduced while the backward pass runs."""
    for index in range(STEPS):
        with job.step(index):
            job.fetch_batch(model.tokens)
            with job.range("DistributedDataParallel.forward"):
                for _ in range(model.layers):
                    for name, inputs, outputs in model.linears:
                        if name.endswith(("q_proj", "gate_proj")):
                            norm(job, model)
                        linear_forward(job, model, inputs, outputs)
                        between(job, model, name)
            head_forward(job, model)
            filled = 4 * model.root_parameters
            with job.autograd():
                done = linear_backward(job, model, model.hidden, model.vocabulary)
                for layer in range(model.layers):
                    for name, inputs, outputs in reversed(model.linears):
                        between(job, model, name, backward=True)
                        done = linear_backward(job, model, inputs, outputs)
                        filled += 4 * inputs * outputs
                        last = layer == model.layers - 1 and name.endswith("q_proj")
                        while filled >= BUCKET_BYTES or (last and filled):
                            with job.node("torch::autograd::AccumulateGrad"):
                                size = min(filled, BUCKET_BYTES)
                                reduced = job.collective(
                                    "allreduce", size, stream=REDUCE, after=done, dtype="Float"
                                )
                            filled -= size
            adam(job, model.root_parameters + model.layers * model.layer_parameters, reduced)


RUNS = {
    "synthetic_fsdp2_healthy": lambda job: fsdp2(job, WIDE, fine=False),
    "synthetic_fsdp2_fine_wrapping": lambda job: fsdp2(job, NARROW, fine=True),
    "synthetic_zero3_gather_stall": lambda job: zero3(job, WIDE_SHORT),
    "synthetic_ddp_tiny_batch": lambda job: ddp(job, SMALL),
}


def build(name: str) -> list[TraceBuilder]:
    """Return the traces of all ranks of the run ``name``."""
    job = Job(name)
    RUNS[name](job)
    return job.finish()


def make(name: str, folder: Path) -> list[Path]:
    """Write the run ``name`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    return [builder.write(folder / f"rank-{rank}.json.gz") for rank, builder in enumerate(build(name))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; all unless given")
    for each in parser.parse_args().names or RUNS:
        for path in make(each, HERE / each):
            print(f"{each}/{path.name}  {path.stat().st_size / 1024:.0f} KiB")
