"""Gathers of sharded units: how far ahead, what they take, and what small ones cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.topics.small_runs import (
    MIB,
    of_lanes,
    of_run,
)
from tracedoc.testing import TraceBuilder

SHARDED = """
strategy: fsdp2
lead: 30
backward   40-120
allgather  {forward}   40-120 256MiB x4 2ms prefetch unit=layers.*
compute    2-42 x4 8ms unit=layers.*          42-122 x4 18ms unit=layers.*
"""


@pytest.mark.parametrize("length", ["0.7ms", "2.8ms"])
def test_a_gather_of_a_block_should_take_its_bytes_and_the_latency_of_the_link(
    tmp_path: Path, length: str
) -> None:
    """However slow it is in this run."""
    lanes = SHARDED.format(forward=f"0-40 256MiB x4 {length} unit=layers.*")
    # 7/8 of 256 MiB and of the half-rate size of 20 MiB cross the link of an H100, at 0.8 x 450 GB/s.
    estimate = of_lanes(tmp_path, lanes, ranks=8)["block_gather_estimate_ms"]
    assert estimate == pytest.approx(0.875 * 276 * MIB / 360e6)


def test_small_units_cost_their_latency_and_the_hooks_that_keep_the_gpu_idle(tmp_path: Path) -> None:
    builders = []
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in (1, 2, 3):
            start = 100 * index
            builder.step(index, start, start + 99).backward(start + 90, start + 95)
            for unit in range(8):
                at = start + 10 * unit
                hook = f"FSDP::all_gather (layers.{unit // 4}.part{unit % 4})"
                # 6 ms of Python inside the hook before the next kernel is launched.
                builder.host(
                    f"FSDP::pre_forward (layers.{unit // 4}.part{unit % 4})",
                    at + 2,
                    at + 8,
                    category="user_annotation",
                )
                builder.collective(
                    "allgather", at + 0.1, at + 0.3, nbytes=2 * MIB, launch_ms=at, within=[hook]
                )
                builder.kernel("first", at + 9, at + 10, launch_ms=at + 8.9)
        builders.append(builder)
    found = of_run(tmp_path, builders)
    assert (found["fsdp_units"].value, found["fsdp_blocks"].value) == (8, 2)
    assert found["sharding_hook_idle_ms"].value == pytest.approx(48, abs=0.01)
