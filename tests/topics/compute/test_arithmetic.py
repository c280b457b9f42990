"""How much a step trains on, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.testing import TraceBuilder
from tracedoc.values import Value


def embeddings(builder: TraceBuilder, start: float, *, passes: int, wrapper: str) -> None:
    """Add forward passes that look words and positions up: 4 samples of 128 tokens each."""
    for number in range(passes):
        at = start + 5 * number
        builder.host(wrapper, at, at + 4, category="user_annotation").gpu_annotation(
            wrapper, at + 1, at + 2.5
        )
        for offset in (1, 2):
            builder.kernel(
                "indexSelectLargeIndex", at + offset, at + offset + 0.5, launch_ms=at + offset - 0.5,
                op="aten::embedding", dims=[[1000, 64], [4, 128], []], types=["float", "long int", ""],
            )  # fmt: skip


def facts_of(folder: Path, *, passes: int, wrapper: str) -> dict[str, Value]:
    builder = TraceBuilder()
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start, start + 99).backward(start + 50, start + 60)
        embeddings(builder, start + 10, passes=passes, wrapper=wrapper)
    measurements = tracedoc.measure([builder.write(folder / "rank-0.json")]).measurements
    return {name: fact.value for name, fact in measurements.facts.items()}


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel.forward", "FSDP::root_pre_forward"])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_pass_counts_once_however_often_it_looks_tokens_up(
    wrapper: str, passes: int, tmp_path: Path
) -> None:
    facts = facts_of(tmp_path, passes=passes, wrapper=wrapper)
    assert facts["micro_batch_samples"] == 4
    # 4 samples of 128 tokens a pass, in steps of 100 ms.
    assert facts["samples_per_s"] == pytest.approx(40 * passes)
    assert facts["tokens_per_s"] == pytest.approx(5120 * passes)
