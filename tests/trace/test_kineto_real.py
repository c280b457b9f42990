"""Every real trace opens, and its columns are those of a slow reader with exact decimals."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.trace.reference import reference_rows, rows_of
from tracedoc.errors import InputError
from tracedoc.trace.columns import Kind
from tracedoc.trace.kineto import read_trace
from tracedoc.trace.vocabulary import P2P_OPS

NOT_TRACES = {
    "eg.rank_0.pt.trace.json.gz": "execution trace",
    "bytedance_timeline-ST.json.gz": "not one of PyTorch's profiler",
}


PARTS = 8
"""The traces are read in so many tests, which run beside each other."""

TWINS = ("resnet50_v100_workers4_2021", "dlrm_v100_2rank_r1")
"""Runs of 30 MB each that were recorded by the same profilers as others that are here."""


def real_traces(shared_traces: Path) -> tuple[list[Path], list[Path]]:
    """Return one trace of each run, with all format variants; and those of twins and of the other ranks."""
    paths = sorted(p for p in shared_traces.rglob("*.json.gz") if p.name not in NOT_TRACES)
    assert len(paths) > 60
    first = {path.parent: path for path in reversed(paths)}
    one = [path for path in paths if path.parent.name == "format_variants" or first[path.parent] == path]
    one = [path for path in one if path.parent.name not in TWINS]
    return one, [path for path in paths if path not in one]


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_real_trace_has_the_columns_of_the_exact_reader(
    shared_traces: Path, part: int, others: bool
) -> None:
    for path in real_traces(shared_traces)[others][part::PARTS]:
        trace = read_trace(path)
        text = gzip.decompress(path.read_bytes()).decode()
        assert rows_of(trace) == reference_rows(text), path
        assert not trace.info.truncated


@pytest.mark.parametrize(("name", "words"), sorted(NOT_TRACES.items()))
def test_files_with_the_name_of_a_trace_are_called_what_they_are(
    shared_traces: Path, name: str, words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read_trace(shared_traces / "format_variants" / name)
    assert caught.value.hint


def test_python_functions_are_kept_only_where_asked(shared_traces: Path) -> None:
    path = shared_traces / "format_variants" / "h100_bert-small.json.gz"
    assert not read_trace(path).rows(Kind.PYTHON).size
    trace = read_trace(path, python_functions=True)
    assert trace.rows(Kind.PYTHON).size > 0
    assert rows_of(trace) == reference_rows(
        gzip.decompress(path.read_bytes()).decode(), python_functions=True
    )


def test_mtia_is_a_device_that_is_not_understood(shared_traces: Path) -> None:
    trace = read_trace(shared_traces / "format_variants" / "mtia_inference_rank_0.json.gz")
    assert [limit.code for limit in trace.limits] == ["unknown-device"]
    assert trace.rows(Kind.ACCELERATOR).size > 0
    assert trace.rows(Kind.KERNEL).size == 0


def test_collective_arguments_of_kernels_and_records(shared_traces: Path) -> None:
    trace = read_trace(shared_traces / "ddp_resnet_a100_2rank_r0" / "nccl_data.json.gz")
    kernels = [row for row in trace.collectives if trace.kind[row] == Kind.KERNEL]
    assert len(kernels) == 21
    first = trace.collectives[kernels[0]]
    assert (first.group_ranks, first.group_size, first.group_name) == ((0, 1), 2, "0")
    assert sum(c.in_elements or 0 for c in trace.collectives.values() if c.name == "allreduce") > 0
    assert not any(c.name in P2P_OPS for c in trace.collectives.values())


def test_shapes_of_collectives_and_of_operators_that_compute_are_kept(shared_traces: Path) -> None:
    trace = read_trace(shared_traces / "cpu_gloo" / "ddp" / "rank0.json.gz")
    shaped = {trace.row_name(row) for row in trace.shapes}
    assert "gloo:all_reduce" in shaped
    assert "aten::addmm" in shaped
    assert "aten::add_" in shaped
    assert "aten::view" not in shaped
    row = next(row for row in trace.shapes if trace.row_name(row) == "gloo:all_reduce")
    assert trace.shapes[row].types == ("float",)


def test_header_of_a_rocm_trace(shared_traces: Path) -> None:
    info = read_trace(shared_traces / "ddp_resnet_mi300_8rank_r0" / "resnet_act_checkpoint.json.gz").info
    assert (info.rank, info.world_size, info.backend, info.vendor) == (0, 8, "nccl", "amd")
    assert info.devices[0].name == "AMD Instinct MI300X"
    assert info.groups[0].ranks == tuple(range(8))
    assert info.has_shapes
