"""A file into which several ranks were merged is no rank's trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tracedoc
from tracedoc.errors import InputError

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def written(folder: Path, kernels: list[tuple[str, int]]) -> Path:
    """Write a trace of kernels by name and device, without anything of the host."""
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": 7, "ts": 100.0 * place, "dur": 50,
         "args": {"device": device, "stream": 7, "correlation": place}}
        for place, (name, device) in enumerate(kernels, 1)
    ]  # fmt: skip
    file = folder / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def test_the_communication_of_several_devices_alone_is_refused(tmp_path: Path) -> None:
    trace = tracedoc.load(written(tmp_path, [(NCCL, 0), (NCCL, 1), (NCCL, 0), (NCCL, 1)]))
    with pytest.raises(InputError, match="nothing but the communication of 2 devices"):
        tracedoc.build_timeline(trace)


@pytest.mark.parametrize(
    "kernels", [[(NCCL, 0), (NCCL, 0)], [(NCCL, 0), ("gemm", 0), (NCCL, 1), ("gemm", 1)]]
)
def test_one_device_or_devices_that_compute_are_a_process(
    tmp_path: Path, kernels: list[tuple[str, int]]
) -> None:
    assert tracedoc.build_timeline(tracedoc.load(written(tmp_path, kernels))).judged is not None
