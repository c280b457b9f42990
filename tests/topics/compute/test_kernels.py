"""Facts about kernels, matrix products and memory, on small traces worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tracedoc
from tests.topics.small_runs import of_run, two_steps
from tracedoc.step.work import gemm_table
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.build import RankTimeline
from tracedoc.values import Unknown, Value

SGEMM = "ampere_sgemm_128x64_tn"
BF16 = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"


def one_of(tmp_path: Path, builder: TraceBuilder) -> tuple[RankTimeline, dict[str, Value]]:
    path = builder.write(tmp_path / "rank-0.json")
    measurements = tracedoc.measure([path]).measurements
    timeline = tracedoc.build_timeline(tracedoc.load(path))
    return timeline, {name: fact.value for name, fact in measurements.facts.items()}


def steps_of(*kernels: tuple[str, float, float]) -> TraceBuilder:
    """Build three steps of 100 ms with these kernels, launched 1 ms before the step's first one."""
    builder = TraceBuilder(0, 2)
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start - 2, start + 97).backward(start + 50, start + 60)
        for number, (name, first, last) in enumerate(kernels):
            builder.kernel(name, start + first, start + last, launch_ms=start - 1 + 0.02 * number)
    return builder


def test_kernels_are_told_by_what_they_compute(tmp_path: Path) -> None:
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(x)"
    _, facts = one_of(tmp_path, steps_of((SGEMM, 0, 30), (BF16, 30, 60), (add, 60, 80)))
    assert facts["tensor_core_frac"] == 0.5
    assert facts["matrix_dtypes"] == "bf16 50 %, fp32 50 %"
    assert facts["plain_matrix_ms"] == 30


def test_tensor_cores_are_unknown_where_names_do_not_tell(tmp_path: Path) -> None:
    _, facts = one_of(tmp_path, steps_of(("triton_mm_3", 0, 60), (BF16, 60, 80)))
    assert facts["tensor_core_frac"] == Unknown("kernel names show it for only 25 % of the kernel time")
    assert facts["plain_matrix_ms"] == 0


def test_matrix_products_are_kept_by_shape_alone_and_beside_communication(tmp_path: Path) -> None:
    builder = steps_of((BF16, 0, 10), (BF16, 20, 32), (BF16, 40, 56))
    for index in (1, 2, 3):
        builder.collective("allreduce", 100 * index + 40, 100 * index + 60, launch_ms=100 * index - 0.5)
    timeline, _ = one_of(tmp_path, builder)
    table = gemm_table(timeline)
    assert len(table) == 1
    assert table.gridded.tolist() == [True]
    # Two complete steps: 10 and 12 ms alone, 16 ms beside the all-reduce.
    assert (table.alone[0], table.alone_p10_ns[0], table.alone_median_ns[0]) == (4, 10_000_000, 10_000_000)
    assert (table.beside[0], table.beside_p10_ns[0]) == (2, 16_000_000)


def test_the_key_of_a_product_is_that_of_its_name_and_grid(tmp_path: Path) -> None:
    one, _ = one_of(tmp_path, steps_of((BF16, 0, 10), (BF16, 20, 32)))
    path = tmp_path / "wider.json"
    path.write_text(steps_of((BF16, 0, 10), (BF16, 20, 32)).to_json().replace("[132, 1, 1]", "[66, 2, 1]"))
    other = tracedoc.build_timeline(tracedoc.load(path))
    keys = {int(gemm_table(timeline).keys[0]) for timeline in (one, other, one)}
    assert len(keys) == 2


def memory_events(builder: TraceBuilder, peaks: list[tuple[int, int, int]]) -> str:
    """Return the builder's trace with ``[memory]`` instants: device type, allocated and reserved bytes."""
    document = json.loads(builder.to_json())
    at = document["traceEvents"][-1]["ts"]
    document["traceEvents"] += [
        {
            "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": at,
            "args": {
                "Total Reserved": reserved, "Total Allocated": allocated, "Bytes": 64, "Addr": 1,
                "Device Id": 0 if kind else -1, "Device Type": kind, "Ev Idx": 1,
            },
        }
        for kind, allocated, reserved in peaks
    ]  # fmt: skip
    return json.dumps(document)


def test_memory_peaks_are_those_of_the_device(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    gib = 1 << 30
    path.write_text(
        memory_events(
            steps_of((BF16, 0, 60)), [(1, 10 * gib, 20 * gib), (1, 8 * gib, 24 * gib), (0, 1 << 50, 0)]
        )
    )
    measurements = tracedoc.measure([path]).measurements
    facts = {name: fact.value for name, fact in measurements.facts.items()}
    assert facts["peak_allocated_bytes"] == 10 * gib
    assert facts["peak_reserved_bytes"] == 24 * gib
    assert facts["device_memory_bytes"] == tracedoc.load(path).info.devices[0].memory_bytes


def test_memory_is_unknown_where_it_was_not_recorded(tmp_path: Path) -> None:
    _, facts = one_of(tmp_path, steps_of((BF16, 0, 60)))
    assert facts["peak_reserved_bytes"] == Unknown("device memory was not recorded (profile_memory=True)")


LOOKUP = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("aten::scaled_dot_product_attention", "computes_attention"),
        ("aten::native_batch_norm", "has_batch_norm"),
        (LOOKUP, "updates_in_backward"),
        ("aten::mm", ""),
    ],
)
def test_what_operators_tell_of_the_model(tmp_path: Path, name: str, fact: str) -> None:
    builder = steps_of((BF16, 0, 60)).host(name, 1, 2)
    _, facts = one_of(tmp_path, builder)
    traits = ("computes_attention", "has_batch_norm", "updates_in_backward")
    assert [one for one in traits if facts[one]] == [fact] * bool(fact)


@pytest.mark.parametrize(
    ("ranks", "name", "suits"),
    [
        (1, "aten::native_batch_norm", True),
        (2, "aten::layer_norm", True),
        (2, "aten::native_batch_norm", False),
    ],
)
def test_under_ddp_batch_norm_keeps_passes_out_of_cuda_graphs(
    tmp_path: Path, ranks: int, name: str, suits: bool
) -> None:
    builders = [two_steps(TraceBuilder(rank, ranks)).host(name, 111, 112) for rank in range(ranks)]
    for builder in builders[: ranks if ranks > 1 else 0]:
        builder.host("DistributedDataParallel.forward", 113, 114, category="user_annotation")
    facts = of_run(tmp_path, builders)
    assert facts["strategy_family"].value == ("single" if ranks == 1 else "ddp")
    assert facts["launcher"].value == ("python" if ranks == 1 else "torchrun")
    assert facts["suits_cuda_graphs"].value is suits
