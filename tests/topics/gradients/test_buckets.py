"""Buckets of gradients by number and size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.topics.small_runs import (
    MIB,
    of_lanes,
)

BUCKETS = """
backward   20-80
compute    0-80  x40
allreduce  40-50 25MiB  50-60 10MiB  70-75 1MiB
allgather  85-90 8MiB
step: 100
"""


def test_reductions_of_gradients_by_number_and_size(tmp_path: Path) -> None:
    facts = of_lanes(tmp_path, BUCKETS)
    assert facts["gradient_buckets"] == 3
    assert facts["gradient_bytes"] == 36 * MIB
    assert facts["median_bucket_bytes"] == 10 * MIB
    assert facts["comm_bytes_per_step"] == 44 * MIB


@pytest.mark.parametrize(
    ("second", "mebibytes"),
    [("", 4), ("70-95 1MiB x12", 4)],  # twelve in all, or in each of two micro-batches
    ids=["one reduces", "both reduce"],
)
def test_a_bucket_is_a_third_of_what_one_micro_batch_reduces(
    tmp_path: Path, second: str, mebibytes: int
) -> None:
    text = f"""
    host       0-5    name=DistributedDataParallel.forward  50-55 name=DistributedDataParallel.forward
    backward   15-28  65-78
    compute    0-30   45-75
    allreduce  20-45  1MiB x12  {second}
    optimizer  95-100
    """
    facts = of_lanes(tmp_path, text)
    assert facts["gradient_bytes"] == (24 if second else 12) * MIB
    assert facts["suggested_bucket_bytes"] == mebibytes * MIB
    assert facts["suggested_bucket_mb"] == mebibytes
