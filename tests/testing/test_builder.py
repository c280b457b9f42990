"""What TraceBuilder writes has the shape of a Kineto trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tracedoc.testing import TraceBuilder

BASE_NS = 1_767_225_600_000_000_000


def _document(builder: TraceBuilder) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(builder.to_json())
    return document


def _events(builder: TraceBuilder, category: str) -> list[dict[str, Any]]:
    return [e for e in _document(builder)["traceEvents"] if e.get("cat") == category]


def test_kernel_is_linked_to_its_launch_inside_an_operator() -> None:
    builder = TraceBuilder().kernel("gemm", 10, 12, launch_ms=9, op="aten::mm")
    (kernel,) = _events(builder, "kernel")
    (launch,) = _events(builder, "cuda_runtime")
    (operator,) = _events(builder, "cpu_op")
    assert kernel["dur"] == 2000.0
    assert kernel["ts"] - launch["ts"] == 1000.0
    assert kernel["args"]["correlation"] == launch["args"]["correlation"]
    assert kernel["args"]["External id"] == operator["args"]["External id"]
    assert operator["ts"] <= launch["ts"]
    assert launch["ts"] + launch["dur"] <= operator["ts"] + operator["dur"]
    assert (kernel["pid"], kernel["tid"]) == (0, 7)


def test_unlinked_kernel_has_no_launch() -> None:
    builder = TraceBuilder().kernel("gemm", 10, 12, linked=False)
    assert _events(builder, "cuda_runtime") == []
    assert "External id" not in _events(builder, "kernel")[0]["args"]


def test_time_is_relative_to_the_base_with_nanoseconds_kept() -> None:
    text = TraceBuilder().kernel("gemm", 0.000001, 0.000003, launch_ms=0).to_json()
    assert '"ts": 1000000000.001, "dur": 0.002' in text
    assert f'"baseTimeNanoseconds": {BASE_NS}' in text


def test_absolute_layout_states_unix_time() -> None:
    text = TraceBuilder(layout="absolute").kernel("gemm", 0.000001, 0.000003, launch_ms=0).to_json()
    assert '"ts": 1767226600000000.001, "dur": 0.002' in text
    assert "baseTimeNanoseconds" not in text


def test_array_layout_is_a_bare_list() -> None:
    document = json.loads(TraceBuilder(layout="array").kernel("gemm", 0, 1).to_json())
    assert isinstance(document, list)


def test_launches_on_one_thread_follow_each_other() -> None:
    builder = TraceBuilder().kernel("a", 10, 11, launch_ms=5).kernel("b", 11, 12, launch_ms=5)
    first, second = _events(builder, "cpu_op")
    assert second["ts"] >= first["ts"] + first["dur"]


def test_launch_never_comes_after_its_kernel() -> None:
    with pytest.raises(ValueError, match="after its start"):
        TraceBuilder().kernel("a", 10, 11, launch_ms=10.5)
    builder = TraceBuilder()
    for _ in range(5):
        builder.kernel("a", 10, 11, launch_ms=10)
    assert all(launch["ts"] == 1000010000.0 for launch in _events(builder, "cuda_runtime"))


@pytest.mark.parametrize(
    ("op", "taken_in", "put_out"),
    [
        ("allreduce", 1024, 1024),
        ("allgather", 256, 1024),
        ("reducescatter", 1024, 256),
        ("broadcast", 1024, 1024),
        ("alltoall", 1024, 1024),
    ],
)
def test_collective_states_elements_as_nccl_does(op: str, taken_in: int, put_out: int) -> None:
    builder = TraceBuilder(1, 4).collective(op, 0, 1, nbytes=4096, dtype="Float")
    args = _events(builder, "kernel")[0]["args"]
    assert (args["In msg nelems"], args["Out msg nelems"]) == (taken_in, put_out)
    assert args["Group size"] == 4
    assert args["Process Group Ranks"] == "[0, 1, 2, 3]"


def test_collective_writes_operator_record_annotation_and_shadow() -> None:
    builder = TraceBuilder(0, 2).collective("allgather", 10, 20, nbytes=4096)
    operators = [e["name"] for e in _events(builder, "cpu_op")]
    assert operators == ["c10d::_allgather_base_", "record_param_comms"]
    assert [e["name"] for e in _events(builder, "user_annotation")] == ["nccl:_all_gather_base"]
    (shadow,) = _events(builder, "gpu_user_annotation")
    assert shadow["ts"] == pytest.approx(1000009999.999)
    record = _events(builder, "cpu_op")[1]
    assert _events(builder, "kernel")[0]["args"]["External id"] == record["args"]["External id"]


def test_sequence_counts_within_the_group() -> None:
    builder = TraceBuilder(0, 4)
    builder.collective("allreduce", 0, 1).collective("allreduce", 1, 2, group="tp", ranks=[0, 1])
    builder.collective("allreduce", 2, 3)
    assert [e["args"]["Seq"] for e in _events(builder, "kernel")] == [1, 1, 2]
    names = [group["pg_name"] for group in _document(builder)["distributedInfo"]["pg_config"]]
    assert names == ["0", "tp"]


def test_long_rank_lists_are_shortened() -> None:
    builder = TraceBuilder(0, 64).collective("allreduce", 0, 1)
    listed = _events(builder, "kernel")[0]["args"]["Process Group Ranks"]
    assert listed.startswith("[0, 1, ")
    assert listed.endswith("28, ..., 63]")


def test_cpu_trace_has_gloo_on_its_own_thread_and_no_gpu() -> None:
    builder = TraceBuilder(0, 2, device=None).collective("reducescatter", 10, 20, nbytes=4096, dtype="Float")
    (call,) = _events(builder, "cpu_op")
    (gloo,) = _events(builder, "user_annotation")
    assert call["name"] == "c10d::_reduce_scatter_base_"
    assert gloo["name"] == "gloo:all_reduce"
    assert gloo["tid"] != call["tid"]
    assert gloo["args"]["Input Dims"] == [[1024]]
    assert _document(builder)["deviceProperties"] == []
    with pytest.raises(ValueError, match="no GPU events"):
        builder.kernel("gemm", 0, 1)


def test_pageable_copy_blocks_the_call() -> None:
    builder = TraceBuilder().copy("HtoD", 10, 15, 1 << 20, pageable=True, launch_ms=10)
    assert _events(builder, "gpu_memcpy")[0]["name"] == "Memcpy HtoD (Pageable -> Device)"
    assert _events(builder, "cuda_runtime")[0]["dur"] == 5000.0


def test_every_trace_says_that_it_is_synthetic() -> None:
    assert _document(TraceBuilder().kernel("gemm", 0, 1))["tracedoc_synthetic"] is True


def test_equal_builders_write_equal_bytes(tmp_path: Path) -> None:
    paths = [TraceBuilder().kernel("gemm", 0, 1).write(tmp_path / f"{i}.json.gz") for i in range(2)]
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert json.loads(gzip.decompress(first))["schemaVersion"] == 1


def test_kernel_arguments_are_those_of_a_real_nccl_kernel(shared_traces: Path) -> None:
    with gzip.open(shared_traces / "ddp_resnet_a100_2rank_r0" / "nccl_data.json.gz") as stream:
        real = json.load(stream)["traceEvents"]
    kernel = next(
        e for e in real if e.get("cat") == "kernel" and e["name"].startswith("ncclKernel_AllReduce")
    )
    record = next(e for e in real if e.get("name") == "record_param_comms")
    builder = TraceBuilder(0, 2).collective("allreduce", 0, 1)
    assert set(kernel["args"]) <= set(_events(builder, "kernel")[0]["args"])
    assert set(record["args"]) - {"Record function id", "Ev Idx"} <= set(
        _events(builder, "cpu_op")[1]["args"]
    )
