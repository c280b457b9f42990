"""Hold what a rule may promise a run that is known: whether it fits on its GPUs unsharded."""

from __future__ import annotations

import pytest

from tracedoc.planner.measured import unsharded

GB = 1e9
RUN = {"parameters": 10**9, "gpus": 4, "memory_bytes": 40 * GB, "peak_bytes": 10 * GB}


def test_a_run_that_need_not_be_sharded() -> None:
    """1e9 parameters on 4: 4 GB of shards become 16 GB and 2 GB of copies."""
    found = unsharded("full-shard", **RUN)
    assert found.fits
    assert found.added_bytes == pytest.approx(14 * GB)
    # Of the 14 GB that are added 8 % more may come, 1.12 GB.
    assert unsharded("full-shard", **RUN | {"memory_bytes": 25.0 * GB}).fits is False
    assert unsharded("full-shard", **RUN | {"memory_bytes": 25.2 * GB}).fits is True


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("memory_bytes", "the memory of the GPU"),
        ("peak_bytes", "the peak of the run"),
        ("parameters", "the parameters"),
    ],
)
def test_what_is_not_known_is_not_promised(what: str, reason: str) -> None:
    found = unsharded("full-shard", **RUN | {what: None})
    assert found.fits is None
    assert reason in found.reason
