"""What operators cost in floating-point operations, and how much a step trains on, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.flops import COUNTERS
from tracedoc.values import Value

FLASH = "aten::_scaled_dot_product_flash_attention"
# Query [B=2, H=3, S=5, D=11], key [2, 3, T=7, 11]: two products of 2 x 2 x 3 x 5 x 7 x 11 = 4620 operations.
QUERY, KEY, GRADIENT = [2, 3, 5, 11], [2, 3, 7, 11], [2, 3, 5, 13]


@pytest.mark.parametrize(
    ("operator", "dims", "operations"),
    [
        ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::mm", [[3, 5], [6, 7]], None),
        ("aten::mm", [[3, 5]], None),
        ("aten::addmm", [[7], [3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::_scaled_mm", [[3, 5], [5, 7], [], []], 2 * 3 * 5 * 7),
        ("aten::bmm", [[2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::baddbmm", [[2, 3, 7], [2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        (FLASH, [QUERY, KEY, KEY], 9240),
        (FLASH, [QUERY, [2, 3, 7]], None),
        # Five products where forward has two; the gradient of the output comes first.
        (f"{FLASH}_backward", [GRADIENT, QUERY, KEY, KEY], 23100),
    ],
)
def test_operations_follow_from_shapes(operator: str, dims: list[list[int]], operations: int | None) -> None:
    assert COUNTERS[operator](dims) == operations


def embeddings(builder: TraceBuilder, start: float, *, passes: int, wrapper: str) -> None:
    """Add forward passes that look words and positions up: 4 samples of 128 tokens each."""
    for number in range(passes):
        at = start + 5 * number
        builder.host(wrapper, at, at + 4, category="user_annotation")
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
